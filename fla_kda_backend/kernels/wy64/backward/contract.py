"""What the host and the backward kernels agree on: addresses, numbers of a launch, choices of a plan. Free of the DSL."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from fla_kda_backend.kernels.arguments import Address, Count, Real, Stride, joined
from fla_kda_backend.kernels.variant import Variant
from fla_kda_backend.kernels.wy64.contract import CLUSTER_CTAS


class Addresses(NamedTuple):
    """What changes from call to call. Gradients are contiguous and have the dtype of their tensor unless said otherwise."""

    q: Address  # [tokens, qk_heads, 128] bf16
    k: Address  # [tokens, qk_heads, 128] bf16
    v: Address  # [tokens, heads, 128] bf16
    g: Address  # [tokens, heads, 128]
    beta: Address  # [tokens, heads]
    a_log: Address  # [heads]
    dt_bias: Address  # [heads, 128]
    initial_state: Address  # [num_seqs, heads] states
    cu_seqlens: Address  # [num_seqs + 1]
    d_out: Address  # [tokens, heads, 128] bf16
    d_final_state: Address  # [num_seqs, heads] fp32 states
    workspace: Address  # see record.py
    carry_in: Address  # [heads] fp32 states of the sequence that began before slot_begin, see states.store_carry
    carry_out: Address  # [heads] fp32 states of the sequence that goes on past slot_end; other memory than carry_in
    d_carry_in: Address  # [heads] gradients of the states of the sequence that goes on past slot_end
    d_carry_out: Address  # [heads] gradients of the states of the sequence that began before slot_begin
    dq: Address  # [tokens, qk_heads, 128]; grouped: [tokens, heads, 128] fp32, of the normalised q of each value head
    dk: Address  # likewise
    dv: Address  # [tokens, heads, 128] bf16
    dg: Address  # [tokens, heads, 128]
    dbeta: Address  # [tokens, heads]
    d_initial_state: Address  # [num_seqs, heads] fp32 states
    d_bias_sums: Address  # [slots, heads, 128] fp32: sums over a chunk's tokens of the gradient of dt_bias
    d_a_log_sums: Address  # [slots, heads, 128] fp32: the same of A_log, per channel


class Numbers(NamedTuple):
    """What the metadata of a call decides. A stride of q, k, v, g or d_out, and their addresses, are multiples of 16 bytes."""

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
    d_out_token: Stride
    d_out_head: Stride
    scale: Real  # factor of the scores
    gate_scale: Real  # lower_bound * log2(e)
    seq_len: Count  # tokens of each sequence, or of all packed ones
    num_seqs: Count
    qk_heads: Count
    heads: Count  # a multiple of qk_heads
    slot_begin: Count  # the launch covers the workspace slots [slot_begin, slot_end)
    slot_end: Count


Arguments = joined(Addresses, Numbers)
STAGES = ("all", "states")


@dataclass(frozen=True)
class Schedule:
    """What a plan chooses."""

    max_ctas: int = 132  # the number of SMs
    segmented: bool = False  # the launch may cover only some of the call's slots
    stage: str = "all"  # "states": the states after the launch's slots alone, into carry_out
    d_final_state: bool = False  # there is a gradient of the final states
    d_initial_state: bool = False  # the gradient of the initial states is wanted
    grouped: bool = False  # several value heads share a head of q and k: see Addresses.dq
    beside: bool = False  # local gradients beside the chains; for sequences of equal length, or one packed sequence

    # the choices of the forward's Schedule that its kernels ask for
    overlap = replay = direct = False

    def check(self, variant: Variant) -> None:
        """Raises ValueError where the choices do not fit each other or the variant."""
        if self.max_ctas < CLUSTER_CTAS:
            raise ValueError(f"needs at least {CLUSTER_CTAS} CTAs at once, got max_ctas={self.max_ctas}")
        if self.stage not in STAGES:
            raise ValueError(f"stage must be one of {STAGES}, got {self.stage!r}")
        if self.stage == "states" and not self.segmented:
            raise ValueError("stage='states' needs segmented=True")
        if self.beside and self.segmented:
            raise ValueError("beside=True needs segmented=False")
        if variant.intermediate_states or variant.final_state:
            raise ValueError("needs a variant without final and intermediate states: the backward writes none")
        if self.d_initial_state and variant.initial_state is None:
            raise ValueError("d_initial_state=True needs an initial state")

    def in_segments(self) -> "Schedule":
        """The schedule of launches that cover only some slots each."""
        return replace(self, segmented=True, beside=False)

    def starts_from_zero(self, variant: Variant) -> bool:
        """Never: the reverse chain needs W and Q of first chunks, too."""
        return False

    @property
    def params(self) -> dict[str, object]:
        """What the dispatch log shows."""
        return {"max_ctas": self.max_ctas, **({"beside": True} if self.beside else {})}
