"""The intermediate states of the 64-token chain: bf16, as the products take them, in the order of time.

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


class IntermediateStates:
    """Finds the rows and stores the states, where the variant asks for them; elsewhere nothing happens.

    All methods are for whole chain warps, because sequences are counted a warp at a time.

    Args:
        variant: see contract.py.
        args: the kernel's ChainArguments.
        fragments: the chain thread's Fragments, whose rounded state is stored.
    """

    def __init__(self, variant, args, fragments):
        self.wanted = variant.intermediate_states is not None
        self.cu_dtype, self.v_first = variant.cu_seqlens, variant.state_v_first
        self.args, self.fragments = args, fragments

    @cute.jit
    def count(self, item, counted):
        """(sequence, chunks of all sequences before it) of an item; `counted`: the same of an earlier item, or (0, 0).

        The sequences of a CTA's items rise, except the up to MAX_SORTED sequences that are sorted. So all sequences are
        counted once.
        """
        if const_expr(self.wanted):
            if const_expr(self.cu_dtype is None):
                counted = (item.seq, item.slot)  # no slot is empty
            else:
                args = self.args
                seq, chunks = counted
                if item.seq < seq:
                    seq, chunks = Int32(0), Int32(0)
                chunks += sequences.chunks_of(seq, item.seq, args.cu_seqlens, args.seq_len, LOG2_CHUNK, self.cu_dtype)
                counted = (item.seq, chunks)
        return counted

    @cute.jit
    def address(self, item, counted):
        """Address of the item's value half of the state before its first chunk."""
        address = Int64(0)
        if const_expr(self.wanted):
            value_half = const_expr(states.half_offset("bf16", self.v_first))
            args, chunks = self.args, counted[1]
            if const_expr(self.cu_dtype is not None):
                chunks = sequences.first_row(chunks, item.length, args.num_seqs, args.seq_len, LOG2_CHUNK)
            row = (Int64(chunks) + item.first) * args.heads + item.head
            address = args.intermediate_states + row * ROW_BYTES + item.value_half * value_half
        return address

    def step(self):
        """Bytes from the state before one chunk to the state before the next."""
        return Int64(self.args.heads) * ROW_BYTES

    @cute.jit
    def store_zeros(self, address):
        if const_expr(self.wanted):
            for k in cutlass.range_constexpr(0, 8, 2):
                words = [[Int32(0)] * 4] * 2
                states.store_rounded(address, k, words, self.v_first)

    @cute.jit
    def store(self, address, begin: cutlass.Constexpr, end: cutlass.Constexpr):
        """The rounded state, blocks of 16 keys `begin` to `end`. No product that reads them may be in flight."""
        if const_expr(self.wanted):
            for k in cutlass.range_constexpr(begin, end, 2):
                words = [[self.fragments.s_words[j, k + b] for j in range(4)] for b in range(2)]
                states.store_rounded(address, k, words, self.v_first)

    @cute.jit
    def store_between(self, link, links, address, begin: cutlass.Constexpr, end: cutlass.Constexpr):
        """`store` after a link, unless it is the item's last: the state after that one is not between chunks."""
        if const_expr(self.wanted):
            if link + 1 < links:
                self.store(address, begin, end)
