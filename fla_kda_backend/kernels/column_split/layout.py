"""Shared memory of the 16-token prepare kernel: which region lies where, and where a thread's words lie in it."""

from typing import NamedTuple

from fla_kda_backend.kernels.column_split.record import CHUNK, LOG2_CHUNK, RECORD_BYTES, ROW_BYTES

ALIGNMENT = 128
LEVELS = LOG2_CHUNK
LOWER = CHUNK * ROW_BYTES  # offset of a level's keys of lower tokens, behind its 16 rows of upper tokens
LEVEL_BYTES = LOWER + CHUNK // 2 * ROW_BYTES


class Layout(NamedTuple):
    """Byte offset of each region; None: the variant has none. The record comes first, at 0."""

    k_tile: int  # [16] rows as those of the record: k^, later k_inv
    half_sums: int  # sums of y over tokens, [128] fp32: over tokens 0 to 7, later over all; by levels [2, 128]: over each half
    l_transposed: int | None  # [16, 16] fp32: L^T for the substitution
    diagonal: int | None  # [16] fp32: q^ . k^ of each token
    scores: int | None  # [16, 16] fp32, below the diagonal, before the scale
    levels: int | None  # [LEVELS] operands of LEVEL_BYTES: see levels.py
    size: int  # bytes in all

    @classmethod
    def of(cls, robust, needs_levels):
        sizes = {
            "k_tile": CHUNK * ROW_BYTES,
            "half_sums": 1024 if needs_levels else 512,
            "l_transposed": 1024 if robust else 0,
            "diagonal": 128 if robust else 0,
            "scores": 1024 if needs_levels else 0,
            "levels": LEVELS * LEVEL_BYTES if needs_levels else 0,
        }
        assert robust or not needs_levels  # the levels' L^T is solved by substitution
        assert all(size % ALIGNMENT == 0 for size in sizes.values())
        offsets, end = {}, RECORD_BYTES + (-RECORD_BYTES) % ALIGNMENT
        for name, size in sizes.items():
            offsets[name] = end if size else None
            end += size
        return cls(**offsets, size=end)


def word_at(pair, token_half, i):
    """Byte offset in a tile of channels 2 * pair, 2 * pair + 1 of token 8 * token_half + i; i < 8 is also the row's swizzle."""
    return (8 * token_half + i) * ROW_BYTES + ((pair // 4) ^ i) * 16 + (pair % 4) * 4
