"""U and W by block forward elimination: (I + M) X = diag(beta) [V, -K_start], one band after the other; see kernel.py."""

from cutlass import Int64

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.prepare.blocks import below_offset, diagonal_fragment
from fla_kda_backend.kernels.wy64.prepare.fragments import pack_block, zeros
from fla_kda_backend.kernels.wy64.prepare.memory import DiagonalPart, Table
from fla_kda_backend.kernels.wy64.record import BANDS


def eliminate(base, x, u_at, w_at, lane):
    """U to global memory and -W over K_start, 16 channels of each, transposed. x: per band, blocks of V^T and K_start^T, or of
    V^T alone, and then no W. u_at: global address of the warp's fragments, None: no U. w_at: ldmatrix address of the warp's
    channels. Returns the words of both, per band."""
    done, sides = [], range(len(x[0]))
    for i in range(BANDS):
        acc = [zeros() for _ in sides]
        for part in (DiagonalPart.T_BETA_LEAD, DiagonalPart.T_BETA_REST):
            d = diagonal_fragment(base, i, part, lane)
            acc = [[ptx.mma_bf16(x[i][t], d[2 * n : 2 * n + 2], acc[t][n]) for n in range(2)] for t in sides]
        for j in range(i):
            for part in range(2):
                m = ptx.lds_v4_b32(base + Table.BELOW + below_offset(i, j) + part * 512 + lane * 16)
                acc = [[ptx.mma_bf16(done[j][t], m[2 * n : 2 * n + 2], acc[t][n]) for n in range(2)] for t in sides]
        done.append([pack_block(c) for c in acc])
        if u_at is not None:
            ptx.stg_words(u_at + Int64(i * 2048), done[i][0])
        if len(sides) > 1:
            ptx.stmatrix_x4_trans(w_at + i * 2048, done[i][1])
    return done
