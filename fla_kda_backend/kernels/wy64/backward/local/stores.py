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
_stg_b32 = ptx.ordered(_IF.format("$2", "$3", "@p st.global.b32 [$0], $1;"), "lrrr ->", "Store 4 bytes where row < rows.")
_stg_v2_f32 = ptx.ordered(
    _IF.format("$3", "$4", "@p st.global.v2.f32 [$0], {$1, $2};"), "lffrr ->", "Store two fp32 where row < rows."
)
_row_address = ptx.pure("mad.wide.s32 $0, $1, $2, $3;", "rrl -> l", "address + row * pitch.")
stg_v4_below = ptx.ordered(
    _IF.format("$5", "$6", "@p st.global.v4.b32 [$0], {$1, $2, $3, $4};"), "lrrrrrr ->", "Store 16 bytes where row < rows."
)


def store_one(address, x, dtype, row, rows):
    """One element of a gradient, an fp32, in its dtype."""
    if dtype == "fp32":
        _stg_f32(address, x, row, rows)
    else:
        _stg_b16(address, ptx.pack_bf16x2(x, x), row, rows)


def store_pairs(address, pitch, values, dtype, rows):
    """Values [token][2 channels] of successive tokens; pitch: bytes from a token to the next one."""
    for i in range(len(values) // 2):
        at, pair = _row_address(pitch, i, address), values[2 * i : 2 * i + 2]
        if dtype == "fp32":
            _stg_v2_f32(at, *pair, Int32(i), rows)
        else:
            _stg_b32(at, ptx.pack_bf16x2(*pair), Int32(i), rows)


@cute.jit
def clear_rows(address, row_bytes: cutlass.Constexpr, row, count: cutlass.Constexpr, first, end, tokens, head, heads, thread,
               threads: cutlass.Constexpr):  # fmt: skip
    """Zero the rows of a gradient [tokens, heads, row_bytes] that lie in [row, row + count) but outside [first, end)."""
    if address != 0:
        per_row = const_pieces(row_bytes)
        for i in cutlass.range(thread, count * per_row, threads, unroll=1):
            at = row + i // per_row
            if at < tokens and (at < first or at >= end):
                to = (
                    address + (Int64(at) * Int64(heads) + Int64(head)) * row_bytes + Int64(i % per_row) * (row_bytes // per_row)
                )
                if cutlass.const_expr(row_bytes >= 16):
                    ptx.stg_words(to, [Int32(0)] * 4)
                elif cutlass.const_expr(row_bytes == 4):
                    ptx.stg_b32(to, Int32(0))
                else:
                    ptx.stg_b16(to, Int32(0))


def const_pieces(row_bytes):
    return max(row_bytes // 16, 1)
