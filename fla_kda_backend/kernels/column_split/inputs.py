"""What a call's q, k, g, beta and the gate's parameters mean, and how the 16-token prepare kernel reads them."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.column_split.record import ROW_BYTES
from fla_kda_backend.kernels.variant import Variant

LOG2E = 1.44269502  # rounds to the fp32 constant that FlashKDA multiplies A_log by
LEAST = -160.0  # log2 of a token's decay; 2**-160 is a true zero in fp32
# log2(1 + z) / z for z in [0, 1], within 2e-7: Chebyshev interpolation of degree 8, lowest coefficient first
LOG2_1P = (
    1.4426949983881148, -0.7213403288518793, 0.48069547531830753, -0.35842849237632357, 0.2757196684331654,
    -0.19728522437557816, 0.11305198982459311, -0.042687192869986276, 0.007579137508097726,
)  # fmt: skip


class Inputs16:
    """A kernel inherits it. options: a Variant; robust: approximate the sigmoid well, not as FlashKDA does."""

    threads = 128
    options = Variant()
    robust = False

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
        """Channels 2*pair, 2*pair + 1 of tokens 8*half to 8*half + 7: bf16 pairs, or two fp32 words each."""
        count = const_expr(self.size(self.options.gate_dtype) // 2)
        words = cute.make_rmem_tensor((8 * count,), Int32)
        words.fill(0)
        for i in cutlass.range_constexpr(8):
            row = 8 * half + i
            if row < rows:
                at = address + Int64(row) * row_stride + Int64(pair) * (4 * count)
                if const_expr(count == 1):
                    words[i] = ptx.ldg_nc_b32(at)
                else:
                    words[2 * i], words[2 * i + 1] = ptx.ldg_nc_v2_b32(at)
        return words

    @cute.jit
    def load_bias(self, address, head, pair):
        """dt_bias of channels 2*pair, 2*pair + 1."""
        if const_expr(self.options.dt_bias == "fp32"):
            at = address + Int64(head * 512 + pair * 8)
            return (ptx.ldg_nc_f32(at), ptx.ldg_nc_f32(at + 4))
        elif const_expr(self.options.dt_bias == "bf16"):
            return ptx.unpack_bf16x2(ptx.ldg_nc_b32(address + Int64(head * 256 + pair * 4)))
        else:
            return (Float32(0.0), Float32(0.0))

    @cute.jit
    def load_rate(self, address, head):
        """What `gate` multiplies by: exp(A_log) / 2 (FlashKDA's), -exp(A_log) or, for a sigmoid, -log2(e) exp(A_log)."""
        rate = Float32(1.0)
        if const_expr(self.options.a_log is not None):
            size = const_expr(self.size(self.options.a_log))
            load = const_expr(ptx.ldg_nc_f32 if size == 4 else ptx.ldg_nc_bf16)
            rate = ptx.ex2(ptx.mul(load(address + Int64(head) * size), Float32(LOG2E)))
        if const_expr(self.options.gate == "softplus"):
            return Float32(0.0) - rate
        else:
            return ptx.mul(rate, Float32(-LOG2E if self.robust else 0.5))

    @cute.jit
    def load_beta(self, address, token, heads, head, rows, lane):
        """beta of tokens lane//4 and + 8 in fp32, as it multiplies; 0 past the end. `token`: of the chunk's first row."""
        size = const_expr(self.size(self.options.beta_dtype))
        address += (token * Int64(heads) + Int64(head)) * size
        beta = cute.make_rmem_tensor((2,), Float32)
        beta.fill(0.0)
        for i in cutlass.range_constexpr(2):
            row = lane // 4 + 8 * i
            if row < rows:
                load = const_expr(ptx.ldg_nc_f32 if size == 4 else ptx.ldg_nc_bf16)
                x = load(address + Int64(row) * Int64(heads) * size)
                if const_expr(self.options.beta == "given"):
                    beta[i] = x
                elif const_expr(self.robust):
                    one = const_expr(2.0 if self.options.beta == "twice" else 1.0)
                    beta[i] = self.sigmoid(x * Float32(-LOG2E), Float32(one))
                else:
                    beta[i] = ptx.fma(ptx.tanh(x * Float32(0.5)), Float32(0.5), Float32(0.5))
        return beta

    def size(self, dtype):
        return 4 if dtype == "fp32" else 2

    # ---- element-wise ---------------------------------------------------------------------------------------------
    def sigmoid(self, exponent, scale):
        """scale * sigmoid(x), from exponent = -x log2(e)."""
        return ptx.mul(scale, ptx.rcp(ptx.add(ptx.ex2(exponent), Float32(1.0))))

    @cute.jit
    def normalise(self, words, tile, thread):
        """The rows of `words`, l2-normalised where the call says so, written as bf16 to the swizzled tile; returned too."""
        result = []
        for i in cutlass.range_constexpr(2):
            packed = [words[i, j] for j in range(4)]
            if const_expr(self.options.l2norm):
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
            if const_expr(self.options.l2norm):
                packed = [ptx.pack_bf16x2(ptx.mul(x[2 * j], factor), ptx.mul(x[2 * j + 1], factor)) for j in range(4)]
            ptx.sts_v4_b32(at, packed)
            result.append(packed)
        return result

    @cute.jit
    def gate(self, words, bias, rate, gate_scale, rows, half):
        """y = log2 of the decay of 8 tokens and 2 channels; 0 past the end. `rate` is load_rate's."""
        y = cute.make_rmem_tensor((8, 2), Float32)
        for i in cutlass.range_constexpr(8):
            if const_expr(self.options.gate_dtype == "bf16"):
                raw = ptx.unpack_bf16x2(words[i])
            else:
                raw = (ptx.as_f32(words[2 * i]), ptx.as_f32(words[2 * i + 1]))
            inside = 8 * half + i < rows
            for j in cutlass.range_constexpr(2):
                if const_expr(self.options.gate == "given"):
                    value = ptx.max_nan(ptx.mul(raw[j], Float32(LOG2E)), Float32(LEAST))
                elif const_expr(self.options.gate == "softplus"):
                    value = ptx.max_nan(ptx.mul(self.softplus(ptx.add(raw[j], bias[j])), rate), Float32(LEAST))
                elif const_expr(self.robust):
                    value = self.sigmoid(ptx.mul(ptx.add(raw[j], bias[j]), rate), gate_scale)
                else:
                    x = ptx.mul(ptx.add(raw[j], bias[j]), rate)
                    value = ptx.mul(ptx.fma(ptx.tanh(x), Float32(0.5), Float32(0.5)), gate_scale)
                y[i, j] = value if inside else Float32(0.0)
        return y

    def softplus(self, x):
        """log2(e) * softplus(x) = log2(1 + e**x), relative to itself also where it is tiny."""
        z = ptx.ex2(ptx.mul(ptx.absolute(x), Float32(-LOG2E)))
        series = Float32(LOG2_1P[-1])
        for coefficient in LOG2_1P[-2::-1]:
            series = ptx.fma(series, z, Float32(coefficient))
        return ptx.fma(ptx.max_nan(x, Float32(0.0)), Float32(LOG2E), ptx.mul(series, z))
