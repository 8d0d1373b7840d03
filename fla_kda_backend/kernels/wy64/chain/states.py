"""The states between the chunks of the 64-token chain: bf16, as the products take them, in the order of time.

The state before chunk c of a sequence lies at row (chunks of all sequences before it) + c of a tensor [rows, heads] of
[V, K] (state_v_first) or [K, V] states.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from fla_kda_backend.kernels import sequences
from fla_kda_backend.kernels.wy64 import states
from fla_kda_backend.kernels.wy64.record import HEAD_DIM, LOG2_CHUNK

ROW_BYTES = HEAD_DIM * HEAD_DIM * 2  # of one head


class ChainStates:
    """A chain kernel inherits it, with TaskList. `states`: whether the states are asked for; without, nothing happens.

    All methods are for whole chain warps, because sequences are counted a warp at a time.
    """

    states = False
    state_v_first = True

    @cute.jit
    def count(self, p, item, counted):
        """(sequence, chunks of all before it) of an item; `counted`: that of an item before, or (0, 0).

        The sequences of a CTA's items rise, but for the up to MAX_SORTED sequences that are sorted: so they are counted
        once in all.
        """
        if const_expr(self.states):
            if const_expr(self.cu_dtype is None):
                counted = (item.seq, item.slot)  # no slot is empty
            else:
                seq, chunks = counted
                if item.seq < seq:
                    seq, chunks = Int32(0), Int32(0)
                chunks += sequences.chunks_of(seq, item.seq, p.cu_seqlens, p.seq_len, LOG2_CHUNK, self.cu_dtype)
                counted = (item.seq, chunks)
        return counted

    @cute.jit
    def state_row(self, p, item, t, counted):
        """Address of the item's part of the state before its first chunk."""
        row = Int64(0)
        if const_expr(self.states):
            part = const_expr(states.half_offset("bf16", self.state_v_first))
            chunks = counted[1]
            if const_expr(self.cu_dtype is not None):
                chunks = sequences.first_row(chunks, item.length, p.num_seqs, p.seq_len, LOG2_CHUNK)
            row = t.states + ((Int64(chunks) + item.first) * p.heads + item.head) * ROW_BYTES + item.half * part
        return row

    def state_step(self, p):
        """Bytes from one chunk's state to the next one's."""
        return Int64(p.heads) * ROW_BYTES

    @cute.jit
    def store_zeros(self, address):
        if const_expr(self.states):
            for k in cutlass.range_constexpr(0, 8, 2):
                words = [[Int32(0)] * 4] * 2
                states.store_rounded(address, k, words, self.state_v_first)

    @cute.jit
    def store_rounded(self, t, address, begin: cutlass.Constexpr, end: cutlass.Constexpr):
        """The rounded state, blocks of 16 keys `begin` to `end`. No product that reads them may be in flight."""
        if const_expr(self.states):
            for k in cutlass.range_constexpr(begin, end, 2):
                words = [[t.s_words[j, k + b] for j in range(4)] for b in range(2)]
                states.store_rounded(address, k, words, self.state_v_first)

    @cute.jit
    def store_between(self, t, c, links, address, begin: cutlass.Constexpr, end: cutlass.Constexpr):
        """store_rounded after link `c`, unless it is the last: the state after that is none between chunks."""
        if const_expr(self.states):
            if c + 1 < links:
                self.store_rounded(t, address, begin, end)
