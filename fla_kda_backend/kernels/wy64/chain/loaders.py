"""The loader warps of the 64-token chain: records into the two rings of shared memory, by bulk copies.

The copies of a stage, and its loader's one arrival, complete the stage's `full`. Both value halves need most of a record:
cluster.py says who copies what.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.ring import RingPosition
from fla_kda_backend.kernels.wy64 import states
from fla_kda_backend.kernels.wy64.chain.shared import A_COLUMN, A_PIECES, QK_BYTES, QKA_BYTES
from fla_kda_backend.kernels.wy64.record import (
    A_BYTES,
    DECAY_AT,
    DECAY_BYTES,
    Q_AT,
    Q_BYTES,
    RECORD_BYTES,
    U_AT,
    U_BYTES,
    W_AT,
    W_BYTES,
)

FIRST_PAUSE, LONGEST_PAUSE = 32, 128  # ns, of a thread that waits for a flag


class Loader:
    """What both loaders need; cta: see arguments.py."""

    def __init__(self, cta):
        self.initial, self.v_first = cta.variant.initial_state, cta.variant.state_v_first
        self.overlap = cta.schedule.overlap  # the chain runs beside prepare and waits for each record
        self.zero_start = cta.schedule.starts_from_zero(cta.variant)  # W and Q of a sequence's first chunk are not needed
        self.args, self.workspace = cta.args, cta.workspace
        self.shared, self.tasks, self.cluster = cta.shared, cta.tasks, cta.cluster

    @cute.jit
    def wait_for_records(self, item, link, ready):
        """Wait until the record of a link is written; by whole warps, which ask for 32 records at a time.

        `ready`: the records of this number of the item's links were seen to be written. Returns the new number.
        """
        last = item.spine_links + item.output_links - 1
        pause = Int32(FIRST_PAUSE)
        while ready <= link:
            at = cutlass.min(link + cute.arch.lane_idx(), last)
            flag = self.workspace.record_flag(item.head, item.slot + item.first + at)
            written = cute.arch.vote_ballot_sync(ptx.ldg_acquire_b32(flag) != 0)
            ready = link + cute.arch.popc(written & ~(written + 1))
            if ready <= link:
                ptx.nanosleep(pause)
                pause = cutlass.min(2 * pause, Int32(LONGEST_PAUSE))
            else:
                # One lane has the copy engine read what any lane has seen to be written.
                cute.arch.sync_warp()
                ptx.fence_proxy_async_global()
        return ready


class ChainLoader(Loader):
    """Fills the chain ring: W, U and the decay of each link."""

    @cute.jit
    def run(self):
        ring = self.shared.chain
        if const_expr(not self.overlap):
            ptx.dependency_wait()  # in every CTA, also where it has no chunk: see launch.py
        at = RingPosition.of_writer(ring.stages)
        for turn in cutlass.range(self.tasks.rounds(), unroll=1):
            item = self.tasks.item_now(turn)
            source = self.workspace.record(item.head, item.slot + item.first)
            ready = Int32(0)
            for link in cutlass.range(item.spine_links + item.output_links, unroll=1):
                if const_expr(self.overlap):
                    ready = self.wait_for_records(item, link, ready)
                w_bytes = Int32(W_BYTES)
                if const_expr(self.zero_start):
                    w_bytes = ptx.less_b32(0, link, W_BYTES, 0)
                ring.wait_empty(at)
                with cute.arch.elect_one():
                    full = ring.full + at.stage
                    cute.arch.mbarrier_arrive_and_expect_tx(full, w_bytes + (U_BYTES + DECAY_BYTES))
                    self.load(source, item, at.stage, w_bytes, full.toint())
                source += RECORD_BYTES
                at.advance()
        if const_expr(self.overlap):
            ptx.dependency_wait()

    @cute.jit
    def load(self, source, item, stage, w_bytes, full):
        """The copies of a stage, from the record at `source`; by one lane."""
        if w_bytes > 0:
            self.cluster.fetch(self.shared.w.toint() + stage * W_BYTES, source + W_AT, w_bytes, full)
        u = source + U_AT + item.value_half * U_BYTES
        self.cluster.fetch_own(self.shared.u.toint() + stage * U_BYTES, u, Int32(U_BYTES), full)
        decay = self.shared.decay.toint() + stage * DECAY_BYTES
        self.cluster.fetch(decay, source + DECAY_AT, Int32(DECAY_BYTES), full)


class OutputLoader(Loader):
    """Fills the output ring: the initial state of a sequence, then Q, K_end and A of each link."""

    @cute.jit
    def needed(self, item, link):
        """Begin and end, in bytes, of what a link needs of {Q, K_end, first column of A}. With the end of the first column
        come the other columns."""
        begin = Int32(0)
        if const_expr(self.zero_start):
            begin = ptx.less_b32(0, link, 0, Q_BYTES)
        return begin, Int32(QK_BYTES + A_COLUMN)

    @cute.jit
    def run(self):
        ring = self.shared.output
        at = RingPosition.of_writer(ring.stages)
        for turn in cutlass.range(self.tasks.rounds(), unroll=1):
            item = self.tasks.item_now(turn)
            if const_expr(self.initial is not None):
                if item.starts():
                    ring.wait_empty(at)
                    self.load_initial_state(item, at.stage)
                    at.advance()
            if const_expr(not self.overlap):
                ptx.dependency_wait()
            source = self.workspace.record(item.head, item.slot + item.first) + Q_AT
            ready = Int32(0)
            for link in cutlass.range(item.spine_links + item.output_links, unroll=1):
                if const_expr(self.overlap):
                    ready = self.wait_for_records(item, link, ready)
                begin, end = self.needed(item, link)
                ring.wait_empty(at)
                with cute.arch.elect_one():
                    self.load(source, begin, end, at.stage)
                source += RECORD_BYTES
                at.advance()

    @cute.jit
    def load_initial_state(self, item, stage):
        """The item's value half of the sequence's initial state, where Q and K_end would lie; by the whole warp."""
        args = self.args
        source = args.initial_state + states.state_offset(item.seq, item.head, args.heads, self.initial)
        target = self.shared.qka.toint() + stage * QKA_BYTES
        states.fetch_state(target, self.shared.output.full + stage, source, item.value_half, self.initial, self.v_first)

    @cute.jit
    def load(self, source, begin, end, stage):
        """The arrival and the copies of a stage, from Q of the record at `source`; by one lane."""
        full = self.shared.output.full + stage
        rest = ptx.less_b32(QK_BYTES, end, A_BYTES - A_COLUMN, 0)
        cute.arch.mbarrier_arrive_and_expect_tx(full, end - begin + rest)
        target = self.shared.qka.toint() + stage * QKA_BYTES
        self.cluster.fetch(target + begin, source + begin, end - begin, full.toint())
        if rest > 0:
            for at, to, size in A_PIECES[1:]:
                self.cluster.fetch(target + QK_BYTES + to, source + QK_BYTES + at, Int32(size), full.toint())
