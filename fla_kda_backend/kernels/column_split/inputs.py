"""What a call's q, k, g, beta and the gate's parameters mean, and how the 16-token prepare kernel reads them.

The gate's formulas stand here alone, in `Inputs.gate_rate` and `Inputs.log2_decay`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.column_split.record import ROW_BYTES
from fla_kda_backend.kernels.variant import DTYPE_BYTES

LOG2E = 1.44269502  # rounds to the fp32 constant that FlashKDA multiplies A_log by
LEAST = -160.0  # log2 of a token's decay; 2**-160 is a true zero in fp32
# log2(1 + z) / z for z in [0, 1], within 2e-7: Chebyshev interpolation of degree 8, lowest coefficient first
LOG2_1P = (
    1.4426949983881148, -0.7213403288518793, 0.48069547531830753, -0.35842849237632357, 0.2757196684331654,
    -0.19728522437557816, 0.11305198982459311, -0.042687192869986276, 0.007579137508097726,
)  # fmt: skip
LOAD = {"bf16": ptx.ldg_nc_bf16, "fp32": ptx.ldg_nc_f32}


class Inputs:
    """Reads and transforms the inputs of one chunk and head. robust: approximate sigmoids well, not as FlashKDA does."""

    def __init__(self, variant, robust):
        self.variant, self.robust = variant, robust
        self.gate_words = DTYPE_BYTES[variant.gate_dtype] // 2  # 32-bit words per channel pair of g

    # ---- loads ----------------------------------------------------------------------------------------------------
    @cute.jit
    def load_rows(self, address, row_stride, rows, thread):
        """Rows thread // 16 and thread // 16 + 8, 8 channels each, as 2 x 4 words; rows past the end are 0."""
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
    def load_gate(self, address, row_stride, rows, pair, token_half):
        """g of channels 2 * pair, 2 * pair + 1 of the half's 8 tokens: a bf16 pair or two fp32 words per token."""
        count = const_expr(self.gate_words)
        words = cute.make_rmem_tensor((8 * count,), Int32)
        words.fill(0)
        for i in cutlass.range_constexpr(8):
            row = 8 * token_half + i
            if row < rows:
                at = address + Int64(row) * row_stride + Int64(pair) * (4 * count)
                if const_expr(count == 1):
                    words[i] = ptx.ldg_nc_b32(at)
                else:
                    words[2 * i], words[2 * i + 1] = ptx.ldg_nc_v2_b32(at)
        return words

    @cute.jit
    def load_bias(self, address, head, pair):
        """dt_bias of channels 2 * pair, 2 * pair + 1."""
        if const_expr(self.variant.dt_bias == "fp32"):
            at = address + Int64(head * 512 + pair * 8)
            return (ptx.ldg_nc_f32(at), ptx.ldg_nc_f32(at + 4))
        elif const_expr(self.variant.dt_bias == "bf16"):
            return ptx.unpack_bf16x2(ptx.ldg_nc_b32(address + Int64(head * 256 + pair * 4)))
        else:
            return (Float32(0.0), Float32(0.0))

    @cute.jit
    def load_rate(self, address, head):
        """The head's `gate_rate`."""
        steepness = Float32(1.0)
        if const_expr(self.variant.a_log is not None):
            a_log = LOAD[self.variant.a_log](address + Int64(head) * DTYPE_BYTES[self.variant.a_log])
            steepness = ptx.ex2(ptx.mul(a_log, Float32(LOG2E)))
        return self.gate_rate(steepness)

    @cute.jit
    def load_beta(self, address, token, heads, head, rows, lane):
        """beta of rows lane // 4 and lane // 4 + 8 in fp32, as it multiplies; 0 past the end. token: the chunk's first."""
        size = const_expr(DTYPE_BYTES[self.variant.beta_dtype])
        address += (token * Int64(heads) + Int64(head)) * size
        beta = cute.make_rmem_tensor((2,), Float32)
        beta.fill(0.0)
        for i in cutlass.range_constexpr(2):
            row = lane // 4 + 8 * i
            if row < rows:
                x = LOAD[self.variant.beta_dtype](address + Int64(row) * Int64(heads) * size)
                if const_expr(self.variant.beta == "given"):
                    beta[i] = x
                elif const_expr(self.robust):
                    one = const_expr(2.0 if self.variant.beta == "twice" else 1.0)
                    beta[i] = self.sigmoid(x * Float32(-LOG2E), Float32(one))
                else:
                    beta[i] = self.sigmoid_of_twice(x * Float32(0.5))
        return beta

    # ---- the gate -------------------------------------------------------------------------------------------------
    def gate_rate(self, steepness):
        """The factor that `log2_decay` takes, from steepness = exp(A_log)."""
        if self.variant.gate == "softplus":
            return Float32(0.0) - steepness
        return ptx.mul(steepness, Float32(-LOG2E if self.robust else 0.5))

    def log2_decay(self, raw, bias, rate, gate_scale):
        """y = log2 of the decay of one token and channel, from g, dt_bias, `gate_rate` and lower_bound * log2(e)."""
        if self.variant.gate == "given":
            return ptx.max_nan(ptx.mul(raw, Float32(LOG2E)), Float32(LEAST))
        x = ptx.add(raw, bias)
        if self.variant.gate == "softplus":
            return ptx.max_nan(ptx.mul(self.softplus(x), rate), Float32(LEAST))
        x = ptx.mul(x, rate)
        return self.sigmoid(x, gate_scale) if self.robust else ptx.mul(self.sigmoid_of_twice(x), gate_scale)

    @cute.jit
    def log2_decays(self, words, bias, rate, gate_scale, rows, token_half):
        """y of the half's 8 tokens and 2 channels, from the words of `load_gate`; 0 past the end."""
        y = cute.make_rmem_tensor((8, 2), Float32)
        for i in cutlass.range_constexpr(8):
            if const_expr(self.gate_words == 1):
                raw = ptx.unpack_bf16x2(words[i])
            else:
                raw = (ptx.as_f32(words[2 * i]), ptx.as_f32(words[2 * i + 1]))
            inside = 8 * token_half + i < rows
            for j in cutlass.range_constexpr(2):
                value = self.log2_decay(raw[j], bias[j], rate, gate_scale)
                y[i, j] = value if inside else Float32(0.0)
        return y

    # ---- functions ------------------------------------------------------------------------------------------------
    def sigmoid(self, exponent, scale):
        """scale * sigmoid(x), from exponent = -x log2(e)."""
        return ptx.mul(scale, ptx.rcp(ptx.add(ptx.ex2(exponent), Float32(1.0))))

    def sigmoid_of_twice(self, x):
        """sigmoid(2 x), as FlashKDA computes it."""
        return ptx.fma(ptx.tanh(x), Float32(0.5), Float32(0.5))

    def softplus(self, x):
        """log2(e) * softplus(x) = log2(1 + e**x); the relative error stays small where the value is tiny."""
        z = ptx.ex2(ptx.mul(ptx.absolute(x), Float32(-LOG2E)))
        series = Float32(LOG2_1P[-1])
        for coefficient in LOG2_1P[-2::-1]:
            series = ptx.fma(series, z, Float32(coefficient))
        return ptx.fma(ptx.max_nan(x, Float32(0.0)), Float32(LOG2E), ptx.mul(series, z))

    @cute.jit
    def normalise(self, words, tile, thread):
        """Write the rows of `load_rows` to a tile as bf16, l2-normalised where the call says so; returns what is written."""
        result = []
        for i in cutlass.range_constexpr(2):
            packed = [words[i, j] for j in range(4)]
            if const_expr(self.variant.l2norm):
                x = []
                for j in cutlass.range_constexpr(4):
                    x += list(ptx.unpack_bf16x2(packed[j]))
                total = Float32(0.0)
                for j in cutlass.range_constexpr(8):
                    total = ptx.fma(x[j], x[j], total)
                for distance in (8, 4, 2, 1):
                    total = ptx.add(total, cute.arch.shuffle_sync_bfly(total, offset=distance))
                factor = ptx.rsqrt(ptx.add(total, Float32(1e-6)))
            row = thread // 16 + 8 * i
            at = tile + row * ROW_BYTES + ((thread % 16) ^ (row % 8)) * 16
            if const_expr(self.variant.l2norm):
                packed = [ptx.pack_bf16x2(ptx.mul(x[2 * j], factor), ptx.mul(x[2 * j + 1], factor)) for j in range(4)]
            ptx.sts_v4_b32(at, packed)
            result.append(packed)
        return result
