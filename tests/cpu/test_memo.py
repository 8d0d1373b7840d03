"""A remembered verdict: the same as a new one, for exactly the calls that it fits, without their tensors, and fast."""

import gc
import os
import statistics
import threading
import time
import types
import warnings
import weakref
from pathlib import Path

import interpreters
import pytest
import torch
from calls import H200, prefill, tensor

import fla_kda_backend
from fla_kda_backend import config, dispatch_log, facts, memo, op, planning
from fla_kda_backend.call import PARAMETERS, POSITIONAL


@pytest.fixture
def backend(monkeypatch):
    """The backend, to which every device is an H200; the launches of its kernels are kept in .launched."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FLA warns that there is no GPU
        from fla_kda_backend import backend

    launched = []
    monkeypatch.setattr(facts, "device_facts", lambda device: (H200.capability, H200.sm_count))
    monkeypatch.setattr(op, "launcher", lambda spec: lambda *arguments: launched.append((spec, arguments)))
    monkeypatch.setattr(op, "_current_device", lambda: None)  # as the index of a CPU
    monkeypatch.setattr(op, "_stream_handle", lambda index: 7)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: H200.capability)
    with torch.no_grad():
        yield types.SimpleNamespace(module=backend, launched=launched, decided=count(monkeypatch, backend))


def count(monkeypatch, backend):
    """One entry for each call that the rules were asked about."""
    anew, seen = backend.decide_anew, []
    monkeypatch.setattr(backend, "decide_anew", lambda *call: seen.append(True) or anew(*call))
    return seen


def decide(backend, *args, **kwargs):
    return backend.module.decide(args, kwargs, *backend.module.identity(args, kwargs))


def fingerprint(*args, **kwargs):
    from fla_kda_backend.backend import identity

    return memo.fingerprint(*identity(args, kwargs))


def chunk_kda(**arguments):
    from fla.ops.kda import chunk_kda

    import fla_kda_backend

    assert fla_kda_backend.register()
    return chunk_kda(**arguments)


CALLS = {
    "accepted": {},
    "packed": {"batch": 1, "cu_seqlens": tensor(3, dtype=torch.int32, device="cpu"), "initial_state": None},
    "scale": {"scale": 0.25, "dt_bias": tensor(4, 128, dtype=torch.float32, device="cpu")},
    "no state": {"output_final_state": False, "initial_state": None},
}
DECLINED = {"head_dim": {"dim": 64}, "flag_type": {"safe_gate": "yes"}, "unknown_argument": {"window": 4}}


@pytest.mark.parametrize("changes", CALLS.values(), ids=CALLS)
def test_a_hit_is_what_a_miss_was(backend, changes):
    arguments = [prefill(device="cpu", **changes) for _ in range(2)]
    with dispatch_log.capture() as seen:
        found = [chunk_kda(**each) for each in arguments]
        memo.clear()
        found.append(chunk_kda(**arguments[1]))
    assert len(backend.decided) == 2
    first, hit, again = seen
    assert first.outcome == "accepted" and first[1:] == hit[1:] == again[1:]
    assert 0 < first.time <= hit.time <= again.time and {*hit.to_dict()} == {*first.to_dict()}
    assert len({(out.shape, out.dtype, state is None or (state.shape, state.dtype)) for out, state in found}) == 1

    (spec, one), *others = backend.launched
    for other_spec, other in others:
        assert other_spec == spec and one[14:] == other[14:]  # all but addresses
    second = arguments[1]
    order = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    addresses = [0 if second[name] is None else second[name].data_ptr() for name in order]
    cu_seqlens = second.get("cu_seqlens")
    for (_, told), (out, state) in zip(others, found[1:]):
        assert list(told[:8]) == addresses and told[10] == (0 if cu_seqlens is None else cu_seqlens.data_ptr())
        assert told[8:10] == (0 if state is None else state.data_ptr(), out.data_ptr()) and told[-1] == 7


@pytest.mark.parametrize("name", DECLINED)
def test_a_declined_hit_is_what_a_miss_was(backend, name):
    verifier = backend.module.KdaCuteBackend().chunk_kda_verifier
    dispatch_log.clear()
    with dispatch_log.capture() as seen:
        answers = [verifier(**prefill(**DECLINED[name])) for _ in range(3)]
    assert len(backend.decided) == 1
    assert answers == [(False, f"{name}: {seen[0].message}")] * 3
    assert [record[1:] for record in seen] == [seen[0][1:]] * 3
    assert [row.count for row in dispatch_log.summary()] == [3]


def test_positional_and_named_arguments_reach_the_same_kernel_arguments(backend):
    arguments = prefill(device="cpu")
    given = [arguments.pop(name) for name in POSITIONAL[:5]]
    implementation = backend.module.KdaCuteBackend().chunk_kda
    for _ in range(2):
        implementation(*given, **arguments)
        implementation(**dict(reversed([*zip(POSITIONAL, given), *arguments.items()])))
    assert len(backend.decided) == 2
    addresses = [told[:8] for _, told in backend.launched]
    assert len(addresses) == 4 and len({*addresses}) == 1 and addresses[0][0] == given[0].data_ptr()


@pytest.mark.parametrize("before", [1, 4], ids=["remembered", "recent"])
@pytest.mark.parametrize("name", ["q", "beta", "initial_state", "dt_bias"])
def test_calls_of_other_strides_have_verdicts_of_their_own(backend, name, before):
    arguments = prefill(device="cpu", dt_bias=tensor(4, 128, dtype=torch.float32, device="cpu"))
    x = arguments[name]
    strided = torch.zeros(x.mT.shape, dtype=x.dtype).mT
    assert strided.shape == x.shape and not strided.is_contiguous()
    place = {"q": 0, "beta": 4, "dt_bias": 6, "initial_state": 7}[name]
    for _ in range(2):
        for other, read in ((x, True), (strided, False)):
            for _ in range(before):
                chunk_kda(**arguments | {name: other})
                _, told = backend.launched[-1]
                assert (told[place] == other.data_ptr()) == read and told[1] == arguments["k"].data_ptr()
                assert told[15:17] == (4 * 128, 128)  # of q, or of its copy
    assert len(backend.decided) == 2


@pytest.mark.parametrize("before", [1, 4], ids=["remembered", "recent"])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "initial_state", "A_log", "dt_bias"])
def test_addresses_are_looked_at_in_each_call(backend, name, before):
    arguments = prefill(device="cpu")
    x = arguments[name]
    unaligned = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    place = {"q": 0, "k": 1, "v": 2, "g": 3, "A_log": 5, "dt_bias": 6, "initial_state": 7}[name]
    for _ in range(before):
        chunk_kda(**arguments)
    for other, read in ((unaligned, False), (x, True), (unaligned, False)):
        chunk_kda(**arguments | {name: other})
        _, told = backend.launched[-1]
        assert (told[place] == other.data_ptr()) == read and told[place] % 16 == 0
    assert len(backend.decided) == 1


def test_the_host_copy_of_cu_seqlens_is_read_in_each_call(backend):
    """A fingerprint has no values: how many intermediate states there are is counted anew."""
    arguments = prefill(device="cpu", batch=1, tokens=200, initial_state=None, return_intermediate_states=True)
    arguments["cu_seqlens"] = tensor(3, dtype=torch.int64, device="cpu")
    for offsets, chunks in (([0, 64, 200], 4), ([0, 1, 200], 5), ([0, 200, 200], 4), ([0, 1, 2], 2)):
        with torch.inference_mode():
            out, state, states = chunk_kda(**arguments, cu_seqlens_cpu=torch.tensor(offsets))
        assert states.shape == (1, chunks, 4, 128, 128) and state.shape == (2, 4, 128, 128)
        assert backend.launched[-1][1][14] == states.data_ptr()
    assert len(backend.decided) == 1


# ---- what a fingerprint holds --------------------------------------------------------------------------------------
FULL = {
    **{name: tensor(2, 3, 4, 128) for name in "qkvg"},
    "beta": tensor(2, 3, 4),
    "scale": 1.0,
    "initial_state": tensor(2, 4, 128, 128),
    **dict.fromkeys(
        ("output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel",
         "allow_neg_eigval", "safe_gate", "disable_recompute", "return_intermediate_states", "state_v_first", "use_graph",
         "transpose_state_layout"),
        True,
    ),
    "lower_bound": -5.0,
    "cu_seqlens": tensor(3, dtype=torch.int32),
    "cu_seqlens_cpu": tensor(3, dtype=torch.int32),
    "cp_context": None,
    "max_num_seqs": 2,
    "A_log": tensor(4, dtype=torch.float32),
    "dt_bias": tensor(512, dtype=torch.float32),
    "chunk_size": 64,
}  # fmt: skip
TENSORS = [name for name, value in FULL.items() if isinstance(value, torch.Tensor)]
FLOATS = [name for name in TENSORS if FULL[name].dtype.is_floating_point]


def test_every_parameter_is_tried():
    assert set(FULL) == set(PARAMETERS)


def test_equal_calls_have_one_fingerprint():
    twin = {name: torch.empty_like(value) if name in TENSORS else value for name, value in FULL.items()}
    assert fingerprint(**FULL) == fingerprint(**twin) and hash(fingerprint(**FULL)) == hash(fingerprint(**twin))


def recent(*args, **kwargs):
    """Whether the last verdict, on FULL, is given to the call."""
    from fla_kda_backend import backend

    names, values = backend.identity((), FULL)
    memo.keep_recent(names, values, memo.fingerprint(names, values), "verdict")
    return memo.recent(*backend.identity(args, kwargs)) == "verdict"


@pytest.fixture
def torchs_guards():
    if memo.TensorGuards is None:
        pytest.skip("this torch has no TensorGuards")


def test_the_last_verdict_is_given_to_an_equal_call(torchs_guards):
    twin = {name: torch.empty_like(value) if name in TENSORS else value for name, value in FULL.items()}
    assert recent(**FULL) and recent(**twin)
    assert not recent(**dict(reversed(FULL.items()))) and not recent(*FULL.values())
    with torch.no_grad():
        names, values = FULL.keys(), FULL.values()
        assert memo.recent([0, *names], [*values]) is None


def others_of(name):
    x = FULL[name]
    others = {
        "longer": tensor(*x.shape[:-1], x.shape[-1] + 1, dtype=x.dtype),
        "another rank": tensor(1, *x.shape, dtype=x.dtype),
        "dtype": x.to(torch.float64),
        "device": tensor(*x.shape, dtype=x.dtype, device="cpu"),
        "layout": torch.zeros(x.shape, dtype=x.dtype).to_sparse(),
        "strides": torch.empty_strided(x.shape, [2 * stride for stride in x.stride()], dtype=x.dtype, device=x.device),
        "Parameter": torch.nn.Parameter(x, requires_grad=False),
        "None": None,
    }
    if name in FLOATS:
        others["requires_grad"] = torch.empty_like(x).requires_grad_()
        others["Parameter that requires grad"] = torch.nn.Parameter(x)
    return others


@pytest.mark.parametrize("name", TENSORS)
def test_the_last_verdict_is_given_to_no_other_tensor(name, torchs_guards):
    for kind, other in others_of(name).items():
        assert not recent(**FULL | {name: other}), kind


@pytest.mark.parametrize("name", [name for name in FULL if name not in TENSORS])
def test_the_last_verdict_is_given_to_no_other_value(name, torchs_guards):
    for value in (True, False, 1, 0, 1.0, 0.0, -0.0, 2, -5, -5.0, None, "", "0.0", tensor(1), object()):
        same = type(value) is type(FULL[name]) and value == FULL[name]
        assert recent(**FULL | {name: value}) == same, value


@pytest.mark.parametrize("kind, twice", [
    ("nested", True), *(pytest.param(*rest, marks=pytest.mark.slow) for rest in (
        ("nested", False), ("sparse", False), ("sparse", True), ("compressed", False), ("compressed", True))),
])  # fmt: skip
def test_tensors_without_strides_end_no_process(kind, twice, torchs_guards):
    """torch's check of them does; so a process of its own, as the call after others, and as others themselves."""
    odd = {
        "nested": "torch.nested.nested_tensor([torch.zeros(5, 2, 128), torch.zeros(8, 2, 128)])",
        "sparse": "torch.zeros(16, 256).to_sparse()",
        "compressed": "torch.zeros(16, 256).to_sparse_csr()",
    }[kind]
    interpreters.result(
        "import json, torch\n"
        "from fla_kda_backend import backend, dispatch_log\n"
        "plain = {name: torch.zeros(1, 4, 2, 128) for name in 'qkvg'}\n"
        "plain |= dict(beta=torch.zeros(1, 4, 2), scale=1.0, safe_gate=True)\n"
        f"odd = plain | {{'q': {odd}}}\n"
        "def ask(call):\n"
        "    return backend.decide((), call, *backend.identity((), call)).decision.accepted\n"
        f"calls = [odd] * 4 if {twice} else [plain] * 3 + [odd] * 2\n"
        "assert not any(map(ask, calls))\n"
        "print(json.dumps(None))",
        PYTHONPATH=Path(fla_kda_backend.__file__).parent.parent,
        PYTHONWARNINGS="ignore",
    )  # fmt: skip


def test_forward_mode_gradients_count(monkeypatch):
    q, k = FULL["q"], FULL["k"]
    outside = fingerprint(q, k)
    with torch.autograd.forward_ad.dual_level():
        assert fingerprint(q, k) != outside
    assert fingerprint(q, k) == outside


def test_a_zero_is_left_to_fingerprints(torchs_guards):
    """0.0 equals -0.0."""
    from fla_kda_backend import backend

    memo.clear()
    names, values = backend.identity((), FULL | {"scale": 0.0})
    memo.keep_recent(names, values, memo.fingerprint(names, values), "verdict")
    assert memo.recent(names, values) is None


@pytest.mark.parametrize("name", TENSORS)
def test_each_property_of_each_tensor_counts(name):
    others = others_of(name)
    keys = {kind: fingerprint(**FULL | {name: other}) for kind, other in others.items()}
    assert len({fingerprint(**FULL), *keys.values()}) == len(keys) + 1
    left_out = {other: value for other, value in FULL.items() if other != name}
    assert fingerprint(**left_out) not in {fingerprint(**FULL), *keys.values()}


@pytest.mark.parametrize("name", [name for name in FULL if name not in TENSORS])
def test_type_and_value_of_each_plain_argument_count(name):
    values = [True, False, 1, 0, 1.0, 0.0, -0.0, 2, -5, -5.0, None, "", "0.0", tensor(1)]
    keys = {fingerprint(**FULL | {name: value}) for value in values}
    assert len(keys) == len(values)


def test_names_places_and_modes_count(monkeypatch):
    q, k = FULL["q"], FULL["k"]
    keys = [fingerprint(q, k), fingerprint(q, k=k), fingerprint(q, q=k), fingerprint(q=q, k=k), fingerprint(q=q, v=k)]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            keys.append(fingerprint(q, k))
    for variable in (config.MODE, config.UNTESTED):
        for value in ("", "0", "1"):
            monkeypatch.setenv(variable.name, value)
            keys.append(fingerprint(q, k))
        monkeypatch.delenv(variable.name)
    assert len(set(keys)) == len(keys) and fingerprint(q, k) == keys[0]


class Subclass(torch.Tensor):
    pass


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


@pytest.mark.parametrize("value", [
    torch.zeros(1).as_subclass(Subclass), types.SimpleNamespace(cu_seqlens=None), [0, 1], (1, 2), 1j, torch.float32, object(),
    nested(), type("Number", (int,), {})(3),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_what_may_be_more_than_it_shows_has_no_fingerprint(backend, value):
    assert fingerprint(**FULL | {"cp_context": value}) is None
    for _ in range(2):
        assert not decide(backend, **prefill(cp_context=value)).decision.accepted
    assert len(backend.decided) == 2 and not memo._verdicts


# ---- what is not remembered ----------------------------------------------------------------------------------------
def test_switches_between_calls(backend, monkeypatch):
    arguments = prefill(device="cpu")
    gather = facts.gather
    monkeypatch.setattr(facts, "gather", lambda call: gather(call)._replace(untested=config.UNTESTED.get()))
    for variable in (config.MODE, config.UNTESTED):
        monkeypatch.setenv(variable.name, "")  # to be undone in the end
    with dispatch_log.capture() as seen:
        for mode, untested in (("auto", "1"), ("exact", "1"), ("auto", "0"), ("exact", "1"), ("auto", "1")):
            os.environ[config.MODE.name], os.environ[config.UNTESTED.name] = mode, untested
            decide(backend, **arguments).log.record()
    kernels = [dict(record.params).get("arithmetic") for record in seen]
    assert kernels == [None, "exact", None, "exact", None]
    assert len(backend.decided) == 3


def test_strict_mode_between_calls(backend, monkeypatch):
    verifier = backend.module.KdaCuteBackend().chunk_kda_verifier
    arguments = prefill(dim=64)
    assert not verifier(**arguments)[0]
    monkeypatch.setenv(config.STRICT.name, "1")
    assert verifier(**arguments) == (True, None)
    with pytest.raises(backend.module.StrictModeError, match="head_dim"):
        backend.module.KdaCuteBackend().chunk_kda(**arguments)
    monkeypatch.delenv(config.STRICT.name)
    assert not verifier(**arguments)[0]


def test_environment_that_changes_during_a_decision(backend, monkeypatch):
    arguments = prefill(device="cpu")

    def plan(call, facts, plan=planning.plan):
        monkeypatch.setenv(config.MODE.name, "exact")  # as another thread might
        return plan(call, facts)

    monkeypatch.setattr(planning, "plan", plan)
    decide(backend, **arguments)
    assert not memo._verdicts


def test_failed_rules_are_tried_again(backend, monkeypatch):
    gather = facts.gather
    monkeypatch.setattr(facts, "gather", lambda call: 1 / 0)
    assert decide(backend, **prefill()).decision.code == "internal_error"
    monkeypatch.setattr(facts, "gather", gather)
    assert decide(backend, **prefill()).decision.accepted


def test_failed_preparation_is_tried_again(backend, monkeypatch):
    arguments = prefill(device="cpu")
    monkeypatch.setenv(config.STRICT.name, "1")
    launcher = op.launcher
    monkeypatch.setattr(op, "launcher", lambda spec: 1 / 0)
    for _ in range(2):
        with dispatch_log.capture() as seen, pytest.raises(ZeroDivisionError):
            chunk_kda(**arguments)
        assert [record.outcome for record in seen] == ["failed"] and seen[0].shapes[0] == arguments["q"].shape
    monkeypatch.setattr(op, "launcher", launcher)
    chunk_kda(**arguments)
    assert len(backend.launched) == len(backend.decided) == 1


# ---- memory and threads --------------------------------------------------------------------------------------------
def test_no_tensor_is_kept(backend):
    arguments = prefill(device="cpu", A_log=torch.nn.Parameter(torch.zeros(4)))
    for _ in range(2):
        result = chunk_kda(**arguments)
    assert len(memo._verdicts) == 1
    tensors = [*result, *arguments.values()]
    held = [weakref.ref(value) for value in tensors if isinstance(value, torch.Tensor)]
    del arguments, result, tensors
    gc.collect()
    assert [reference() for reference in held] == [None] * 10


def test_a_declined_call_keeps_no_tensor(backend):
    arguments = prefill(dim=64)
    backend.module.KdaCuteBackend().chunk_kda_verifier(**arguments)
    assert len(memo._verdicts) == 1
    held = weakref.ref(arguments["q"])
    del arguments
    gc.collect()
    assert held() is None


def test_the_memo_is_bounded(backend, monkeypatch):
    monkeypatch.setattr(memo, "LIMIT", 8)
    for tokens in range(1, 30):
        assert decide(backend, **prefill(tokens=tokens)).decision.accepted
        assert 1 <= len(memo._verdicts) <= 8


def test_threads(backend, monkeypatch):
    monkeypatch.setattr(memo, "LIMIT", 4)
    wrong = []

    def work(number):
        arguments = prefill(scale=float(number), tokens=number)
        for _ in range(200):
            verdict = decide(backend, **arguments)
            content = verdict.log.content
            if content[-1][0] != number or content[7][0][1] != number:
                wrong.append(content)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


# ---- time ----------------------------------------------------------------------------------------------------------
def microseconds(function, number=500):
    times = []
    for _ in range(number):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def test_host_time_of_a_call(backend):
    arguments = prefill(device="cpu", batch=1, tokens=16, heads=1)
    chunk_kda(**arguments)
    from fla.ops.kda import chunk_kda as entry_point

    def call():
        entry_point(**arguments)
        backend.launched.clear()

    def call_anew():
        memo.clear()
        call()

    remembered = min(microseconds(call) for _ in range(5))
    assert len(backend.decided) == 1
    assert remembered < 0.6 * min(microseconds(call_anew) for _ in range(5))
    assert remembered < 100  # a fifth of that where this was written; the machine may be slower, and busy


def test_host_time_of_a_repeated_record(backend):
    log = decide(backend, **prefill()).log
    assert min(microseconds(log.record) for _ in range(5)) < 5
