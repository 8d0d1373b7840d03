"""Stores of gradients. Rows past the sequence's end are not stored: these stores take a row and the number of rows."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from fla_kda_backend.kernels import ptx

_IF = "{{ .reg .pred p; .reg .b16 h; setp.lt.s32 p, {}, {}; {} }}"
_stg_b16 = ptx.ordered(
    _IF.format("$2", "$3", "cvt.u16.u32 h, $1; @p st.global.b16 [$0], h;"), "lrrr ->", "Store 2 bytes where row < rows."
)
_stg_f32 = ptx.ordered(_IF.format("$2", "$3", "@p st.global.f32 [$0], $1;"), "lfrr ->", "Store an fp32 where row < rows.")
stg_v4_below = ptx.ordered(
    _IF.format("$5", "$6", "@p st.global.v4.b32 [$0], {$1, $2, $3, $4};"), "lrrrrrr ->", "Store 16 bytes where row < rows."
)


def store_one(address, x, dtype, row, rows):
    """One element of a gradient, an fp32, in its dtype."""
    if dtype == "fp32":
        _stg_f32(address, x, row, rows)
    else:
        _stg_b16(address, ptx.pack_bf16x2(x, x), row, rows)


def store_column(address, pitch, values, dtype, rows):
    """Values of successive tokens of a channel; pitch: bytes from a token to the next one."""
    for i in range(0, len(values), 2):
        if dtype == "fp32":
            for e in range(2):
                _stg_f32(address, values[i + e], Int32(i + e), rows)
                address = address + pitch
        else:
            word = ptx.pack_bf16x2(values[i], values[i + 1])
            _stg_b16(address, word, Int32(i), rows)
            address = address + pitch
            _stg_b16(address, word >> 16, Int32(i + 1), rows)
            address = address + pitch


@cute.jit
def clear_rows(address, row_bytes: cutlass.Constexpr, row, count: cutlass.Constexpr, first, end, tokens, head, heads, thread,
               threads: cutlass.Constexpr):  # fmt: skip
    """Zero the rows of a gradient [tokens, heads, row_bytes] that lie in [row, row + count) but outside [first, end)."""
    if address != 0:
        per_row = _pieces(row_bytes)
        for i in cutlass.range(thread, count * per_row, threads, unroll=1):
            at = row + i // per_row
            if at < tokens and (at < first or at >= end):
                to = address + (Int64(at) * heads + head) * row_bytes + Int64(i % per_row) * (row_bytes // per_row)
                if cutlass.const_expr(row_bytes >= 16):
                    ptx.stg_words(to, [Int32(0)] * 4)
                elif cutlass.const_expr(row_bytes == 4):
                    ptx.stg_b32(to, Int32(0))
                else:
                    ptx.stg_b16(to, Int32(0))


def _pieces(row_bytes):
    """Stores that a row takes."""
    return max(row_bytes // 16, 1)
