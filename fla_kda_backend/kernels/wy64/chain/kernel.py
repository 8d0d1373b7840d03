"""The recurrence of the 64-token WY form on WGMMA, with the state in registers (SM90).

One task is (sequence, head, half of the value columns); a CTA works through its tasks one after the other. Per chunk
of 64 tokens, with the images that the prepare kernel left in the chunk's record (`S` [128 keys, 64 values] is kept as
S^T):

    V' = U - W S          tensor core: A = S^T in bf16, from registers; B = -W; accumulator `acc_v` starts at U
    O  = Q S              tensor core: the same A; B = Q; accumulator `acc_o`
    S  = diag(decay) S    CUDA cores: a column scale of the fp32 accumulators `acc_s`, while the products above run
    S += K_end^T V'       tensor core: A = V'^T in bf16, from registers; B = K_end; accumulators `acc_s`
    O += A V'             tensor core: the same A; B = A; written one chunk later, under the next products

Where every task begins with a state zero, its first link is V' = U, S = K_end^T U, O = A U, and neither W nor Q of that
chunk is read.

Rounding: the products take bf16 operands and accumulate in fp32; S and V' are rounded to bf16 for use as operands, O
once on its way out; the state stays fp32 for the whole sequence.

Layout: one warpgroup holds the 64 value rows of S^T. An accumulator of a 64 x N product and the A operand of a
product over those N columns have the same order in registers (8 values per 16 columns), so operands are made by
rounding alone and no warp waits for another on the chain. B operands are the swizzled images of the record, brought in
by one-dimensional bulk copies; A comes without its blocks above the diagonal, in whose places zeros stand from the
start. U and the decay come in accumulator order.

Warps: 0-3 chain and outputs, 4 loads the ring {W, U, decay}, 7 the ring {Q, K_end, A}, 5 and 6 write O. The two rings
exist because W is needed half a chunk before K_end and freed as much earlier. An initial state takes a stage of the
second ring before the sequence's first chunk, so that it comes while the CTA's last task still runs.

The order of statements in `link` is a schedule. ptxas serialises WGMMAs, silently, when accumulators in flight are
touched: state arithmetic stands between groups, never inside one; shared-memory accesses stand between the products
of a group because they would wait for everything queued before them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64 import groups, states
from fla_kda_backend.kernels.wy64.chain.fragments import (
    A_COLUMN,
    K_MAJOR,
    MN_MAJOR,
    QK_BYTES,
    QKA_BYTES,
    ChainFragments,
    Ring,
    Shared,
)
from fla_kda_backend.kernels.wy64.chain.states import ChainStates
from fla_kda_backend.kernels.wy64.chain.transfers import ChainTransfers
from fla_kda_backend.kernels.wy64.cluster import CTAS, ChainPair, whole_clusters
from fla_kda_backend.kernels.wy64.record import CHUNK, DECAY_BYTES, HALF, STATE_BYTES, U_BYTES, W_BYTES
from fla_kda_backend.kernels.wy64.states import image_bytes
from fla_kda_backend.kernels.wy64.tasks import MAX_SORTED, Problem, TaskList

SMEM_LIMIT = 232448
O_BYTES = CHUNK * HALF * 2  # output of a chunk and half


class ChainWY64(ChainFragments, ChainTransfers, ChainPair, ChainStates, TaskList):
    """State recurrence and outputs from the 64-token records; see the module's docstring.

    cu_dtype: None (batch of equal lengths), "int32" or "int64". initial, final: None, "fp32" or "bf16". states: write the
    state before each chunk (chain_states.py). segmented: a launch may cover only some of the call's slots. state_v_first:
    states are [.., H, V, K], else [.., H, K, V]. max_ctas: CTAs to spread the tasks over (the number of SMs). overlap: see
    wy64.py. scaled: multiply O by `scale`, which Q and A are free of. direct: sequences of one chunk are left
    to prepare. The two halves of a head are a cluster, see chain_pair.py.
    """

    CHAIN_WARPS = 4
    CHAIN_LOADER, OUTPUT_LOADER = 4, 7
    O_WRITERS = (5, 6)
    THREADS = 256  # 255 registers a thread; between 288 and 384 threads ptxas would cap them at 168
    HEADER_BYTES = 1024

    def __init__(self, variant, schedule):
        self.cu_dtype, self.initial, self.final = variant.cu_seqlens, variant.initial_state, variant.final_state
        self.states, self.state_v_first = variant.intermediate_states is not None, variant.state_v_first
        self.segmented, self.overlap, self.direct = schedule.segmented, schedule.overlap, schedule.direct
        self.scaled, self.max_ctas = not variant.l2norm, whole_clusters(schedule.max_ctas)
        self.evict_first = not self.resumes  # the spine and the replay read records twice
        # every item begins with a sequence's state zero: W and Q of first chunks are not used
        self.zero_start = schedule.starts_from_zero(variant)
        stages = self.chain_stages, self.output_stages = 4, 3
        if self.chain_stages < 3 or self.output_stages < 2:
            raise ValueError(f"needs at least 3 and 2 stages, got {stages}: a stage is freed after the next has arrived")
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"stages {stages} need {self.smem_bytes} bytes of shared memory, limit {SMEM_LIMIT}")
        assert image_bytes(self.initial, self.state_v_first) <= QK_BYTES + A_COLUMN  # and does not reach the zeros of A

    @property
    def smem_bytes(self):
        chain = self.chain_stages * (W_BYTES + U_BYTES + DECAY_BYTES)
        return self.HEADER_BYTES + chain + self.output_stages * QKA_BYTES + O_BYTES

    @cute.jit
    def __call__(self, initial_state, final_state, out, cu_seqlens, workspace, carry_in, carry_out, states, scale,
                 seq_len, num_seqs, heads, slot_begin, slot_end, stream):  # fmt: skip
        """Launch all sequences and heads; addresses are Int64, scale Float32, counts Int32."""
        self.kernel(
            initial_state, final_state, out, cu_seqlens, workspace, carry_in, carry_out, states, scale, seq_len, num_seqs,
            heads, slot_begin, slot_end,
        ).launch(
            grid=[self.grid(num_seqs * heads * 2), 1, 1],
            block=[self.THREADS, 1, 1],
            cluster=[CTAS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        initial_state: Int64,  # [num_seqs, heads] states, 16-byte aligned
        final_state: Int64,  # [num_seqs, heads] states
        out: Int64,  # [tokens, heads, 128] bf16
        cu_seqlens: Int64,  # [num_seqs + 1]
        workspace: Int64,  # see record64.py
        carry_in: Int64,  # [heads, 2] states of the sequence that began before slot_begin
        carry_out: Int64,  # the same, of the one that goes on past slot_end; not the same memory as carry_in
        chunk_states: Int64,  # [chunks, heads] bf16 states, see chain_states.py
        scale: Float32,
        seq_len: Int32,
        num_seqs: Int32,
        heads: Int32,
        slot_begin: Int32,
        slot_end: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        sm, order = self.allocate()
        p = Problem(
            initial_state, final_state, out, cu_seqlens, workspace, carry_in, carry_out, order, seq_len, num_seqs, heads,
            slot_begin, slot_end,
        )  # fmt: skip
        self.init_barriers(tid, sm)
        self.greet()
        self.clear_above_diagonal(tid, sm)
        self.sort(p, tid, cute.recast_ptr(sm.o, dtype=Int32))
        self.meet()
        if warp == self.CHAIN_LOADER:
            self.load_chain(p, sm)
        elif warp == self.OUTPUT_LOADER:
            self.load_output(p, sm)
        elif warp == self.O_WRITERS[0] or warp == self.O_WRITERS[1]:
            thread = tid - 32 * self.O_WRITERS[0]
            self.announce(thread, p, sm)
            self.write_o(thread, p, sm)
        elif warp < self.CHAIN_WARPS:
            self.chain(tid, warp, p, sm, chunk_states, scale)
        self.part()

    # ---- what the replay does differently (chain_replay_wy64.py)

    link_time = 110  # beside an overlapped prepare, see there; on an H200 24 and 40 heads want it, others do not mind
    resumes = False  # whether an item may begin inside a sequence although the launch is not segmented

    def chains_per_group(self, chains):
        """How many chains, of two tasks each, run at once beside an overlapped prepare; see groups.py."""
        return groups.chains_per_group(chains, self.max_ctas, cutlass.max)

    def grid(self, tasks):
        return 2 * self.chains_per_group(tasks // 2) if self.overlap else cutlass.min(tasks, Int32(self.max_ctas))

    @cute.jit
    def resume(self, p, item, t):
        """The state where an item begins that does not begin its sequence."""
        ptx.dependency_wait()
        states.load_carry(p.carry_in + (Int64(item.head) * 2 + item.half) * STATE_BYTES, t.flat_s)

    def plain_links(self, t, p, sm, item, at):
        """The links of an item without outputs."""
        return at

    def announce(self, thread, p, sm):
        """What the writers tell other CTAs."""

    # ---- set-up

    def allocate(self):
        smem = SmemAllocator()
        barriers = lambda n: smem.allocate_array(Int64, n, byte_alignment=8)  # noqa: E731
        ring = lambda n: Ring(barriers(n), barriers(n), n)  # noqa: E731
        chain, output, store, checkpoint = ring(self.chain_stages), ring(self.output_stages), ring(1), ring(1)
        order = smem.allocate_array(Int32, MAX_SORTED, byte_alignment=4)
        tile = lambda size: smem.allocate_array(BFloat16, size // 2, byte_alignment=1024)  # noqa: E731
        w, qka = tile(W_BYTES * chain.stages), tile(QKA_BYTES * output.stages)
        u, o = tile(U_BYTES * chain.stages), tile(O_BYTES)
        decay = smem.allocate_array(Float32, DECAY_BYTES // 4 * chain.stages, byte_alignment=128)
        assert 16 * (chain.stages + output.stages + 2) + 4 * MAX_SORTED <= self.HEADER_BYTES
        return Shared(chain, output, store, checkpoint, w, u, decay, qka, o), order

    @cute.jit
    def init_barriers(self, tid, sm):
        """A loader's one arrival and its bytes fill a stage; one lane of each chain warp frees it. O: the reverse."""
        if tid == 0:
            for ring in (sm.chain, sm.output):
                for s in cutlass.range_constexpr(ring.stages):
                    cute.arch.mbarrier_init(ring.full + s, 1)
                    cute.arch.mbarrier_init(ring.empty + s, self.readers())
            for ring, readers in ((sm.store, len(self.O_WRITERS)), (sm.checkpoint, 1)):
                cute.arch.mbarrier_init(ring.full, self.CHAIN_WARPS)
                cute.arch.mbarrier_init(ring.empty, readers)
        cute.arch.mbarrier_init_fence()

    # ---- chain warps

    @cute.jit
    def chain(self, tid, warp, p, sm, chunk_states, scale):
        """`at`: stage and parity of both rings and the parity of O."""
        t = self.operands(tid, warp, sm)
        t.states, t.scale, counted = chunk_states, scale, (Int32(0), Int32(0))
        t.acc_o.fill(0.0)
        at = (Int32(0), Int32(0), Int32(0), Int32(0), Int32(1))
        entries = self.entries(p, self.task(p, Int32(0)))
        for turn in cutlass.range(self.rounds(p), unroll=1):
            item = self.item(p, self.task(p, turn), entries)
            entries = self.entries(p, self.task(p, turn + 1))  # in flight during this task
            if item.links > 0:
                counted = self.count(p, item, counted)
                row, step = self.state_row(p, item, t, counted), self.state_step(p)
                if const_expr(self.zero_start):
                    self.store_zeros(row)
                    at = self.first_link(t, sm, at)
                    if item.links > 1:
                        row += step
                        self.begin(t, sm, at[0], at[1], row)
                    at = self.links(t, sm, Int32(1), item.links, at, row, step)
                else:
                    at = self.start(t, p, sm, item, at)
                    self.begin(t, sm, at[0], at[1], row)
                    at = self.plain_links(t, p, sm, item, at)
                    at = self.links(t, sm, Int32(0), item.links, at, row, step)
                at = self.finish(t, sm, at)
                if item.ends:
                    self.store_state(p, item, t)
                elif const_expr(self.segmented):
                    carry = p.carry_out + (Int64(item.head) * 2 + item.half) * STATE_BYTES
                    states.store_carry(carry, t.flat_s)
            elif item.empty:
                at = self.first_state(t, sm, at)
                self.store_state(p, item, t)

    @cute.jit
    def start(self, t, p, sm, item, at):
        """The state before an item's first link."""
        if const_expr(self.segmented or self.resumes):
            if item.first > 0:
                self.resume(p, item, t)
            else:
                at = self.first_state(t, sm, at)
        else:
            at = self.first_state(t, sm, at)
        return at

    @cute.jit
    def first_state(self, t, sm, at):
        stage, phase, out_stage, out_phase, o_phase = at
        if const_expr(self.initial is None):
            for part in t.flat_s:
                part.fill(0.0)
        else:
            cute.arch.mbarrier_wait(sm.output.full + out_stage, out_phase)
            image = sm.qka.toint() + out_stage * QKA_BYTES
            states.load_state(image, self.initial, self.state_v_first, t.flat_s)
            ptx.fence_proxy_async()  # these reads before the copy that the stage takes next
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                self.free(sm.output.empty + out_stage)
            out_stage, out_phase = self.advance(out_stage, out_phase, self.output_stages)
        return stage, phase, out_stage, out_phase, o_phase

    @cute.jit
    def store_state(self, p, item, t):
        if const_expr(self.final is not None):
            address = p.final_state + self.state_offset(p, item, self.final)
            states.store_state(address, item.half, self.final, self.state_v_first, t.flat_s)

    @cute.jit
    def first_link(self, t, sm, at):
        """From state zero: V' = U, S = K_end^T V', O = A V'. At the end acc_o holds O, as after `links`."""
        stage, phase, out_stage, out_phase, o_phase = at
        cute.arch.mbarrier_wait(sm.chain.full + stage, phase)
        for k in cutlass.range_constexpr(4):
            self.load_u(t, stage, k)
            for j in cutlass.range_constexpr(4):
                t.v_words[j, k] = t.u_words[j, k]
        cute.arch.mbarrier_wait(sm.output.full + out_stage, out_phase)
        warpgroup.fence()
        for h in cutlass.range_constexpr(2):
            self.product(MN_MAJOR, t.acc_s[h], t.v_bf16, t.k_end[None, h, None, out_stage], range(4), zero=True)
        self.product(K_MAJOR, t.acc_o, t.v_bf16, t.a[None, 0, None, out_stage], range(4), zero=True)
        warpgroup.commit_group()
        with cute.arch.elect_one():
            self.free(sm.chain.empty + stage)
        warpgroup.wait_group(0)
        stage, phase = self.advance(stage, phase, self.chain_stages)
        out_stage, out_phase = self.advance(out_stage, out_phase, self.output_stages)
        return stage, phase, out_stage, out_phase, o_phase

    @cute.jit
    def begin(self, t, sm, stage, phase, row):
        """What `links` expects of the first chunk and the state."""
        cute.arch.mbarrier_wait(sm.chain.full + stage, phase)
        for k in cutlass.range_constexpr(4):
            self.load_u(t, stage, k)
        for k in cutlass.range_constexpr(8):
            self.load_decay(t, stage, k)
        self.start_v(t)
        self.round_state(t, 0, 8)
        self.store_rounded(t, row, 0, 8)

    @cute.jit
    def links(self, t, sm, first, links, at, row, step):
        """The links of an item with outputs, from number `first` on. On entry S is rounded, acc_v holds U, `decay` that
        of the chunk and acc_o, unless first = 0, the O before; at the end acc_o holds the last O, and the last output
        stage is still to be freed. row, step: address of the stored state, and how far on the next one's is."""
        stage, phase, out_stage, out_phase, o_phase = at
        following, following_phase = self.advance(stage, phase, self.chain_stages)
        ready = (
            cute.arch.mbarrier_test_wait(sm.chain.full + following, following_phase),
            cute.arch.mbarrier_test_wait(sm.output.full + out_stage, out_phase),
            cute.arch.mbarrier_test_wait(sm.store.empty, o_phase),
        )
        position = (*at, self.before(out_stage))
        for c in cutlass.range(first, links, unroll=1):
            row += step
            position, ready = self.link(t, sm, c, links, position, ready, row)
        return position[:5]

    @cute.jit
    def link(self, t, sm, c, links, at, ready, row):
        """Link `c`. ptxas tracks no accumulator in flight across the loop's edge (it would serialise every product), so
        that the body ends by waiting for its O."""
        stage, phase, out_stage, out_phase, o_phase, previous_out = at
        chain_ready, output_ready, o_ready = ready
        following, following_phase = self.advance(stage, phase, self.chain_stages)
        warpgroup.fence()
        self.product(K_MAJOR, t.acc_v, t.s_bf16, t.w[None, 0, None, stage], range(8))
        warpgroup.commit_group()
        warpgroup.wait_group(1)  # O of the previous chunk
        if c + 1 < links:
            if not chain_ready:
                cute.arch.mbarrier_wait(sm.chain.full + following, following_phase)
        self.decay_state(t)
        if not output_ready:
            cute.arch.mbarrier_wait(sm.output.full + out_stage, out_phase)
        if not o_ready:
            cute.arch.mbarrier_wait(sm.store.empty, o_phase)
        self.round_output(t)
        warpgroup.fence()
        for k in cutlass.range_constexpr(8):
            self.product(K_MAJOR, t.acc_o, t.s_bf16, t.q[None, 0, None, out_stage], (k,), zero=(k == 0))
            if const_expr(k % 2 == 0):
                self.store_o(t, k // 2)
            else:
                self.load_u(t, following, k // 2)
        warpgroup.commit_group()
        cute.arch.sync_warp()
        if c > 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(sm.store.full)
                self.free(sm.output.empty + previous_out)
            o_phase = o_phase ^ 1
        warpgroup.wait_group(1)  # V'
        self.round(t.flat_v_bf16, t.flat_v, range(4))
        with cute.arch.elect_one():
            self.free(sm.chain.empty + stage)
        warpgroup.fence()
        for h in cutlass.range_constexpr(2):
            self.product(MN_MAJOR, t.acc_s[h], t.v_bf16, t.k_end[None, h, None, out_stage], range(4))
            warpgroup.commit_group()
        for k in cutlass.range_constexpr(4):
            self.product(K_MAJOR, t.acc_o, t.v_bf16, t.a[None, 0, None, out_stage], (k,))
            for j in cutlass.range_constexpr(2):
                self.load_decay(t, following, 2 * k + j)
        warpgroup.commit_group()
        if c + 1 < links:
            self.start_v(t)
        previous_out = out_stage
        out_stage, out_phase = self.advance(out_stage, out_phase, self.output_stages)
        stage, phase = following, following_phase
        after, after_phase = self.advance(stage, phase, self.chain_stages)
        warpgroup.wait_group(2)  # S, keys 0 to 63
        self.round_state(t, 0, 4)
        self.store_between(t, c, links, row, 0, 4)
        chain_ready = cute.arch.mbarrier_test_wait(sm.chain.full + after, after_phase)
        output_ready = cute.arch.mbarrier_test_wait(sm.output.full + out_stage, out_phase)
        o_ready = cute.arch.mbarrier_test_wait(sm.store.empty, o_phase)
        warpgroup.wait_group(0)  # S, keys 64 to 127
        self.round_state(t, 4, 8)
        self.store_between(t, c, links, row, 4, 8)
        return (stage, phase, out_stage, out_phase, o_phase, previous_out), (chain_ready, output_ready, o_ready)

    @cute.jit
    def finish(self, t, sm, at):
        """Hand over the last O of an item and free its output stage."""
        stage, phase, out_stage, out_phase, o_phase = at
        self.round_output(t)
        cute.arch.mbarrier_wait(sm.store.empty, o_phase)
        for k in cutlass.range_constexpr(4):
            self.store_o(t, k)
        cute.arch.sync_warp()
        last = self.before(out_stage)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(sm.store.full)
            self.free(sm.output.empty + last)
        return stage, phase, out_stage, out_phase, o_phase ^ 1
