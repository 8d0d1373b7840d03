"""Tensors whose elements are not what lies at their address never reach a kernel, whatever calls came before.

chunk_kda of the installed FLA on CPU tensors that pass for an H200's; launches are kept instead of made.
"""

import types

import pytest
import torch
from calls import FLAS, H200, prefill, tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fla_kda_backend import dispatch_log, eligibility, facts, memo, op

SHAPE = {"batch": 1, "tokens": 16, "heads": 1, "dt_bias": tensor(1, 128, dtype=torch.float32, device="cpu")}
TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")


@pytest.fixture
def ask(monkeypatch, kda):
    """ask(arguments) is who ran chunk_kda of them: "ours" or "FLA's Triton", and the log's code."""
    from fla_kda_backend import backend

    launched = []
    monkeypatch.setattr(facts, "device_facts", lambda device: (H200.capability, H200.sm_count))
    monkeypatch.setattr(op, "launcher", lambda spec: lambda *arguments: launched.append(arguments))
    monkeypatch.setattr(op, "_current_device", lambda: None)  # as the index of a CPU
    monkeypatch.setattr(op, "_stream_handle", lambda index: 7)
    monkeypatch.setattr(backend, "_warned", set())
    fla_ran = []
    monkeypatch.setattr(kda.chunk.ChunkKDAFunction, "apply", lambda *arguments: fla_ran.append(FLAS) or (FLAS, None))

    def ask(arguments):
        launched.clear()
        fla_ran.clear()
        with dispatch_log.capture() as seen:
            kda.chunk.chunk_kda(**arguments)
        assert len(launched) + len(fla_ran) == 1
        (record,) = seen
        return ("ours" if launched else FLAS), record.code

    with torch.no_grad():
        yield ask


OURS = ("ours", "accepted")


def freed(x, bytes_left=0):
    x = x.clone()
    x.untyped_storage().resize_(bytes_left)
    return x


def view_of_freed(x):
    flat = torch.zeros(x.numel() + 64, dtype=x.dtype)
    view = flat[64:].view(x.shape)
    flat.untyped_storage().resize_(0)
    assert view.data_ptr() not in (0, x.data_ptr())  # torch adds the offset to no address
    return view


# An odd tensor like x, and whether nothing but its address tells it from x.
ODD = {
    "negative": torch._neg_view,
    "functional": torch._to_functional_tensor,
    "zero": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "freed": freed,
}
FREED = {"all": freed, "all but 2 bytes": lambda x: freed(x, x.numel() * x.itemsize - 2), "of a view": view_of_freed}


@pytest.mark.parametrize("before", [0, 1, 4], ids=["new", "remembered", "recent"])
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", TENSORS)
def test_odd_tensors_are_not_read(ask, name, kind, before):
    arguments = prefill(device="cpu", **SHAPE)
    odd = arguments | {name: ODD[kind](arguments[name])}
    if kind == "negative" and before and arguments[name].dtype not in memo.NEGATABLE:
        pytest.skip("no public function of torch makes it, and fingerprints do not ask")
    for _ in range(before):
        assert ask(arguments) == OURS
    for _ in range(3):
        who, code = ask(odd)
        assert who == FLAS and code in ("memory", "exception")
        assert code == "memory" or before and kind != "negative"
    assert ask(arguments) == OURS  # nothing was learnt from the odd ones


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32])
def test_the_imaginary_part_of_a_conjugate_is_not_read(ask, dtype):
    arguments = prefill(device="cpu", **SHAPE)
    z = torch.zeros(arguments["beta"].shape, dtype=dtype)
    beta = z.conj().imag
    plain = torch.view_as_real(z)[..., 1]
    assert beta.is_neg() and beta.stride() == plain.stride() and beta.dtype == plain.dtype
    accepted = OURS if beta.dtype == torch.float32 else (FLAS, "input_dtype")
    for _ in range(3):
        assert ask(arguments | {"beta": plain}) == accepted
        assert ask(arguments | {"beta": beta}) in ((FLAS, "memory"), (FLAS, "input_dtype"))


@pytest.mark.parametrize("kind", FREED)
def test_freed_storages_have_no_elements(kind):
    x = torch.zeros(4, 64)
    assert facts.oddity(x) is None and facts.oddity(x[1:, ::2]) is None and facts.oddity(x[4:]) is None
    assert facts.oddity(FREED[kind](x)).startswith("a storage of ")
    assert facts.oddity(FREED[kind](x)[:0]) is None


def test_every_kind_of_odd_tensor_is_named():
    x = torch.zeros(4, dtype=torch.complex64)
    found = {name: facts.oddity(odd(x)) for name, odd in ODD.items()} | {"conjugate": facts.oddity(x.conj())}
    keys = {"negative": "Negative", "functional": "Functionalize", "zero": "ZeroTensor", "conjugate": "Conjugate"}
    assert all(key in found[name] for name, key in keys.items())
    with FakeTensorMode():
        assert "Python" in facts.oddity(torch.zeros(4))
    with torch.inference_mode():
        assert facts.oddity(torch.zeros(4)) is None
    for plain in (torch.zeros(4), torch.zeros(4, requires_grad=True), torch.nn.Parameter(x), x.real, x.imag, torch.zeros(0)):
        assert facts.oddity(plain) is None


def test_a_launch_on_a_gpu_knows_an_offset_from_an_address(ask):
    """Guards and fingerprints do not see that a storage was freed; a view into it has its offset as its address."""
    from fla_kda_backend import backend

    arguments = prefill(device="cpu", **SHAPE)
    assert ask(arguments) == OURS
    verdict = backend.decide((), arguments, *backend.identity((), arguments))
    assert verdict.launch.lowest == 2 and op.LOWEST_ADDRESS > 2**20
    verdict.launch.lowest = 4096  # a CPU's addresses may be lower than a GPU's
    for name in TENSORS:
        # The launch raises; from then on such calls are decided anew, and the rule sees it.
        assert ask(arguments | {name: view_of_freed(arguments[name])}) in ((FLAS, "exception"), (FLAS, "memory"))
    assert ask(arguments) == OURS


# ---- torch.func and dispatch modes ------------------------------------------------------------------------------------
TRANSFORMS = {
    "vmap": lambda f, x: torch.vmap(f)(x),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).float().sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
}


@pytest.mark.parametrize("before", [0, 1, 4], ids=["new", "remembered", "recent"])
@pytest.mark.parametrize("captured", [False, True], ids=["its own tensor", "tensors from outside"])
@pytest.mark.parametrize("kind", TRANSFORMS)
def test_transforms_of_torch_func_are_declined(ask, kind, captured, before):
    arguments = prefill(device="cpu", **SHAPE)
    for _ in range(before):
        assert ask(arguments) == OURS
    seen = []

    def model(q):
        q = q if kind != "vmap" else q.reshape(1, 16, 1, 128)
        seen.append(ask(arguments if captured else arguments | {"q": q}))
        return q * 1

    TRANSFORMS[kind](model, arguments["q"].expand(3, 1, 16, 1, 128) if kind == "vmap" else arguments["q"])
    assert seen == [(FLAS, "intercepted")]
    assert ask(arguments) == OURS


@pytest.mark.parametrize("before", [0, 1, 4], ids=["new", "remembered", "recent"])
@pytest.mark.parametrize("mode", [FlopCounterMode, lambda display: FakeTensorMode()], ids=["counter", "fake"])
def test_dispatch_modes_are_declined(ask, mode, before):
    arguments = prefill(device="cpu", **SHAPE)
    for _ in range(before):
        assert ask(arguments) == OURS
    with mode(display=False):
        assert ask(arguments) == (FLAS, "intercepted")
    assert ask(arguments) == OURS


def test_wrappers_that_outlive_their_transform(ask):
    arguments = prefill(device="cpu", **SHAPE)
    kept = []
    torch.func.functionalize(lambda q: kept.append(q) or q * 1)(arguments["q"])
    torch.func.grad(lambda q: kept.append(q) or q.float().sum())(arguments["q"])
    for wrapper in kept:
        for before in (False, True):
            memo.clear()
            assert not before or ask(arguments) == OURS
            assert ask(arguments | {"q": wrapper})[0] == FLAS


def test_fake_meta_and_lazy_tensors_are_declined(ask):
    arguments = prefill(device="cpu", **SHAPE)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    for name in TENSORS:
        decision = eligibility.check(eligibility.parse((), arguments | {name: fake[name]}), H200)
        assert decision.code == "tensor_type"
        decision = eligibility.check(eligibility.parse((), arguments | {name: arguments[name].to("meta")}), H200)
        assert decision.code == "one_device"
    assert facts.gather(types.SimpleNamespace(q=torch.zeros(1))).intercepted is None


def test_subclasses_are_declined(ask):
    from torch.testing._internal.two_tensor import TwoTensor

    arguments = prefill(device="cpu", **SHAPE)
    for name in TENSORS:
        assert ask(arguments) == OURS
        assert ask(arguments | {name: TwoTensor(arguments[name], arguments[name])}) == (FLAS, "tensor_type")


# ---- FlashKDA's call ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["q", "beta", "A_log", "initial_state", "out"])
@pytest.mark.parametrize("kind", ODD)
def test_fwd_raises(ask, monkeypatch, kind, name):
    monkeypatch.setattr(op, "_check_fwd", lambda *arguments: None)  # which asks for a GPU
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    given = prefill(device="cpu", **SHAPE)
    given = {key: given[key] for key in (*TENSORS, "lower_bound")}
    given |= {"scale": 0.1, "out": torch.empty_like(given["v"])}
    odd = given | {name: ODD[kind](given[name])}
    with pytest.raises(ValueError, match="elements in memory as they are"):
        op.fwd(**odd)
    with pytest.raises(ValueError, match="torch.func's functionalize"):
        torch.func.functionalize(lambda x: op.fwd(**given) or x)(torch.zeros(1))
    op.fwd(**given)
    if kind != "negative" or name in ("A_log", "initial_state"):  # _check_fwd refuses out, and torch makes no other
        with pytest.raises((ValueError, RuntimeError)):
            op.fwd(**odd)


def test_freed_storages_do_not_count_against_the_kernels(ask):
    """However often a caller hands over tensors without memory, calls with memory still run here."""
    from fla_kda_backend import backend

    arguments = prefill(device="cpu", **SHAPE)
    for _ in range(5):
        assert ask(arguments) == OURS
        verdict = backend.decide((), arguments, *backend.identity((), arguments))
        verdict.launch.lowest = 4096
        assert ask(arguments | {"q": view_of_freed(arguments["q"])})[0] == FLAS
    assert ask(arguments) == OURS
