"""Prepare kernel for chunks of 64 tokens in WY form: everything of KDA that does not depend on the state.

One CTA of 256 threads per (slot, head); CTAs are independent. The chunk's tokens are four bands of 16. With i, j
tokens, b a band, G the sum of log2 decays from the chunk's start, l the same from the start of the token's own band
and t[b] the sum over band b:

    y        = gate_scale * sigmoid(exp(A_log) * (g + dt_bias))      special-function unit; 0 past the end; fp16, scaled
    l        = running sum of y in a band                            tensor cores: a triangle of ones; fp32
    q^, k^   = x * rsqrt(sum x^2 + 1e-6)                             sum: diagonal of x x^T on the tensor cores; fp32
    q_band   = bf16(q^ * 2^l)        k_band = bf16(k^ * 2^l)         CUDA cores; operands of A and M
    k_inv    = bf16(k^ * 2^-l)       k_next = bf16(k^ * 2^(t[b]-l))  the same
    Q        = bf16(scale * q^ * 2^G)                                image in place of q
    K_end    = bf16(k^ * 2^(G_63 - G))                               image in place of k
    K_start  = bf16(-k^ * 2^G)                                       image in place of g
    A_ij     = bf16(scale * q_i k_j 2^(G_i - G_j)), j <= i           tensor cores, fp32 accumulators; zeros above
    M_ij     = beta_i * k_i k_j 2^(G_i - G_j), j < i                 tensor cores, fp32, then fp16 leading + rest
    T        = (I + M)^-1                                            16x16 diagonal blocks: fp32 substitution, a lane a
                                                                     column; blocks below: products in fp16 lead + rest
    Tb       = T diag(beta)                                          bf16 leading + rest
    U        = bf16(Tb V),  -W = bf16(Tb K_start)                    tensor cores, as U^T = V^T Tb^T
    d        = 2^G_63                                                fp32

Every factor that joins two bands is at most 1 whatever the gate: the diagonal blocks use 2^l and 2^-l (16 tokens: at
most 2^115.4 with lower_bound >= -5), blocks of neighbouring bands k_next, blocks further apart k_next times the decay
of the bands between. So nothing overflows, an underflow is a true one, and no later token reaches an earlier output.
Rows past the sequence's end are zeros with y = beta = 0: they vanish from every product and d is the decay of the
real rows.

Warps: band w = warp % 4, channel half h = warp // 4. A warp holds its 16 rows x 64 channels in m16n8k16 A-fragment
order from the loads to the products, so that no barrier stands between loads and arithmetic. A and M are sums over
both halves: the two warps of a band swap partial sums; half 0 finishes A, half 1 finishes M and inverts. For U and W
a warp computes 16 of the 128 channels.

The workspace holds one record of RECORD_BYTES per (head, slot):

    -W, Q, K_end   64 rows of 128 channels, as two tiles [64 rows][64 channels] with 128-byte swizzle: 16-byte piece p
                   of row r lies at piece p ^ (r & 7). A: one such tile, [64 rows i][64 columns j]
    U              per value half: accumulators of U^T [64 channels x 64 tokens], [16-token block][128 threads][8 bf16]
    d              fp32, channel 16a + 8b + 2c + e at 16a + 4c + 2b + e
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from fla_kda_backend.kernels.shared import ptx, sequences

CHUNK, LOG2_CHUNK, BANDS = 64, 6, 4
ROW_BYTES = 256  # 128 bf16 channels
W_AT, Q_AT, K_AT, A_AT, U_AT, D_AT, RECORD_BYTES = 0, 16384, 32768, 49152, 57344, 73728, 74240

LOG2E = 1.4426950408889634
GATE_ONE = 8192.0  # y is summed in fp16 times 2^13: |y| < 8 fills the range, 2^-30 is still normal
GATE_UNIT = 0x0800  # 2^-13 in fp16

# shared memory, bytes: tiles of 64 rows x 128 channels as in the workspace
Q_TILE, K_TILE, G_TILE, V_TILE = 0, 16384, 32768, 49152
TABLES = 65536  # per band and channel, fp32 [4][128]
BAND_SUM = TABLES  # t[b]
FROM_START = TABLES + 2048  # 2^G at the band's start
TO_END = TABLES + 4096  # 2^(G_63 - G at the band's end)
BAND = TABLES + 6144  # 2^t[b]
MIDDLE = TABLES + 8192  # 2^(t[1] + t[2]), [128]
SQUARES = TABLES + 8704  # sums of squares of q, k: [2][64 rows][2 halves]
BIAS, RATE = TO_END, MIDDLE  # before the tables: dt_bias per warp [8][64], A_log per warp
M_BLOCKS = TABLES  # after the images: blocks of M below the diagonal, B fragments in fp16, lead 512 B | rest 512 B
K_NEXT = TABLES + 10240  # k_next as B fragments, [4 bands][8 steps][32 lanes][16 B]
TB_LEAD, TB_REST = K_NEXT, K_NEXT + 8192  # after A and M: Tb^T, swizzled tiles [64 j][64 i]
SWAP = K_NEXT + 16384  # partial sums, [4 bands][A | M][2][32 lanes][16 B]
A_TILE = SWAP + 8192
INVERSE = A_TILE + 8192  # per band 1536 B: M^T fp32 [16][16], then T^T fp16 lead, rest [16][24]
SMEM_BYTES = INVERSE + 6144

SOLVERS = 5  # barrier of the four warps that invert; 1 to 4: the two warps of a band


def _zeros():
    return [[Float32(0.0)] * 4, [Float32(0.0)] * 4]


def _pack_block(c):
    """Accumulators of a 16x16 block as four 8x8 bf16 tiles (A-fragment order)."""
    return [ptx.pack_bf16x2(c[n][2 * r], c[n][2 * r + 1]) for n in range(2) for r in range(2)]


def _split_block(c):
    """Accumulators of a 16x16 block as A fragments in fp16, lead and rest."""
    parts = [ptx.split_f16x2(c[n][2 * r], c[n][2 * r + 1]) for n in range(2) for r in range(2)]
    return [p[0] for p in parts], [p[1] for p in parts]


def _product_split(a, b, c):
    """c + a.b for 16x16 fp16 operands given as (lead, rest); rest.rest is left out."""
    out = []
    for n in range(2):
        r = ptx.mma_f16(a[0], b[0][2 * n : 2 * n + 2], c[n])
        r = ptx.mma_f16(a[1], b[0][2 * n : 2 * n + 2], r)
        out.append(ptx.mma_f16(a[0], b[1][2 * n : 2 * n + 2], r))
    return out


class PrepareWY64:
    """Compile-time facts: the dtype of cu_seqlens (None: equal lengths), fp16 terms of the gate, order of the CTAs, and
    how many CTAs ahead to bring rows into the L2 (0: none; equal lengths only)."""

    threads = 256
    smem_bytes = SMEM_BYTES

    def __init__(self, cu_dtype=None, gate_terms=1, head_major=False, lookahead=0, ctas_per_sm=2):
        if cu_dtype not in sequences.CU_DTYPES or gate_terms not in (1, 2):
            raise ValueError(f"unsupported: cu_dtype={cu_dtype!r}, gate_terms={gate_terms!r}")
        self.cu_dtype, self.gate_terms, self.head_major = cu_dtype, gate_terms, head_major
        self.lookahead, self.ctas_per_sm = lookahead if cu_dtype is None else 0, ctas_per_sm

    @cute.jit
    def __call__(self, q, k, v, g, beta, a_log, dt_bias, cu_seqlens, workspace, scale, gate_scale, seq_len, num_seqs,
                 heads, slot_begin, slot_end, stream):  # fmt: skip
        """Launch over slots [slot_begin, slot_end) and all heads; addresses are Int64, counts Int32."""
        self.kernel(
            q, k, v, g, beta, a_log, dt_bias, cu_seqlens, workspace, scale, gate_scale, seq_len, num_seqs, heads,
            slot_begin, slot_end - slot_begin,
        ).launch(
            grid=[(slot_end - slot_begin) * heads, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q: Int64,  # [tokens, H, 128] bf16
        k: Int64,  # [tokens, H, 128] bf16
        v: Int64,  # [tokens, H, 128] bf16
        g: Int64,  # [tokens, H, 128] bf16, before the gate
        beta: Int64,  # [tokens, H] bf16, before the sigmoid
        a_log: Int64,  # [H] fp32
        dt_bias: Int64,  # [H, 128] fp32
        cu_seqlens: Int64,  # [num_seqs + 1] int32 or int64
        workspace: Int64,  # [H, slots, RECORD_BYTES]
        scale: Float32,
        gate_scale: Float32,  # lower_bound * log2(e)
        seq_len: Int32,
        num_seqs: Int32,
        heads: Int32,
        slot_begin: Int32,
        slots: Int32,
    ):
        ptx.dependency_launch()
        smem = SmemAllocator().allocate_array(BFloat16, SMEM_BYTES // 2, byte_alignment=1024).toint()
        block, _, _ = cute.arch.block_idx()
        local_slot, head = self.place(block, slots, heads)
        slot = slot_begin + local_slot
        s = sequences.sequence_of_slot(slot, num_seqs, cu_seqlens, seq_len, LOG2_CHUNK, self.cu_dtype)
        begin, length, base = sequences.sequence(s, cu_seqlens, seq_len, LOG2_CHUNK, self.cu_dtype)
        offset = (slot - base) * CHUNK
        if offset < length:
            record = workspace + (Int64(head) * Int64(slots) + Int64(local_slot)) * RECORD_BYTES
            self.chunk(q, k, v, g, beta, a_log, dt_bias, record, smem, scale, gate_scale,
                       Int64(begin) + Int64(offset), length - offset, head, heads)  # fmt: skip
        if const_expr(self.lookahead > 0):
            self.look_ahead(q, k, v, g, seq_len, heads, slot_begin, slots, block)

    def place(self, block, slots, heads):
        """Slot, counted from the launch's first, and head of a CTA."""
        if self.head_major:
            head = block // slots
            return block - head * slots, head
        slot = block // heads
        return slot, block - slot * heads

    @cute.jit
    def look_ahead(self, q, k, v, g, seq_len, heads, slot_begin, slots, block):
        """Bring the rows of a later CTA into the L2."""
        later = block + self.lookahead
        if later < slots * heads:
            thread, _, _ = cute.arch.thread_idx()
            local_slot, head = self.place(later, slots, heads)
            slot = slot_begin + local_slot
            chunks = (seq_len + (CHUNK - 1)) >> LOG2_CHUNK
            s = slot // chunks
            row = (slot - s * chunks) * CHUNK + (thread >> 1) % CHUNK
            if row < seq_len:
                at = (Int64(s * seq_len + row) * Int64(heads) + Int64(head)) * ROW_BYTES + Int64((thread & 1) * 128)
                if thread < 128:
                    ptx.prefetch_l2(g + at)
                    ptx.prefetch_l2(q + at)
                else:
                    ptx.prefetch_l2(k + at)
                    ptx.prefetch_l2(v + at)

    @cute.jit
    def chunk(self, q, k, v, g, beta, a_log, dt_bias, record, smem, scale, gate_scale, token, rows, head, heads):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread % 32
        band, half = warp & 3, warp >> 2
        group, quad = lane >> 2, lane & 3  # row and column pair of a fragment
        rows_band = rows - 16 * band
        row8, upper = lane & 7, (lane >> 3) & 1
        swizzled = ((lane >> 4) ^ row8) << 4
        row = 16 * band + row8 + 8 * upper
        # one 16x16 block of the warp's rows, its own half: ldmatrix and stmatrix address of step `kk`
        at = [half * 8192 + row * 128 + (swizzled ^ (kk << 5)) for kk in range(4)]

        stride = Int64(heads) * ROW_BYTES
        first = (token * Int64(heads) + Int64(head)) * ROW_BYTES
        self.load_rows(g + first, smem + G_TILE, stride, rows_band, band, half, lane)
        bias_at, rate_at = smem + BIAS + warp * 256, smem + RATE + warp * 4
        self.load_gate(a_log, dt_bias, bias_at, rate_at, head, half, lane)
        ptx.cp_async_commit()
        beta_at = beta + (token * Int64(heads) + Int64(head)) * 2
        beta_rows = [self.load_beta(beta_at, heads, rows, 16 * band + r) for r in (group, group + 8, lane & 15)]
        self.load_rows(q + first, smem + Q_TILE, stride, rows_band, band, half, lane)
        self.load_rows(k + first, smem + K_TILE, stride, rows_band, band, half, lane)
        ptx.cp_async_commit()
        self.load_rows(v + first, smem + V_TILE, stride, rows_band, band, half, lane)
        ptx.cp_async_commit()

        ptx.cp_async_wait(2)
        cute.arch.sync_warp()
        rate = ptx.ex2(ptx.lds_f32(rate_at) * Float32(LOG2E)) * Float32(-LOG2E)
        bias = [ptx.lds_f32(bias_at + (8 * n + group) * 4) * rate for n in range(8)]
        l = self.decay_sums(smem + G_TILE, at, bias, rate, gate_scale, rows_band, group, quad)  # noqa: E741
        if lane >= 28:  # these hold row 15
            for n in cutlass.range_constexpr(8):
                ptx.sts_v2_f32(smem + BAND_SUM + band * 512 + half * 256 + n * 32 + quad * 8, l[n][2], l[n][3])
        ptx.cp_async_wait(1)
        cute.arch.sync_warp()
        self.squares(smem, Q_TILE, at, band, half, group, quad, 0)
        self.squares(smem, K_TILE, at, band, half, group, quad, 512)
        cute.arch.sync_threads()
        self.factors(smem, record, thread, half)
        norms_at = smem + SQUARES + (16 * band + group) * 8
        q_norms = [self.norm(norms_at + 64 * r) for r in range(2)]
        k_norms = [self.norm(norms_at + 512 + 64 * r) for r in range(2)]
        cute.arch.sync_threads()

        table_at = smem + band * 512 + half * 256 + quad * 8
        next_at = smem + K_NEXT + band * 4096 + half * 2048 + lane * 16
        q_band, k_band, a, m = self.images(smem, at, l, q_norms, k_norms, table_at, next_at, scale)
        ptx.fence_proxy_async()
        cute.arch.sync_threads()
        if thread == 0:
            ptx.bulk_store(record + Q_AT, smem + Q_TILE, Int32(32768))
            ptx.bulk_commit()
        self.scores(smem, q_band, k_band, a, m, beta_rows, scale, band, half, lane)
        ptx.fence_proxy_async()
        cute.arch.sync_threads()
        if thread == 0:
            ptx.bulk_store(record + A_AT, smem + A_TILE, Int32(8192))
            ptx.bulk_commit()
        if half == 1:
            self.invert(smem, beta_rows, band, lane, row8 + 8 * upper, swizzled)
        ptx.cp_async_wait(0)
        cute.arch.sync_threads()
        tb = self.inverse_fragments(smem, row8 + 8 * upper, swizzled)
        columns = half * 8192 + (row8 + 8 * (lane >> 4)) * 128 + (((2 * band + upper) ^ row8) << 4)
        for i, words in enumerate(self.product(tb, smem + G_TILE + columns)):
            ptx.stmatrix_x4_trans(smem + G_TILE + columns + i * 2048, words)
        ptx.fence_proxy_async()
        cute.arch.sync_threads()
        if thread == 0:
            ptx.bulk_store(record + W_AT, smem + G_TILE, Int32(16384))
            ptx.bulk_commit()
        u_at = record + Int64(U_AT + half * 8192 + (band * 32 + lane) * 16)
        for i, words in enumerate(self.product(tb, smem + V_TILE + columns)):
            ptx.stg_words(u_at + Int64(i * 2048), words)
        if thread == 0:
            ptx.bulk_wait_read()

    # ---- loads -----------------------------------------------------------------------------------------------------
    def load_rows(self, address, tile, stride, rows_band, band, half, lane):
        """The warp's 16 rows x 64 channels into the swizzled tile; rows past the end become zeros and are not read."""
        row, piece = lane >> 3, lane & 7
        source = address + Int64(16 * band + row) * stride + Int64(half * 128 + piece * 16)
        target = tile + half * 8192 + (16 * band + row) * 128
        for i in range(4):
            size = ptx.less_b32(row + 4 * i, rows_band, 16, 0)
            swizzled = (piece ^ row ^ (4 * (i & 1))) << 4
            ptx.cp_async_16_or_zero(target + i * 512 + swizzled, source + stride * (4 * i), size)

    @cute.jit
    def load_gate(self, a_log, dt_bias, bias, rate, head, half, lane):
        """dt_bias of the warp's channels and A_log, through shared memory: loads into registers would be scheduled
        behind the wait for g."""
        source = dt_bias + Int64(head * 512 + half * 256 + lane * 4)
        for i in cutlass.range_constexpr(2):
            ptx.cp_async_4(bias + lane * 4 + i * 128, source + Int64(i * 128))
        if lane == 0:
            ptx.cp_async_4(rate, a_log + Int64(head) * 4)

    def load_beta(self, address, heads, rows, row):
        """sigmoid(beta) of a row of the chunk, 0 past the end (where the last row is read instead)."""
        x = ptx.ldg_nc_bf16(address + Int64(ptx.less_b32(row, rows, row, rows - 1)) * Int64(heads) * 2)
        return ptx.less_f32(row, rows, ptx.rcp(Float32(1.0) + ptx.ex2(x * Float32(-LOG2E))), 0.0)

    # ---- gate and norms --------------------------------------------------------------------------------------------
    def decay_sums(self, tile, at, bias, rate, gate_scale, rows_band, group, quad):
        """l of the warp's rows as accumulators [8 tiles of 8 channels][4]. Rows past the end weigh 0 in the sum."""
        column = 2 * quad

        def ones(limit):  # a pair of columns of the triangle
            low = ptx.less_b32(column, limit, GATE_UNIT, 0)
            return low | ptx.less_b32(column + 1, limit, GATE_UNIT << 16, 0)

        def least(x, y):
            return ptx.less_b32(x, y, x, y)

        triangle = [ones(least(group + 1, rows_band)), ones(rows_band), Int32(0), ones(least(group + 1, rows_band - 8))]
        over_scale = ptx.rcp(gate_scale * Float32(GATE_ONE))
        zero = [Float32(0.0)] * 4
        sums = []
        for kk in range(4):
            words = ptx.ldmatrix_x4_trans(tile + at[kk])
            for n in range(2):
                lead, rest = [], []
                for j in range(2):
                    y = []
                    for x in ptx.unpack_bf16x2(words[2 * n + j]):
                        e = ptx.ex2(ptx.fma(x, rate, bias[2 * kk + n]))
                        y.append(ptx.rcp(ptx.fma(e, over_scale, over_scale)))
                    if self.gate_terms == 2:
                        pair, small = ptx.split_f16x2(*y)
                        rest.append(small)
                    else:
                        pair = ptx.pack_f16x2(*y)
                    lead.append(pair)
                total = ptx.mma_f16(triangle, lead, zero)
                sums.append(ptx.mma_f16(triangle, rest, total) if self.gate_terms == 2 else total)
        return sums

    @cute.jit
    def squares(self, smem, tile: cutlass.Constexpr, at, band, half, group, quad, table: cutlass.Constexpr):
        """Sums of squares of the warp's rows over its 64 channels: the diagonal of x x^T."""
        c0 = c1 = [Float32(0.0)] * 4
        for kk in cutlass.range_constexpr(4):
            x = ptx.ldmatrix_x4(smem + tile + at[kk])
            c0 = ptx.mma_bf16(x, (x[0], x[2]), c0)
            c1 = ptx.mma_bf16(x, (x[1], x[3]), c1)
        odd = group & 1
        if quad == group >> 1:
            where = smem + SQUARES + table + (16 * band + group) * 8 + half * 4
            ptx.sts_f32(where, ptx.less_f32(0, odd, c0[1], c0[0]))
            ptx.sts_f32(where + 64, ptx.less_f32(0, odd, c1[3], c1[2]))

    def norm(self, address):
        low, high = ptx.lds_v2_f32(address)
        return ptx.rsqrt(low + high + Float32(1e-6))

    @cute.jit
    def factors(self, smem, record, thread, half):
        """The decays that join bands, one channel a thread, and the chunk's decay d."""
        channel = thread & 127
        where = smem + channel * 4
        t = [ptx.lds_f32(where + BAND_SUM + 512 * b) for b in range(4)]
        if half == 0:
            total = t[0]
            ptx.sts_f32(where + FROM_START, Float32(1.0))
            for b in cutlass.range_constexpr(1, 4):
                ptx.sts_f32(where + FROM_START + 512 * b, ptx.ex2(total))
                total = total + t[b]
            position = (channel & ~15) + ((channel & 7) >> 1) * 4 + (channel & 1) + ((channel >> 3) & 1) * 2
            ptx.stg_f32(record + Int64(D_AT + position * 4), ptx.ex2(total))
        else:
            for b in cutlass.range_constexpr(4):
                ptx.sts_f32(where + BAND + 512 * b, ptx.ex2(t[b]))
            ptx.sts_f32(where + MIDDLE, ptx.ex2(t[1] + t[2]))
            ptx.sts_f32(where + TO_END + 1536, Float32(1.0))
            ptx.sts_f32(where + TO_END + 1024, ptx.ex2(t[3]))
            ptx.sts_f32(where + TO_END + 512, ptx.ex2(t[2] + t[3]))
            ptx.sts_f32(where + TO_END, ptx.ex2(t[1] + t[2] + t[3]))

    # ---- images and operands -----------------------------------------------------------------------------------------
    def images(self, smem, at, l, q_norms, k_norms, table_at, next_at, scale):  # noqa: E741
        """Write Q, K_start, K_end and k_next; return q_band, k_band and the diagonal blocks of A and M."""
        a, m = _zeros(), _zeros()
        q_band, k_band = [], []
        for kk in range(4):
            q_words, k_words = ptx.ldmatrix_x4(smem + Q_TILE + at[kk]), ptx.ldmatrix_x4(smem + K_TILE + at[kk])
            columns = [kk * 64 + n * 32 for n in range(2)]
            start = [ptx.lds_v2_f32(table_at + FROM_START + c) for c in columns]
            own = [ptx.lds_v2_f32(table_at + BAND + c) for c in columns]
            end = [ptx.lds_v2_f32(table_at + TO_END + c) for c in columns]
            start_scaled = [[f * scale for f in pair] for pair in start]
            rows = {name: [] for name in ("q_band", "k_band", "Q", "K_start", "k_inv", "k_next", "K_end")}
            for r in range(4):  # register of an A fragment: rows group + 8 * (r & 1), channels 8 * (r >> 1) + 2 * quad
                n, low = r >> 1, 2 * (r & 1)
                pair = {name: [] for name in rows}
                for e, (x, z) in enumerate(zip(ptx.unpack_bf16x2(q_words[r]), ptx.unpack_bf16x2(k_words[r]))):
                    sum_l = l[2 * kk + n][low + e]
                    grow, shrink = ptx.ex2(-sum_l), ptx.ex2(sum_l)
                    x, z = x * q_norms[r & 1] * shrink, z * k_norms[r & 1]
                    z_inv, z = z * grow, z * shrink
                    z_next = z_inv * own[n][e]
                    pair["q_band"].append(x)
                    pair["Q"].append(x * start_scaled[n][e])
                    pair["k_band"].append(z)
                    pair["K_start"].append(-(z * start[n][e]))
                    pair["k_inv"].append(z_inv)
                    pair["k_next"].append(z_next)
                    pair["K_end"].append(z_next * end[n][e])
                for name, values in pair.items():
                    rows[name].append(ptx.pack_bf16x2(*values))
            ptx.stmatrix_x4(smem + Q_TILE + at[kk], rows["Q"])
            ptx.stmatrix_x4(smem + G_TILE + at[kk], rows["K_start"])
            ptx.stmatrix_x4(smem + K_TILE + at[kk], rows["K_end"])
            ptx.sts_v4_b32(next_at + kk * 512, rows["k_next"])
            q_band.append(rows["q_band"])
            k_band.append(rows["k_band"])
            a, m = self.accumulate(rows["q_band"], rows["k_band"], rows["k_inv"], a, m)
        return q_band, k_band, a, m

    def accumulate(self, q_rows, k_rows, columns, a, m):
        """One k-step of a 16x16 block of A and of M. `columns` are A-fragment words: B words in another order."""
        operands = [(columns[n], columns[n + 2]) for n in range(2)]
        a = [ptx.mma_bf16(q_rows, operands[n], a[n]) for n in range(2)]
        return a, [ptx.mma_bf16(k_rows, operands[n], m[n]) for n in range(2)]

    # ---- A and M -----------------------------------------------------------------------------------------------------
    @cute.jit
    def scores(self, smem, q_band, k_band, a, m, beta_rows, scale, band, half, lane):
        """The blocks of the warp's rows: the diagonal one, of partial sums a, m, then those of the bands before."""
        self.finish(smem, a, m, beta_rows, scale, band, half, lane, band, True)
        next_at = smem + K_NEXT + half * 2048 + lane * 16
        if band > 0:
            a_next, m_next = self.block_below(q_band, k_band, next_at + (band - 1) * 4096, None)
            self.finish(smem, a_next, m_next, beta_rows, scale, band, half, lane, band - 1, False)
        for other in cutlass.range(band - 1, unroll=1):
            between = BAND + (other + 1) * 512
            if band - other == 3:
                between = Int32(MIDDLE)
            factors = smem + between + half * 256 + (lane & 3) * 8
            a_far, m_far = self.block_below(q_band, k_band, next_at + other * 4096, factors)
            self.finish(smem, a_far, m_far, beta_rows, scale, band, half, lane, other, False)
        if half == 0:
            for other in cutlass.range(band + 1, 4, unroll=1):
                ptx.stmatrix_x4(self.a_block(smem, band, other, lane), [Int32(0)] * 4)

    def block_below(self, q_band, k_band, next_at, factors):
        a, m = _zeros(), _zeros()
        for kk in range(4):
            words = ptx.lds_v4_b32(next_at + kk * 512)
            if factors is not None:
                decay = [ptx.lds_v2_f32(factors + kk * 64 + n * 32) for n in range(2)]
                pairs = [ptx.unpack_bf16x2(w) for w in words]
                words = [ptx.pack_bf16x2(*(x * f for x, f in zip(pairs[r], decay[r >> 1]))) for r in range(4)]
            a, m = self.accumulate(q_band[kk], k_band[kk], words, a, m)
        return a, m

    def a_block(self, smem, band, other, lane):
        row8 = lane & 7
        row = 16 * band + row8 + 8 * ((lane >> 3) & 1)
        return smem + A_TILE + row * 128 + ((((lane >> 4) ^ row8) << 4) ^ (other << 5))

    @cute.jit
    def finish(self, smem, a, m, beta_rows, scale, band, half, lane, other, diagonal: cutlass.Constexpr):
        """Swap partial sums between the two warps of the band; half 0 stores the block of A, half 1 that of M."""
        group, quad = lane >> 2, lane & 3
        swap = smem + SWAP + band * 2048 + lane * 16
        self.band_barrier(band)  # the last swap has been read
        if half == 0:
            for n in cutlass.range_constexpr(2):
                ptx.sts_v4_f32(swap + 1024 + 512 * n, m[n])
        else:
            for n in cutlass.range_constexpr(2):
                ptx.sts_v4_f32(swap + 512 * n, a[n])
        self.band_barrier(band)
        partner = [ptx.lds_v4_f32(swap + half * 1024 + 512 * n) for n in range(2)]
        if half == 0:
            block = [[(x + y) * scale for x, y in zip(a[n], partner[n])] for n in range(2)]
            if const_expr(diagonal):
                block = self.masked(block, group, quad, 1)
            ptx.stmatrix_x4(self.a_block(smem, band, other, lane), _pack_block(block))
        else:
            block = [[(x + y) * beta_rows[e >> 1] for e, (x, y) in enumerate(zip(m[n], partner[n]))] for n in range(2)]
            if const_expr(diagonal):
                block = self.masked(block, group, quad, 0)
                for n in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(4):
                        i, j = group + 8 * (e >> 1), 8 * n + 2 * quad + (e & 1)
                        ptx.sts_f32(smem + INVERSE + band * 1536 + j * 64 + i * 4, block[n][e])
            else:
                parts = [ptx.split_f16x2(block[n][2 * r], block[n][2 * r + 1]) for r in range(2) for n in range(2)]
                where = smem + M_BLOCKS + (band * (band - 1) // 2 + other) * 1024 + lane * 16
                ptx.sts_v4_b32(where, [p[0] for p in parts])
                ptx.sts_v4_b32(where + 512, [p[1] for p in parts])

    def band_barrier(self, band):
        cute.arch.barrier(barrier_id=1 + band, number_of_threads=64)

    def masked(self, block, group, quad, more):
        """Keep columns j < i + more of a diagonal block."""
        return [
            [ptx.less_f32(8 * n + 2 * quad + (e & 1), group + 8 * (e >> 1) + more, block[n][e], 0.0) for e in range(4)]
            for n in range(2)
        ]

    # ---- inverse -----------------------------------------------------------------------------------------------------
    @cute.jit
    def invert(self, smem, beta_rows, band, lane, row, swizzled):
        """The column of blocks of T that the warp's band heads, as Tb^T; the four warps of half 1."""
        column = lane & 15
        inverse = smem + INVERSE + band * 1536
        cute.arch.sync_warp()
        x = self.substitute(inverse, column)
        cute.arch.sync_warp()
        pairs = [(x[2 * i], x[2 * i + 1]) for i in range(8)]
        parts = [ptx.split_f16x2(*p) for p in pairs]
        for part in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(2):
                words = [p[part] for p in parts[4 * i : 4 * i + 4]]
                ptx.sts_v4_b32(inverse + part * 768 + column * 48 + i * 16, words)
        beta_column = beta_rows[2]
        scaled = [(low * beta_column, high * beta_column) for low, high in pairs]
        lead = [ptx.pack_bf16x2(*p) for p in scaled]
        rest = [ptx.rest_bf16x2(*p, w) for p, w in zip(scaled, lead)]
        tb_at = smem + (16 * band + column) * 128
        for i in cutlass.range_constexpr(2):
            piece = ((2 * band + i) ^ (column & 7)) << 4
            ptx.sts_v4_b32(tb_at + TB_LEAD + piece, lead[4 * i : 4 * i + 4])
            ptx.sts_v4_b32(tb_at + TB_REST + piece, rest[4 * i : 4 * i + 4])
        cute.arch.barrier(barrier_id=SOLVERS, number_of_threads=128)
        for b in cutlass.range_constexpr(3):
            if band == b:
                self.solve_column(smem, beta_rows, b, lane, row, swizzled)

    def substitute(self, m_transposed, column):
        """A column of (I + M)^-1 for the strictly lower 16x16 M, given as M^T in fp32, by forward substitution."""
        x = [ptx.less_f32(column, i, 0.0, ptx.less_f32(i, column, 0.0, 1.0)) for i in range(16)]
        for j in range(15):
            m = {}
            for quarter in range((j + 1) // 4, 4):
                m.update(enumerate(ptx.lds_v4_f32(m_transposed + j * 64 + quarter * 16), 4 * quarter))
            for i in range(j + 1, 16):
                x[i] = x[i] - m[i] * x[j]
        return x

    def solve_column(self, smem, beta_rows, b, lane, row, swizzled):
        """T_ib^T = -(sum over b <= c < i of T_cb^T M_ic^T) T_ii^T for i > b, scaled by beta as blocks of Tb^T."""
        at = smem + INVERSE + row * 48 + (lane >> 4) * 16
        t = {b: (ptx.ldmatrix_x4(at + b * 1536), ptx.ldmatrix_x4(at + b * 1536 + 768))}
        for i in range(b + 1, BANDS):
            acc = _zeros()
            for c in range(b, i):
                where = smem + M_BLOCKS + (i * (i - 1) // 2 + c) * 1024 + lane * 16
                acc = _product_split(t[c], (ptx.lds_v4_b32(where), ptx.lds_v4_b32(where + 512)), acc)
            own = (ptx.ldmatrix_x4_trans(at + i * 1536), ptx.ldmatrix_x4_trans(at + i * 1536 + 768))
            block = [[-x for x in part] for part in _product_split(_split_block(acc), own, _zeros())]
            if i < BANDS - 1:
                t[i] = _split_block(block)
            scaled = [[x * beta_rows[e >> 1] for e, x in enumerate(part)] for part in block]
            lead = _pack_block(scaled)
            rest = [
                ptx.rest_bf16x2(scaled[r >> 1][2 * (r & 1)], scaled[r >> 1][2 * (r & 1) + 1], lead[r]) for r in range(4)
            ]
            target = smem + b * 2048 + row * 128 + (swizzled ^ (i << 5))
            ptx.stmatrix_x4(target + TB_LEAD, lead)
            ptx.stmatrix_x4(target + TB_REST, rest)

    # ---- U and W -----------------------------------------------------------------------------------------------------
    def inverse_fragments(self, smem, row, swizzled):
        """B fragments of the blocks of Tb^T, keyed (token block summed over, token block of the result): lead, rest."""
        at = smem + row * 128
        return {
            (j, i): [ptx.ldmatrix_x4_trans(at + part + j * 2048 + (swizzled ^ (i << 5))) for part in (TB_LEAD, TB_REST)]
            for i in range(BANDS)
            for j in range(i + 1)
        }

    def product(self, tb, columns):
        """x^T Tb^T for 16 channels of a tile x: accumulators of the four 16-token blocks as bf16 words."""
        x = [ptx.ldmatrix_x4_trans(columns + j * 2048) for j in range(BANDS)]
        blocks = []
        for i in range(BANDS):
            acc = _zeros()
            for j in range(i + 1):
                for part in tb[j, i]:
                    acc = [ptx.mma_bf16(x[j], part[2 * n : 2 * n + 2], acc[n]) for n in range(2)]
            blocks.append(_pack_block(acc))
        return blocks
