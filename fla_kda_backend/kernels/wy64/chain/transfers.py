"""What the loader and writer warps of the 64-token chain move; see chain_wy64.py.

The loaders bring records into two rings of shared memory, {W, U, decay} and {Q, K_end, A}, each by bulk copies that
complete on the stage's mbarrier. The writers take O from shared memory to its rows in global memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64 import states
from fla_kda_backend.kernels.wy64.chain.fragments import A_COLUMN, A_PIECES, QK_BYTES, QKA_BYTES
from fla_kda_backend.kernels.wy64.record import (
    A_BLOCK,
    A_BYTES,
    BANDS,
    CHUNK,
    DECAY_AT,
    DECAY_BYTES,
    HALF,
    HEAD_DIM,
    Q_AT,
    Q_BYTES,
    RECORD_BYTES,
    U_AT,
    U_BYTES,
    W_AT,
    W_BYTES,
)

PAUSE = (32, 128)  # ns, of a waiting thread: the first and the longest


class ChainTransfers:
    """A kernel inherits it, with TaskList and ChainPair.

    zero_start: every item begins with the state zero of a sequence, and W and Q of its first chunk are not needed.
    """

    zero_start = False
    overlap = False  # the chain runs beside prepare and waits for each record

    @cute.jit
    def advance(self, stage, phase, stages: cutlass.Constexpr):
        stage += 1
        if stage == stages:
            stage = Int32(0)
            phase = phase ^ 1
        return stage, phase

    @cute.jit
    def before(self, out_stage):
        """The output stage before this one."""
        last = out_stage - 1
        if out_stage == 0:
            last = Int32(self.output_stages - 1)
        return last

    @cute.jit
    def clear_above_diagonal(self, tid, sm):
        """The blocks of A that no copy touches."""
        for s in cutlass.range_constexpr(self.output_stages):
            for j in cutlass.range_constexpr(1, BANDS):
                if tid < j * A_BLOCK // 16:
                    at = sm.qka.toint() + s * QKA_BYTES + QK_BYTES + j * A_COLUMN + tid * 16
                    ptx.sts_v4_b32(at, [Int32(0)] * 4)
        ptx.fence_proxy_async()

    # ---- loader warps

    @cute.jit
    def output_part(self, item, link):
        """Begin and end of what a link needs of {Q, K_end, first column of A}; with the latter come the other columns."""
        begin = Int32(0)
        if const_expr(self.zero_start):
            begin = ptx.less_b32(0, link, 0, Q_BYTES)
        return begin, Int32(QK_BYTES + A_COLUMN)

    @cute.jit
    def wait_for_records(self, p, item, link, ready):
        """Wait until the record of a link is written; `ready`: links of the item whose records were seen to be. Whole
        warps ask for 32 records at a time."""
        last = item.plain + item.links - 1
        pause = Int32(PAUSE[0])
        while ready <= link:
            at = cutlass.min(link + cute.arch.lane_idx(), last)
            written = cute.arch.vote_ballot_sync(ptx.ldg_acquire_b32(p.ready(item.head, item.slot + item.first + at)) != 0)
            ready = link + cute.arch.popc(written & ~(written + 1))
            if ready <= link:
                ptx.nanosleep(pause)
                pause = cutlass.min(2 * pause, Int32(PAUSE[1]))
            else:
                # What any lane has seen to be written, the copy engine reads on behalf of one.
                cute.arch.sync_warp()
                ptx.fence_proxy_async_global()
        return ready

    @cute.jit
    def load_chain(self, p, sm):
        if const_expr(not self.overlap):
            ptx.dependency_wait()  # in every CTA, also where it has no chunk: see wy64.py
        stage, phase = Int32(0), Int32(1)
        for turn in cutlass.range(self.rounds(p), unroll=1):
            item = self.item_now(p, turn)
            source = p.record(item.head, item.slot + item.first)
            ready = Int32(0)
            for link in cutlass.range(item.plain + item.links, unroll=1):
                if const_expr(self.overlap):
                    ready = self.wait_for_records(p, item, link, ready)
                used = Int32(W_BYTES)
                if const_expr(self.zero_start):
                    used = ptx.less_b32(0, link, W_BYTES, 0)
                cute.arch.mbarrier_wait(sm.chain.empty + stage, phase)
                with cute.arch.elect_one():
                    full = sm.chain.full + stage
                    cute.arch.mbarrier_arrive_and_expect_tx(full, used + (U_BYTES + DECAY_BYTES))
                    full = full.toint()
                    if used > 0:
                        self.fetch(sm.w.toint() + stage * W_BYTES, source + W_AT, used, full)
                    u = source + U_AT + item.half * U_BYTES
                    self.fetch_own(sm.u.toint() + stage * U_BYTES, u, Int32(U_BYTES), full)
                    self.fetch(sm.decay.toint() + stage * DECAY_BYTES, source + DECAY_AT, Int32(DECAY_BYTES), full)
                source += RECORD_BYTES
                stage, phase = self.advance(stage, phase, self.chain_stages)
        if const_expr(self.overlap):
            ptx.dependency_wait()

    @cute.jit
    def load_output(self, p, sm):
        stage, phase = Int32(0), Int32(1)
        for turn in cutlass.range(self.rounds(p), unroll=1):
            item = self.item_now(p, turn)
            if const_expr(self.initial is not None):
                if item.starts():
                    cute.arch.mbarrier_wait(sm.output.empty + stage, phase)
                    state = p.initial_state + self.state_offset(p, item, self.initial)
                    target = sm.qka.toint() + stage * QKA_BYTES
                    states.fetch_state(
                        target, sm.output.full + stage, state, item.half, self.initial, self.state_v_first
                    )
                    stage, phase = self.advance(stage, phase, self.output_stages)
            if const_expr(not self.overlap):
                ptx.dependency_wait()
            source = p.record(item.head, item.slot + item.first) + Q_AT
            ready = Int32(0)
            for link in cutlass.range(item.plain + item.links, unroll=1):
                if const_expr(self.overlap):
                    ready = self.wait_for_records(p, item, link, ready)
                begin, end = self.output_part(item, link)
                cute.arch.mbarrier_wait(sm.output.empty + stage, phase)
                with cute.arch.elect_one():
                    full = sm.output.full + stage
                    rest = ptx.less_b32(QK_BYTES, end, A_BYTES - A_COLUMN, 0)
                    cute.arch.mbarrier_arrive_and_expect_tx(full, end - begin + rest)
                    target = sm.qka.toint() + stage * QKA_BYTES
                    self.fetch(target + begin, source + begin, end - begin, full.toint())
                    if rest > 0:
                        for at, to, size in A_PIECES[1:]:
                            self.fetch(target + QK_BYTES + to, source + QK_BYTES + at, Int32(size), full.toint())
                source += RECORD_BYTES
                stage, phase = self.advance(stage, phase, self.output_stages)

    # ---- writer warps

    @cute.jit
    def write_o(self, thread, p, sm):
        """Rows of 128 bytes: 8 threads a row, 8 rows at a time; rows past the end of the sequence are not written."""
        row, piece = thread // 8, thread % 8
        source = sm.o.toint() + row * 128 + (piece ^ row) * 16
        phase = Int32(0)
        step = Int64(p.heads) * (HEAD_DIM * 2 * 8)
        for turn in cutlass.range(self.rounds(p), unroll=1):
            item = self.item_now(p, turn)
            token = (item.first + item.plain) * CHUNK + row
            line = (Int64(item.begin) + token) * p.heads + item.head
            target = p.out + line * (HEAD_DIM * 2) + item.half * (HALF * 2) + piece * 16
            left = item.length - token
            for _link in cutlass.range(item.links, unroll=1):
                cute.arch.mbarrier_wait(sm.store.full, phase)
                rows = [ptx.lds_v4_b32(source + 1024 * k) for k in range(8)]
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(sm.store.empty)
                for k in cutlass.range_constexpr(8):
                    if left > 8 * k:
                        ptx.stg_once_words(target + step * k, rows[k])
                target += step * 8
                left -= CHUNK
                phase = phase ^ 1

    def state_offset(self, p, item, kind):
        return (Int64(item.seq) * p.heads + item.head) * (states.size(kind) * HEAD_DIM * HEAD_DIM)
