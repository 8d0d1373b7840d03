"""Prepare kernel for chunks of 16 tokens: everything of KDA that does not depend on the state.

One CTA of 128 threads per (slot, head); CTAs are independent. With q, k, g the rows of the chunk (D = 128 channels):

    q^, k^  = bf16(x * rsqrt(sum x^2 + 1e-6))                   CUDA cores, 16 lanes a row; rows past the end are 0
    y       = sigmoid((g + dt_bias) * exp(A_log)) * gate_scale  CUDA cores; log2 of the decay; 0 past the end
    c       = running sum of y over the tokens                  fp32, token by token; 8 tokens a thread, then 8 in another
    e, n    = bf16(2^c), bf16(2^-c);   decay = 2^c_15 in fp32   special-function unit
    k_start = bf16(k^ * e)      q_start = bf16(bf16(q^ * e) * bf16(scale))
    k_inv   = bf16(k^ * n)      k_end   = bf16(k_inv * bf16(decay))
    L       = strictly_lower(k_start k_inv^T) * sigmoid(beta)   tensor cores, fp32 accumulators
    scores  = bf16(lower(q_start k_inv^T))                      tensor cores, fp32 accumulators
    inverse = bf16((I + L)^-1)

Two settings of the arithmetic. "exact" is FlashKDA's, to the bit: L and sigmoid(beta) are rounded to fp16 and the inverse is
(I - L)(I + L^2)(I + L^4)(I + L^8), formed in fp16 on the tensor cores, whose powers grow and cancel when keys repeat.
"robust" keeps L in fp32 and substitutes forward, one lane a column; and it rounds k_end once, bf16(k^ * 2^(c_15 - c)),
instead of three times. Nothing else differs.

sigmoid(x) is fma(tanh.approx(x/2), 1/2, 1/2). The chunk's results leave in one bulk copy of RECORD_BYTES:

    k_start, q_start, k_end  16 rows of 256 bytes; 16-byte piece p of row r lies at piece p ^ (r & 7)
    scores, inverse          m16n8k16 A fragments: 32 lanes of 16 bytes
    decay                    fp32, channel k at (k % 8) * 16 + (k // 16) * 2 + (k // 8) % 2: the recurrence's order
    beta                     per token bf16(sigmoid(beta)) twice in one 32-bit word; 0 past the end
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from fla_kda_backend.kernels.shared import ptx, sequences
from fla_kda_backend.kernels.shared.record16 import (
    ARITHMETICS,
    BETA,
    CHUNK,
    DECAY,
    INVERSE,
    K_END,
    K_START,
    LOG2_CHUNK,
    Q_START,
    RECORD_BYTES,
    ROW_BYTES,
    SCORES,
)

LOG2E = 1.44269502  # rounds to the fp32 constant that FlashKDA multiplies A_log by


class PrepareChunk16:
    """Compile-time facts: the setting of the arithmetic, the dtype of cu_seqlens (None: equal lengths)."""

    threads = 128

    def __init__(self, arithmetic="exact", cu_dtype=None, ctas_per_sm=8):
        if arithmetic not in ARITHMETICS or cu_dtype not in sequences.CU_DTYPES:
            raise ValueError(f"unsupported: arithmetic={arithmetic!r}, cu_dtype={cu_dtype!r}")
        self.robust, self.cu_dtype, self.ctas_per_sm = arithmetic == "robust", cu_dtype, ctas_per_sm
        # shared memory: the record, k^ (later k_inv), the running sums at token 7 (later 15), L^T of the substitution
        self.k_inv = RECORD_BYTES + (-RECORD_BYTES) % 128
        self.half_sum = self.k_inv + CHUNK * ROW_BYTES
        self.l_transposed = self.half_sum + 512
        self.smem_bytes = self.l_transposed + (1024 if self.robust else 0)

    @cute.jit
    def __call__(self, q, k, g, beta, a_log, dt_bias, out, cu_seqlens, workspace, scale, gate_scale, seq_len, num_seqs,
                 heads, slot_begin, slot_end, stream):  # fmt: skip
        """Launch over slots [slot_begin, slot_end) and all heads; addresses are Int64, counts Int32."""
        self.kernel(
            q, k, g, beta, a_log, dt_bias, out, cu_seqlens, workspace, scale, gate_scale, seq_len, num_seqs, heads,
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
        g: Int64,  # [tokens, H, 128] bf16, before the gate
        beta: Int64,  # [tokens, H] bf16, before the sigmoid
        a_log: Int64,  # [H] fp32
        dt_bias: Int64,  # [H, 128] fp32
        out: Int64,  # [tokens, H, 128] bf16; rows outside every packed sequence become 0
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
        block, _, _ = cute.arch.block_idx()
        local_slot = block // heads
        head = block - local_slot * heads
        slot = slot_begin + local_slot
        s = sequences.sequence_of_slot(slot, num_seqs, cu_seqlens, seq_len, LOG2_CHUNK, self.cu_dtype)
        begin, length, base = sequences.sequence(s, cu_seqlens, seq_len, LOG2_CHUNK, self.cu_dtype)
        offset = (slot - base) * CHUNK
        smem = SmemAllocator().allocate_array(BFloat16, self.smem_bytes // 2, byte_alignment=128).toint()
        if offset >= 0 and offset < length:
            record = workspace + (Int64(head) * Int64(slots) + Int64(local_slot)) * RECORD_BYTES
            self.chunk(q, k, g, beta, a_log, dt_bias, record, smem, scale, gate_scale,
                       Int64(begin) + Int64(offset), length - offset, head, heads)  # fmt: skip
        if const_expr(self.cu_dtype is not None):
            self.clear_outside(out, cu_seqlens, slot, num_seqs, seq_len, head, heads)
        # The recurrence may begin to start. It waits for the end of this grid before it reads the workspace; everything
        # else that it touches is older than this grid, which is launched without such an overlap.
        ptx.dependency_launch()

    @cute.jit
    def clear_outside(self, out, cu_seqlens, slot, num_seqs, tokens, head, heads):
        """Zero this slot's share of the output rows that no sequence covers: tokens 16*slot to 16*slot + 15."""
        thread, _, _ = cute.arch.thread_idx()
        first, end = sequences.span(num_seqs, cu_seqlens, self.cu_dtype)
        sequences.clear_rows(out, slot * CHUNK, CHUNK, first, end, tokens, head, heads, thread, self.threads)

    @cute.jit
    def chunk(self, q, k, g, beta, a_log, dt_bias, record, smem, scale, gate_scale, token, rows, head, heads):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread % 32
        row_stride = Int64(heads) * ROW_BYTES
        first = token * row_stride + Int64(head) * ROW_BYTES

        # every load of the chunk is in flight before the first one is used
        q_rows = self.load_rows(q + first, row_stride, rows, thread)
        k_rows = self.load_rows(k + first, row_stride, rows, thread)
        pair, half = thread % 64, thread // 64
        g_words = self.load_gate(g + first, row_stride, rows, pair, half)
        bias = dt_bias + Int64(head * 512 + pair * 8)
        bias = (ptx.ldg_nc_f32(bias), ptx.ldg_nc_f32(bias + 4))
        rate = ptx.mul(ptx.ex2(ptx.mul(ptx.ldg_nc_f32(a_log + Int64(head) * 4), Float32(LOG2E))), Float32(0.5))
        beta_rows = self.load_beta(beta + (token * Int64(heads) + Int64(head)) * 2, heads, rows, lane)

        self.normalise(q_rows, smem + Q_START, thread)
        self.normalise(k_rows, smem + self.k_inv, thread)
        y = self.gate(g_words, bias, rate, gate_scale, rows, half)
        if half == 0:
            self.running_sum(y, (Float32(0.0), Float32(0.0)))
            ptx.sts_v2_f32(smem + self.half_sum + pair * 8, y[7, 0], y[7, 1])
        cute.arch.sync_threads()
        if half == 1:
            self.running_sum(y, ptx.lds_v2_f32(smem + self.half_sum + pair * 8))
            if const_expr(self.robust):
                ptx.sts_v2_f32(smem + self.half_sum + pair * 8, y[7, 0], y[7, 1])
            where = smem + self.decay_of(pair)
            ptx.sts_f32(where, ptx.ex2(y[7, 0]))
            ptx.sts_f32(where + 64, ptx.ex2(y[7, 1]))
        k_words = self.scale_rows(y, smem, pair, half, scale)
        cute.arch.sync_threads()
        if const_expr(self.robust):
            self.end_rows_robust(k_words, y, smem, pair, half)
        else:
            self.end_rows_exact(k_words, smem, pair, half)
        if warp == 0:
            if lane % 4 == 0:
                for r in cutlass.range_constexpr(2):
                    ptx.sts_b32(smem + BETA + (lane // 4 + 8 * r) * 4, ptx.pack_bf16x2(beta_rows[r], beta_rows[r]))
            self.invert(smem, lane, beta_rows)
        if warp == 1:
            self.write_scores(smem, lane)
        ptx.fence_proxy_async()
        cute.arch.sync_threads()
        if thread == 0:
            ptx.bulk_store(record, smem, Int32(RECORD_BYTES))
            ptx.bulk_commit()
            ptx.bulk_wait_read()

    # ---- loads ----------------------------------------------------------------------------------------------------
    @cute.jit
    def load_rows(self, address, row_stride, rows, thread):
        """Rows thread//16 and + 8, 8 channels each, as 2 x 4 words; rows past the end are 0."""
        words = cute.make_rmem_tensor((2, 4), Int32)
        words.fill(0)
        for i in cutlass.range_constexpr(2):
            row = thread // 16 + 8 * i
            if row < rows:
                loaded = ptx.ldg_nc_v4_b32(address + Int64(row) * row_stride + Int64(thread % 16) * 16)
                for j in cutlass.range_constexpr(4):
                    words[i, j] = loaded[j]
        return words

    @cute.jit
    def load_gate(self, address, row_stride, rows, pair, half):
        """Channels 2*pair, 2*pair + 1 of tokens 8*half to 8*half + 7."""
        words = cute.make_rmem_tensor((8,), Int32)
        words.fill(0)
        for i in cutlass.range_constexpr(8):
            row = 8 * half + i
            if row < rows:
                words[i] = ptx.ldg_nc_b32(address + Int64(row) * row_stride + Int64(pair) * 4)
        return words

    @cute.jit
    def load_beta(self, address, heads, rows, lane):
        """sigmoid(beta) of tokens lane//4 and + 8 in fp32; 0 past the end."""
        sigmoid = cute.make_rmem_tensor((2,), Float32)
        sigmoid.fill(0.0)
        for i in cutlass.range_constexpr(2):
            row = lane // 4 + 8 * i
            if row < rows:
                x = ptx.ldg_nc_bf16(address + Int64(row) * Int64(heads) * 2)
                sigmoid[i] = ptx.fma(ptx.tanh(x * Float32(0.5)), Float32(0.5), Float32(0.5))
        return sigmoid

    # ---- element-wise ---------------------------------------------------------------------------------------------
    @cute.jit
    def normalise(self, words, tile, thread):
        """l2norm of the rows of `words`, written as bf16 to the swizzled tile."""
        for i in cutlass.range_constexpr(2):
            x = []
            for j in cutlass.range_constexpr(4):
                x += list(ptx.unpack_bf16x2(words[i, j]))
            total = Float32(0.0)
            for j in cutlass.range_constexpr(8):
                total = ptx.fma(x[j], x[j], total)
            for distance in (8, 4, 2, 1):
                total = ptx.add(total, cute.arch.shuffle_sync_bfly(total, offset=distance))
            factor = ptx.rsqrt(ptx.add(total, Float32(1e-6)))
            row = thread // 16 + 8 * i
            ptx.sts_v4_b32(
                tile + row * ROW_BYTES + ((thread % 16) ^ (row % 8)) * 16,
                [ptx.pack_bf16x2(ptx.mul(x[2 * j], factor), ptx.mul(x[2 * j + 1], factor)) for j in range(4)],
            )

    @cute.jit
    def gate(self, words, bias, rate, gate_scale, rows, half):
        """y of 8 tokens and 2 channels; 0 past the end. `rate` is exp(A_log) / 2."""
        y = cute.make_rmem_tensor((8, 2), Float32)
        for i in cutlass.range_constexpr(8):
            raw = ptx.unpack_bf16x2(words[i])
            inside = 8 * half + i < rows
            for j in cutlass.range_constexpr(2):
                x = ptx.mul(ptx.add(raw[j], bias[j]), rate)
                value = ptx.mul(ptx.fma(ptx.tanh(x), Float32(0.5), Float32(0.5)), gate_scale)
                y[i, j] = value if inside else Float32(0.0)
        return y

    @cute.jit
    def running_sum(self, y, start):
        """y becomes its inclusive sum over the tokens, beginning at `start`."""
        for j in cutlass.range_constexpr(2):
            c = start[j]
            for i in cutlass.range_constexpr(8):
                c = ptx.add(c, y[i, j])
                y[i, j] = c

    @cute.jit
    def scale_rows(self, c, smem, pair, half, scale):
        """Replace q^ by q_start and k^ by k_inv, write k_start; returns the words that k_end is made of: k_inv, or k^."""
        kept = cute.make_rmem_tensor((8,), Int32)
        factor = ptx.pack_bf16x2(scale, scale)
        product = self.product_bf16x2
        for i in cutlass.range_constexpr(8):
            at = self.word(pair, half, i)
            grow = ptx.pack_bf16x2(ptx.ex2(c[i, 0]), ptx.ex2(c[i, 1]))
            shrink = ptx.pack_bf16x2(ptx.ex2(-c[i, 0]), ptx.ex2(-c[i, 1]))
            k_hat = ptx.lds_b32(smem + self.k_inv + at)
            q_hat = ptx.lds_b32(smem + Q_START + at)
            k_inv = product(k_hat, shrink)
            ptx.sts_b32(smem + K_START + at, product(k_hat, grow))
            ptx.sts_b32(smem + Q_START + at, product(product(q_hat, grow), factor))
            ptx.sts_b32(smem + self.k_inv + at, k_inv)
            kept[i] = k_hat if self.robust else k_inv
        return kept

    @cute.jit
    def end_rows_exact(self, k_inv, smem, pair, half):
        """k_end = bf16(k_inv * bf16(decay))."""
        where = smem + self.decay_of(pair)
        decay = ptx.pack_bf16x2(ptx.lds_f32(where), ptx.lds_f32(where + 64))
        for i in cutlass.range_constexpr(8):
            ptx.sts_b32(smem + K_END + self.word(pair, half, i), self.product_bf16x2(k_inv[i], decay))

    @cute.jit
    def end_rows_robust(self, k_hat, c, smem, pair, half):
        """k_end = bf16(k^ * 2^(c_15 - c))."""
        total = ptx.lds_v2_f32(smem + self.half_sum + pair * 8)
        for i in cutlass.range_constexpr(8):
            k = ptx.unpack_bf16x2(k_hat[i])
            rest = [k[j] * ptx.ex2(total[j] - c[i, j]) for j in range(2)]
            ptx.sts_b32(smem + K_END + self.word(pair, half, i), ptx.pack_bf16x2(rest[0], rest[1]))

    def product_bf16x2(self, a, b):
        """bf16(a * b); FlashKDA multiplies in fp32 with denormals flushed."""
        return ptx.mul_bf16x2(a, b) if self.robust else ptx.mul_bf16x2_ftz(a, b)

    def decay_of(self, pair):
        """Byte offset of the decay of channel 2*pair in the record; that of channel 2*pair + 1 is 64 bytes on."""
        return DECAY + ((2 * pair) % 8) * 64 + (pair // 8) * 8 + ((pair // 4) % 2) * 4

    def word(self, pair, half, i):
        """Byte offset in a tile of the channel pair `pair` of token 8*half + i (i < 8, so i is also the row's swizzle)."""
        return (8 * half + i) * ROW_BYTES + ((pair // 4) ^ i) * 16 + (pair % 4) * 4

    # ---- the two 16x16 matrices -----------------------------------------------------------------------------------
    @cute.jit
    def product(self, tile, k_inv, lane):
        """tile . k_inv^T as two m16n8 accumulators (keys 0..7, 8..15), k-blocks in ascending order."""
        zero = Float32(0.0)
        c = [[zero] * 4, [zero] * 4]
        row_a = lane % 16
        row_b = lane % 8 + 8 * (lane // 16)
        for block in cutlass.range_constexpr(8):
            a = ptx.ldmatrix_x4(tile + row_a * ROW_BYTES + ((2 * block + lane // 16) ^ (row_a % 8)) * 16)
            b = ptx.ldmatrix_x4(k_inv + row_b * ROW_BYTES + ((2 * block + (lane // 8) % 2) ^ (row_b % 8)) * 16)
            c[0] = ptx.mma_bf16(a, (b[0], b[1]), c[0])
            c[1] = ptx.mma_bf16(a, (b[2], b[3]), c[1])
        return [list(c[0]), list(c[1])]

    @cute.jit
    def write_scores(self, smem, lane):
        c = self.product(smem + Q_START, smem + self.k_inv, lane)
        for tile in cutlass.range_constexpr(2):
            for e in cutlass.range_constexpr(4):
                i, j = lane // 4 + 8 * (e // 2), 8 * tile + 2 * (lane % 4) + e % 2
                c[tile][e] = c[tile][e] if i >= j else Float32(0.0)
        fragment = [ptx.pack_bf16x2(c[t][2 * r], c[t][2 * r + 1]) for t in range(2) for r in range(2)]
        ptx.sts_v4_b32(smem + SCORES + lane * 16, fragment)

    @cute.jit
    def invert(self, smem, lane, beta):
        c = self.product(smem + K_START, smem + self.k_inv, lane)
        if const_expr(self.robust):
            self.invert_substitution(c, smem, lane, beta)
        else:
            self.invert_neumann(c, smem, lane, beta)

    @cute.jit
    def invert_neumann(self, c, smem, lane, beta):
        betas = [ptx.pack_f16x2(beta[r], beta[r]) for r in range(2)]
        power, x = [], []  # fragments in the order (rows, columns) = (0, 0), (8, 0), (0, 8), (8, 8)
        for tile in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                i, j = lane // 4 + 8 * r, 8 * tile + 2 * (lane % 4)
                word = ptx.mul_f16x2(ptx.pack_f16x2(c[tile][2 * r], c[tile][2 * r + 1]), betas[r])
                keep = (Int32(0xFFFF) if i > j else Int32(0)) | (Int32(-65536) if i > j + 1 else Int32(0))
                word = word & keep
                one = (Int32(0x3C00) if i == j else Int32(0)) | (Int32(0x3C000000) if i == j + 1 else Int32(0))
                power.append(word)
                x.append(ptx.sub_f16x2(one, word))
        for _ in cutlass.range_constexpr(3):
            power = self.multiply_f16(power, self.transpose(power))
            x = [ptx.add_f16x2(a, b) for a, b in zip(x, self.multiply_f16(x, self.transpose(power)))]
        fragment = []
        for word in x:
            fragment.append(ptx.pack_bf16x2(*ptx.unpack_f16x2(word)))
        ptx.sts_v4_b32(smem + INVERSE + lane * 16, fragment)

    def transpose(self, fragment):
        """A fragment of M -> the B registers of M: tile n holds (rows 0..7, 8..15) of columns 8n..8n+7."""
        return [ptx.movmatrix(word) for word in fragment]

    def multiply_f16(self, a, b):
        """a . b for 16x16 fp16 matrices, fp16 accumulators from 0."""
        zero = (Int32(0), Int32(0))
        left = ptx.mma_f16_f16(a, (b[0], b[1]), zero)
        right = ptx.mma_f16_f16(a, (b[2], b[3]), zero)
        return [left[0], left[1], right[0], right[1]]

    @cute.jit
    def invert_substitution(self, c, smem, lane, beta):
        """Column `lane` of (I + L)^-1; L^T goes through shared memory so that a lane reads a column of L as vectors."""
        table = smem + self.l_transposed
        for tile in cutlass.range_constexpr(2):
            for e in cutlass.range_constexpr(4):
                i, j = lane // 4 + 8 * (e // 2), 8 * tile + 2 * (lane % 4) + e % 2
                ptx.sts_f32(table + j * 64 + i * 4, ptx.mul(c[tile][e], beta[e // 2]))
        cute.arch.sync_warp()
        column = lane % 16
        x = [Float32(1.0) if column == i else Float32(0.0) for i in range(CHUNK)]
        for j in cutlass.range_constexpr(CHUNK - 1):
            minus = Float32(0.0) - x[j]
            for group in cutlass.range_constexpr((j + 1) // 4, 4):
                row = ptx.lds_v4_f32(table + j * 64 + group * 16)
                for e in cutlass.range_constexpr(4):
                    if const_expr(4 * group + e > j):
                        x[4 * group + e] = ptx.fma(row[e], minus, x[4 * group + e])
        if lane < 16:
            where = smem + INVERSE + (column // 2 % 4) * 16 + (column // 8) * 8 + (column % 2) * 2
            for i in cutlass.range_constexpr(CHUNK):
                ptx.sts_b16(where + (i % 8) * 64 + (i // 8) * 4, ptx.pack_bf16x2(x[i], x[i]))
