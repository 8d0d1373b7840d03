"""Prepare kernel for chunks of 16 tokens: everything of KDA that does not depend on the state.

One CTA of 128 threads per (slot, head); CTAs are independent. With q, k, g the rows of the chunk (D = 128 channels):

    q^, k^  = bf16(x * rsqrt(sum x^2 + 1e-6))                   CUDA cores, 16 lanes per row; rows past the end are 0
    y       = sigmoid((g + dt_bias) * exp(A_log)) * gate_scale  CUDA cores; log2 of the decay; 0 past the end
    c       = running sum of y over the tokens                  fp32, token by token; 8 tokens in one thread, then 8 in another
    e, n    = bf16(2^c), bf16(2^-c);   decay = 2^c_15 in fp32   special-function unit
    k_start = bf16(k^ * e)      q_start = bf16(bf16(q^ * e) * bf16(scale))
    k_inv   = bf16(k^ * n)      k_end   = bf16(k_inv * bf16(decay))
    L       = strictly_lower(k_start k_inv^T) * sigmoid(beta)   tensor cores, fp32 accumulators
    scores  = bf16(lower(q_start k_inv^T))                      tensor cores, fp32 accumulators
    inverse = bf16((I + L)^-1)

Two settings of the arithmetic. "exact" is FlashKDA's, to the bit: L and sigmoid(beta) are rounded to fp16 and the inverse is
(I - L)(I + L^2)(I + L^4)(I + L^8), formed in fp16 on the tensor cores. Its powers grow and cancel when keys repeat. Its
sigmoid(x) is fma(tanh.approx(x/2), 1/2, 1/2).

"robust" keeps L in fp32 and substitutes forward, one lane per column. It rounds each result once, with e, n and the scale in
fp32 and k_end = bf16(k^ * 2^(c_15 - c)). The diagonal of the scores is scale * q^ . k^; sigmoid(x) is 1 / (1 + e^-x). It
takes every Variant. Where y or k^ have no bound (Variant.needs_levels), k_inv would overflow: L and the scores then come from
products whose factors are at most 1 (levels.py), and k_end from the sum of y over the tokens behind.

Parts: inputs.py (q^, k^, y, beta), products.py or levels.py (the rows and the scores), inverse.py. The chunk's results are
laid out in shared memory as record.py says and leave in one bulk copy.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from fla_kda_backend.kernels import ptx, sequences
from fla_kda_backend.kernels.column_split.inputs import Inputs
from fla_kda_backend.kernels.column_split.inverse import Inverse
from fla_kda_backend.kernels.column_split.layout import ALIGNMENT, Layout
from fla_kda_backend.kernels.column_split.levels import Levels
from fla_kda_backend.kernels.column_split.products import Products
from fla_kda_backend.kernels.column_split.record import BETA, CHUNK, LOG2_CHUNK, Q_START, RECORD_BYTES, ROW_BYTES


class PrepareArguments(NamedTuple):
    q: Int64  # [tokens, qk_heads, 128] bf16
    k: Int64  # [tokens, qk_heads, 128] bf16
    g: Int64  # [tokens, heads, 128] before the gate
    beta: Int64  # [tokens, heads] before the sigmoid
    a_log: Int64  # [heads]
    dt_bias: Int64  # [heads, 128]
    out: Int64  # [tokens, heads, 128] bf16; rows outside every packed sequence become 0
    cu_seqlens: Int64  # [num_seqs + 1] int32 or int64
    workspace: Int64  # [heads, slots, RECORD_BYTES]
    scale: Float32
    gate_scale: Float32  # lower_bound * log2(e)
    seq_len: Int32
    num_seqs: Int32
    heads: Int32
    slot_begin: Int32
    slots: Int32
    qk_heads: Int32  # divides heads


class PrepareChunk16:
    """Compile-time facts: those of the Variant; of the Schedule, its arithmetic."""

    threads = 128

    def __init__(self, variant, schedule):
        self.robust, self.cu_dtype = schedule.arithmetic == "robust", variant.cu_seqlens
        self.needs_levels = variant.needs_levels
        self.ctas_per_sm = 4 if self.needs_levels else 8 if variant.gate_dtype == "bf16" else 6
        self.layout = Layout.of(self.robust, self.needs_levels)
        self.smem_bytes = self.layout.size
        self.inputs = Inputs(variant, self.robust)
        self.inverse = Inverse(self.robust, self.layout)
        self.levels, self.products = Levels(self.layout), Products(self.robust, self.layout)  # one of them is used

    @cute.jit
    def __call__(self, a, stream):
        """Launch over slots [slot_begin, slot_end) and all heads; a: the contract's Arguments."""
        arguments = PrepareArguments(
            q=a.q,
            k=a.k,
            g=a.g,
            beta=a.beta,
            a_log=a.a_log,
            dt_bias=a.dt_bias,
            out=a.out,
            cu_seqlens=a.cu_seqlens,
            workspace=a.workspace,
            scale=a.scale,
            gate_scale=a.gate_scale,
            seq_len=a.seq_len,
            num_seqs=a.num_seqs,
            heads=a.heads,
            slot_begin=a.slot_begin,
            slots=a.slot_end - a.slot_begin,
            qk_heads=a.qk_heads,
        )
        self.kernel(arguments).launch(
            grid=[arguments.slots * a.heads, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, args: PrepareArguments):
        block, _, _ = cute.arch.block_idx()
        local_slot = block // args.heads
        head = block - local_slot * args.heads
        slot = args.slot_begin + local_slot
        s = sequences.sequence_of_slot(slot, args.num_seqs, args.cu_seqlens, args.seq_len, LOG2_CHUNK, self.cu_dtype)
        begin, length, base = sequences.sequence(s, args.cu_seqlens, args.seq_len, LOG2_CHUNK, self.cu_dtype)
        offset = (slot - base) * CHUNK
        smem = SmemAllocator().allocate_array(BFloat16, self.smem_bytes // 2, byte_alignment=ALIGNMENT).toint()
        if offset >= 0 and offset < length:
            record = args.workspace + (Int64(head) * Int64(args.slots) + Int64(local_slot)) * RECORD_BYTES
            self.chunk(args, record, smem, Int64(begin) + Int64(offset), length - offset, head)
        if const_expr(self.cu_dtype is not None):
            self.clear_outside(args, slot, head)
        # From here on the recurrence may start. It waits for the end of this grid before it reads the workspace; everything
        # else that it touches is older than this grid, which is launched without such an overlap.
        ptx.dependency_launch()

    @cute.jit
    def clear_outside(self, args, slot, head):
        """Zero this slot's share of the output rows that no sequence covers: tokens 16 * slot to 16 * slot + 15."""
        thread, _, _ = cute.arch.thread_idx()
        first, end = sequences.span(args.num_seqs, args.cu_seqlens, self.cu_dtype)
        sequences.clear_rows(args.out, slot * CHUNK, CHUNK, first, end, args.seq_len, head, args.heads, thread, self.threads)

    @cute.jit
    def chunk(self, args, record, smem, token, rows, head):
        """Prepare one chunk for one head. token: its first one; rows: tokens from there to the end of its sequence."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread % 32
        row_stride = Int64(args.heads) * ROW_BYTES
        first = token * row_stride + Int64(head) * ROW_BYTES

        # every load of the chunk is in flight before the first one is used
        if const_expr(self.robust):
            qk_stride = Int64(args.qk_heads) * ROW_BYTES
            qk_first = token * qk_stride + Int64(head // (args.heads // args.qk_heads)) * ROW_BYTES
        else:  # as many heads of q and k
            qk_stride, qk_first = row_stride, first
        inputs, gate_words = self.inputs, const_expr(self.inputs.gate_words)
        q_rows = inputs.load_rows(args.q + qk_first, qk_stride, rows, thread)
        k_rows = inputs.load_rows(args.k + qk_first, qk_stride, rows, thread)
        pair, token_half = thread % 64, thread // 64  # a thread's y: 2 of 128 channels, 8 of 16 tokens
        g_words = inputs.load_gate(args.g + first * gate_words, row_stride * gate_words, rows, pair, token_half)
        bias = inputs.load_bias(args.dt_bias, head, pair)
        rate = inputs.load_rate(args.a_log, head)
        beta = inputs.load_beta(args.beta, token, args.heads, head, rows, lane)

        q_words = inputs.normalise(q_rows, smem + Q_START, thread)
        k_words = inputs.normalise(k_rows, smem + self.layout.k_tile, thread)
        y = inputs.log2_decays(g_words, bias, rate, args.gate_scale, rows, token_half)
        if const_expr(self.robust):
            self.write_diagonal(q_words, k_words, smem, thread)
        if const_expr(self.needs_levels):
            if warp == 0:
                self.write_beta(smem, lane, beta)
            self.levels.write_rows(y, smem, pair, token_half, args.scale)
            cute.arch.sync_threads()
            self.levels.multiply(smem, lane, warp)  # warp l computes level l
            cute.arch.sync_threads()
            if warp == 0:
                self.inverse.substitute(smem, lane)
            if warp == 1:
                self.levels.write_scores(smem, lane, args.scale)
        else:
            kept = self.products.write_rows(y, smem, pair, token_half, args.scale)
            cute.arch.sync_threads()
            self.products.write_k_end(kept, y, smem, pair, token_half)
            if warp == 0:
                self.write_beta(smem, lane, beta)
                self.inverse.write(self.products.keys(smem, lane), smem, lane, beta)
            if warp == 1:
                self.products.write_scores(smem, lane, args.scale)
        ptx.fence_proxy_async()
        cute.arch.sync_threads()
        if thread == 0:
            ptx.bulk_store(record, smem, Int32(RECORD_BYTES))
            ptx.bulk_commit()
            ptx.bulk_wait_read()

    @cute.jit
    def write_beta(self, smem, lane, beta):
        """The record's beta, by one warp."""
        if lane % 4 == 0:
            for r in cutlass.range_constexpr(2):
                at = smem + BETA + (lane // 4 + 8 * r) * 4
                if const_expr(self.robust):
                    ptx.sts_f32(at, beta[r])
                else:
                    ptx.sts_b32(at, ptx.pack_bf16x2(beta[r], beta[r]))

    @cute.jit
    def write_diagonal(self, q_words, k_words, smem, thread):
        """q^ . k^ of the rows of `normalise`, 8 channels per thread."""
        for i in cutlass.range_constexpr(2):
            total = Float32(0.0)
            for j in cutlass.range_constexpr(4):
                for a, b in zip(ptx.unpack_bf16x2(q_words[i][j]), ptx.unpack_bf16x2(k_words[i][j])):
                    total = ptx.fma(a, b, total)
            for distance in (8, 4, 2, 1):
                total = ptx.add(total, cute.arch.shuffle_sync_bfly(total, offset=distance))
            if thread % 16 == 0:
                ptx.sts_f32(smem + self.layout.diagonal + (thread // 16 + 8 * i) * 4, total)
