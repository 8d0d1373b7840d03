"""The loader warps of the reverse chain: records by bulk copies, d_out by 16-byte pieces.

A stage of the first ring is complete with its loader's arrival, the bytes of the copies, and the arrival of the warp that
brought d_out. Each CTA brings its own value half of d_out; cluster.py says who copies what of the rest.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.ring import RingPosition
from fla_kda_backend.kernels.wy64.backward.reverse.shared import A_IMAGE, D_OUT_BYTES, WQ_BYTES
from fla_kda_backend.kernels.wy64.chain.shared import A_PIECES
from fla_kda_backend.kernels.wy64.record import (
    A_AT,
    A_BYTES,
    CHUNK,
    DECAY_AT,
    DECAY_BYTES,
    HALF,
    K_END_AT,
    K_END_BYTES,
    Q_AT,
    RECORD_BYTES,
    W_AT,
    W_BYTES,
)


class RecordLoader:
    """One warp, which fills both rings, but for d_out; cta: see arguments.py."""

    def __init__(self, cta):
        self.args, self.workspace, self.beside = cta.args, cta.workspace, cta.schedule.beside
        self.shared, self.tasks, self.cluster = cta.shared, cta.tasks, cta.cluster

    @cute.jit
    def run(self):
        if const_expr(self.beside):
            ptx.dependency_launch()  # of the local gradients, in every CTA, also where it has no chunk
        first, second = self.shared.first, self.shared.second
        at_first, at_second = RingPosition.of_writer(first.stages), RingPosition.of_writer(second.stages)
        for turn in cutlass.range(self.tasks.rounds(), unroll=1):
            item = self.tasks.item_now(turn)
            source = self.workspace.record(item.head, item.slot + item.first + item.output_links - 1)
            for _link in cutlass.range(item.output_links, unroll=1):
                first.wait_empty(at_first)
                with cute.arch.elect_one():
                    self.load_first(source, at_first.stage)
                second.wait_empty(at_second)
                with cute.arch.elect_one():
                    self.load_second(source, at_second.stage)
                source -= RECORD_BYTES
                at_first.advance()
                at_second.advance()

    @cute.jit
    def load_first(self, source, stage):
        """The arrival and the copies of a stage, from the record at `source`; by one lane."""
        full, shared = self.shared.first.full + stage, self.shared
        cute.arch.mbarrier_arrive_and_expect_tx(full, K_END_BYTES + A_BYTES + DECAY_BYTES)
        full = full.toint()
        for at, to, size in A_PIECES:
            self.cluster.fetch(shared.a.toint() + stage * A_IMAGE + to, source + A_AT + at, Int32(size), full)
        decay = shared.decay.toint() + stage * DECAY_BYTES
        self.cluster.fetch(decay, source + DECAY_AT, Int32(DECAY_BYTES), full)
        self.cluster.fetch(shared.k_end.toint() + stage * K_END_BYTES, source + K_END_AT, Int32(K_END_BYTES), full)

    @cute.jit
    def load_second(self, source, stage):
        """The same of the second ring. W and Q follow each other in the record, too."""
        full = self.shared.second.full + stage
        cute.arch.mbarrier_arrive_and_expect_tx(full, WQ_BYTES)
        self.cluster.fetch(self.shared.wq.toint() + stage * WQ_BYTES, source + W_AT, Int32(WQ_BYTES), full.toint())


assert W_AT + W_BYTES == Q_AT


class OutputGradientLoader:
    """One of WARPS warps that bring d_out; they take the stages in turn, so that one's stage does not wait for the other's.

    Args:
        cta: see arguments.py.
        number: of the warp among them.
    """

    WARPS = 2

    def __init__(self, cta, number):
        self.args, self.shared, self.tasks, self.number = cta.args, cta.shared, cta.tasks, number

    @cute.jit
    def run(self):
        ring = self.shared.first
        at, use = RingPosition.of_writer(ring.stages), Int32(0)
        for turn in cutlass.range(self.tasks.rounds(), unroll=1):
            item = self.tasks.item_now(turn)
            for link in cutlass.range(item.output_links, unroll=1):
                ring.wait_empty(at)  # of the other warps' uses, too: a wait that leaves phases out could take one for another
                if use % self.WARPS == self.number:
                    self.load(item, item.first + item.output_links - 1 - link, at.stage)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(ring.full + at.stage)
                use += 1
                at.advance()

    @cute.jit
    def load(self, item, chunk, stage):
        """The item's value half of the rows of a chunk; zeros past the end of the sequence. 8 lanes per row."""
        args, lane = self.args, cute.arch.lane_idx()
        row, piece = lane // 8, lane % 8
        left = item.length - (chunk * CHUNK + row)
        token = Int64(item.begin) + (chunk * CHUNK + row)
        element = token * args.d_out_token + Int64(item.head) * args.d_out_head + item.value_half * HALF + piece * 8
        source, step = args.d_out + element * 2, args.d_out_token * (4 * 2)
        target = self.shared.d_out.toint() + stage * D_OUT_BYTES
        # rows row + 4 * i: their number modulo 8 is row or row + 4
        targets = [target + r * 128 + (piece ^ r) * 16 for r in (row, row + 4)]
        for i in cutlass.range_constexpr(CHUNK // 4):
            size = ptx.less_b32(4 * i, left, 16, 0)
            ptx.cp_async_16_or_zero(targets[i % 2] + i // 2 * 1024, source, size)
            source += step
        ptx.cp_async_wait_all()
        cute.arch.sync_warp()
