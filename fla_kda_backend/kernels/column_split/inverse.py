"""The inverse of I + L of a chunk, by one warp; formulas and roundings stand in prepare.py."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.column_split.record import CHUNK, INVERSE, fragment_at


class Inverse:
    """robust: substitute forward in fp32; otherwise form the product of powers in fp16. layout: a Layout."""

    def __init__(self, robust, layout):
        self.robust, self.layout = robust, layout

    @cute.jit
    def write(self, c, smem, lane, beta):
        """The record's inverse, from accumulators of k_start . k_inv^T and beta of the lane's rows."""
        if const_expr(self.robust):
            table = smem + self.layout.l_transposed
            for tile in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(4):
                    i, j = lane // 4 + 8 * (e // 2), 8 * tile + 2 * (lane % 4) + e % 2
                    ptx.sts_f32(table + j * 64 + i * 4, ptx.mul(c[tile][e], beta[e // 2]))
            cute.arch.sync_warp()
            self.substitute(smem, lane)
        else:
            self.multiply_powers(c, smem, lane, beta)

    # ---- exact ----------------------------------------------------------------------------------------------------
    @cute.jit
    def multiply_powers(self, c, smem, lane, beta):
        """(I - L)(I + L^2)(I + L^4)(I + L^8), the Neumann series, in fp16."""
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
            power = self.multiply(power, self.transpose(power))
            x = [ptx.add_f16x2(a, b) for a, b in zip(x, self.multiply(x, self.transpose(power)))]
        fragment = []
        for word in x:
            fragment.append(ptx.pack_bf16x2(*ptx.unpack_f16x2(word)))
        ptx.sts_v4_b32(smem + INVERSE + lane * 16, fragment)

    def transpose(self, fragment):
        """The A fragment of a matrix as its B registers: tile n holds (rows 0 to 7, 8 to 15) of columns 8n to 8n + 7."""
        return [ptx.movmatrix(word) for word in fragment]

    def multiply(self, a, b):
        """a . b for 16x16 fp16 matrices, fp16 accumulators from 0."""
        zero = (Int32(0), Int32(0))
        left = ptx.mma_f16_f16(a, (b[0], b[1]), zero)
        right = ptx.mma_f16_f16(a, (b[2], b[3]), zero)
        return [left[0], left[1], right[0], right[1]]

    # ---- robust ---------------------------------------------------------------------------------------------------
    @cute.jit
    def substitute(self, smem, lane):
        """The record's inverse from L^T in shared memory: lane j solves for column j of (I + L)^-1.

        L lies transposed so that a lane reads a column of L as vectors. inverse - I is written in two terms.
        """
        table = smem + self.layout.l_transposed
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
            lead_at = smem + INVERSE + fragment_at(0, column)
            rest_at = smem + INVERSE + fragment_at(column, 0)
            for i in cutlass.range_constexpr(CHUNK):
                lead = ptx.pack_bf16x2(x[i], x[i])
                rest = ptx.sub(x[i], ptx.unpack_bf16x2(lead)[0])
                if column < i:
                    ptx.sts_b16(lead_at + fragment_at(i, 0), lead)
                    ptx.sts_b16(rest_at + fragment_at(0, i), ptx.pack_bf16x2(rest, rest))
                if column == i:
                    ptx.sts_b16(lead_at + fragment_at(i, 0), Int32(0))
