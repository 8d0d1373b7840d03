"""The 64-token chain for few heads and long sequences: a spine without outputs, outputs by CTAs that replay stretches.

A link of ChainWY64 is longer with outputs than the chain needs, and few heads leave most SMs idle. Here a spine CTA
carries the state of one (sequence, head, half) through the chunks without computing outputs: V' = U - W S and S =
diag(decay) S + K_end^T V' only. At every 16th chunk it leaves the fp32 state in the workspace and sets a flag.
Replay CTAs take stretches of 16 chunks in order of time, wait for the stretch's flag and run the links of ChainWY64
from the checkpoint: the same arithmetic, hence the same bits. Outputs from the last checkpoint's place on come from the
spine CTA itself, for they are on its way to the final state.

Progress. Blocks 0 to tasks - 1 are the spine; it waits for the copy engine, its own warps and the prepare grid only.
The replay blocks have higher numbers and wait for spine blocks of the same grid. Blocks, and clusters, start in the order of
their numbers, so when a replay block starts, every spine block has started or ended and goes on to its end, whatever else
runs on the GPU and however few SMs there are: with one SM the spine blocks end first, one after the other. Waiting
threads pause, so they take few issue slots and little of the L2 from others. The prepare grid clears the flags, after
all earlier work of the stream and before the first flag is read: a launch depends neither on what the workspace held
nor on launches before it, and graphs can be replayed. Launches that may overlap need workspaces of their own.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from fla_kda_backend.kernels import ptx, sequences
from fla_kda_backend.kernels.wy64 import states
from fla_kda_backend.kernels.wy64.chain.fragments import A_COLUMN, K_MAJOR, MN_MAJOR, QK_BYTES
from fla_kda_backend.kernels.wy64.chain.kernel import ChainWY64
from fla_kda_backend.kernels.wy64.chain.transfers import PAUSE
from fla_kda_backend.kernels.wy64.record import CHUNK, CHUNKS_PER_CHECKPOINT, FLAG_BYTES, LOG2_CHUNK, Q_BYTES, STATE_BYTES
from fla_kda_backend.kernels.wy64.tasks import MAX_SORTED, Item

SPINE = -1  # its segment number


class ChainReplayWY64(ChainWY64):
    """ChainWY64 with spine and replay, for launches that cover all slots; the same arguments, without `segmented`,
    `states`.

    The grid has max_ctas CTAs, at least two for each task. Meant for few tasks: each (sequence, head, half) is one.
    """

    resumes = True
    link_time = 50  # of the spine

    def chains_per_group(self, chains):
        return chains

    def grid(self, tasks):
        return cutlass.max(Int32(self.max_ctas), 2 * tasks)

    # ---- items: a spine CTA has one, the replay CTAs take (segment, task) in order of time

    @cute.jit
    def rounds(self, p):
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        tasks = p.num_seqs * p.heads * 2
        turns = Int32(1)
        if bid >= tasks:
            longest = p.seq_len
            if const_expr(self.cu_dtype is not None):
                if p.num_seqs <= MAX_SORTED:
                    _, longest, _ = sequences.sequence(
                        p.ordered()[0], p.cu_seqlens, p.seq_len, LOG2_CHUNK, self.cu_dtype
                    )
            items = tasks * self.segments((longest + (CHUNK - 1)) >> LOG2_CHUNK) - (bid - tasks)
            replay = grid - tasks
            turns = cutlass.max((items + replay - 1) // replay, Int32(0))
        return turns

    @cute.jit
    def segments(self, chunks):
        """Stretches that are replayed."""
        return cutlass.max(chunks - 1, Int32(0)) // CHUNKS_PER_CHECKPOINT

    @cute.jit
    def task(self, p, turn):
        """(sequence, head, half, segment)."""
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        tasks = p.num_seqs * p.heads * 2
        index, segment = bid, Int32(SPINE)
        if bid >= tasks:
            index = bid - tasks + turn * (grid - tasks)
            segment = index // tasks
            index = index - segment * tasks
        pair = index // 2
        rank = pair // p.heads
        return self.of_rank(p, rank), pair - rank * p.heads, index % 2, segment

    @cute.jit
    def item(self, p, task, entries):
        seq, head, half, segment = task
        begin, length, slot, chunks = self.place(p, seq, entries)
        segments = self.segments(chunks)
        spine = segment == SPINE
        first, plain, links = Int32(0), segments * CHUNKS_PER_CHECKPOINT, chunks - segments * CHUNKS_PER_CHECKPOINT
        if segment != SPINE:
            first, plain, links = segment * CHUNKS_PER_CHECKPOINT, Int32(0), Int32(0)
            if segment < segments:
                links = Int32(CHUNKS_PER_CHECKPOINT)
        return Item(seq, head, half, begin, length, slot, first, plain, links, spine and length == 0, spine)

    @cute.jit
    def output_part(self, item, link):
        begin, end = Int32(0), Int32(QK_BYTES + A_COLUMN)
        if link < item.plain:
            begin, end = Int32(Q_BYTES), Int32(QK_BYTES)
        return begin, end

    # ---- checkpoints

    @cute.jit
    def announce(self, thread, p, sm):
        """Set the flag of each of a spine CTA's checkpoints once its chain warps have written it."""
        item = self.item_now(p, Int32(0))
        if item.ends and thread == 0:
            if const_expr(not self.overlap):
                ptx.dependency_wait()
            parity = Int32(0)
            flag = p.flag(item.head, item.slot, item.half)
            for _checkpoint in cutlass.range(item.plain // CHUNKS_PER_CHECKPOINT - 1, unroll=1):
                flag += CHUNKS_PER_CHECKPOINT * FLAG_BYTES
                cute.arch.mbarrier_wait(sm.checkpoint.full, parity)
                ptx.stg_release_b32(flag, Int32(1))
                cute.arch.mbarrier_arrive(sm.checkpoint.empty)
                parity = parity ^ 1
        cute.arch.sync_warp()

    @cute.jit
    def resume(self, p, item, t):
        if const_expr(not self.overlap):
            ptx.dependency_wait()
        slot = item.slot + item.first
        address = p.flag(item.head, slot, item.half)
        flag, pause = ptx.ldg_acquire_b32(address), Int32(PAUSE[0])
        while flag == 0:
            ptx.nanosleep(pause)
            pause = cutlass.min(2 * pause, Int32(PAUSE[1]))
            flag = ptx.ldg_acquire_b32(address)
        states.load_carry(p.checkpoint(item.head, slot, item.half), t.flat_s)

    # ---- the spine's links

    @cute.jit
    def plain_links(self, t, p, sm, item, at):
        """Entry and exit as `links` expects: S rounded, acc_v = U, decay of the next chunk. The loop is rotated to begin
        between V' and the update: begun at V', ptxas would wait for the products before the scaling."""
        if item.plain > 0:
            at = self.spine(t, p, sm, item, at)
        return at

    @cute.jit
    def spine(self, t, p, sm, item, at):
        stage, phase, out_stage, out_phase, o_phase = at
        following, following_phase = self.advance(stage, phase, self.chain_stages)
        warpgroup.fence()
        self.product(K_MAJOR, t.acc_v, t.s_bf16, t.w[None, 0, None, stage], range(8))
        warpgroup.commit_group()
        self.decay_state(t)
        cute.arch.mbarrier_wait(sm.chain.full + following, following_phase)
        for k in cutlass.range_constexpr(4):
            self.load_u(t, following, k)
        cute.arch.mbarrier_wait(sm.output.full + out_stage, out_phase)
        warpgroup.wait_group(0)
        with cute.arch.elect_one():
            self.free(sm.chain.empty + stage)
        count, parity = Int32(CHUNKS_PER_CHECKPOINT), Int32(1)
        checkpoint = p.checkpoint(item.head, item.slot, item.half)
        for _c in cutlass.range(item.plain - 1, unroll=1):
            # acc_v: V' of a chunk; S already decayed; u_words: U of the next chunk, whose stage is `following`.
            after, after_phase = self.advance(following, following_phase, self.chain_stages)
            next_out, next_out_phase = self.advance(out_stage, out_phase, self.output_stages)
            ready = cute.arch.mbarrier_test_wait(sm.chain.full + after, after_phase)
            self.update(t, out_stage, following, 2)
            self.start_v(t)
            if not ready:
                cute.arch.mbarrier_wait(sm.chain.full + after, after_phase)
            warpgroup.wait_group(1)  # S, keys 0 to 63
            self.round_state(t, 0, 4)
            warpgroup.fence()
            for k in cutlass.range_constexpr(4):
                self.product(K_MAJOR, t.acc_v, t.s_bf16, t.w[None, 0, None, following], (k,))
                self.load_u(t, after, k)
            warpgroup.commit_group()
            warpgroup.wait_group(1)  # S, keys 64 to 127
            self.round_state(t, 4, 8)
            warpgroup.fence()
            self.product(K_MAJOR, t.acc_v, t.s_bf16, t.w[None, 0, None, following], range(4, 6))
            with cute.arch.elect_one():
                self.free(sm.output.empty + out_stage)
            self.product(K_MAJOR, t.acc_v, t.s_bf16, t.w[None, 0, None, following], range(6, 8))
            warpgroup.commit_group()
            count -= 1
            if count == 0:
                count = Int32(CHUNKS_PER_CHECKPOINT)
                checkpoint += 2 * STATE_BYTES
                cute.arch.mbarrier_wait(sm.checkpoint.empty, parity)
                states.store_carry(checkpoint, t.flat_s)
                parity = parity ^ 1
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(sm.checkpoint.full)
            self.decay_state(t)
            # The wait ends a basic block: without it ptxas moves the scaling behind the products.
            cute.arch.mbarrier_wait(sm.output.full + next_out, next_out_phase)
            warpgroup.wait_group(0)
            with cute.arch.elect_one():
                self.free(sm.chain.empty + following)
            following, following_phase = after, after_phase
            out_stage, out_phase = next_out, next_out_phase
        self.update(t, out_stage, following, 1)
        self.start_v(t)
        warpgroup.wait_group(0)
        with cute.arch.elect_one():
            self.free(sm.output.empty + out_stage)
        self.round_state(t, 0, 8)
        out_stage, out_phase = self.advance(out_stage, out_phase, self.output_stages)
        return following, following_phase, out_stage, out_phase, o_phase

    @cute.jit
    def update(self, t, out_stage, following, groups: cutlass.Constexpr):
        """S += K_end^T V', in one group or two; the decay of the chunk in stage `following` is loaded in between."""
        self.round(t.flat_v_bf16, t.flat_v, range(4))
        warpgroup.fence()
        for h in cutlass.range_constexpr(2):
            for k in cutlass.range_constexpr(4):
                self.product(MN_MAJOR, t.acc_s[h], t.v_bf16, t.k_end[None, h, None, out_stage], (k,))
                self.load_decay(t, following, 4 * h + k)
            if const_expr(h == 1 or groups == 2):
                warpgroup.commit_group()
