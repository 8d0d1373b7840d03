"""What the 64-token kernels share: the record of the workspace, and which sequence, head and chunks a task covers.

Slots: chunk c of sequence s has slot (cu_seqlens[s] >> 6) + s + c, without cu_seqlens s * ceil(seq_len / 64) + c. A
launch covers slots [slot_begin, slot_end); the workspace holds one record per (head, slot) of that range,
[head][slot].
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from . import ptx

CHUNK = 64
HEAD_DIM = 128
HALF = HEAD_DIM // 2

# Byte offsets and sizes of the images in a record: -W, Q, K_end, A, U (two halves of the value columns), decay.
W_AT, Q_AT, K_END_AT, A_AT, U_AT, DECAY_AT = 0, 16384, 32768, 49152, 57344, 73728
W_BYTES, Q_BYTES, K_END_BYTES, A_BYTES, U_BYTES, DECAY_BYTES = 16384, 16384, 16384, 8192, 8192, 512
RECORD_BYTES = 74240
O_BYTES = CHUNK * HALF * 2  # output of a chunk and half
assert DECAY_AT + DECAY_BYTES == RECORD_BYTES and U_AT + 2 * U_BYTES == DECAY_AT

MAX_SORTED = 128  # up to so many sequences the longest goes first; more keep their order


@dataclass(frozen=True)
class Problem:
    """Run-time facts that all CTAs of a launch share."""

    cu_seqlens: Int64
    workspace: Int64
    order: Any  # shared memory for MAX_SORTED Int32
    seq_len: Int32
    num_seqs: Int32
    heads: Int32
    slot_begin: Int32
    slot_end: Int32

    def ordered(self):
        return cute.make_tensor(self.order, cute.make_layout(MAX_SORTED))


class TaskList:
    """Deals the tasks (sequence, head, half of the value columns) of a launch out to its CTAs; a kernel inherits it.

    cu_dtype: type of cu_seqlens, Int32 or Int64; None: sequences of equal length.
    """

    cu_dtype = None

    @cute.jit
    def sort(self, p, tid, scratch):
        """order[rank] = sequence, longest first, by counting. All threads call it (at least MAX_SORTED); a block
        barrier follows. scratch: shared memory for MAX_SORTED Int32."""
        if const_expr(self.cu_dtype is not None):
            if p.num_seqs <= MAX_SORTED:
                lengths = cute.make_tensor(scratch, cute.make_layout(MAX_SORTED))
                mine = Int32(0)
                if tid < p.num_seqs:
                    begin, end = self.bounds(p, tid)
                    mine = end - begin
                    lengths[tid] = mine
                cute.arch.sync_threads()
                if tid < p.num_seqs:
                    rank = Int32(0)
                    for other in cutlass.range(p.num_seqs, unroll=4):
                        theirs = lengths[other]
                        if theirs > mine or (theirs == mine and other < tid):
                            rank += 1
                    p.ordered()[rank] = tid

    @cute.jit
    def rounds(self, p):
        """How many tasks a CTA has at most."""
        grid, _, _ = cute.arch.grid_dim()
        return (p.num_seqs * p.heads * 2 + grid - 1) // grid

    @cute.jit
    def task(self, p, turn):
        """(sequence, head, half) of this CTA's task number `turn`; sequence -1: none.

        Tasks are dealt out forwards and backwards in turn, so that with falling lengths the sums come out even; the
        two halves of a head fall to neighbouring CTAs and share its records in the L2.
        """
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        index = turn * grid + bid
        if turn % 2 == 1:
            index = turn * grid + grid - 1 - bid
        pair = index // 2
        rank = pair // p.heads
        seq = rank
        if rank >= p.num_seqs:
            seq = Int32(-1)
        elif const_expr(self.cu_dtype is not None):
            if p.num_seqs <= MAX_SORTED:
                seq = p.ordered()[rank]
        return seq, pair % p.heads, index % 2

    @cute.jit
    def bounds(self, p, seq):
        """(first token, first token of the next sequence); 0, 0 for sequence -1. Fewer than 2^31 tokens in all."""
        begin, end = Int32(0), Int32(0)
        if seq >= 0:
            if const_expr(self.cu_dtype is None):
                begin = seq * p.seq_len
                end = begin + p.seq_len
            else:
                begin = ptx.ldg_nc_b32(p.cu_seqlens + Int64(seq) * self.cu_dtype.width // 8)  # the low word of an Int64
                end = ptx.ldg_nc_b32(p.cu_seqlens + Int64(seq + 1) * self.cu_dtype.width // 8)
        return begin, end

    @cute.jit
    def span(self, p, seq, begin, end):
        """(slot of chunk 0, first chunk and number of chunks in this launch)."""
        chunks = (end - begin + CHUNK - 1) // CHUNK
        slot = begin // CHUNK + seq
        if const_expr(self.cu_dtype is None):
            slot = seq * chunks
        first = cutlass.max(p.slot_begin - slot, Int32(0))
        links = cutlass.max(cutlass.min(p.slot_end - slot, chunks) - first, Int32(0))
        return slot, first, links

    @cute.jit
    def record(self, p, head, slot):
        """Address of the record of (head, slot)."""
        return p.workspace + (Int64(head) * (p.slot_end - p.slot_begin) + (slot - p.slot_begin)) * RECORD_BYTES
