"""Which (slot, head) pairs a CTA works on, and how their inputs come into shared memory."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from fla_kda_backend.kernels import ptx, sequences
from fla_kda_backend.kernels.wy64.backward.local.memory import INFO_BYTES, TILE_BYTES, Full, Info, Place, Table
from fla_kda_backend.kernels.wy64.backward.order import chunk_of_turn
from fla_kda_backend.kernels.wy64.backward.record import N_BYTES, READY_PARTS, STATE_HALF_BYTES, T_BYTES, V_AT, V_HALF_BYTES
from fla_kda_backend.kernels.wy64.backward.workspace import local_record, next_address, ready_address, record
from fla_kda_backend.kernels.wy64.chain.loaders import FIRST_PAUSE, LONGEST_PAUSE
from fla_kda_backend.kernels.wy64.prepare.gates import BETAS
from fla_kda_backend.kernels.wy64.prepare.memory import Tensor
from fla_kda_backend.kernels.wy64.prepare.tiles import Tiles
from fla_kda_backend.kernels.wy64.record import CHUNK, HEAD_DIM, LOG2_CHUNK

ELEMENT_BYTES = {"bf16": 2, "fp32": 4}


class LocalArguments(NamedTuple):
    """The kernel's parameters, in their order. Addresses and strides are Int64, strides in elements."""

    q_map: cute.CopyAtom  # as prepare's
    k_map: cute.CopyAtom
    v_map: cute.CopyAtom
    g_map: cute.CopyAtom
    d_out_map: cute.CopyAtom
    coordinates: cute.Tensor  # of q, k, v, d_out
    g_coordinates: cute.Tensor
    g: Int64
    g_token: Int64
    g_head: Int64
    beta: Int64
    beta_token: Int64
    beta_head: Int64
    a_log: Int64
    dt_bias: Int64
    cu_seqlens: Int64
    workspace: Int64
    dq: Int64
    dk: Int64
    dv: Int64
    dg: Int64
    dbeta: Int64
    d_bias_sums: Int64
    d_a_log_sums: Int64
    scale: Float32
    gate_scale: Float32
    seq_len: Int32
    num_seqs: Int32
    heads: Int32
    heads_per_qk_head: Int32
    slot_begin: Int32
    slots: Int32


def read(address, index, dtype):
    """Element of a tensor in global memory, as fp32."""
    load = ptx.ldg_nc_f32 if dtype == "fp32" else ptx.ldg_nc_bf16
    return load(address + index * ELEMENT_BYTES[dtype])


class Loads:
    """beside: the kernel runs beside the chains, see launch.py. CTAs then take pairs one by one, in the order of order.py, all
    heads of a chunk together."""

    def __init__(self, variant, beside=False):
        self.variant, self.cu_dtype, self.beside = variant, variant.cu_seqlens, beside
        self.tiles, self.beta_form = Tiles(variant), BETAS[variant.beta]
        self.wide_gate = self.tiles.wide_gate

    # ---- pairs
    @cute.jit
    def find(self, args, memory, n, number):
        """Write the Info of the CTA's pair n: the first one from `number` on that has a chunk. Pairs without one on the way get
        their sums, zeros. By a whole warp."""
        grid, _, _ = cute.arch.grid_dim()
        rows, token, head, slot = Int32(0), Int32(0), Int32(0), Int32(0)
        while number < args.slots * args.heads and rows <= 0:
            group = number // args.heads
            head = number - group * args.heads
            slot = args.slots - 1 - group
            at = args.slot_begin + slot
            s = sequences.sequence_of_slot(at, args.num_seqs, args.cu_seqlens, args.seq_len, LOG2_CHUNK, self.cu_dtype)
            begin, length, base = sequences.sequence(s, args.cu_seqlens, args.seq_len, LOG2_CHUNK, self.cu_dtype)
            index = at - base
            if index >= 0:
                rows = length - index * CHUNK
            token = begin + index * CHUNK
            if rows <= 0:
                self.clear_sums(args, at, head)
                number += grid
        self.write_info(args, memory, n, rows, token, head, slot, number)

    @cute.jit
    def clear_sums(self, args, slot, head):
        """The sums of a pair without a chunk; slot: of the call."""
        for sums in (args.d_bias_sums, args.d_a_log_sums):
            if sums != 0:
                to = sums + (Int64(slot) * args.heads + head) * (HEAD_DIM * 4) + Int64(ptx.lane_index() * 16)
                ptx.stg_words(to, [Int32(0)] * 4)

    @cute.jit
    def write_info(self, args, memory, n, rows, token, head, slot, number):
        info = memory.table(Table.INFO) + (n & 1) * INFO_BYTES
        with cute.arch.elect_one():
            ptx.sts_v4_b32(info, [rows, head, slot, token])
            ptx.sts_b32(info + Info.QK_HEAD, head // args.heads_per_qk_head)
            ptx.sts_b32(info + Info.NUMBER, number)

    # ---- beside the chains
    @cute.jit
    def take(self, args):
        """The number of the next pair that no CTA has. By a whole warp."""
        number = Int32(0)
        if ptx.lane_index() == 0:
            number = ptx.atom_add_b32(next_address(args.workspace, args.heads, args.slots), Int32(1))
        cute.arch.sync_warp()
        return cute.arch.shuffle_sync(number, 0)

    @cute.jit
    def find_beside(self, args, memory, n):
        """As `find`, of the pairs that are left; and whether the chains have come to it already. By a whole warp."""
        rows, token, head, slot = Int32(0), Int32(0), Int32(0), Int32(0)
        chains = args.num_seqs * args.heads
        number = self.take(args)
        while number < args.slots * args.heads and rows <= 0:
            turn = number // chains
            chain = number - turn * chains
            s = chain // args.heads
            head = chain - s * args.heads
            begin, length, base = sequences.sequence(s, args.cu_seqlens, args.seq_len, LOG2_CHUNK, self.cu_dtype)
            chunks = (length + (CHUNK - 1)) >> LOG2_CHUNK  # of each sequence
            if turn < chunks:
                index = chunk_of_turn(turn, chunks, cutlass.min)
                slot, token, rows = base + index, begin + index * CHUNK, length - index * CHUNK
            else:  # a slot without a chunk: one of those around the one packed sequence
                slot = turn - chunks
                if slot >= base:
                    slot += chunks
                self.clear_sums(args, slot, head)
                number = self.take(args)
        self.write_info(args, memory, n, rows, token, head, slot, number)
        cute.arch.sync_warp()
        self.test_chains(args, memory, n)

    def ready_address(self, args, memory, n):
        """Of pair n, see workspace.py."""
        return ready_address(args.workspace, args.heads, args.slots, memory.info(n, Info.HEAD), memory.info(n, Info.SLOT))

    @cute.jit
    def test_chains(self, args, memory, n):
        """Write whether both chains have left their parts of pair n's local record, or there is no pair. By a whole warp."""
        ready = Int32(1)
        if memory.info(n, Info.ROWS) > 0:
            parts = ptx.ldg_acquire_b32(self.ready_address(args, memory, n))
            if cute.arch.vote_ballot_sync(parts < READY_PARTS) != 0:
                ready = Int32(0)
        with cute.arch.elect_one():
            ptx.sts_b32(memory.table(Table.INFO) + (n & 1) * INFO_BYTES + Info.READY, ready)
        cute.arch.sync_warp()

    @cute.jit
    def wait_for_chains(self, args, memory, n):
        """Wait until they have. By the warp that then loads."""
        if memory.info(n, Info.ROWS) > 0:
            address = self.ready_address(args, memory, n)
            parts, pause = ptx.ldg_acquire_b32(address), Int32(FIRST_PAUSE)
            while parts < READY_PARTS:
                ptx.nanosleep(pause)
                pause = cutlass.min(2 * pause, Int32(LONGEST_PAUSE))
                parts = ptx.ldg_acquire_b32(address)
        cute.arch.sync_warp()

    @cute.jit
    def load_records_if_ready(self, args, memory, n):
        """load_records; beside the chains only where they have been there. By warp 0, as what follows."""
        if const_expr(self.beside):
            if memory.info(n, Info.READY) == 0:
                self.test_chains(args, memory, n)
            if memory.info(n, Info.READY) != 0:
                ptx.fence_proxy_async_global()
                self.load_records(args, memory, n)
        else:
            self.load_records(args, memory, n)

    @cute.jit
    def load_if_not_yet(self, args, memory, n):
        """What that has left out, once the chains have been there."""
        if memory.info(n, Info.READY) == 0:
            self.wait_for_chains(args, memory, n)
            ptx.fence_proxy_async_global()
            self.load_records(args, memory, n)

    # ---- copies; each by warp 0, for pair n, whose Info is written
    @cute.jit
    def rows(self, args, memory, n, tensor_map, coordinates, tensor: cutlass.Constexpr, place: cutlass.Constexpr, head, full):
        """A tile of rows."""
        dtype, layout = self.tiles.dtype(tensor), self.tiles.layout(tensor)
        size = CHUNK * HEAD_DIM * dtype.width // 8
        ring = cute.append(layout.outer, cute.make_layout(1, stride=CHUNK * HEAD_DIM))
        tile = cute.make_tensor(cute.recast_ptr(memory.place(place), layout.inner, dtype), ring)
        box = (CHUNK, 1024 // dtype.width, dtype.width // 8)
        token = memory.info(n, Info.TOKEN)
        source = cute.local_tile(cute.domain_offset((token, 0, 0, 0), coordinates), box, (0, 0, 0, None))
        target, source = cpasync.tma_partition(
            tensor_map, 0, cute.make_layout(1), cute.group_modes(tile, 0, 3), cute.group_modes(source, 0, 3)
        )
        assert size in (TILE_BYTES, 2 * TILE_BYTES)
        cute.copy(tensor_map, source[None, head], target[None, 0], tma_bar_ptr=full)

    @cute.jit
    def load_early(self, args, memory, n):
        """T, N, S, dV', dO."""
        if memory.info(n, Info.ROWS) > 0:
            head = memory.info(n, Info.HEAD)
            full = memory.mbarriers + int(Full.EARLY)
            with cute.arch.elect_one():
                state, v, tn = 2 * STATE_HALF_BYTES, 2 * V_HALF_BYTES, T_BYTES + N_BYTES
                cute.arch.mbarrier_arrive_and_expect_tx(full, tn + state + v + TILE_BYTES)
                local = local_record(args.workspace, args.heads, args.slots, head, memory.info(n, Info.SLOT))
                ptx.bulk_load_once(memory.base, local, Int32(tn + state), full.toint())  # T, N, S lie side by side
                ptx.bulk_load_once(memory.base + Place.X, local + int(Place.X), Int32(v), full.toint())
            self.rows(args, memory, n, args.d_out_map, args.coordinates, Tensor.V, Place.D_OUT, head, full)

    @cute.jit
    def load_rows(self, args, memory, n):
        """q and k."""
        if memory.info(n, Info.ROWS) > 0:
            qk_head = memory.info(n, Info.QK_HEAD)
            full = memory.mbarriers + int(Full.ROWS)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * TILE_BYTES)
            self.rows(args, memory, n, args.q_map, args.coordinates, Tensor.Q, Place.Q, qk_head, full)
            self.rows(args, memory, n, args.k_map, args.coordinates, Tensor.K, Place.K, qk_head, full)

    @cute.jit
    def load_late(self, args, memory, n):
        """dS', V' and v."""
        if memory.info(n, Info.ROWS) > 0:
            head = memory.info(n, Info.HEAD)
            full = memory.mbarriers + int(Full.LATE)
            with cute.arch.elect_one():
                state, v = const_expr((2 * STATE_HALF_BYTES, 2 * V_HALF_BYTES))
                cute.arch.mbarrier_arrive_and_expect_tx(full, state + v + TILE_BYTES)
                place = args.workspace, args.heads, args.slots, head, memory.info(n, Info.SLOT)
                ptx.bulk_load_once(memory.base + Place.DS, local_record(*place) + int(Place.DS), Int32(state), full.toint())
                ptx.bulk_load_once(memory.base + Place.V_NEW, record(*place) + V_AT, Int32(v), full.toint())
            self.rows(args, memory, n, args.v_map, args.coordinates, Tensor.V, Place.V, head, full)

    def load_records(self, args, memory, n):
        """The local record, dO and v."""
        self.load_early(args, memory, n)
        self.load_late(args, memory, n)

    @cute.jit
    def load_gate(self, args, memory, n):
        """g."""
        if memory.info(n, Info.ROWS) > 0:
            full, head = memory.mbarriers + int(Full.GATE), memory.info(n, Info.HEAD)
            place = const_expr(Place.PATCHES if self.wide_gate else Place.K_NEXT)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, (2 if self.wide_gate else 1) * TILE_BYTES)
            self.rows(args, memory, n, args.g_map, args.g_coordinates, Tensor.G, place, head, full)

    # ---- single values
    def raw_beta(self, args, token, row, rows, head):
        """What `beta` makes beta from."""
        at = token + ptx.less_b32(row, rows, row, 0)
        return read(args.beta, Int64(at) * args.beta_token + Int64(head) * args.beta_head, self.variant.beta_dtype)

    def beta(self, raw, row, rows):
        """beta of a row of the chunk; 0 past the end."""
        return ptx.less_f32(row, rows, self.beta_form(raw), 0.0)

    def parameters(self, args, head, channel):
        """A_log of the head and dt_bias of two channels, 0 where there is none."""
        a_log, bias = Float32(0.0), [Float32(0.0)] * 2
        if self.variant.a_log is not None:
            a_log = read(args.a_log, Int64(head), self.variant.a_log)
        if self.variant.dt_bias is not None:
            at = Int64(head) * HEAD_DIM + Int64(channel)
            bias = [read(args.dt_bias, at + c, self.variant.dt_bias) for c in range(2)]
        return a_log, bias

    def g_again(self, args, token, row, channel, rows, head):
        """g of 8 rows from `row` on and two channels, from global memory; past the end that of the last row. For `g_pairs`."""
        size = ELEMENT_BYTES[self.variant.gate_dtype]
        at = args.g + (Int64(token) * args.g_token + Int64(head) * args.g_head + Int64(channel)) * size
        pitch = Int32(args.g_token) * size
        pairs = []
        for i in range(8):
            from_row = _row_address(pitch, cutlass.min(row + i, rows - 1), at)
            if self.variant.gate_dtype == "fp32":
                pairs.append(ptx.ldg_nc_v2_b32(from_row))
            else:
                pairs.append(ptx.ldg_nc_b32(from_row))
        return pairs

    def g_pairs(self, words):
        """Pairs of fp32 of what g_again has loaded, apart from it so that nothing waits for the loads before."""
        if self.variant.gate_dtype == "fp32":
            return [tuple(ptx.as_f32(x) for x in pair) for pair in words]
        return [ptx.unpack_bf16x2(word) for word in words]


_row_address = ptx.pure("mad.wide.s32 $0, $1, $2, $3;", "rrl -> l", "address + row * pitch.")
