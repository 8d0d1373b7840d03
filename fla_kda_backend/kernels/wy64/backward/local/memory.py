"""Shared memory of the local kernel: byte offsets from `base`, which is aligned to 1024 bytes.

Images of 64 or 128 rows are pairs of swizzled halves of 64 channels or values, as in record.py. Some places are used twice in
the course of a chunk; kernel.py says when.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.backward.record import DS_AT, DV_AT, LOCAL_BYTES, N_AT, S_AT, T_AT

THREADS = 512
TILE_BYTES = 16384
HALF_TILE = TILE_BYTES // 2
STATE_HALF = 16384  # 128 keys x 64 values
BLOCK = 512  # a 16x16 block in bf16
DIAGONAL_PITCH = 144  # of a row of a 16x16 block of pairs of fp32, of 128 bytes
DIAGONAL = 16 * DIAGONAL_PITCH
WORDS = 1024  # 8 words of each lane of a warp
PATCH = 2048  # fp32, 16 tokens of a band x 32 channels of a quarter


class Place(IntEnum):
    """The local record comes first, in its own order, then what else the chains leave."""

    T = T_AT
    N = N_AT
    S = S_AT
    DS = DS_AT
    X = DV_AT  # dV' at first
    D_OUT = LOCAL_BYTES
    V_NEW = D_OUT + TILE_BYTES
    Q = V_NEW + TILE_BYTES  # then q_row; then, as in K and K_NEXT, WORDS of each warp
    K = Q + TILE_BYTES  # then k_row
    K_NEXT = K + TILE_BYTES  # g at first, where it is bf16
    V = K_NEXT + TILE_BYTES  # then dA and dM
    PATCHES = V + TILE_BYTES  # one per warp, at quarter * 4 + band; g at first, where it is fp32; at last Sums
    TABLES = PATCHES + 2 * TILE_BYTES


class Part(IntEnum):
    """Offsets in V once v is consumed."""

    D_A = 0  # bf16 blocks below the diagonal, as N's, 32-byte swizzle
    D_M = 6 * BLOCK
    DIAGONAL = 12 * BLOCK  # per band [16][16] (dA, dM) in fp32; anchored.py: per band three blocks, dA lead and rest, dM
    DIAGONAL_VALUES = 24 * BLOCK  # anchored.py: dA_ii in fp32


class Table(IntEnum):
    """Offsets in TABLES; fp32."""

    MBARRIERS = 0
    ZERO = 56  # a 0 that ptxas does not know of
    INFO = 64  # of the current pair and of the next one, INFO_BYTES each
    BAND = 256  # [4 bands][128]: decay of the whole band; anchored.py: [8 halves of bands][128]
    C0 = BAND + 4096  # [2 value halves][128]: S . dS'
    RSTD = C0 + 1024  # [q, k][64]
    BETA = RSTD + 512  # [64]
    DOT_Q = BETA + 256  # [4 quarters][64]: dq . q
    DOT_K = DOT_Q + 1024  # dk . k
    DOT_BETA = DOT_K + 1024  # k . kr
    X_V = DOT_BETA + 1024  # [2 value halves][64]: X . v
    END = X_V + 512


class Sums(IntEnum):
    """Offsets in a warp's patch at the end of a chunk; fp32 [32 channels], sums over the band's tokens."""

    D_G = 0
    E = 128
    BIAS = 256
    A_LOG = 384


class Info(IntEnum):
    """What is known of a pair; int32 each."""

    ROWS = 0  # from the chunk's first row to the sequence's end, may exceed 64; at most 0: there are no more pairs
    HEAD = 4
    SLOT = 8  # counted from the launch's first
    TOKEN = 12
    QK_HEAD = 16
    NUMBER = 20  # of the pair in the launch
    READY = 24  # 0: the chains have not left all of the local record yet; beside the chains only


class Full(IntEnum):
    """mbarriers."""

    EARLY = 0  # T, N, S, dV', dO
    ROWS = 1  # q, k
    LATE = 2  # dS', V', v
    GATE = 3  # g


INFO_BYTES = 32
SMEM_BYTES = Place.TABLES + Table.END
assert Part.DIAGONAL + 4 * DIAGONAL <= TILE_BYTES and SMEM_BYTES <= 232448 - 1024
assert all(place % 1024 == 0 for place in Place if place != Place.N)


@dataclass(frozen=True)
class Memory:
    """The CTA's shared memory."""

    pointer: Any  # bf16, at base
    mbarriers: Any  # pointer to Int64
    base: Int32

    def info(self, n, field):
        """An Info field of the CTA's pair number n."""
        return ptx.lds_b32(self.base + (Place.TABLES + Table.INFO) + (n & 1) * INFO_BYTES + field)

    def table(self, table):
        return self.base + Place.TABLES + table

    def place(self, place):
        """Pointer to bf16."""
        return self.pointer + int(place) // 2


@dataclass(frozen=True)
class Coord:
    """A warp holds 16 tokens (a band) and 32 channels (a quarter, the number of its warpgroup)."""

    tid: Int32
    warp: Int32
    quarter: Int32
    band: Int32
    lane: Int32

    @classmethod
    def read(cls):
        """This thread's, read again, so that what depends on it takes no registers for long."""
        tid = ptx.thread_index()
        warp = cute.arch.make_warp_uniform(tid >> 5)
        return cls(tid=tid, warp=warp, quarter=warp >> 2, band=warp & 3, lane=tid & 31)

    @property
    def group(self):
        return self.lane >> 2

    @property
    def quad(self):
        return self.lane & 3
