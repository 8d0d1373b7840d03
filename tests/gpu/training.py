"""Gradients of chunk_kda: on our kernels, on FLA's Triton kernels, in double precision; and their errors."""

import gc
from dataclasses import replace

import pytest
import torch
from call_table import FLASHKDA
from golden import relative_error
from gpu.launching import scratch_is_nan, untuned
from kda_calls import plain

from fla_kda_backend import dispatch_log, register
from fla_kda_backend.reference import backward
from fla_kda_backend.reference.backward import DIFFERENTIABLE
from fla_kda_backend.testing import TOKEN_AXIS, Form, Normal, make, regime

ON_HEADS = {"q": 2, "k": 2, "v": 2, "g": 2, "beta": 2, "initial_state": 1, "A_log": 0, "dt_bias": 0}  # the axis of the heads
TWO_CHANNELS = "two channels"  # a regime beside testing.REGIMES
SUMS = ("A_log", "dt_bias")  # over all tokens
HERE = [(dispatch_log.ACCEPTED, "accepted", "wy64"), (dispatch_log.ACCEPTED, "backward", "wy64_backward")]  # what the log says


def training_call(kind, lengths, heads, device, regime_name="normal", seed=0, **changes):
    """Keyword arguments of chunk_kda, of a kind; lengths as Form.of takes them; regime_name may be TWO_CHANNELS."""
    form, normal = Form.of(kind, lengths, heads), Normal(device, kind, lengths, heads, regime_name, seed)

    def draw(form):
        return two_in_turn(kind, form, normal) if regime_name == TWO_CHANNELS else regime(regime_name, kind, form, normal)

    return make(form, draw, device, spelled_out=True) | changes


def two_in_turn(kind, form, normal):
    """Two channels make up the keys, and one hardly decays in the first 8 tokens of each 16, the other in the last 8; all other
    channels decay at once. A gradient is a sum of few terms then, and no rounding averages out over channels."""
    values = regime("normal", kind, form, normal)
    g, k = torch.full_like(values["g"], 4.0), 0.02 * values["k"]
    first = (torch.arange(form.tokens, device=g.device) % 16 < 8).float()[None, :, None]
    g[..., 0], g[..., 1] = 4 - 16 * first, 16 * first - 12
    k[..., :2] += 1
    still = {name: torch.zeros_like(values[name]) for name in ("A_log", "dt_bias")}
    return values | still | {"g": g, "k": k}


def gradients_of_results(call, seed=0):
    """(d_out [B, T, HV, 128] bf16, d_final_state fp32, or None where the call has no final state), normal."""
    v = call["v"]
    normal = Normal(v.device, "gradients", seed)
    d_out = normal(*v.shape).to(v.dtype)
    if not call["output_final_state"]:
        return d_out, None
    sequences = len(v) if call["cu_seqlens"] is None else len(call["cu_seqlens"]) - 1
    return d_out, normal(sequences, v.shape[2], 128, 128)


def leaves_of(call, wanted=DIFFERENTIABLE):
    """The call with tensors of the same memory, of which the wanted ones require grad; and these."""
    leaves = {name: call[name].detach().requires_grad_() for name in wanted if call[name] is not None}
    return call | leaves, leaves


def differentiate(function, call, d_out, d_final, wanted=DIFFERENTIABLE):
    """((out, final_state), {name: gradient}) of function(**call), chunk_kda or one like it."""
    given, leaves = leaves_of(call, wanted)
    with torch.enable_grad():
        results = function(**given)[:2]
    pairs = [(x, d) for x, d in zip(results, (d_out, d_final)) if d is not None]
    outputs, grads = zip(*pairs)
    found = torch.autograd.grad(outputs, list(leaves.values()), grads, allow_unused=True)
    return tuple(None if x is None else x.detach() for x in results), dict(zip(leaves, found))


def here(call, d_out, d_final, wanted=DIFFERENTIABLE):
    """differentiate(chunk_kda, ..) on our kernels, with memory that holds NaN. To be called in strict mode."""
    from fla.ops.kda import chunk_kda

    with scratch_is_nan(), dispatch_log.capture() as seen:
        found = differentiate(chunk_kda, call, d_out, d_final, wanted)
    assert [(record.outcome, record.code, record.kernel) for record in seen] == HERE
    return found


def on_triton(call, d_out, d_final, monkeypatch):
    """{name: gradient} of FLA's Triton kernels, of `plain` calls, in the shapes and dtypes of the call's tensors."""
    from fla.ops.kda import chunk_kda

    turned = call["state_v_first"]
    given = d_final if d_final is None or not turned else d_final.mT.contiguous()
    with monkeypatch.context() as patched:
        patched.setenv("FLA_KDA_CUTE", "0")
        patched.setenv("FLA_FLASH_KDA", "0")
        with dispatch_log.capture() as seen:
            _, found = differentiate(chunk_kda, plain(call), d_out.contiguous(), given)
    assert not seen
    if turned:
        found["initial_state"] = found["initial_state"].mT
    return {name: found[name].reshape(call[name].shape).to(call[name].dtype) for name in differentiable(call)}


def differentiable(call):
    """Names of the call's tensors that have a gradient."""
    ignored = () if call["use_gate_in_kernel"] else SUMS
    return [name for name in DIFFERENTIABLE if call[name] is not None and name not in ignored]


def precise(call, d_out, d_final, at_once=32):
    """{name: gradient} in double precision; heads that share no q and k in parts, so that memory suffices."""
    if call["q"].shape[2] != call["v"].shape[2]:
        return backward.gradients(d_out, d_final, rounded=False, **call)
    parts = []
    for first in range(0, call["v"].shape[2], at_once):
        few = slice(first, first + at_once)
        some = of_heads(call, few)
        states = None if d_final is None else d_final[:, few]
        parts.append(backward.gradients(d_out[:, :, few], states, rounded=False, **some))
    names = [name for name in parts[0] if parts[0][name] is not None]
    joined = {name: torch.cat([part[name] for part in parts], ON_HEADS[name]) for name in names}
    return {name: grad.reshape(call[name].shape) for name, grad in joined.items()}


def of_heads(call, heads):
    """Some heads alone."""
    some = {}
    for name, axis in ON_HEADS.items():
        x = call[name]
        if x is not None:
            x = x.reshape(call["v"].shape[2], -1) if name in SUMS else x
            some[name] = x[(slice(None),) * axis + (heads,)]
    return call | some


# ---- errors ------------------------------------------------------------------------------------------------------------
def errors(found, wanted):
    """{name: relative error}."""
    assert all(found[name].isfinite().all() for name in wanted), [name for name in wanted if not found[name].isfinite().all()]
    return {name: relative_error(found[name], grad) for name, grad in wanted.items()}


def squares(grads, heads):
    """{name: [heads] sums of squares}."""
    found = {}
    for name, grad in grads.items():
        x = grad.reshape(heads, -1) if name in SUMS else grad.movedim(ON_HEADS[name], 0).reshape(heads, -1)
        found[name] = x.double().square().sum(1)
    return found


class Pool:
    """Errors over heads and draws: the root mean square of each head's relative error; of sums over tokens, of all together.

    Heads whose gradient is nothing beside that of the others have no say.
    """

    def __init__(self):
        self.error, self.size = {}, {}

    def add(self, found, wanted, heads):
        differences = {name: found[name].double() - grad for name, grad in wanted.items()}
        assert all(x.isfinite().all() for x in differences.values())
        error, size = squares(differences, heads), squares(wanted, heads)
        for name in wanted:
            weight = torch.ones_like(size[name]) if name in SUMS else size[name]
            real = size[name] > 1e-12 * size[name].max()
            self.error[name] = self.error.get(name, 0.0) + (error[name][real] / weight[real]).sum().item()
            self.size[name] = self.size.get(name, 0.0) + (size[name][real] / weight[real]).sum().item()

    @property
    def errors(self):
        return {name: (self.error[name] / self.size[name]) ** 0.5 for name in self.error if self.size[name] > 0}


def ratios(ours, theirs):
    return {name: ours[name] / theirs[name] for name in ours if theirs.get(name)}


def table(title, ours, theirs):
    """What a test prints."""
    cells = [f"{name} {ours[name]:.1e}/{theirs[name]:.1e}={ours[name] / max(theirs[name], 1e-300):.2f}" for name in ours]
    print(f"\n{title}: " + "  ".join(cells))


def equal(one, other):
    """Whether two results of differentiate agree to the bit; NaN agrees with nothing."""
    (results, grads), (results2, grads2) = one, other
    same = lambda a, b: a is b is None or (a.dtype == b.dtype and torch.equal(a, b))  # noqa: E731
    return (
        all(map(same, results, results2))
        and grads.keys() == grads2.keys()
        and all(same(grads[name], grads2[name]) for name in grads)
    )


def padded(call, before, behind):
    """A packed call with rows of NaN before its first sequence and behind its last one."""
    rows = {}
    for name in TOKEN_AXIS:
        x = call[name]
        pad = lambda n: torch.full((1, n, *x.shape[2:]), float("nan"), dtype=x.dtype, device=x.device)  # noqa: E731, B023
        rows[name] = torch.cat([pad(before), x, pad(behind)], 1)
    return call | rows | {"cu_seqlens": call["cu_seqlens"] + before}


def kind_of(kind, **changes):
    return replace(kind, **changes)


PACKED = kind_of(FLASHKDA, cu_seqlens="int64")


def small(found, call, grads, limit=8e-3):
    """Whether gradients are right; a wrong one is off by 0.1 and more."""
    wanted = {name: x for name, x in precise(call, *grads).items() if x is not None and x.any()}
    seen = errors(found, wanted)
    assert all(value < (5 * limit if name in SUMS else limit) for name, value in seen.items()), seen


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    """Of the tests of a module that imports it: what is not ours raises, and FLA's kernels do not tune themselves."""
    monkeypatch.setenv("FLA_KDA_CUTE_STRICT", "1")
    monkeypatch.setenv("FLA_FLASH_KDA", "0")
    assert register()
    untuned(monkeypatch)
    yield
    gc.collect()
