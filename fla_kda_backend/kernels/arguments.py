"""Names and types of what a launch takes. Free of the DSL: the host packs by these tables, the kernels unpack by them.

A compiled family is called with its Addresses, its Numbers and a stream handle, in this order.
"""

from typing import Any, NamedTuple, NewType

Address = NewType("Address", int)  # Int64, in global memory; 0: the call has no such tensor
Stride = NewType("Stride", int)  # Int64, in elements
Real = NewType("Real", float)  # Float32
Count = NewType("Count", int)  # Int32


class Addresses(NamedTuple):
    """What changes from call to call. Every family takes the same addresses."""

    q: Address  # [tokens, qk_heads, 128] bf16
    k: Address  # [tokens, qk_heads, 128] bf16
    v: Address  # [tokens, heads, 128] bf16
    g: Address  # [tokens, heads, 128]
    beta: Address  # [tokens, heads]
    a_log: Address  # [heads]
    dt_bias: Address  # [heads, 128]
    initial_state: Address  # [num_seqs, heads] states
    final_state: Address  # [num_seqs, heads] states
    out: Address  # [tokens, heads, 128] bf16
    cu_seqlens: Address  # [num_seqs + 1]
    workspace: Address  # as the family's record.py lays it out
    carry_in: Address  # [heads] fp32 states of the sequence that began before slot_begin
    carry_out: Address  # [heads] fp32 states of the sequence that goes on past slot_end; other memory than carry_in
    intermediate_states: Address  # [chunks, heads] bf16 states


def kinds(*tables: type) -> list[Any]:
    """Types of the fields of the tables, in order."""
    return [kind for table in tables for kind in table.__annotations__.values()]


def joined(*tables: type) -> Any:
    """A NamedTuple class with the fields of all tables, in order: what a launch takes before the stream."""
    return NamedTuple("Arguments", [field for table in tables for field in table.__annotations__.items()])
