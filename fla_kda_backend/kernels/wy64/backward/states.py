"""The forward chain of the backward pass: the state before each chunk, and V', without outputs.

The recurrence of chain/kernel.py, with the same bits:

    V' = U - W S
    S  = diag(decay) S + K_end^T V'

For every chunk both operands of these products go to its local record (record.py), as the tensor cores take them: S, the
state before the chunk, rounded to bf16, and V' rounded to bf16. Clusters, rings and layouts are those of chain/kernel.py, the
order of a link is that of the spine in chain/replay.py.

Warps of a CTA:

    0 to 3   chain warps: the links (state_links.py)
    4        loads the chain ring {W, U, decay}
    5        writes the images of S and V'
    6        idle
    7        loads the output ring {K_end}

Images. A stage of the output ring has place for Q and A, which no link here needs. S of a link stands in the place of Q, V'
in the place of A, in the stage of the link's K_end. The chain warps leave them there in the course of the link after, and
arrive on `images`; the writer copies them to the local record, two bulk stores a link. `full` of an output stage has one more
arrival than in the forward, the writer's: it comes once the images of the use before have been read. So a wait for K_end is
one for the place of the images, too, and the chain warps wait for nothing else.

Besides what cluster.py says:

    images n, in each CTA          4 arrivals, one of each chain warp, when it has stored its part of the images of use n.
    full of the output ring        two arrivals, the loader's and the writer's, and the bytes of use n. The writer arrives for
                                   use n when it has read the images of use n - stages, and at the start for the first use of
                                   each stage. It has seen these images, so all chain warps have seen phase n - stages of this
                                   `full`: the arrival counts for phase n and no earlier one.

No deadlock. Chain warps that wait for `full` of use n have arrived on `images` for use n - 2 and all before (links.link: the
images of a link are signalled before the wait for the K_end of the link after the next; the last link's of an item before the
next item). With at least two stages that is what the writer waits for before it arrives for use n.

Order. The chain warps write images by ordinary stores, then arrive (release); the writer waits (acquire), passes a proxy fence,
and has the copy engine read them. It waits until they are read, and arrives; the chain warps wait for that before they store
again.

Beside the local gradients (launch.py) the writer counts a chunk as left there once its copies are complete, which it asks for
two chunks later or more, so that it does not wait.

Other grids. All of a CTA's reads of records come after a wait for prepare. Each CTA lets the reverse chain start after such a
wait, so that the reverse chain finds prepare's records complete; see launch.py.
"""

from dataclasses import replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.ring import RingPosition
from fla_kda_backend.kernels.wy64.backward.record import LOCAL_BYTES, S_AT, STATE_HALF_BYTES, V_AT, V_HALF_BYTES
from fla_kda_backend.kernels.wy64.backward.state_links import StateWarps
from fla_kda_backend.kernels.wy64.backward.state_shared import SMEM_BYTES, StateShared
from fla_kda_backend.kernels.wy64.backward.workspace import (
    local_record,
    next_address,
    publish_at,
    publish_rest,
    ready_address,
    record,
)
from fla_kda_backend.kernels.wy64.chain.arguments import Cta
from fla_kda_backend.kernels.wy64.chain.loaders import ChainLoader, Loader
from fla_kda_backend.kernels.wy64.chain.shared import QK_BYTES, QKA_BYTES
from fla_kda_backend.kernels.wy64.cluster import CTAS, Cluster, whole_clusters
from fla_kda_backend.kernels.wy64.record import FLAG_BYTES, K_END_AT, K_END_BYTES, Q_BYTES, RECORD_BYTES
from fla_kda_backend.kernels.wy64.tasks import Tasks
from fla_kda_backend.kernels.wy64.workspace import Workspace


class StatesArguments(NamedTuple):
    """In the order of the kernel's parameters. Int64: addresses in global memory; 0: there is no such tensor."""

    initial_state: Int64  # [num_seqs, heads] states, 16-byte aligned
    cu_seqlens: Int64  # [num_seqs + 1] int32 or int64
    workspace: Int64  # see record.py
    carry_in: Int64  # [heads, 2 value halves] states of the sequence that began before slot_begin; see store_carry
    carry_out: Int64  # the same, of the sequence that goes on past slot_end; not wanted where 0
    seq_len: Int32  # tokens of each sequence, or of all packed ones
    num_seqs: Int32
    heads: Int32
    slot_begin: Int32
    slot_end: Int32

    @classmethod
    def of(cls, a):
        """From the Arguments of the family's contract, which bear the same names."""
        return cls(**{name: getattr(a, name) for name in cls._fields})


class StateTasks(Tasks):
    """With stage "states" only sequences that go on past the launch are worked on: what is wanted are the states there."""

    def __init__(self, variant, schedule, args, order):
        super().__init__(variant, schedule, args, order)
        self.states_alone = schedule.stage == "states"

    @cute.jit
    def item(self, task, entries):
        item = Tasks.item(self, task, entries)
        links = item.output_links
        if const_expr(self.states_alone):
            if item.ends:
                links = Int32(0)
        return replace(item, output_links=links)


class RecordLoader(ChainLoader):
    """Fills the chain ring: W, U and the decay of each link."""

    def __init__(self, cta):
        super().__init__(cta)
        self.beside = cta.schedule.beside

    @cute.jit
    def run(self):
        ptx.dependency_wait()  # in every CTA, also where it has no chunk
        if const_expr(self.beside):
            self.clear_next()
        ptx.dependency_launch()  # and then the reverse chain may start
        self.fill()

    @cute.jit
    def clear_next(self):
        """The local gradients begin with the first pair."""
        args = self.args
        block, _, _ = cute.arch.block_idx()
        if block == 0:
            with cute.arch.elect_one():
                ptx.stg_b32(next_address(args.workspace, args.heads, args.slot_end - args.slot_begin), Int32(0))
                ptx.fence_gpu()
        cute.arch.sync_warp()

    @cute.jit
    def fill(self):
        ring = self.shared.chain
        at = RingPosition.of_writer(ring.stages)
        for turn in cutlass.range(self.tasks.rounds(), unroll=1):
            item = self.tasks.item_now(turn)
            source = self.workspace.record(item.head, item.slot + item.first)
            for _link in cutlass.range(item.output_links, unroll=1):
                ring.wait_empty(at)
                with cute.arch.elect_one():
                    full = ring.full + at.stage
                    cute.arch.mbarrier_arrive_and_expect_tx(full, self.shared.chain_bytes)
                    self.load(source, item, at.stage, Int32(self.shared.w_bytes), full.toint())
                source += RECORD_BYTES
                at.advance()


class KeyLoader(Loader):
    """Fills the output ring: K_end of each link."""

    @cute.jit
    def run(self):
        ptx.dependency_wait()
        ring = self.shared.output
        at = RingPosition.of_writer(ring.stages)
        for turn in cutlass.range(self.tasks.rounds(), unroll=1):
            item = self.tasks.item_now(turn)
            source = self.workspace.record(item.head, item.slot + item.first) + K_END_AT
            for _link in cutlass.range(item.output_links, unroll=1):
                ring.wait_empty(at)
                with cute.arch.elect_one():
                    full = ring.full + at.stage
                    cute.arch.mbarrier_arrive_and_expect_tx(full, Int32(K_END_BYTES))
                    target = self.shared.qka.toint() + at.stage * QKA_BYTES + Q_BYTES
                    self.cluster.fetch(target, source, Int32(K_END_BYTES), full.toint())
                source += RECORD_BYTES
                at.advance()


class ImageWriter:
    """One warp: the images of S and V' from shared memory to the local records; cta: see chain/arguments.py."""

    def __init__(self, cta):
        self.args, self.shared, self.tasks, self.beside = cta.args, cta.shared, cta.tasks, cta.schedule.beside

    @cute.jit
    def run(self):
        args, ring, places = self.args, self.shared.images, self.shared.output
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(places.stages):
                cute.arch.mbarrier_arrive(places.full + stage)
        at = RingPosition.of_reader(ring.stages)
        for turn in cutlass.range(self.tasks.rounds(), unroll=1):
            item = self.tasks.item_now(turn)
            slots, slot = args.slot_end - args.slot_begin, item.slot + item.first - args.slot_begin
            target = local_record(args.workspace, args.heads, slots, item.head, slot)
            s = target + S_AT + item.value_half * STATE_HALF_BYTES
            v = record(args.workspace, args.heads, slots, item.head, slot) + V_AT + item.value_half * V_HALF_BYTES
            ready = ready_address(args.workspace, args.heads, slots, item.head, slot)
            for link in cutlass.range(item.output_links, unroll=1):
                ring.wait_full(at)
                ptx.fence_proxy_async()
                with cute.arch.elect_one():
                    source = self.shared.qka.toint() + at.stage * QKA_BYTES
                    ptx.bulk_store(s, source, Int32(STATE_HALF_BYTES))
                    ptx.bulk_store(v, source + QK_BYTES, Int32(V_HALF_BYTES))
                    ptx.bulk_commit()
                    ptx.bulk_wait_read()
                    cute.arch.mbarrier_arrive(places.full + at.stage)
                    if const_expr(self.beside):
                        publish_at(link, ready, FLAG_BYTES, ptx.bulk_wait_but_two)
                s += LOCAL_BYTES
                v += RECORD_BYTES
                at.advance()
            if const_expr(self.beside):
                with cute.arch.elect_one():
                    publish_rest(item.output_links, ready, FLAG_BYTES)
                cute.arch.sync_warp()


class ChainStates:
    """S and V' of each chunk of a launch, into the local records; with stage "states" the states after the launch alone.

    Args:
        variant: its cu_seqlens, initial_state and state_v_first matter.
        schedule: see contract.py.
    """

    CHAIN_WARPS = 4  # from warp 0 on
    RECORD_LOADER, IMAGE_WRITER, KEY_LOADER = 4, 5, 7
    THREADS = 256  # 255 registers per thread
    smem_bytes = SMEM_BYTES

    def __init__(self, variant, schedule):
        self.variant, self.schedule = variant, schedule
        self.keeps_images = schedule.stage == "all"
        self.max_ctas = whole_clusters(schedule.max_ctas)  # CTAs to spread the tasks over

    @cute.jit
    def __call__(self, a, stream):
        """Launch over slots [slot_begin, slot_end) and all heads; a: the contract's Arguments."""
        self.kernel(StatesArguments.of(a)).launch(
            grid=[cutlass.min(a.num_seqs * a.heads * 2, Int32(self.max_ctas)), 1, 1],
            block=[self.THREADS, 1, 1],
            cluster=[CTAS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, args: StatesArguments):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        shared = StateShared.allocate()
        workspace = Workspace(args.workspace, args.heads, args.slot_begin, args.slot_end)
        tasks = StateTasks(self.variant, self.schedule, args, shared.order)
        cluster = Cluster(self.CHAIN_WARPS, evict_first=False)  # the reverse chain reads most of a record, too
        cta = Cta(self.variant, self.schedule, args, workspace, shared, tasks, cluster)

        shared.init_barriers(tid, self.CHAIN_WARPS, self.keeps_images, cluster.arrivals_to_free)
        cluster.cluster_arrive()
        tasks.sort(tid, cute.recast_ptr(shared.qka, dtype=Int32))
        cluster.cluster_wait()
        if warp == self.RECORD_LOADER:
            RecordLoader(cta).run()
        elif warp == self.KEY_LOADER:
            KeyLoader(cta).run()
        elif warp == self.IMAGE_WRITER:
            if const_expr(self.keeps_images):
                ImageWriter(cta).run()
        elif warp < self.CHAIN_WARPS:
            StateWarps(cta, tid, warp).run()
        cluster.cluster_exit()
