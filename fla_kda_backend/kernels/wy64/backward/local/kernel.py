"""The local gradients of a chunk and value head: everything of the backward pass that neither chain computes.

Given S, V', dS', dV' (the local record), T and N (likewise), dO and the inputs, with the notation of prepare/kernel.py; i, j
tokens; b, c bands; p[b] = 2^t[b] the decay of band b; "between" the product of the p of the bands strictly between two bands;
r_i = 2^l_i, n_j = 2^(t[b] - l_j) within the token's band b; "before", "behind" the products of the p of the bands before and
behind b; D = 2^G_63. s = scale; s_x = 1, or scale where q and k are not normalised (dS' and dV' are divided by it then).

    X     = T^T dV'                                       WGMMA; T in bf16 from its diagonal blocks and N
    dv    = beta s_x X
    dA    = s dO V'^T, j <= i                             WGMMA
    dM    = -s_x X V'^T, j < i
    dQ_   = dO S^T      X_w = -X S^T      dKe = V' dS'^T  WGMMA
    C0    = row sums of S * dS'                           mma.sync
    q_row = bf16(q^ r)     k_row = bf16(beta k^ r)     k_next = bf16(k^ n)
    between bands (mma.sync; dA, dM in bf16), by Horner's scheme over the bands, as "between" scales columns of accumulators:
    U_q   = before s dQ_ + sum over c < b of between dA[b,c] k_next[c]
    U_k   = before s_x X_w + the same of dM
    Y_c   = sum over b' > b of between (dA[b',b]^T q_row[b'] + dM[b',b]^T k_row[b'])
    between the halves of a band, of 8 tokens each (mma.sync; dA in two bf16 terms, dM in one), P, N as r, n within the half:
    q8 = bf16(q^ P), k8 = bf16(beta k^ P) of the second half, kcol8 = bf16(k^ N) of the first one
    Y8_q  = dA kcol8       Y8_k = dM kcol8                in the second half
    Y8_c  = dA^T q8 + dM^T k8                             in the first half
    inside a half, fp32, f = 2^(G_i - G_j), pairs j < i:
    dq_i += dA_ij f k_j      kr_i += dM_ij f k_j      kc_j += f (dA_ij q_i + dM_ij beta_i k_i)
    and so, with lo the decay of the band's tokens before the half (r = P lo), hi of those behind it (n = N hi),
    dq    = P (lo U_q + Y8_q) + inside + dA_ii k_i
    kr    = P (lo U_k + Y8_k) + inside
    kc    = N (hi (Y_c + behind s_x dKe) + Y8_c) + inside
    dk    = beta kr + kc + dA_ii q_i
    dbeta = s_x X . v + k . kr
    dG    = q_row U_q + k_row U_k - k_next Y_c + q8 Y8_q + k8 Y8_k - kcol8 Y8_c
            + inside: q dq + beta k kr - k kc             without the diagonal
    e     = k_next behind s_x dKe
    d_i   = sum over j >= i of dG_j + D C0 s_x + sum over j < i of e_j      the gradient of the natural log decay
    then the gradients of the gate, of beta's form and of the normalisation (gates.py, columns.py)

Products between bands and halves enter dG with the very operands that were multiplied, so that the sum of row terms equals
that of column terms to fp32: each pair of tokens both at or after i has to vanish from d_i. Decays are running products of
factors at most 1.

Rows past the sequence's end: dO, q, k are zeroed, their decay is 1; V', dV' are zero there.

Threads: 16 warps; warp w has band w % 4 and channel quarter w // 4, which is its warpgroup: as accumulators of WGMMA (rows of
the band, columns of the quarter, tensors.py) and as columns (a lane: two channels and half of the band's tokens, columns.py).
One CTA per SM works through the pairs block, block + blocks, ...; the last slots go first. Beside the chains (../launch.py) it
takes one pair after the other, in the order in which they get ready, and loads what the chains leave of it once they have been
there.

Steps of a chunk (a line: barrier of the CTA), with what is loaded for the next chunk as soon as its place is free:

    step   warpgroups 0, 1                    2, 3
    1      X over dV', dv, X . v, beta        1 / norms; zero dO, q, k past the end; find the next pair
    ------------------------------------------------------------------------------------------------------
    2      dA, dM; dQ_, X_w, dKe into registers; C0; a; images over q, k, g
    ------------------------------------------------------------------------------------------------------
    3      U_q over S, U_k over X and dO, dKe over dS', words of q and k over T and V'; all gradients; sums
    ------------------------------------------------------------------------------------------------------   all, but g in fp32
    4      dq, dk, dg, dbeta
    ------------------------------------------------------------------------------------------------------
    5      sums for dt_bias and A_log

Where g is fp32 it lies in the patches and comes after step 5. g is read once more, from global memory, in step 3.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from fla_kda_backend.kernels import ptx, sequences
from fla_kda_backend.kernels.wy64.backward.local.anchored import AnchoredColumns
from fla_kda_backend.kernels.wy64.backward.local.columns import Columns
from fla_kda_backend.kernels.wy64.backward.local.gates import BETA_GRADIENTS
from fla_kda_backend.kernels.wy64.backward.local.loads import Loads, LocalArguments
from fla_kda_backend.kernels.wy64.backward.local.memory import (
    PATCH,
    SMEM_BYTES,
    THREADS,
    Coord,
    Full,
    Info,
    Memory,
    Place,
    Sums,
    Table,
)
from fla_kda_backend.kernels.wy64.backward.local.stores import clear_rows, store_one
from fla_kda_backend.kernels.wy64.backward.local.tensors import Tensors
from fla_kda_backend.kernels.wy64.prepare.memory import Tensor
from fla_kda_backend.kernels.wy64.record import BANDS, CHUNK, HEAD_DIM

BYTES = {"bf16": 2, "fp32": 4}


class LocalGradients:
    """The kernel of a Variant under a Schedule."""

    smem_bytes = SMEM_BYTES

    def __init__(self, variant, schedule):
        self.variant, self.schedule = variant, schedule
        self.loads = Loads(variant, schedule.beside)

    @cute.jit
    def __call__(self, a, stream):
        """Launch over slots [slot_begin, slot_end) and all heads; a: the contract's Arguments."""
        tokens = a.seq_len
        if const_expr(self.variant.cu_seqlens is None):
            tokens = a.seq_len * a.num_seqs
        tensor_map = self.loads.tiles.tensor_map
        q_map, _ = tensor_map(Tensor.Q, a.q, a.q_token, a.q_head, tokens, a.qk_heads)
        k_map, _ = tensor_map(Tensor.K, a.k, a.k_token, a.k_head, tokens, a.qk_heads)
        v_map, coordinates = tensor_map(Tensor.V, a.v, a.v_token, a.v_head, tokens, a.heads)
        g_map, g_coordinates = tensor_map(Tensor.G, a.g, a.g_token, a.g_head, tokens, a.heads)
        d_out_map, _ = tensor_map(Tensor.V, a.d_out, a.d_out_token, a.d_out_head, tokens, a.heads)
        slots = a.slot_end - a.slot_begin
        self.kernel(
            LocalArguments(
                q_map=q_map,
                k_map=k_map,
                v_map=v_map,
                g_map=g_map,
                d_out_map=d_out_map,
                coordinates=coordinates,
                g_coordinates=g_coordinates,
                g=a.g,
                g_token=a.g_token,
                g_head=a.g_head,
                beta=a.beta,
                beta_token=a.beta_token,
                beta_head=a.beta_head,
                a_log=a.a_log,
                dt_bias=a.dt_bias,
                cu_seqlens=a.cu_seqlens,
                workspace=a.workspace,
                dq=a.dq,
                dk=a.dk,
                dv=a.dv,
                dg=a.dg,
                dbeta=a.dbeta,
                d_bias_sums=a.d_bias_sums,
                d_a_log_sums=a.d_a_log_sums,
                scale=a.scale,
                gate_scale=a.gate_scale,
                seq_len=a.seq_len,
                num_seqs=a.num_seqs,
                heads=a.heads,
                heads_per_qk_head=a.heads // a.qk_heads,
                slot_begin=a.slot_begin,
                slots=slots,
            )
        ).launch(
            grid=[cutlass.min(slots * a.heads, Int32(self.schedule.max_ctas)), 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=self.schedule.beside,
        )

    @cute.kernel
    def kernel(self, args: LocalArguments):
        coord = Coord.read()
        allocator = SmemAllocator()
        pointer = allocator.allocate_array(BFloat16, SMEM_BYTES // 2, byte_alignment=1024)
        tables = pointer + (Place.TABLES + Table.MBARRIERS) // 2
        memory = Memory(pointer=pointer, mbarriers=cute.recast_ptr(tables, dtype=Int64), base=pointer.toint())
        n = Int32(0)
        if coord.warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(len(Full)):
                    cute.arch.mbarrier_init(memory.mbarriers + i, 1)
            cute.arch.mbarrier_init_fence()
            ptx.sts_b32(memory.table(Table.ZERO), Int32(0))
            if const_expr(self.schedule.beside):
                self.loads.find_beside(args, memory, n)
            else:
                block, _, _ = cute.arch.block_idx()
                self.loads.find(args, memory, n, block)
                cute.arch.sync_warp()
            self.loads.load_rows(args, memory, n)
            self.loads.load_gate(args, memory, n)
            if const_expr(self.schedule.beside):
                self.loads.wait_for_chains(args, memory, n)
                ptx.fence_proxy_async_global()
            self.loads.load_records(args, memory, n)
        if const_expr(self.variant.cu_seqlens is not None):
            self.clear_outside(args, coord.tid)
        cute.arch.sync_threads()
        rows = memory.info(n, Info.ROWS)
        while rows > 0:
            self.chunk(args, memory, n, rows)
            n += 1
            rows = memory.info(n, Info.ROWS)
        if const_expr(self.schedule.beside):
            ptx.dependency_wait()  # in every CTA: see ../launch.py

    @cute.jit
    def clear_outside(self, args, tid):
        """Zero this CTA's part of the gradients' rows that no sequence covers."""
        first, end = sequences.span(args.num_seqs, args.cu_seqlens, self.variant.cu_seqlens)
        if first > 0 or end < args.seq_len:
            block, _, _ = cute.arch.block_idx()
            grid, _, _ = cute.arch.grid_dim()
            qk_bytes = HEAD_DIM * (4 if self.schedule.grouped else 2)
            for number in cutlass.range(block, args.slots * args.heads, grid, unroll=1):
                slot = number // args.heads
                row, head = (args.slot_begin + slot) * CHUNK, number - slot * args.heads
                for out, size in (
                    (args.dq, qk_bytes),
                    (args.dk, qk_bytes),
                    (args.dv, HEAD_DIM * 2),
                    (args.dg, HEAD_DIM * BYTES[self.variant.gate_dtype]),
                    (args.dbeta, BYTES[self.variant.beta_dtype]),
                ):
                    clear_rows(out, size, row, CHUNK, first, end, args.seq_len, head, args.heads, tid, THREADS)

    # ---- one chunk
    @cute.jit
    def chunk(self, args, memory, n, rows):
        """The gradients of the CTA's pair number n. rows: from its first row to the sequence's end."""
        parity, coord = n & 1, Coord.read()
        full = lambda which: memory.mbarriers + int(which)  # noqa: E731
        head, token = memory.info(n, Info.HEAD), memory.info(n, Info.TOKEN)
        s_x = Float32(1.0) if self.variant.l2norm else args.scale
        tensors = Tensors(self.loads, memory, coord)
        # step 1
        row = 16 * coord.band + coord.group
        raw = [self.loads.raw_beta(args, token, row + 8 * r, rows, head) for r in range(2)]
        a_log, bias = self.loads.parameters(args, head, coord.quarter * 32 + 2 * (coord.lane & 15))
        cute.arch.mbarrier_wait(full(Full.EARLY), parity)
        tensors.find_x(args, token, rows, head, raw, s_x, full(Full.LATE), parity)
        if coord.quarter >= 2:
            self.finish_inputs(args, memory, coord, n, rows, full(Full.ROWS), parity)
        ptx.fence_proxy_async()  # X and zeros of dO before the products
        cute.arch.sync_threads()
        # step 2
        cute.arch.mbarrier_wait(full(Full.LATE), parity)
        cute.arch.mbarrier_wait(full(Full.ROWS), parity)
        cute.arch.mbarrier_wait(full(Full.GATE), parity)
        blocks, _ = tensors.accumulator()
        tensors.start_d_a_or_d_m(blocks)
        columns_type = Columns if self.variant.needs_levels else AnchoredColumns
        columns = columns_type(self.variant, self.schedule, self.loads, args, memory, rows, s_x)
        columns.load(args.gate_scale, a_log, bias)
        columns.find_decays()
        warpgroup.wait_group(0)
        tensors.store_blocks(blocks, args.scale, s_x, not self.variant.needs_levels)
        (acc_q, d_q), (acc_x, x_s), (acc_k, d_k_end) = (tensors.accumulator() for _ in range(3))
        tensors.start_d_q(acc_q)
        tensors.start_x_s(acc_x)
        columns.write_row_images()
        tensors.start_d_k_end(acc_k)
        columns.write_next_image()
        tensors.sum_s_ds()
        warpgroup.wait_group(0)
        cute.arch.sync_threads()
        # step 3
        columns.place()
        columns.park_words()
        columns.put(d_k_end, Place.DS)
        if const_expr(self.variant.needs_levels):
            self.find_gradients(args, columns, d_q, x_s, s_x)
        else:
            self.find_gradients_anchored(args, columns, d_q, x_s, s_x)
        g, a_log, bias = self.fetch_gate(args, coord, token, rows, head)  # for step 4
        columns.share_sums()
        columns.place()
        ptx.fence_proxy_async()  # what was read and written of shared memory before the next chunk's copies
        cute.arch.sync_threads()
        if columns.coord.warp == 0:
            self.loads.load_records_if_ready(args, memory, n + 1)
            self.loads.load_rows(args, memory, n + 1)
            if const_expr(not self.loads.wide_gate):
                self.loads.load_gate(args, memory, n + 1)
        # step 4
        coord = columns.coord
        columns.store_q_and_k(token, head)
        columns.store_gate(self.loads.g_pairs(g), a_log, bias, token, head)
        self.store_beta(args, memory, coord, rows, token, head)
        slot = memory.info(n, Info.SLOT)  # before the barrier, behind which step 1 may write the Info of pair n + 2 there
        ptx.wait_for_loads(memory.base, [slot])  # which the barrier does not
        cute.arch.sync_threads()
        # step 5
        self.store_sums(args, memory, coord, slot, head)
        if const_expr(self.loads.wide_gate):
            ptx.fence_proxy_async()
            cute.arch.sync_threads()
            if coord.warp == 0:
                self.loads.load_gate(args, memory, n + 1)
        if const_expr(self.schedule.beside):
            if coord.warp == 0:
                self.loads.load_if_not_yet(args, memory, n + 1)

    def find_gradients(self, args, columns, d_q, x_s, s_x):
        """Step 3 up to the sums."""
        columns.add_bands_before(d_q, x_s, args.scale, Float32(0.0) - s_x)
        columns.put(d_q, Place.S)
        columns.put(x_s, Place.X)
        columns.add_level()
        columns.place()
        columns.add_rows_between(columns.kr, int(Place.K), int(Place.X))
        columns.start_columns()
        columns.add_rows_between(columns.z, int(Place.Q), int(Place.S))
        columns.place()
        columns.put_bands_behind()
        columns.find_band_decays()
        columns.finish_columns()
        columns.place()
        columns.add_rows_inside()
        columns.add_columns_inside()

    def find_gradients_anchored(self, args, columns, d_q, x_s, s_x):
        """Step 3 up to the sums, see anchored.py."""
        columns.find_rows(d_q, x_s, args.scale, Float32(0.0) - s_x)
        columns.put(d_q, Place.S)
        columns.put(x_s, Place.X)
        columns.place()
        columns.find_columns()
        columns.place()
        columns.add_rows()
        columns.place()
        columns.add_columns()

    def fetch_gate(self, args, coord, token, rows, head):
        """g, not yet unpacked, and the gate's parameters for a lane's tokens and channels."""
        channel = coord.quarter * 32 + 2 * (coord.lane & 15)
        g = self.loads.g_again(args, token, 16 * coord.band + 8 * (coord.lane >> 4), channel, rows, head)
        return g, *self.loads.parameters(args, head, channel)

    @cute.jit
    def finish_inputs(self, args, memory, coord, n, rows, full_rows, parity):
        """Step 1 of warpgroups 2 and 3."""
        if coord.warp == 15:
            if const_expr(self.schedule.beside):
                self.loads.find_beside(args, memory, n + 1)
            else:
                grid, _, _ = cute.arch.grid_dim()
                self.loads.find(args, memory, n + 1, memory.info(n, Info.NUMBER) + grid)
        tid = coord.tid & 255
        if rows < CHUNK:
            for i in cutlass.range_constexpr(4):
                piece = tid + 256 * i  # of 1024: 2 halves of 64 rows of 8 pieces
                if ((piece >> 3) & 63) >= rows:
                    ptx.sts_v4_b32(memory.base + Place.D_OUT + piece * 16, [Int32(0)] * 4)
        cute.arch.mbarrier_wait(full_rows, parity)
        # a thread's quarter of a row of q and of k, which no other thread reads or writes here
        row = tid >> 2
        piece = lambda place, i: (  # noqa: E731
            memory.base + int(place) + (i >> 1) * 8192 + row * 128 + (((coord.quad + 4 * (i & 1)) ^ (row & 7)) << 4)
        )
        if rows < CHUNK:
            if row >= rows:
                for i in cutlass.range_constexpr(4):
                    for place in (Place.Q, Place.K):
                        ptx.sts_v4_b32(piece(place, i), [Int32(0)] * 4)
        if const_expr(self.variant.l2norm):
            for place, table in ((Place.Q, Table.RSTD), (Place.K, Table.RSTD + 256)):
                total = Float32(0.0)
                for i in cutlass.range_constexpr(4):
                    for word in ptx.lds_v4_b32(piece(place, i)):
                        x, y = ptx.unpack_bf16x2(word)
                        total = ptx.fma(y, y, ptx.fma(x, x, total))
                for mask in (1, 2):
                    total = total + ptx.as_f32(ptx.shuffle_xor(_bits(total), mask))
                total = ptx.less_f32(row, rows, total, 1.0)
                ptx.sts_f32(memory.table(table) + row * 4, ptx.rsqrt(total + Float32(1e-6)))

    @cute.jit
    def store_beta(self, args, memory, coord, rows, token, head):
        """dbeta."""
        tid, dtype = coord.tid, self.variant.beta_dtype
        if args.dbeta != 0 and tid < CHUNK:
            x = [ptx.lds_f32(memory.table(Table.X_V) + 256 * i + tid * 4) for i in range(2)]
            y = [ptx.lds_f32(memory.table(Table.DOT_BETA) + 256 * i + tid * 4) for i in range(4)]
            d = (x[0] + x[1]) + ((y[0] + y[1]) + (y[2] + y[3]))
            beta = ptx.lds_f32(memory.table(Table.BETA) + tid * 4)
            at = args.dbeta + (Int64(token + tid) * args.heads + head) * BYTES[dtype]
            store_one(at, BETA_GRADIENTS[self.variant.beta](d, beta), dtype, tid, rows)

    @cute.jit
    def store_sums(self, args, memory, coord, slot, head):
        """The chunk's sums for dt_bias, by threads 0 to 127, and for A_log, by threads 128 to 255."""
        row = (Int64(args.slot_begin + slot) * args.heads + head) * (HEAD_DIM * 4)
        for which, (out, sums, parameter) in enumerate(
            ((args.d_bias_sums, Sums.BIAS, self.variant.dt_bias), (args.d_a_log_sums, Sums.A_LOG, self.variant.a_log))
        ):
            if const_expr(parameter is not None):
                channel = coord.tid - HEAD_DIM * which
                if out != 0 and channel >= 0 and channel < HEAD_DIM:
                    at = memory.base + Place.PATCHES + sums + (channel >> 5) * (BANDS * PATCH) + (channel & 31) * 4
                    x = [ptx.lds_f32(at + b * PATCH) for b in range(BANDS)]
                    ptx.stg_f32(out + row + Int64(channel * 4), (x[0] + x[1]) + (x[2] + x[3]))


_bits = ptx.pure("mov.b32 $0, $1;", "f -> r", "The bits of an fp32.")
