"""What a launch of the 64-token chain works on: which sequence, head and chunks a task covers, and where they lie.

Where a sequence's chunks lie in the workspace: sequences.py. A launch covers slots [slot_begin, slot_end).
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from fla_kda_backend.kernels import ptx, sequences
from fla_kda_backend.kernels.wy64.record import (
    CHUNK,
    CHUNKS_PER_CHECKPOINT,
    FLAG_BYTES,
    LOG2_CHUNK,
    LOG2_CHUNKS_PER_CHECKPOINT,
    READY_AT,
    RECORD_BYTES,
    STATE_BYTES,
)

MAX_SORTED = 128  # up to so many sequences the longest goes first; more keep their order


@dataclass(frozen=True)
class Problem:
    """Run-time facts that all CTAs of a launch share; see the kernel's parameters."""

    initial_state: Int64
    final_state: Int64
    out: Int64
    cu_seqlens: Int64
    workspace: Int64
    carry_in: Int64
    carry_out: Int64
    order: Any  # shared memory for MAX_SORTED Int32
    seq_len: Int32
    num_seqs: Int32
    heads: Int32
    slot_begin: Int32
    slot_end: Int32

    def ordered(self):
        return cute.make_tensor(self.order, cute.make_layout(MAX_SORTED))

    def record(self, head, slot):
        """Address of the record of (head, slot)."""
        return self.workspace + self.number(head, slot) * RECORD_BYTES

    def number(self, head, slot):
        """Records before that of (head, slot)."""
        return Int64(head) * (self.slot_end - self.slot_begin) + (slot - self.slot_begin)

    def flag(self, head, slot, half):
        """Address of a record's flag."""
        slots = self.slot_end - self.slot_begin
        return flag_address(self.workspace, self.heads, slots, head, slot - self.slot_begin) + 8 * half

    def ready(self, head, slot):
        """Address of the flag that says that a record is written."""
        return self.flag(head, slot, 0) + READY_AT

    def checkpoint(self, head, slot, half):
        """Address of the state at the beginning of a chunk."""
        slots = self.slot_end - self.slot_begin
        per_head = (slots + (CHUNKS_PER_CHECKPOINT - 1)) >> LOG2_CHUNKS_PER_CHECKPOINT
        place = (Int64(head) * per_head + (slot >> LOG2_CHUNKS_PER_CHECKPOINT)) * 2 + half
        return flag_address(self.workspace, self.heads, slots, self.heads, 0) + place * STATE_BYTES


def flag_address(workspace, heads, slots, head, slot):
    """Address of the two flags of a record; slots and slot are counted from the launch's first."""
    return workspace + Int64(heads) * slots * RECORD_BYTES + (Int64(head) * slots + slot) * FLAG_BYTES


@cute.jit
def clear_flags(workspace, heads, slots, head, slot):
    """Clear the flags of a record, by one thread of the CTA that writes it: whatever the workspace held before, the
    chain, which waits for all of them, finds only zeros."""
    ptx.stg_words(flag_address(workspace, heads, slots, head, slot), [Int32(0)] * 4)


@dataclass(frozen=True)
class Item:
    """A stretch of one sequence, head and half of the value columns that one CTA works through."""

    seq: Int32
    head: Int32
    half: Int32
    begin: Int32  # first token of the sequence
    length: Int32  # of the sequence, in tokens
    slot: Int32  # of the sequence's chunk 0
    first: Int32  # first chunk of the stretch
    plain: Int32  # links without outputs, which come first
    links: Int32  # links with outputs
    empty: Boolean  # a sequence without tokens, whose states this CTA copies
    ends: Boolean  # the state after the last link is the final one

    @cute.jit
    def starts(self):
        """Whether the sequence's initial state is needed."""
        return self.empty or (self.first == 0 and self.links > 0)


class TaskList:
    """Deals the tasks (sequence, head, half of the value columns) of a launch out to its CTAs; a kernel inherits it.

    cu_dtype: type of cu_seqlens, "int32" or "int64"; None: sequences of equal length. segmented: the launch may cover
    only some of the call's slots.
    """

    cu_dtype = None
    segmented = True
    direct = False  # sequences of one chunk are left to prepare

    @cute.jit
    def sort(self, p, tid, scratch):
        """order[rank] = sequence, longest first, by counting. All threads call it (at least MAX_SORTED); a block
        barrier follows. scratch: shared memory for MAX_SORTED Int32."""
        if const_expr(self.cu_dtype is not None):
            if p.num_seqs <= MAX_SORTED:
                lengths = cute.make_tensor(scratch, cute.make_layout(MAX_SORTED))
                mine = Int32(0)
                if tid < p.num_seqs:
                    _, mine, _ = sequences.sequence(tid, p.cu_seqlens, p.seq_len, LOG2_CHUNK, self.cu_dtype)
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
    def of_rank(self, p, rank):
        """The sequence of that rank."""
        seq = rank
        if const_expr(self.cu_dtype is not None):
            if p.num_seqs <= MAX_SORTED:
                seq = p.ordered()[rank]
        return seq

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
        seq = Int32(-1)
        if rank < p.num_seqs:
            seq = self.of_rank(p, rank)
        return seq, pair % p.heads, index % 2

    @cute.jit
    def entries(self, p, task):
        """What `item` needs of memory."""
        return sequences.entries(task[0], p.cu_seqlens, self.cu_dtype)

    @cute.jit
    def item_now(self, p, turn):
        task = self.task(p, turn)
        return self.item(p, task, self.entries(p, task))

    @cute.jit
    def place(self, p, seq, entries):
        """First token, length, slot of chunk 0 and number of chunks of a sequence; for sequence -1 the last is 0."""
        begin, length, slot = sequences.placed(seq, entries, p.seq_len, LOG2_CHUNK, self.cu_dtype)
        chunks = (length + (CHUNK - 1)) >> LOG2_CHUNK
        if const_expr(self.cu_dtype is None):
            if seq < 0:
                chunks = Int32(0)
        return begin, length, slot, chunks

    @cute.jit
    def item(self, p, task, entries):
        seq, head, half = task
        begin, length, slot, chunks = self.place(p, seq, entries)
        first, links = Int32(0), chunks
        if const_expr(self.direct):
            if chunks == 1:
                links = Int32(0)
        empty = length == 0 and seq >= 0
        if const_expr(self.segmented):
            first = cutlass.max(p.slot_begin - slot, Int32(0))
            links = cutlass.max(cutlass.min(p.slot_end - slot, chunks) - first, Int32(0))
            empty = empty and slot >= p.slot_begin and slot < p.slot_end
        return Item(seq, head, half, begin, length, slot, first, Int32(0), links, empty, first + links == chunks)
