"""Which chunk a team of prepare_wy64 works on, and how their rows come into shared memory. Warp 0 does both."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind, make_smem_layout_atom

from fla_kda_backend.kernels import ptx, sequences
from fla_kda_backend.kernels.wy64.prepare.steps import BIAS, LOG2E, RATE, TILE_BYTES
from fla_kda_backend.kernels.wy64.record import CHUNK, HALF, LOG2_CHUNK, RECORD_BYTES
from fla_kda_backend.kernels.wy64.tasks import clear_flags

# shared memory before the tiles: mbarriers of g, q, k, v; the number of the team's chunk, and 0; the plans of two chunks
NUMBER, PLAN, PLAN_BYTES, HEADER_BYTES = 32, 64, 320, 1024
# of a plan: rows from the chunk's first to the sequence's end (0: no chunk), the number of the (chunk, head) pair, first
# token, chunk of the sequence; for the next plan: sequences up to this one, chunks behind it; the head of q and k. Then
# beta of its rows
ROWS, TASK, HEAD, SLOT, TOKEN, INDEX, SEQUENCES, BEHIND, QK_HEAD = range(0, 36, 4)
BETA = 64
G, Q, K, V = range(4)
TEAM = 256  # threads that work on a chunk
BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class Problem:
    """Run-time facts of a launch; see the kernel's parameters."""

    full: Any  # mbarriers of g, q, k, v
    tiles: Any  # shared memory, aligned to 1024
    header: Int32  # its address, and that of the tiles
    smem: Int32
    maps: Any  # tensor maps of g, q, k, v
    coordinates: Any  # of each
    beta: Int64
    beta_token: Int64
    beta_head: Int64
    a_log: Int64
    dt_bias: Int64
    final_state: Int64
    out: Int64
    cu_seqlens: Int64
    workspace: Int64
    seq_len: Int32
    num_seqs: Int32
    heads: Int32
    group: Int32  # heads that share one of q and k
    slot_begin: Int32
    slots: Int32
    rounds: Int32
    stay: Int32
    at_once: Int32

    def plan(self, n):
        """Address of the plan of the team's chunk number n."""
        return self.header + PLAN + (n & 1) * PLAN_BYTES

    def beta_rows(self, n):
        """Address of beta of its 64 rows, fp32."""
        return self.plan(n) + BETA

    def record(self, n):
        """Address of its record."""
        head, slot = ptx.lds_v2_b32(self.plan(n) + HEAD)
        (workspace,) = ptx.pin([self.workspace])  # no sum of it and a constant is kept over the loop
        return workspace + (Int64(head) * Int64(self.slots) + Int64(slot)) * RECORD_BYTES


class PrepareLoads:
    """A kernel inherits it. gate, gate_dtype, a_log, dt_bias, beta, beta_dtype, cu_dtype: its compile-time facts."""

    def tile_number(self, n, which):
        """Tile of g (the first of two where g is fp32), q, k or v of the team's chunk number n."""
        if self.gate_dtype == "bf16":
            return (n + which) & 3
        first = (n & 1) * 2
        return {G: first, V: first + 1, Q: first ^ 3, K: first ^ 2}[which]

    def tile(self, p, n, which):
        return p.smem + self.tile_number(n, which) * TILE_BYTES

    def element(self, which):
        return Float32 if which == G and self.gate_dtype == "fp32" else BFloat16

    def tile_layout(self, which):
        """64 rows x 128 bytes with 128-byte swizzle, as often as 128 channels need."""
        dtype = self.element(which)
        atom = make_smem_layout_atom(SmemLayoutAtomKind.K_SW128, dtype)
        channels = 1024 // dtype.width
        return cute.tile_to_shape(atom, (CHUNK, channels, 2 * HALF // channels), order=(0, 1, 2))

    def tensor_map(self, which, address, token_stride, head_stride, tokens, heads):
        """Of [tokens, heads, 128] as (token, channel of a part, part of a head, head); boxes are a chunk of one head."""
        dtype = self.element(which)
        aligned = 128 // dtype.width
        channels = 8 * aligned
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
        token, head = (cute.assume(x, divby=aligned) for x in (token_stride, head_stride))
        shape = (tokens, channels, 2 * HALF // channels, heads)
        rows = cute.make_tensor(pointer, cute.make_layout(shape, stride=(token, 1, channels, head)))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), rows, self.tile_layout(which),
                                           (CHUNK, *shape[1:3]))  # fmt: skip

    # ---- plans and loads -------------------------------------------------------------------------------------------
    @cute.jit
    def make_plan(self, p, n, task, sequences_left, behind):
        """Plan the team's chunk number n: pair `task` of the launch, in one of the first `sequences_left` sequences."""
        # pinned here: nothing made of it is kept in a register over the loop
        seq_len, heads, group = ptx.pin([p.seq_len, p.heads, p.group])
        if const_expr(self.overlap):
            s, head, slot = self.place_of(p, task, seq_len, heads)
        else:
            number = task // heads
            head = task - number * heads
            slot, s = p.slots - 1 - number, Int32(-1)
            if const_expr(self.cu_dtype is None):
                if slot >= 0:
                    s = sequences.sequence_of_slot(
                        p.slot_begin + slot, p.num_seqs, p.cu_seqlens, seq_len, LOG2_CHUNK, None
                    )
            else:
                s, behind = sequences.sequence_from_end(
                    number, behind, sequences_left, p.slot_begin, p.slot_begin + p.slots, p.cu_seqlens, seq_len, LOG2_CHUNK,
                    self.cu_dtype,
                )  # fmt: skip
        rows, token, index = Int32(0), Int32(0), Int32(0)
        if s >= 0:
            begin, length, base = sequences.sequence(s, p.cu_seqlens, seq_len, LOG2_CHUNK, self.cu_dtype)
            base -= p.slot_begin
            if const_expr(self.cu_dtype is not None and not self.overlap):
                end = cutlass.min(base + ((length + (CHUNK - 1)) >> LOG2_CHUNK), p.slots)
                slot = end - 1 - (number - behind)
            index = slot - base
            rows, token = length - index * CHUNK, begin + index * CHUNK
        ptx.sts_v4_b32(p.plan(n), [rows, task, head, slot])
        ptx.sts_v4_b32(p.plan(n) + TOKEN, [token, index, s + 1, behind])
        ptx.sts_b32(p.plan(n) + QK_HEAD, head // group)
        cute.arch.sync_warp()

    @cute.jit
    def load(self, p, n, which: cutlass.Constexpr):
        """Bring rows of the planned chunk number n into their tile."""
        head = ptx.lds_b32(p.plan(n) + (QK_HEAD if which in (Q, K) else HEAD))
        token = ptx.lds_b32(p.plan(n) + TOKEN)
        full = p.full + which
        if ptx.lds_b32(p.plan(n) + ROWS) > 0:
            dtype, layout = self.element(which), self.tile_layout(which)
            size = 2 * HALF * CHUNK * dtype.width // 8
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, size)
            ring = cute.append(layout.outer, cute.make_layout(4 * TILE_BYTES // size, stride=2 * HALF * CHUNK))
            tiles = cute.make_tensor(cute.recast_ptr(p.tiles, layout.inner, dtype), ring)
            box = (CHUNK, 1024 // dtype.width, dtype.width // 8)
            rows = cute.local_tile(cute.domain_offset((token, 0, 0, 0), p.coordinates[which]), box, (0, 0, 0, None))
            target, source = cpasync.tma_partition(
                p.maps[which], 0, cute.make_layout(1), cute.group_modes(tiles, 0, 3), cute.group_modes(rows, 0, 3)
            )
            place = self.tile_number(n, which) // (size // TILE_BYTES)
            once = Int64(ptx.ONCE)  # what stays in the L2 should be records
            cute.copy(p.maps[which], source[None, head], target[None, place], tma_bar_ptr=full, cache_policy=once)

    @cute.jit
    def load_tables(self, p, n):
        """beta, the gate's bias and rate for the planned chunk number n; clear the flags of its record."""
        lane = ptx.thread_index() & 31
        rows, head = ptx.lds_b32(p.plan(n) + ROWS), ptx.lds_b32(p.plan(n) + HEAD)
        if rows > 0:
            token = ptx.lds_b32(p.plan(n) + TOKEN)
            x = []
            for i in cutlass.range_constexpr(2):
                row = token + ptx.less_b32(2 * lane + i, rows, 2 * lane + i, 0)
                x.append(self.read(p.beta, Int64(row) * p.beta_token + Int64(head) * p.beta_head, self.beta_dtype))
            rate, bias = Float32(0.0), [Float32(0.0)] * 4
            if const_expr(self.a_log is not None):
                rate = self.read(p.a_log, Int64(head), self.a_log)
            if const_expr(self.dt_bias == "fp32"):
                bias = ptx.ldg_v4_f32(p.dt_bias + Int64(head) * 512 + Int64(lane * 16))
            if const_expr(self.dt_bias == "bf16"):
                words = ptx.ldg_v2_b32(p.dt_bias + Int64(head) * 256 + Int64(lane * 8))
                bias = [y for word in words for y in ptx.unpack_bf16x2(word)]
            if const_expr(not self.overlap):
                heads, slots = ptx.pin([p.heads, p.slots])
                with cute.arch.elect_one():
                    clear_flags(p.workspace, heads, slots, head, ptx.lds_b32(p.plan(n) + SLOT))
            if const_expr(self.beta != "given"):
                x = [ptx.rcp(Float32(1.0) + ptx.ex2(b * Float32(-LOG2E))) for b in x]
            if const_expr(self.beta == "twice"):
                x = [b + b for b in x]
            x = [ptx.less_f32(2 * lane + i, rows, x[i], 0.0) for i in range(2)]
            ptx.sts_v2_f32(p.beta_rows(n) + lane * 8, *x)
            if const_expr(self.gate != "given"):
                rate = ptx.ex2(rate * Float32(LOG2E))
                rate, bias = self.gate_tables(rate, bias)
                ptx.sts_v4_f32(p.smem + BIAS + lane * 16, bias)
                ptx.sts_f32(p.smem + RATE, rate)

    def read(self, address, index, dtype):
        """Element of a tensor in global memory, as fp32."""
        load = ptx.ldg_nc_f32 if dtype == "fp32" else ptx.ldg_nc_bf16
        return load(address + index * BYTES[dtype])

    @cute.jit
    def zero_past_end(self, tile, rows_band, band, half):
        """Rows of the warp's block that belong to the next sequence, or to none."""
        if rows_band < 16:
            lane = ptx.lane_index()
            for i in cutlass.range_constexpr(4):
                row = (lane >> 3) + 4 * i
                if row >= rows_band:
                    at = half * (TILE_BYTES // 2) + (16 * band + row) * 128 + (lane & 7) * 16
                    ptx.sts_v4_b32(tile + at, [Int32(0)] * 4)
            cute.arch.sync_warp()
