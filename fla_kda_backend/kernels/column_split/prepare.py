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
(I - L)(I + L^2)(I + L^4)(I + L^8), formed in fp16 on the tensor cores, whose powers grow and cancel when keys repeat. Its
sigmoid(x) is fma(tanh.approx(x/2), 1/2, 1/2).

"robust" keeps L in fp32 and substitutes forward, one lane a column. It rounds each result once, with e, n and the scale in
fp32 and k_end = bf16(k^ * 2^(c_15 - c)); the diagonal of the scores is scale * q^ . k^; sigmoid(x) is 1 / (1 + e^-x). It
takes every call that InputOptions describes. Where y or k^ have no bound, k_inv would overflow: L and the scores then come
from products whose factors are at most 1 (anchors16.py), and k_end from the sum of y over the tokens behind.

The chunk's results leave in one bulk copy of RECORD_BYTES:

    k_start, q_start, k_end  16 rows of 256 bytes; 16-byte piece p of row r lies at piece p ^ (r & 7)
    scores, inverse          m16n8k16 A fragments: 32 lanes of 16 bytes; robust: inverse - I in two terms, bf16 and what that
                             leaves, the second one transposed, above the diagonal
    decay                    fp32, channel k at (k % 8) * 16 + (k // 16) * 2 + (k // 8) % 2: the recurrence's order
    beta                     per token one 32-bit word: fp32, or exact: bf16(sigmoid(beta)) twice; 0 past the end
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from fla_kda_backend.kernels import ptx, sequences
from fla_kda_backend.kernels.column_split.inputs import Inputs16
from fla_kda_backend.kernels.column_split.levels import LEVEL_BYTES, LEVELS, Anchors16
from fla_kda_backend.kernels.column_split.record import (
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


class PrepareChunk16(Inputs16, Anchors16):
    """Compile-time facts: those of the Variant; of the Schedule, its arithmetic."""

    def __init__(self, variant, schedule):
        self.robust, self.cu_dtype, self.options = schedule.arithmetic == "robust", variant.cu_seqlens, variant
        self.anchored = variant.needs_levels
        self.ctas_per_sm = 4 if self.anchored else 8 if variant.gate_dtype == "bf16" else 6
        # shared memory: the record, k^ (later k_inv), the running sums at token 7 (later 15) or of both halves, L^T of the
        # substitution, what Anchors16 needs
        self.k_tile = RECORD_BYTES + (-RECORD_BYTES) % 128
        self.half_sum = self.k_tile + CHUNK * ROW_BYTES
        self.l_transposed = self.half_sum + (1024 if self.anchored else 512)
        self.smem_bytes = self.l_transposed + (1024 if self.robust else 0)
        if self.robust:
            self.diagonal = self.smem_bytes
            self.smem_bytes += 128
        if self.anchored:
            self.scores = self.smem_bytes
            self.levels = self.scores + 1024
            self.smem_bytes = self.levels + LEVELS * LEVEL_BYTES

    @cute.jit
    def __call__(self, q, k, g, beta, a_log, dt_bias, out, cu_seqlens, workspace, scale, gate_scale, seq_len, num_seqs,
                 qk_heads, heads, slot_begin, slot_end, stream):  # fmt: skip
        """Launch over slots [slot_begin, slot_end) and all heads; addresses are Int64, counts Int32."""
        self.kernel(
            q, k, g, beta, a_log, dt_bias, out, cu_seqlens, workspace, scale, gate_scale, seq_len, num_seqs, heads,
            slot_begin, slot_end - slot_begin, qk_heads,
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
        q: Int64,  # [tokens, qk_heads, 128] bf16
        k: Int64,  # [tokens, qk_heads, 128] bf16
        g: Int64,  # [tokens, H, 128] before the gate
        beta: Int64,  # [tokens, H] before the sigmoid
        a_log: Int64,  # [H]
        dt_bias: Int64,  # [H, 128]
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
        qk_heads: Int32,  # H is a multiple
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
                       Int64(begin) + Int64(offset), length - offset, head, heads, qk_heads)  # fmt: skip
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
    def chunk(self, q, k, g, beta, a_log, dt_bias, record, smem, scale, gate_scale, token, rows, head, heads,
              qk_heads):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread % 32
        row_stride = Int64(heads) * ROW_BYTES
        first = token * row_stride + Int64(head) * ROW_BYTES

        # every load of the chunk is in flight before the first one is used
        if const_expr(self.robust):
            qk_stride = Int64(qk_heads) * ROW_BYTES
            qk_first = token * qk_stride + Int64(head // (heads // qk_heads)) * ROW_BYTES
            g_bytes = const_expr(self.size(self.options.gate_dtype) // 2)
        else:
            qk_stride, qk_first, g_bytes = row_stride, first, 1
        q_rows = self.load_rows(q + qk_first, qk_stride, rows, thread)
        k_rows = self.load_rows(k + qk_first, qk_stride, rows, thread)
        pair, half = thread % 64, thread // 64
        g_words = self.load_gate(g + first * g_bytes, row_stride * g_bytes, rows, pair, half)
        bias = self.load_bias(dt_bias, head, pair)
        rate = self.load_rate(a_log, head)
        beta_rows = self.load_beta(beta, token, heads, head, rows, lane)

        q_words = self.normalise(q_rows, smem + Q_START, thread)
        k_words = self.normalise(k_rows, smem + self.k_tile, thread)
        y = self.gate(g_words, bias, rate, gate_scale, rows, half)
        if const_expr(self.robust):
            self.write_diagonal(q_words, k_words, smem, thread)
        if const_expr(self.anchored):
            if warp == 0:
                self.write_beta(smem, lane, beta_rows)
            self.write_anchored(y, smem, pair, half, scale)
            cute.arch.sync_threads()
            self.multiply_level(smem, lane, warp)
            cute.arch.sync_threads()
            if warp == 0:
                self.substitute(smem, lane)
            if warp == 1:
                self.write_anchored_scores(smem, lane, scale)
        else:
            self.one_anchor(y, smem, beta_rows, scale, warp, lane, pair, half)
        ptx.fence_proxy_async()
        cute.arch.sync_threads()
        if thread == 0:
            ptx.bulk_store(record, smem, Int32(RECORD_BYTES))
            ptx.bulk_commit()
            ptx.bulk_wait_read()

    @cute.jit
    def write_beta(self, smem, lane, beta):
        if lane % 4 == 0:
            for r in cutlass.range_constexpr(2):
                at = smem + BETA + (lane // 4 + 8 * r) * 4
                if const_expr(self.robust):
                    ptx.sts_f32(at, beta[r])
                else:
                    ptx.sts_b32(at, ptx.pack_bf16x2(beta[r], beta[r]))

    def decay_of(self, pair):
        """Byte offset of the decay of channel 2*pair in the record; that of channel 2*pair + 1 is 64 bytes on."""
        return DECAY + ((2 * pair) % 8) * 64 + (pair // 8) * 8 + ((pair // 4) % 2) * 4

    def write_decay(self, smem, pair, c):
        """2^c of two channels, c the sum over the chunk."""
        where = smem + self.decay_of(pair)
        ptx.sts_f32(where, ptx.ex2(c[0]))
        ptx.sts_f32(where + 64, ptx.ex2(c[1]))

    def word(self, pair, half, i):
        """Byte offset in a tile of the channel pair `pair` of token 8*half + i (i < 8, so i is also the row's swizzle)."""
        return (8 * half + i) * ROW_BYTES + ((pair // 4) ^ i) * 16 + (pair % 4) * 4

    # ---- element-wise, decays from the chunk's start only ----------------------------------------------------------
    @cute.jit
    def one_anchor(self, y, smem, beta_rows, scale, warp, lane, pair, half):
        if half == 0:
            self.running_sum(y, (Float32(0.0), Float32(0.0)))
            ptx.sts_v2_f32(smem + self.half_sum + pair * 8, y[7, 0], y[7, 1])
        cute.arch.sync_threads()
        if half == 1:
            self.running_sum(y, ptx.lds_v2_f32(smem + self.half_sum + pair * 8))
            if const_expr(self.robust):
                ptx.sts_v2_f32(smem + self.half_sum + pair * 8, y[7, 0], y[7, 1])
            self.write_decay(smem, pair, (y[7, 0], y[7, 1]))
        k_words = self.scale_rows(y, smem, pair, half, scale)
        cute.arch.sync_threads()
        if const_expr(self.robust):
            self.end_rows_robust(k_words, y, smem, pair, half)
        else:
            self.end_rows_exact(k_words, smem, pair, half)
        if warp == 0:
            self.write_beta(smem, lane, beta_rows)
            self.invert(smem, lane, beta_rows)
        if warp == 1:
            self.write_scores(smem, lane, scale)

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
        for i in cutlass.range_constexpr(8):
            at = self.word(pair, half, i)
            grow = self.factors(ptx.ex2(c[i, 0]), ptx.ex2(c[i, 1]))
            shrink = self.factors(ptx.ex2(-c[i, 0]), ptx.ex2(-c[i, 1]))
            k_hat = ptx.lds_b32(smem + self.k_tile + at)
            q_hat = ptx.lds_b32(smem + Q_START + at)
            k_inv = self.times(k_hat, shrink)
            ptx.sts_b32(smem + K_START + at, self.times(k_hat, grow))
            if const_expr(self.robust):
                ptx.sts_b32(smem + Q_START + at, self.times(q_hat, [ptx.mul(x, scale) for x in grow]))
            else:
                ptx.sts_b32(smem + Q_START + at, self.times(self.times(q_hat, grow), factor))
            ptx.sts_b32(smem + self.k_tile + at, k_inv)
            kept[i] = k_hat if self.robust else k_inv
        return kept

    def factors(self, low, high):
        """What `times` multiplies by: FlashKDA rounds it."""
        return (low, high) if self.robust else ptx.pack_bf16x2(low, high)

    def times(self, word, factors):
        """A bf16 pair times `factors`, rounded; FlashKDA flushes denormals before."""
        return self.scaled(ptx.unpack_bf16x2(word), factors) if self.robust else ptx.mul_bf16x2_ftz(word, factors)

    @cute.jit
    def end_rows_exact(self, k_inv, smem, pair, half):
        """k_end = bf16(k_inv * bf16(decay))."""
        where = smem + self.decay_of(pair)
        decay = ptx.pack_bf16x2(ptx.lds_f32(where), ptx.lds_f32(where + 64))
        for i in cutlass.range_constexpr(8):
            ptx.sts_b32(smem + K_END + self.word(pair, half, i), self.times(k_inv[i], decay))

    @cute.jit
    def end_rows_robust(self, k_hat, c, smem, pair, half):
        """k_end = bf16(k^ * 2^(c_15 - c))."""
        total = ptx.lds_v2_f32(smem + self.half_sum + pair * 8)
        for i in cutlass.range_constexpr(8):
            k = ptx.unpack_bf16x2(k_hat[i])
            rest = [k[j] * ptx.ex2(total[j] - c[i, j]) for j in range(2)]
            ptx.sts_b32(smem + K_END + self.word(pair, half, i), ptx.pack_bf16x2(rest[0], rest[1]))

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
    def write_scores(self, smem, lane, scale):
        c = self.product(smem + Q_START, smem + self.k_tile, lane)
        if const_expr(self.robust):
            diagonal = [ptx.mul(ptx.lds_f32(smem + self.diagonal + (lane // 4 + 8 * r) * 4), scale) for r in range(2)]
        for tile in cutlass.range_constexpr(2):
            for e in cutlass.range_constexpr(4):
                i, j = lane // 4 + 8 * (e // 2), 8 * tile + 2 * (lane % 4) + e % 2
                c[tile][e] = c[tile][e] if i >= j else Float32(0.0)
                if const_expr(self.robust):
                    c[tile][e] = diagonal[e // 2] if i == j else c[tile][e]
        fragment = [ptx.pack_bf16x2(c[t][2 * r], c[t][2 * r + 1]) for t in range(2) for r in range(2)]
        ptx.sts_v4_b32(smem + SCORES + lane * 16, fragment)

    @cute.jit
    def invert(self, smem, lane, beta):
        c = self.product(smem + K_START, smem + self.k_tile, lane)
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
        """L^T to shared memory, and from there the inverse."""
        table = smem + self.l_transposed
        for tile in cutlass.range_constexpr(2):
            for e in cutlass.range_constexpr(4):
                i, j = lane // 4 + 8 * (e // 2), 8 * tile + 2 * (lane % 4) + e % 2
                ptx.sts_f32(table + j * 64 + i * 4, ptx.mul(c[tile][e], beta[e // 2]))
        cute.arch.sync_warp()
        self.substitute(smem, lane)

    @cute.jit
    def substitute(self, smem, lane):
        """Column `lane` of (I + L)^-1 - I in two terms, from L^T in shared memory: a lane reads a column of L as vectors."""
        table = smem + self.l_transposed
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
            first = smem + INVERSE + self.in_fragment(0, column)
            second = smem + INVERSE + self.in_fragment(column, 0)
            for i in cutlass.range_constexpr(CHUNK):
                lead = ptx.pack_bf16x2(x[i], x[i])
                rest = ptx.sub(x[i], ptx.unpack_bf16x2(lead)[0])
                if column < i:
                    ptx.sts_b16(first + self.in_fragment(i, 0), lead)
                    ptx.sts_b16(second + self.in_fragment(0, i), ptx.pack_bf16x2(rest, rest))
                if column == i:
                    ptx.sts_b16(first + self.in_fragment(i, 0), Int32(0))

    def in_fragment(self, i, j):
        """Byte offset of element (i, j) of a 16x16 A fragment; the sum of those of (i, 0) and (0, j)."""
        return (i % 8) * 64 + (i // 8) * 4 + (j // 2 % 4) * 16 + (j // 8) * 8 + (j % 2) * 2
