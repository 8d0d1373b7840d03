"""What the host and the 16-token kernels agree on: the numbers of a launch, the choices of a plan. Free of the DSL."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from fla_kda_backend.kernels.arguments import Addresses, Count, Real, joined
from fla_kda_backend.kernels.variant import Variant

ARITHMETICS = ("exact", "robust")  # FlashKDA's roundings; the same algorithm without those that lose accuracy
VALUE_DIM = 128


class Numbers(NamedTuple):
    """What the metadata of a call decides. Its tensors are contiguous."""

    scale: Real  # multiplies the scores
    gate_scale: Real  # lower_bound * log2(e)
    seq_len: Count  # tokens of each sequence; packed: of all sequences together
    num_seqs: Count
    qk_heads: Count
    heads: Count  # a multiple of qk_heads
    slot_begin: Count  # the launch covers the workspace slots [slot_begin, slot_end)
    slot_end: Count


Arguments = joined(Addresses, Numbers)


@dataclass(frozen=True)
class Schedule:
    """What a plan chooses. Apart from the arithmetic, no choice changes a bit of the results."""

    arithmetic: str = "exact"
    bv: int = 32  # value columns per CTA
    warps: int = 4  # compute warps per CTA
    stages: int = 4  # of the ring that holds records and rows of v
    segmented: bool = False  # the launch may cover only some of the call's slots

    def check(self, variant: Variant) -> None:
        """Raises ValueError where the choices do not fit each other or the variant."""
        if self.arithmetic not in ARITHMETICS:
            raise ValueError(f"arithmetic {self.arithmetic!r} must be in {ARITHMETICS}")
        if self.bv % (8 * self.warps) or VALUE_DIM % self.bv:
            raise ValueError(f"bv must be a multiple of 8 columns per warp and divide {VALUE_DIM}, got {self}")
        if self.stages < 2:
            raise ValueError(f"needs at least 2 stages, got {self.stages}")
        if self.arithmetic == "exact" and variant.changes:
            raise ValueError(f"the exact arithmetic takes FlashKDA's call only, not {variant.changes}")

    def in_segments(self) -> "Schedule":
        """The schedule of launches that cover only some slots each."""
        return replace(self, segmented=True)

    @property
    def params(self) -> dict[str, object]:
        """What the dispatch log shows."""
        return {"arithmetic": self.arithmetic, "bv": self.bv, "warps": self.warps}
