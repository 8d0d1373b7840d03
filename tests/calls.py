"""A call of chunk_kda that every rule accepts, and the facts under which it does."""

import torch

from fla_kda_backend import eligibility
from fla_kda_backend.facts import Facts

H200 = Facts(capability=(9, 0), sm_count=132, grad_enabled=False, inference_mode=False, mode="auto", untested=True)
FLAGS = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "safe_gate", "state_v_first")


def tensor(*shape, dtype=torch.bfloat16, device="meta"):
    """Without memory behind it, on the meta device: a rule that read values would fail."""
    return torch.zeros(shape, dtype=dtype, device=device)


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
