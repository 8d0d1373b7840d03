"""A call of chunk_kda that every rule accepts, and the facts under which it does."""

import torch

from fla_kda_backend import eligibility
from fla_kda_backend.facts import Facts

H200 = Facts(capability=(9, 0), sm_count=132, grad_enabled=False, inference_mode=False, mode="auto", untested=True)
TRAINING = H200._replace(grad_enabled=True)
INFERENCE = H200._replace(inference_mode=True)
FLAGS = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "safe_gate", "state_v_first")
OURS, FLAS, FLASHKDAS = "ours", "FLA's Triton", "FlashKDA's"  # who ran a call, by what stands for its output


def tensor(*shape, dtype=torch.bfloat16, device="meta"):
    """Without memory behind it, on the meta device: a rule that read values would fail."""
    return torch.zeros(shape, dtype=dtype, device=device)


def grown(*shape, dtype=torch.bfloat16):
    return tensor(*shape, dtype=dtype).requires_grad_()


def prefill(batch=2, tokens=80, heads=4, dim=128, device="meta", **changes):
    """Keyword arguments of a prefill as FLA's KDA layer passes them; `changes` replace or add some, None included."""

    def make(*shape, dtype=torch.bfloat16):
        return tensor(*shape, dtype=dtype, device=device)

    return {
        **{name: make(batch, tokens, heads, dim) for name in "qkvg"},
        **dict.fromkeys(FLAGS, True),
        "beta": make(batch, tokens, heads),
        "initial_state": make(batch, heads, dim, dim, dtype=torch.float32),
        "output_final_state": True,
        "A_log": make(heads, dtype=torch.float32),
        "dt_bias": make(heads * dim, dtype=torch.float32),
        "lower_bound": -5.0,
        **changes,
    }


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
