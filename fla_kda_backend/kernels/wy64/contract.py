"""What the host and the 64-token kernels agree on: numbers of a launch, choices of a plan. Free of the DSL."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from fla_kda_backend.kernels.arguments import Addresses, Count, Real, Stride, joined
from fla_kda_backend.kernels.variant import Variant

CLUSTER_CTAS = 2  # the two value halves of a head


class Numbers(NamedTuple):
    """What the metadata of a call decides. A stride of q, k, v or g, and their addresses, are multiples of 16 bytes."""

    q_token: Stride
    q_head: Stride
    k_token: Stride
    k_head: Stride
    v_token: Stride
    v_head: Stride
    g_token: Stride
    g_head: Stride
    beta_token: Stride
    beta_head: Stride
    scale: Real  # factor of the scores
    gate_scale: Real  # lower_bound * log2(e)
    seq_len: Count  # tokens of each sequence, or of all packed ones
    num_seqs: Count
    qk_heads: Count
    heads: Count  # a multiple of qk_heads
    slot_begin: Count  # the launch covers the workspace slots [slot_begin, slot_end)
    slot_end: Count


Arguments = joined(Addresses, Numbers)


@dataclass(frozen=True)
class Schedule:
    """What a plan chooses. Nothing here changes a bit of the results."""

    max_ctas: int = 132  # the number of SMs
    overlap: bool = False  # the chain runs beside prepare; for sequences of equal length, or one packed sequence
    replay: bool = False  # idle SMs compute the outputs of a few long chains
    direct: bool = False  # prepare computes sequences of one chunk whole; see `allows_direct`
    segmented: bool = False  # the launch may cover only some of the call's slots

    def check(self, variant: Variant) -> None:
        """Raises ValueError where the choices do not fit each other or the variant."""
        if self.max_ctas < CLUSTER_CTAS:
            raise ValueError(f"needs at least {CLUSTER_CTAS} CTAs at once, got max_ctas={self.max_ctas}")
        if self.replay and self.segmented:
            raise ValueError("replay=True needs segmented=False: a checkpoint must lie in the same launch")
        if self.overlap and self.segmented:
            raise ValueError("overlap=True needs segmented=False")
        if self.replay and variant.intermediate_states:
            raise ValueError("replay=True needs intermediate_states=None: the spine does not keep every state")
        if variant.intermediate_states == 32:
            raise ValueError("intermediate_states must be 64 or None: chunks have 64 tokens")
        if self.direct and not (allows_direct(variant) and not self.segmented and not self.replay):
            raise ValueError("direct=True is for a bounded bf16 gate, l2norm, no initial state, no segments, replay or states")

    def in_segments(self) -> "Schedule":
        """The schedule of launches that cover only some slots each. The other schedules need all chunks in one launch."""
        return replace(self, overlap=False, replay=False, direct=False, segmented=True)

    def starts_from_zero(self, variant: Variant) -> bool:
        """Whether every chain begins with a sequence's state zero, so that W and Q of first chunks meet nothing."""
        return variant.initial_state is None and not self.segmented and not self.replay

    @property
    def params(self) -> dict[str, object]:
        """What the dispatch log shows."""
        direct = {"direct": True} if self.direct else {}
        return {"max_ctas": self.max_ctas, "overlap": self.overlap, "replay": self.replay, **direct}


def allows_direct(variant: Variant) -> bool:
    """Whether prepare can compute this variant's sequences of one chunk whole."""
    return (
        variant.initial_state is None
        and variant.intermediate_states is None
        and not variant.needs_levels
        and variant.gate_dtype == "bf16"
    )
