"""The four tiles of a team: which input lies in which of them, and how rows and blocks are addressed.

Chunk n has its g in tile n % 4, and q, k, v in the tiles after it. Where g is fp32 it takes two tiles, 0 and 1 or 2 and 3 in
turn: v comes into the second of them once y is in registers, and q and k lie in the other two.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind, make_smem_layout_atom

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.prepare.memory import TILE_BYTES, Tensor
from fla_kda_backend.kernels.wy64.record import CHUNK, HEAD_DIM


class Tiles:
    def __init__(self, variant):
        self.wide_gate = variant.gate_dtype == "fp32"  # g takes two tiles

    def number(self, n, tensor):
        """Tile of an input of the team's chunk number n; of g the first one where it takes two."""
        if not self.wide_gate:
            return (n + tensor) & 3
        first = (n & 1) * 2
        return {Tensor.G: first, Tensor.V: first + 1, Tensor.Q: first ^ 3, Tensor.K: first ^ 2}[tensor]

    def address(self, memory, n, tensor):
        return memory.base + self.number(n, tensor) * TILE_BYTES

    def dtype(self, tensor):
        return Float32 if tensor == Tensor.G and self.wide_gate else BFloat16

    def layout(self, tensor):
        """64 rows x 128 bytes with 128-byte swizzle, as often as 128 channels need."""
        dtype = self.dtype(tensor)
        atom = make_smem_layout_atom(SmemLayoutAtomKind.K_SW128, dtype)
        channels = 1024 // dtype.width
        return cute.tile_to_shape(atom, (CHUNK, channels, HEAD_DIM // channels), order=(0, 1, 2))

    def tensor_map(self, tensor, address, token_stride, head_stride, tokens, heads):
        """Tensor map, and coordinates, of an input [tokens, heads, 128] as (token, channel of a part, part of a head, head).
        A box is a chunk of one head."""
        dtype = self.dtype(tensor)
        aligned = 128 // dtype.width
        channels = 8 * aligned
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
        token, head = (cute.assume(x, divby=aligned) for x in (token_stride, head_stride))
        shape = (tokens, channels, HEAD_DIM // channels, heads)
        rows = cute.make_tensor(pointer, cute.make_layout(shape, stride=(token, 1, channels, head)))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), rows, self.layout(tensor),
                                           (CHUNK, *shape[1:3]))  # fmt: skip


def block_offset(band, half, lane):
    """ldmatrix and stmatrix address, in a bf16 tile, of the first 16x16 block of a band's rows and a channel half. Those of
    the next three blocks are this address with its bits 5 and 6 flipped as in 1 to 3: tiles are aligned to 128 bytes."""
    return half * (TILE_BYTES // 2) + (16 * band + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4)


@cute.jit
def zero_past_end(tile, rows_band, coord):
    """Zero the rows of the warp's block, in the bf16 tile at this address, from `rows_band` on: the next sequence's, or
    none's."""
    if rows_band < 16:
        lane = ptx.lane_index()
        for i in cutlass.range_constexpr(4):
            row = (lane >> 3) + 4 * i
            if row >= rows_band:
                at = coord.half * (TILE_BYTES // 2) + (16 * coord.band + row) * 128 + (lane & 7) * 16
                ptx.sts_v4_b32(tile + at, [Int32(0)] * 4)
        cute.arch.sync_warp()
