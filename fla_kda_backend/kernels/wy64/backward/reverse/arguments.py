"""The parameters of the reverse chain, and what the parts of a CTA have in common."""

from dataclasses import dataclass
from typing import NamedTuple

from cutlass import Float32, Int32, Int64

from fla_kda_backend.kernels.variant import Variant
from fla_kda_backend.kernels.wy64.backward.contract import Schedule
from fla_kda_backend.kernels.wy64.backward.reverse.shared import Shared
from fla_kda_backend.kernels.wy64.cluster import Cluster
from fla_kda_backend.kernels.wy64.tasks import Tasks
from fla_kda_backend.kernels.wy64.workspace import Workspace


class ReverseArguments(NamedTuple):
    """In the order of the kernel's parameters. Int64: addresses in global memory; 0: there is no such tensor."""

    cu_seqlens: Int64  # [num_seqs + 1] int32 or int64
    d_out: Int64  # [tokens, heads, 128] bf16, strided
    d_final_state: Int64  # [num_seqs, heads] fp32 states
    workspace: Int64  # see ../record.py
    d_carry_in: Int64  # [heads, 2 value halves] of the sequence that goes on past slot_end; see store_carry
    d_carry_out: Int64  # the same, of the sequence that began before slot_begin; not the memory of d_carry_in
    d_initial_state: Int64  # [num_seqs, heads] fp32 states
    d_out_token: Int64  # strides, in elements
    d_out_head: Int64
    scale: Float32  # of the scores; gradients are divided by it where Q and A are free of it
    seq_len: Int32  # tokens of each sequence, or of all packed ones
    num_seqs: Int32
    heads: Int32
    slot_begin: Int32
    slot_end: Int32

    @classmethod
    def of(cls, a):
        """From the Arguments of the family's contract, which bear the same names."""
        return cls(**{name: getattr(a, name) for name in cls._fields})


@dataclass(frozen=True)
class Cta:
    """What the warps of a CTA share."""

    variant: Variant
    schedule: Schedule
    args: ReverseArguments
    workspace: Workspace
    shared: Shared
    tasks: Tasks
    cluster: Cluster
