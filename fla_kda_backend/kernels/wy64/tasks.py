"""What each CTA of the 64-token chain works on: which sequence, head and value half, which chunks, and where they lie.

A task is (sequence, head, value half). A launch covers slots [slot_begin, slot_end) of the call's workspace; the part of a
task inside them is a WorkItem. Where the chunks of a sequence lie in the workspace: sequences.py.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from fla_kda_backend.kernels import sequences
from fla_kda_backend.kernels.wy64.record import CHUNK, LOG2_CHUNK

MAX_SORTED = 128  # up to so many sequences the longest goes first; more keep their order


@dataclass(frozen=True)
class WorkItem:
    """Successive chunks of one (sequence, head, value half) that one CTA works through."""

    seq: Int32
    head: Int32
    value_half: Int32
    begin: Int32  # first token of the sequence
    length: Int32  # of the sequence, in tokens
    slot: Int32  # of the sequence's chunk 0
    first: Int32  # the item's first chunk, counted from the sequence's chunk 0
    spine_links: Int32  # links without outputs, which come first
    output_links: Int32  # links with outputs
    empty: Boolean  # a sequence without tokens: this CTA copies its states
    ends: Boolean  # the state after the last link is the sequence's final state

    @cute.jit
    def starts(self):
        """Whether the sequence's initial state is needed."""
        return self.empty or (self.first == 0 and self.output_links > 0)


class Tasks:
    """Deals the tasks of a launch out to its CTAs.

    Args:
        variant, schedule: see contract.py.
        args: the kernel's ChainArguments; cu_seqlens, seq_len, num_seqs, heads, slot_begin and slot_end are read.
        order: shared memory for MAX_SORTED Int32, a tensor; filled by `sort`.
    """

    def __init__(self, variant, schedule, args, order):
        self.cu_dtype = variant.cu_seqlens
        self.segmented, self.direct = schedule.segmented, schedule.direct
        self.args, self.order = args, order

    @cute.jit
    def sort(self, tid, scratch):
        """order[rank] = sequence, longest first, by counting.

        All threads of the CTA call it, at least MAX_SORTED of them, and a barrier of the CTA follows. `scratch` points to
        shared memory for MAX_SORTED Int32.
        """
        if const_expr(self.cu_dtype is not None):
            if self.args.num_seqs <= MAX_SORTED:
                lengths, order = cute.make_tensor(scratch, cute.make_layout(MAX_SORTED)), self.order
                mine = Int32(0)
                if tid < self.args.num_seqs:
                    _, mine, _ = self.sequence(tid)
                    lengths[tid] = mine
                cute.arch.sync_threads()
                if tid < self.args.num_seqs:
                    rank = Int32(0)
                    for other in cutlass.range(self.args.num_seqs, unroll=4):
                        theirs = lengths[other]
                        if theirs > mine or (theirs == mine and other < tid):
                            rank += 1
                    order[rank] = tid

    def sequence(self, seq):
        """First token, length in tokens and slot of chunk 0 of a sequence."""
        return sequences.sequence(seq, self.args.cu_seqlens, self.args.seq_len, LOG2_CHUNK, self.cu_dtype)

    @cute.jit
    def of_rank(self, rank):
        """The sequence of that rank in the order of work."""
        seq = rank
        if const_expr(self.cu_dtype is not None):
            if self.args.num_seqs <= MAX_SORTED:
                seq = self.order[rank]
        return seq

    @cute.jit
    def rounds(self):
        """How many tasks a CTA has at most."""
        grid, _, _ = cute.arch.grid_dim()
        return (self.args.num_seqs * self.args.heads * 2 + grid - 1) // grid

    @cute.jit
    def task(self, turn):
        """(sequence, head, value half) of this CTA's task number `turn`; sequence -1: there is none.

        Tasks are dealt out forwards and backwards in turn, so that with falling lengths the sums come out even. The two
        value halves of a head fall to neighbouring CTAs, which share its records.
        """
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        index = turn * grid + bid
        if turn % 2 == 1:
            index = turn * grid + grid - 1 - bid
        pair = index // 2
        rank = pair // self.args.heads
        seq = Int32(-1)
        if rank < self.args.num_seqs:
            seq = self.of_rank(rank)
        return seq, pair % self.args.heads, index % 2

    @cute.jit
    def entries(self, task):
        """What `item` needs of memory, so that it can be loaded long before."""
        return sequences.entries(task[0], self.args.cu_seqlens, self.cu_dtype)

    @cute.jit
    def item_now(self, turn):
        """The WorkItem of this CTA's task number `turn`."""
        task = self.task(turn)
        return self.item(task, self.entries(task))

    @cute.jit
    def locate(self, seq, entries):
        """First token, length, slot of chunk 0 and number of chunks of a sequence; for sequence -1 the last is 0."""
        begin, length, slot = sequences.sequence_from_entries(seq, entries, self.args.seq_len, LOG2_CHUNK, self.cu_dtype)
        chunks = (length + (CHUNK - 1)) >> LOG2_CHUNK
        if const_expr(self.cu_dtype is None):
            if seq < 0:
                chunks = Int32(0)
        return begin, length, slot, chunks

    @cute.jit
    def item(self, task, entries):
        """The WorkItem of a task, from the sequence's entries of cu_seqlens."""
        seq, head, value_half = task
        begin, length, slot, chunks = self.locate(seq, entries)
        first, links = Int32(0), chunks
        if const_expr(self.direct):
            if chunks == 1:  # prepare has computed it whole
                links = Int32(0)
        empty = length == 0 and seq >= 0
        if const_expr(self.segmented):
            slot_begin, slot_end = self.args.slot_begin, self.args.slot_end
            first = cutlass.max(slot_begin - slot, Int32(0))
            links = cutlass.max(cutlass.min(slot_end - slot, chunks) - first, Int32(0))
            empty = empty and slot >= slot_begin and slot < slot_end
        return WorkItem(
            seq=seq, head=head, value_half=value_half, begin=begin, length=length, slot=slot, first=first, spine_links=Int32(0),
            output_links=links, empty=empty, ends=first + links == chunks,
        )  # fmt: skip
