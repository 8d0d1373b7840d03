"""How the rows of a chunk, its beta and the gate's parameters come into shared memory. Warp 0 does all of it.

Loads of rows are tensor copies, whatever the strides of the inputs: rows past the end of the tensor arrive as zeros, rows of
the next sequence are zeroed after they arrive (tiles.zero_past_end).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.prepare.gates import BETAS
from fla_kda_backend.kernels.wy64.prepare.memory import TILE_BYTES, TILES, ChunkInfo, Table, Tensor
from fla_kda_backend.kernels.wy64.record import CHUNK, HEAD_DIM
from fla_kda_backend.kernels.wy64.workspace import clear_flags

ELEMENT_BYTES = {"bf16": 2, "fp32": 4}


def _read(address, index, dtype):
    """Element of a tensor in global memory, as fp32."""
    load = ptx.ldg_nc_f32 if dtype == "fp32" else ptx.ldg_nc_bf16
    return load(address + index * ELEMENT_BYTES[dtype])


class Loads:
    """gate: a form of gates.py."""

    def __init__(self, variant, schedule, tiles, gate):
        self.beta_dtype, self.a_log, self.dt_bias = variant.beta_dtype, variant.a_log, variant.dt_bias
        self.overlap, self.tiles, self.gate, self.beta = schedule.overlap, tiles, gate, BETAS[variant.beta]

    @cute.jit
    def load(self, args, memory, n, tensor: cutlass.Constexpr):
        """Bring rows of the team's chunk number n, whose ChunkInfo is written, into their tile."""
        head = memory.info(n, ChunkInfo.QK_HEAD if tensor in (Tensor.Q, Tensor.K) else ChunkInfo.HEAD)
        token = memory.info(n, ChunkInfo.TOKEN)
        full = memory.mbarrier(tensor)
        tensor_map, coordinates = args.map(tensor), args.coordinates(tensor)
        if memory.info(n, ChunkInfo.ROWS) > 0:
            dtype, layout = self.tiles.dtype(tensor), self.tiles.layout(tensor)
            size = CHUNK * HEAD_DIM * dtype.width // 8
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, size)
            ring = cute.append(layout.outer, cute.make_layout(TILES * TILE_BYTES // size, stride=CHUNK * HEAD_DIM))
            tiles = cute.make_tensor(cute.recast_ptr(memory.tiles, layout.inner, dtype), ring)
            box = (CHUNK, 1024 // dtype.width, dtype.width // 8)
            rows = cute.local_tile(cute.domain_offset((token, 0, 0, 0), coordinates), box, (0, 0, 0, None))
            target, source = cpasync.tma_partition(
                tensor_map, 0, cute.make_layout(1), cute.group_modes(tiles, 0, 3), cute.group_modes(rows, 0, 3)
            )
            number = self.tiles.number(n, tensor) // (size // TILE_BYTES)
            once = Int64(ptx.ONCE)  # what stays in the L2 should be records
            cute.copy(tensor_map, source[None, head], target[None, number], tma_bar_ptr=full, cache_policy=once)

    @cute.jit
    def load_tables(self, args, memory, n):
        """beta and the gate's tables for the team's chunk number n; clear the flags of its record."""
        lane = ptx.thread_index() & 31
        rows, head = memory.info(n, ChunkInfo.ROWS), memory.info(n, ChunkInfo.HEAD)
        if rows > 0:
            token = memory.info(n, ChunkInfo.TOKEN)
            x = []
            for i in cutlass.range_constexpr(2):
                row = token + ptx.less_b32(2 * lane + i, rows, 2 * lane + i, 0)
                x.append(_read(args.beta, Int64(row) * args.beta_token + Int64(head) * args.beta_head, self.beta_dtype))
            a_log, bias = Float32(0.0), [Float32(0.0)] * 4
            if const_expr(self.a_log is not None):
                a_log = _read(args.a_log, Int64(head), self.a_log)
            if const_expr(self.dt_bias == "fp32"):
                bias = ptx.ldg_v4_f32(args.dt_bias + Int64(head) * (HEAD_DIM * 4) + Int64(lane * 16))
            if const_expr(self.dt_bias == "bf16"):
                words = ptx.ldg_v2_b32(args.dt_bias + Int64(head) * (HEAD_DIM * 2) + Int64(lane * 8))
                bias = [y for word in words for y in ptx.unpack_bf16x2(word)]
            if const_expr(not self.overlap):
                heads, slots = ptx.pin([args.heads, args.slots])
                with cute.arch.elect_one():
                    clear_flags(args.workspace, heads, slots, head, memory.info(n, ChunkInfo.SLOT))
            x = [self.beta(b) for b in x]
            x = [ptx.less_f32(2 * lane + i, rows, x[i], 0.0) for i in range(2)]
            ptx.sts_v2_f32(memory.beta(n) + lane * 8, *x)
            if const_expr(self.gate.has_tables):
                rate, bias = self.gate.tables(a_log, bias)
                ptx.sts_v4_f32(memory.base + Table.BIAS + lane * 16, bias)
                ptx.sts_f32(memory.base + Table.RATE, rate)
