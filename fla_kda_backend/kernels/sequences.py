"""Where a sequence lies in the token axis and in the workspace, computed on the device from cu_seqlens alone.

A chunk of C = 2**log2_chunk tokens occupies one slot of the workspace. The slot base of a sequence is the slot of its first
chunk. Packed sequences: slot base of sequence s = (cu_seqlens[s] >> log2_chunk) + s. Two neighbouring bases are at least
ceil(length / C) apart, so the chunks of two sequences never share a slot, and no prefix sum over lengths is needed. Some
slots stay empty. Batches of equal length: slot base of sequence s = s * ceil(seq_len / C), and no slot is empty.

cu_dtype is the dtype of cu_seqlens, "int32" or "int64"; None: there is none, all sequences have seq_len tokens. Packed,
`seq_len` or `tokens` is the number of tokens in the tensors.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from fla_kda_backend.kernels import ptx


def _cu(cu_seqlens, index, cu_dtype):
    if const_expr(cu_dtype == "int64"):
        return Int32(ptx.ldg_b64(cu_seqlens + Int64(index) * 8))
    return ptx.ldg_b32(cu_seqlens + Int64(index) * 4)


def _clamp(token, tokens):
    return cutlass.max(cutlass.min(token, tokens), Int32(0))


@cute.jit
def sequence(s, cu_seqlens, seq_len, log2_chunk: cutlass.Constexpr, cu_dtype: cutlass.Constexpr):
    """First token, length in tokens and slot base of sequence `s`.

    Entries of cu_seqlens outside the tensors are clamped to them, and where entries fall the sequence is empty: whatever
    cu_seqlens holds, no kernel hangs or leaves its tensors.
    """
    return sequence_from_entries(s, entries(s, cu_seqlens, cu_dtype), seq_len, log2_chunk, cu_dtype)


@cute.jit
def entries(s, cu_seqlens, cu_dtype: cutlass.Constexpr):
    """What `sequence_from_entries` needs of memory: the entries s and s + 1 of cu_seqlens; s < 0: zeros."""
    begin, end = Int32(0), Int32(0)
    if const_expr(cu_dtype is not None):
        if s >= 0:
            begin, end = _cu(cu_seqlens, s, cu_dtype), _cu(cu_seqlens, s + 1, cu_dtype)
    return begin, end


@cute.jit
def sequence_from_entries(s, entries, seq_len, log2_chunk: cutlass.Constexpr, cu_dtype: cutlass.Constexpr):
    """As `sequence`, from its `entries`, which can be loaded long before."""
    if const_expr(cu_dtype is None):
        chunks = (seq_len + ((1 << log2_chunk) - 1)) >> log2_chunk
        return s * seq_len, seq_len, s * chunks
    else:
        begin, end = _clamp(entries[0], seq_len), _clamp(entries[1], seq_len)
        return begin, cutlass.max(end - begin, Int32(0)), (begin >> log2_chunk) + s


@cute.jit
def sequence_of_slot(slot, num_seqs, cu_seqlens, seq_len, log2_chunk: cutlass.Constexpr, cu_dtype: cutlass.Constexpr):
    """The sequence whose slot base is the last one at or before `slot`, or else the first; to be called by whole warps.

    Packed sequences are searched 32 ways at a time: each lane reads one entry of cu_seqlens, a ballot says how many bases
    are at or before the slot. That takes log_32(num_seqs) dependent loads.
    """
    if const_expr(cu_dtype is None):
        chunks = (seq_len + ((1 << log2_chunk) - 1)) >> log2_chunk
        return slot // chunks
    else:
        lane = cute.arch.lane_idx()
        low = Int32(0)  # invariant: the answer is in [low, low + count), or all bases lie after the slot
        count = num_seqs
        while count > 1:
            step = (count + 31) >> 5
            probe = low + lane * step
            inside = lane * step < count
            at = probe if inside else low
            base = (_cu(cu_seqlens, at, cu_dtype) >> log2_chunk) + at
            hits = cute.arch.popc(cute.arch.vote_ballot_sync(inside and base <= slot))
            start = cutlass.max(hits - 1, Int32(0)) * step
            low = low + start
            rest = count - start
            count = step if step < rest else rest
        return low


@cute.jit
def sequence_from_end(number, behind, count, slot_begin, slot_end, cu_seqlens, tokens, log2_chunk: cutlass.Constexpr,
                      cu_dtype: cutlass.Constexpr):  # fmt: skip
    """The packed sequence that holds chunk `number`, and how many chunks lie behind that sequence; (-1, ..): none does.

    Chunks in slots [slot_begin, slot_end) are numbered from the last one backwards. The sequence is one of the first
    `count`, and `behind` chunks lie behind those. To be called by whole warps: 32 sequences per step, one load each.
    """
    lane = cute.arch.lane_idx()
    found = Int32(-1)
    while count > 0:
        s = count - 1 - lane
        _, length, base = sequence(s, cu_seqlens, tokens, log2_chunk, cu_dtype)
        end = cutlass.min(base + ((length + ((1 << log2_chunk) - 1)) >> log2_chunk), slot_end)
        chunks = cutlass.max(end - cutlass.max(base, slot_begin), Int32(0))
        upto = chunks
        for k in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(upto, 1 << k)
            upto += ptx.less_b32(lane, 1 << k, 0, other)
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(behind + upto <= number))
        if passed < 32:
            found = count - 1 - passed
            behind += cute.arch.shuffle_sync(upto - chunks, passed)
            count = Int32(0)
        else:
            behind += cute.arch.shuffle_sync(upto, 31)
            count -= 32
    return found, behind


@cute.jit
def chunks_of(first, end, cu_seqlens, tokens, log2_chunk: cutlass.Constexpr, cu_dtype: cutlass.Constexpr):
    """Chunks of the packed sequences `first` to `end` - 1, each rounded up; to be called by whole warps."""
    lane = cute.arch.lane_idx()
    chunks = Int32(0)
    for step in cutlass.range((end - first + 31) >> 5, unroll=4):
        s = first + 32 * step + lane
        if s < end:
            _, length, _ = sequence(s, cu_seqlens, tokens, log2_chunk, cu_dtype)
            chunks += (length + ((1 << log2_chunk) - 1)) >> log2_chunk
    for k in cutlass.range_constexpr(5):
        chunks += cute.arch.shuffle_sync_bfly(chunks, offset=1 << k)
    return chunks


@cute.jit
def first_row(before, length, num_seqs, tokens, log2_chunk: cutlass.Constexpr):
    """Row of a packed sequence's first chunk among rows without gaps, where `before` chunks of other sequences come first.

    That is `before`, except where entries of cu_seqlens fall and sequences therefore overlap: no row lies past the last
    one that `num_seqs` sequences side by side in `tokens` tokens can need.
    """
    up = const_expr((1 << log2_chunk) - 1)
    return cutlass.min(before, ((tokens + up) >> log2_chunk) + num_seqs - 1 - ((length + up) >> log2_chunk))


@cute.jit
def chunks_before(s, length, num_seqs, cu_seqlens, seq_len, log2_chunk: cutlass.Constexpr, cu_dtype: cutlass.Constexpr):
    """Row of the first chunk of sequence `s` of `length` tokens, among rows without gaps; to be called by whole warps."""
    if const_expr(cu_dtype is None):
        return s * ((seq_len + ((1 << log2_chunk) - 1)) >> log2_chunk)
    else:
        before = chunks_of(Int32(0), s, cu_seqlens, seq_len, log2_chunk, cu_dtype)
        return first_row(before, length, num_seqs, seq_len, log2_chunk)


@cute.jit
def span(num_seqs, cu_seqlens, cu_dtype: cutlass.Constexpr):
    """First token of the first packed sequence and end of the last one: rows outside belong to no sequence."""
    return _cu(cu_seqlens, Int32(0), cu_dtype), _cu(cu_seqlens, num_seqs, cu_dtype)


@cute.jit
def clear_rows(out, row, count: cutlass.Constexpr, first, end, tokens, head, heads, thread, threads: cutlass.Constexpr):
    """Zero the rows of out [tokens, heads, 128] bf16 that lie in [row, row + count) but outside [first, end), for one head."""
    for i in cutlass.range_constexpr(16 * count // threads):  # 16 threads per row
        at = row + thread // 16 + threads // 16 * i
        if at < tokens and (at < first or at >= end):
            address = out + (Int64(at) * Int64(heads) + Int64(head)) * 256 + Int64(thread % 16) * 16
            ptx.stg_words(address, [Int32(0)] * 4)
