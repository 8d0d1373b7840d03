"""The workspace of the backward kernels: byte offsets and sizes; free of the DSL.

    records  [head][slot]: as the forward's, see ../record.py
    flags    [head][slot], of four int32, where the local gradients run beside the chains. At READY_AT stands how many of the
             READY_PARTS CTAs that write to the local record have done so: two value halves, two chains. At NEXT_AT of the
             very first one stands the number of the next pair that no CTA of the local gradients has taken
    locals   [head][slot]: what the local gradients of a chunk need beside the inputs, see below

A local record holds images as they are wanted in shared memory. A swizzled image has rows of 128 bytes; its 16-byte piece p
of row r lies at piece p ^ (r & 7).

    T       fp16, the diagonal blocks of (I + M)^-1, one per band, transposed: [band][16 columns][16 rows], 32 bytes a column,
            piece p of column c at piece p ^ (c >> 2 & 1)
    N       -N_bc of the bands c < b, at block b * (b - 1) / 2 + c, 1 KB each: two parts, lead and rest, of [32 lanes][16
            bytes], as elimination.py takes them
    S       bf16, the state before the chunk: per value half a swizzled image [128 keys][64 values]
    dS      bf16, the gradient of the state after the chunk, the same
    dV      bf16, the gradient of V': per value half a swizzled image [64 tokens][64 values]

V', bf16, the same images, takes the place of U in the record: a chain reads U of a chunk before it writes its V'.

Where q and k are not normalised, dS and dV are divided by the scale.
"""

from fla_kda_backend.kernels.wy64 import record as forward
from fla_kda_backend.kernels.wy64.record import slots

__all__ = ["slots", "workspace_bytes"]

T_BYTES, N_BYTES, STATE_HALF_BYTES, V_HALF_BYTES = 2048, 6144, 16384, 8192
T_AT, N_AT = 0, 2048
S_AT = N_AT + N_BYTES
DS_AT = S_AT + 2 * STATE_HALF_BYTES
DV_AT = DS_AT + 2 * STATE_HALF_BYTES
LOCAL_BYTES = DV_AT + 2 * V_HALF_BYTES
V_AT = forward.U_AT  # in the record
assert S_AT % 1024 == LOCAL_BYTES % 1024 == 0 and V_HALF_BYTES == forward.U_BYTES

READY_AT, NEXT_AT, READY_PARTS = 4, 8, 4


def workspace_bytes(slots, heads, replay=False):
    """Bytes of the workspace of a launch over `slots` slots."""
    return forward.workspace_bytes(slots, heads) + heads * slots * LOCAL_BYTES
