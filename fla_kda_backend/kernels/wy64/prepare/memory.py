"""What a team has in shared memory: a header, four tiles of inputs and images, and tables. Byte offsets of all of it.

A team is 256 threads that prepare one chunk at a time. The header begins with the mbarriers of the four tiles and holds what
warp 0 finds out about the team's chunks; the tiles are 64 rows x 128 channels as in the record; the tables hold what the
warps leave for each other. Tiles and tables are addressed from `base`, the address of the first tile.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from cutlass import Int32

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.record import A_BYTES

TEAM_THREADS = 256
TILE_BYTES = 16384
TILES = 4


class Tensor(IntEnum):
    """Which input a tile holds, and which mbarrier says that it has arrived."""

    G = 0
    Q = 1
    K = 2
    V = 3


class Header(IntEnum):
    """Byte offsets in the header."""

    MBARRIERS = 0  # one per Tensor, 8 bytes each
    CHUNK_NUMBER = 32  # kept up to date where registers are short
    ZERO = 36  # a 0 that ptxas does not know of, see Teams.rematerialize
    CHUNK_INFO = 64  # of the team's current chunk and of its next one, CHUNK_INFO_BYTES each


class ChunkInfo(IntEnum):
    """Byte offsets of what a team knows of one of its chunks; int32 each, except for BETA."""

    ROWS = 0  # from the chunk's first row to the sequence's end, may exceed 64; at most 0: the team has no more chunks
    TASK = 4  # number of the (chunk, head) pair in the launch
    HEAD = 8
    SLOT = 12  # counted from the launch's first
    TOKEN = 16  # the chunk's first
    INDEX = 20  # of the chunk in its sequence
    SEQUENCES = 24  # up to and with this one: the search for the next chunk begins here
    BEHIND = 28  # chunks of the launch behind these sequences, likewise
    QK_HEAD = 32  # head of q and k
    BETA = 64  # fp32 [64 rows]


CHUNK_INFO_BYTES = ChunkInfo.BETA + 4 * 64
HEADER_BYTES = 1024
assert Header.CHUNK_NUMBER == 8 * len(Tensor) and Header.CHUNK_INFO + 2 * CHUNK_INFO_BYTES <= HEADER_BYTES


class Table(IntEnum):
    """Byte offsets from `base` of what stands behind the four tiles. Some places are used twice in the course of a chunk."""

    # decays, per band and channel, fp32 [4 bands][128]
    BAND_SUM = TILES * TILE_BYTES  # t[b]
    FROM_START = BAND_SUM + 2048  # 2^G at the band's start
    TO_END = FROM_START + 2048  # 2^(G_63 - G at the band's end)
    BAND = TO_END + 2048  # 2^t[b]
    MIDDLE = BAND + 2048  # 2^(t[1] + t[2]), fp32 [128]
    # when the images are done, per block below the diagonal: channel half 1's sums of M^T, then -N; 1 KB each
    BELOW = BAND_SUM
    K_NEXT = MIDDLE + 512  # k_next as A fragments, [4 bands][8 steps][32 lanes][16 B]
    A_IMAGE = K_NEXT + 16384  # A as in the record
    DIAGONAL = A_IMAGE + A_BYTES  # per band: channel half 0's sums of M and of A, 1 KB each; then M^T; then DiagonalPart
    A_SUMS = DIAGONAL + 8192  # per block below the diagonal: channel half 0's sums of A, 1 KB each
    # until the images are done: sums of squares of q, of k, [2][64 rows][2 channel halves]; in Levels sums of its own
    SQUARES = A_SUMS
    BIAS = A_SUMS + 6144  # what the gate makes of dt_bias, fp32 [128]
    RATE = BIAS + 512  # what the gate makes of exp(A_log), fp32
    POWERS = RATE + 128  # powers of two of rows, [2 channel halves][64 rows] words, see operands.py


TILES_AND_TABLES_BYTES = Table.POWERS + 512
SQUARES_BYTES = 512  # of q, or of k
BAND_BYTES = 512  # of a band in a table of fp32 [4][128]
DIAGONAL_BYTES = 2048  # of a band in DIAGONAL
BLOCK_BYTES = 1024  # of a 16x16 block in fp32, or in two parts of two bytes
TEAM_STRIDE = -(-TILES_AND_TABLES_BYTES // 1024) * 1024  # from one team's tiles to the next team's


class DiagonalPart(IntEnum):
    """What stands in a band's DIAGONAL at last, 512 bytes each."""

    T_LEAD = 0  # fp16
    T_REST = 1
    T_BETA_LEAD = 2  # T diag(beta), bf16
    T_BETA_REST = 3


@dataclass(frozen=True)
class TeamMemory:
    """A team's shared memory."""

    mbarriers: Any  # pointer to Int64 [4]: one per Tensor
    tiles: Any  # pointer to bf16, aligned to 1024 bytes
    header: Int32  # address
    base: Int32  # address of the tiles

    def mbarrier(self, tensor):
        """Pointer to the mbarrier of an input's tile."""
        return self.mbarriers + int(tensor)

    def chunk_info(self, n):
        """Address of the ChunkInfo of the team's chunk number n."""
        return self.header + Header.CHUNK_INFO + (n & 1) * CHUNK_INFO_BYTES

    def info(self, n, field):
        """One ChunkInfo field of the team's chunk number n."""
        return ptx.lds_b32(self.chunk_info(n) + field)

    def beta(self, n):
        """Address of beta of the chunk's rows, fp32 [64]."""
        return self.chunk_info(n) + ChunkInfo.BETA


@dataclass(frozen=True)
class ThreadCoord:
    """Which chunk a thread works on, and which part of it: its warp holds 16 tokens (a band) x 64 channels (a half)."""

    n: Int32  # number of the chunk among the team's
    warp: Int32  # of 8 in the team: half * 4 + band
    band: Int32
    half: Int32  # channel half
    lane: Int32

    @property
    def group(self):
        """Row, among 8, of the lane's elements of an m16n8k16 fragment."""
        return self.lane >> 2

    @property
    def quad(self):
        """Pair of columns, among 4, of the lane's elements of a fragment."""
        return self.lane & 3
