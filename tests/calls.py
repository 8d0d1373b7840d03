"""A call of chunk_kda that every rule accepts, and the facts under which it does."""

import torch

from fla_kda_backend import eligibility
from fla_kda_backend.facts import Facts
from fla_kda_backend.kernels.variant import Variant
from fla_kda_backend.testing import Form, make

H200 = Facts(capability=(9, 0), sm_count=132, grad_enabled=False, inference_mode=False, mode="auto", untested=True)
TRAINING = H200._replace(grad_enabled=True)
INFERENCE = H200._replace(inference_mode=True)
OURS, FLAS, FLASHKDAS = "ours", "FLA's Triton", "FlashKDA's"  # who ran a call, by what stands for its output


def tensor(*shape, dtype=torch.bfloat16, device="meta"):
    """Zeros; on the meta device without memory, so that a rule that reads values fails."""
    return torch.zeros(shape, dtype=dtype, device=device)


def grown(*shape, dtype=torch.bfloat16):
    return tensor(*shape, dtype=dtype).requires_grad_()


def prefill(batch=2, tokens=80, heads=4, dim=128, device="meta", **changes):
    """Keyword arguments of a prefill as FLA's KDA layer passes them; `changes` replace or add some, None included."""
    form = Form.of(Variant(initial_state="fp32"), (tokens,) * batch, heads, dim=dim, value_dim=dim)
    return make(form, device=device, **changes)


def decide(facts=H200, **changes):
    """The rules' Decision on a prefill with `changes`."""
    return eligibility.check(eligibility.parse((), prefill(**changes)), facts)


def outcomes(world):
    return [(record.outcome, record.code) for record in world.seen]


# ---- changes to it -------------------------------------------------------------------------------------------------
# two sequences whose intermediate states are asked for; two value heads for each of two of q and k
HALVES = {"batch": 1, "initial_state": None, "cu_seqlens": tensor(3, dtype=torch.int32), "return_intermediate_states": True}
GROUPED = {
    **{name: tensor(2, 80, 4, 128) for name in "vg"},
    "beta": tensor(2, 80, 4),
    "initial_state": tensor(2, 4, 128, 128, dtype=torch.float32),
    "A_log": tensor(4, dtype=torch.float32),
    "dt_bias": tensor(512, dtype=torch.float32),
}
# Kimi-Linear's modelling code: pre-activated fp32 g, fp32 sigmoided beta, K-first states
KIMI = {
    **dict.fromkeys(("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "safe_gate", "state_v_first"), False),
    **dict.fromkeys(("A_log", "dt_bias", "lower_bound")),
    "g": tensor(2, 80, 4, 128, dtype=torch.float32),
    "beta": tensor(2, 80, 4, dtype=torch.float32),
}
UNGATED = {"use_gate_in_kernel": False, "safe_gate": False}  # what only the gate reads is ignored, whatever it is
SOFTPLUS = {"lower_bound": None, "safe_gate": False}
