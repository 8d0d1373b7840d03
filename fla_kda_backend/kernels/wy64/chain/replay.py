"""The 64-token chain for few heads and long sequences: a spine without outputs, outputs by CTAs that replay stretches.

A link of ChainWY64 is longer with outputs than the chain needs, and few heads leave most SMs idle. Here a spine CTA
carries the state of one (sequence, head, value half) through the chunks without computing outputs: V' = U - W S and
S = diag(decay) S + K_end^T V' only. At every CHUNKS_PER_CHECKPOINT-th chunk it leaves the fp32 state in the workspace and
sets a flag. The CHUNKS_PER_CHECKPOINT chunks from one checkpoint, or from the initial state, to the next are a stretch.
Replay CTAs take stretches in order of time, wait for the stretch's flag and run the links of ChainWY64 from the checkpoint:
the same arithmetic, hence the same bits. The chunks after the last stretch are the spine CTA's. It computes their outputs,
too, on its way to the final state.

Progress. Blocks 0 to tasks - 1 are the spine; they wait for the copy engine, their own warps and the prepare grid only.
The replay blocks have higher numbers and wait for spine blocks of the same grid. Blocks, and clusters, start in the order of
their numbers. So when a replay block starts, every spine block has started or ended and goes on to its end, whatever else
runs on the GPU and however few SMs there are: with one cluster at a time the spine blocks end first, one after the other.
Waiting threads pause, so they take few issue slots and little of the L2 from others. The prepare grid clears the flags,
after all earlier work of the stream and before the first flag is read. So a launch depends neither on what the workspace
held nor on launches before it, and graphs can be replayed. Launches that may overlap need workspaces of their own.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.ring import RingPosition
from fla_kda_backend.kernels.wy64 import states
from fla_kda_backend.kernels.wy64.chain.kernel import ChainWY64
from fla_kda_backend.kernels.wy64.chain.links import ChainWarps, Positions
from fla_kda_backend.kernels.wy64.chain.loaders import FIRST_PAUSE, LONGEST_PAUSE, OutputLoader
from fla_kda_backend.kernels.wy64.chain.shared import A_COLUMN, QK_BYTES
from fla_kda_backend.kernels.wy64.chain.writer import Writers
from fla_kda_backend.kernels.wy64.record import CHUNK, CHUNKS_PER_CHECKPOINT, FLAG_BYTES, LOG2_CHUNK, Q_BYTES, STATE_BYTES
from fla_kda_backend.kernels.wy64.tasks import MAX_SORTED, Tasks, WorkItem

SPINE = -1  # in place of the number of a stretch


class ReplayTasks(Tasks):
    """A spine CTA has one item, the replay CTAs take (stretch, task) in order of time."""

    @cute.jit
    def rounds(self):
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        tasks = self.args.num_seqs * self.args.heads * 2
        turns = Int32(1)
        if bid >= tasks:
            longest = self.args.seq_len
            if const_expr(self.cu_dtype is not None):
                if self.args.num_seqs <= MAX_SORTED:
                    _, longest, _ = self.sequence(self.order[0])
            items = tasks * self.stretches((longest + (CHUNK - 1)) >> LOG2_CHUNK) - (bid - tasks)
            replay = grid - tasks
            turns = cutlass.max((items + replay - 1) // replay, Int32(0))
        return turns

    @cute.jit
    def stretches(self, chunks):
        """Stretches of a sequence of so many chunks that are replayed."""
        return cutlass.max(chunks - 1, Int32(0)) // CHUNKS_PER_CHECKPOINT

    @cute.jit
    def task(self, turn):
        """(sequence, head, value half, stretch)."""
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        tasks = self.args.num_seqs * self.args.heads * 2
        index, stretch = bid, Int32(SPINE)
        if bid >= tasks:
            index = bid - tasks + turn * (grid - tasks)
            stretch = index // tasks
            index = index - stretch * tasks
        pair = index // 2
        rank = pair // self.args.heads
        return self.of_rank(rank), pair - rank * self.args.heads, index % 2, stretch

    @cute.jit
    def item(self, task, entries):
        """The spine's item runs to the end of the sequence; a stretch past it is an item without links."""
        seq, head, value_half, stretch = task
        begin, length, slot, chunks = self.locate(seq, entries)
        stretches = self.stretches(chunks)
        spine = stretch == SPINE
        replayed = stretches * CHUNKS_PER_CHECKPOINT
        first, spine_links, output_links = Int32(0), replayed, chunks - replayed
        if stretch != SPINE:
            first, spine_links, output_links = stretch * CHUNKS_PER_CHECKPOINT, Int32(0), Int32(0)
            if stretch < stretches:
                output_links = Int32(CHUNKS_PER_CHECKPOINT)
        return WorkItem(
            seq=seq, head=head, value_half=value_half, begin=begin, length=length, slot=slot, first=first,
            spine_links=spine_links, output_links=output_links, empty=spine and length == 0, ends=spine,
        )  # fmt: skip


class ReplayOutputLoader(OutputLoader):
    """Of Q, K_end and A, a link without outputs needs K_end alone."""

    @cute.jit
    def needed(self, item, link):
        begin, end = Int32(0), Int32(QK_BYTES + A_COLUMN)
        if link < item.spine_links:
            begin, end = Int32(Q_BYTES), Int32(QK_BYTES)
        return begin, end


class ReplayChainWarps(ChainWarps):
    """Checkpoints as the states between items, and the spine's links."""

    def __init__(self, cta, tid, warp):
        super().__init__(cta, tid, warp)
        self.overlap, self.workspace = cta.schedule.overlap, cta.workspace

    @cute.jit
    def resume(self, item):
        """The state at the beginning of a stretch, once its flag is set."""
        if const_expr(not self.overlap):
            ptx.dependency_wait()
        slot = item.slot + item.first
        address = self.workspace.checkpoint_flag(item.head, slot, item.value_half)
        flag, pause = ptx.ldg_acquire_b32(address), Int32(FIRST_PAUSE)
        while flag == 0:
            ptx.nanosleep(pause)
            pause = cutlass.min(2 * pause, Int32(LONGEST_PAUSE))
            flag = ptx.ldg_acquire_b32(address)
        states.load_carry(self.workspace.checkpoint(item.head, slot, item.value_half), self.fragments.flat_s)

    @cute.jit
    def spine(self, item, at):
        """The links without outputs. Entry and exit as `links` expects: S rounded, acc_v = U, decay of the next chunk."""
        if item.spine_links > 0:
            at = self.spine_links(item, at)
        return at

    @cute.jit
    def spine_links(self, item, at):
        """The loop is rotated: its body begins between V' and the update. With a body that begins at V', ptxas would wait for
        the products before the scaling."""
        t, shared = self.fragments, self.shared
        output, following = at.output, at.chain.next()
        warpgroup.fence()
        t.minus_w_s(at.chain.stage, range(8))
        warpgroup.commit_group()
        t.decay_state()
        shared.chain.wait_full(following)
        for k in cutlass.range_constexpr(4):
            t.load_u(following.stage, k)
        shared.output.wait_full(output)
        warpgroup.wait_group(0)
        with cute.arch.elect_one():
            self.cluster.free(shared.chain.empty + at.chain.stage)
        count, written = Int32(CHUNKS_PER_CHECKPOINT), RingPosition.of_writer(shared.checkpoint.stages)
        checkpoint = self.workspace.checkpoint(item.head, item.slot, item.value_half)
        for _c in cutlass.range(item.spine_links - 1, unroll=1):
            # acc_v: V' of a chunk; S already decayed; u_words: U of the next chunk, whose stage is `following`.
            count, written, checkpoint, following, output = self.spine_link(count, written, checkpoint, following, output)
        self.update(output.stage, following.stage, 1)
        t.start_v()
        warpgroup.wait_group(0)
        with cute.arch.elect_one():
            self.cluster.free(shared.output.empty + output.stage)
        t.round_state(0, 8)
        return Positions(following, output.next(), at.o)

    @cute.jit
    def spine_link(self, count, written, checkpoint, following, output):
        """From V' of one chunk to V' of the next. count: links until the state goes to the next checkpoint; checkpoint: the
        address of the last one."""
        t, shared = self.fragments, self.shared
        after, next_output = following.next(), output.next()
        ready = shared.chain.is_full(after)
        self.update(output.stage, following.stage, 2)
        t.start_v()
        if not ready:
            shared.chain.wait_full(after)
        warpgroup.wait_group(1)  # S, keys 0 to 63
        t.round_state(0, 4)
        warpgroup.fence()
        for k in cutlass.range_constexpr(4):
            t.minus_w_s(following.stage, (k,))
            t.load_u(after.stage, k)
        warpgroup.commit_group()
        warpgroup.wait_group(1)  # S, keys 64 to 127
        t.round_state(4, 8)
        warpgroup.fence()
        t.minus_w_s(following.stage, range(4, 6))
        with cute.arch.elect_one():
            self.cluster.free(shared.output.empty + output.stage)
        t.minus_w_s(following.stage, range(6, 8))
        warpgroup.commit_group()
        count -= 1
        if count == 0:
            count = Int32(CHUNKS_PER_CHECKPOINT)
            checkpoint += 2 * STATE_BYTES
            shared.checkpoint.wait_empty(written)
            states.store_carry(checkpoint, self.fragments.flat_s)
            written = written.next()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(shared.checkpoint.full)
        t.decay_state()
        # The wait ends a basic block: without it ptxas moves the scaling behind the products.
        shared.output.wait_full(next_output)
        warpgroup.wait_group(0)
        with cute.arch.elect_one():
            self.cluster.free(shared.chain.empty + following.stage)
        return count, written, checkpoint, after, next_output

    @cute.jit
    def update(self, output_stage, following_stage, groups: cutlass.Constexpr):
        """S += K_end^T V', in one group or two; the decay of the chunk in `following_stage` is loaded in between."""
        t = self.fragments
        t.round_v()
        warpgroup.fence()
        for h in cutlass.range_constexpr(2):
            for k in cutlass.range_constexpr(4):
                t.k_end_v(h, output_stage, (k,))
                t.load_decay(following_stage, 4 * h + k)
            if const_expr(h == 1 or groups == 2):
                warpgroup.commit_group()


class ReplayWriters(Writers):
    """The writers of a spine CTA first set flags, then write O: its chain warps make outputs after all checkpoints."""

    def __init__(self, cta, thread):
        super().__init__(cta, thread)
        self.overlap, self.workspace = cta.schedule.overlap, cta.workspace

    @cute.jit
    def publish_checkpoints(self):
        """Set the flag of each checkpoint once the chain warps have written it; by the first writer."""
        item, ring = self.tasks.item_now(Int32(0)), self.shared.checkpoint
        if item.ends and self.thread == 0:
            if const_expr(not self.overlap):
                ptx.dependency_wait()
            at = RingPosition.of_reader(ring.stages)
            flag = self.workspace.checkpoint_flag(item.head, item.slot, item.value_half)
            for _checkpoint in cutlass.range(item.spine_links // CHUNKS_PER_CHECKPOINT - 1, unroll=1):
                flag += CHUNKS_PER_CHECKPOINT * FLAG_BYTES
                ring.wait_full(at)
                ptx.stg_release_b32(flag, Int32(1))
                cute.arch.mbarrier_arrive(ring.empty)
                at.advance()
        cute.arch.sync_warp()


class ChainReplayWY64(ChainWY64):
    """ChainWY64 with spine and replay, for launches that cover all slots and keep no intermediate states.

    The grid has max_ctas CTAs, and at least one spine CTA per task. Meant for few tasks.
    """

    tasks, chain_warps, output_loader, writers = ReplayTasks, ReplayChainWarps, ReplayOutputLoader, ReplayWriters
    link_time = 50  # of the spine

    def chains_per_group(self, chains):
        """All: each spine has a CTA of its own."""
        return chains

    def grid(self, tasks):
        return cutlass.max(Int32(self.max_ctas), 2 * tasks)
