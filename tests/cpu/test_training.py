"""Calls that need gradients, through FLA's own dispatch and autograd, with both launches emulated on the CPU."""

import gc
import types
import weakref

import emulated_launch
import pytest
import torch
from call_table import BY_GATE, KIMI, Case, Kind
from calls import H200, prefill
from emulated_launch import named
from golden import relative_error
from kda_calls import call_of
from torch.utils.checkpoint import checkpoint

import fla_kda_backend
from fla_kda_backend import backend, backward_geometry, config, dispatch_log, facts, failures, geometry, memo, op, planning
from fla_kda_backend.call import DEVICE_INPUTS, parse
from fla_kda_backend.compiling import background
from fla_kda_backend.kernels.families import FAMILIES
from fla_kda_backend.reference import gold

NAMES = [name for name in DEVICE_INPUTS if name != "cu_seqlens"]
SHORT = {"tail": 17, "before": 64, "regime": "normal"}
KINDS = {
    **BY_GATE,
    "kimi": KIMI,
    "no parameters": Kind(a_log=None, dt_bias=None),
    "bf16 parameters": Kind(gate="softplus", a_log="bf16", dt_bias="bf16", beta="twice", cu_seqlens="int32"),
    "fp32 inputs": Kind(gate_dtype="fp32", beta_dtype="fp32", l2norm=False, initial_state=None),
    "no final state": Kind(gate="given", a_log=None, dt_bias=None, beta="given", final_state=None, cu_seqlens="int64"),
}


@pytest.fixture
def world(monkeypatch, kda):
    """.run(**call) is FLA's chunk_kda, .launched what ran of it here, .seen the log, .fla how often FLA's own function ran."""
    monkeypatch.setattr(memo, "_verdicts", {})
    monkeypatch.setattr(memo, "_recent", None)
    monkeypatch.setattr(backend, "_failures", failures.Failures())
    monkeypatch.setattr(backend, "_warned", set())
    world = types.SimpleNamespace(launched=emulated_launch.without_gpu(monkeypatch), run=kda.chunk.chunk_kda, fla=0)
    monkeypatch.setattr(facts, "device_facts", lambda device: ((9, 0), H200.sm_count))

    def fla(*inputs):
        """What FLA launches, by double precision, with its dtypes."""
        world.fla += 1
        names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "scale", "initial_state", "output_final_state",
                 "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval",
                 "state_v_first", "cu_seqlens", "cu_seqlens_cpu", "safe_gate", "lower_bound")  # fmt: skip
        call = dict(zip(names, inputs))
        out, final = gold.forward(**call)
        return out.bfloat16(), final.float() if call["output_final_state"] else None

    monkeypatch.setattr(kda.chunk.ChunkKDAFunction, "apply", fla)
    assert fla_kda_backend.register()
    with dispatch_log.capture() as world.seen:
        yield world


def leaves(call):
    """The call with every float tensor that needs a gradient."""
    return {
        name: x.detach().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in call.items()
    }


def short(**changes):
    call = prefill(1, 80, 2, device="cpu", **changes)
    torch.manual_seed(0)
    return leaves({name: x.normal_() if name in NAMES and x is not None else x for name, x in call.items()})


def along(results, seed=1):
    """A gradient for each result."""
    generator = torch.Generator().manual_seed(seed)
    return [None if x is None else torch.randn(x.shape, generator=generator).to(x.dtype) for x in results]


def gradients(results, call, incoming):
    wanted = [name for name in NAMES if call.get(name) is not None and call[name].requires_grad]
    if not call["use_gate_in_kernel"]:
        wanted = [name for name in wanted if name not in ("A_log", "dt_bias")]
    pairs = [(x, d) for x, d in zip(results, incoming) if d is not None]
    of, d = zip(*pairs)
    found = torch.autograd.grad(of, [call[name] for name in wanted], d, allow_unused=True)
    return {name: x for name, x in zip(wanted, found) if x is not None}


def precise(call, incoming):
    """The gradients in double precision."""
    call = {name: x.detach().double() if name in NAMES and x is not None else x for name, x in call.items()}
    call = leaves(call)
    return gradients(gold.forward(**call), call, [None if d is None else d.double() for d in incoming])


def same(found, expected, call, limit=5e-3):
    for name, x in found.items():
        assert x.dtype == call[name].dtype and x.shape == call[name].shape, name
        assert relative_error(x, expected[name]) < limit, name
    return found.keys() == expected.keys()


def told(world, family="wy64_backward"):
    return [(spec, named(spec, arguments)) for spec, arguments in world.launched if spec.family == family]


def codes(world):
    return [(record.outcome, record.code) for record in world.seen]


# ---- gradients ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["whole", "fused", "transposed", "unaligned"])
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_call(world, kind, heads, layout):
    call = leaves(call_of(Case(KINDS[kind], layout=layout, heads=heads, **SHORT)))
    results = world.run(**call)
    incoming = along(results)
    assert same(gradients(results, call, incoming), precise(call, incoming), call)
    assert codes(world) == [("accepted", "accepted"), ("accepted", "backward")] and not world.fla


def test_results_have_the_bits_of_calls_without_gradients(world):
    call = short()
    with torch.no_grad():
        plain = world.run(**call)
    assert all(torch.equal(a, b) for a, b in zip(world.run(**call), plain))
    forwards = told(world, "wy64")
    assert forwards[0][0] == forwards[1][0]


@pytest.mark.parametrize("given", ["out", "final_state"])
def test_either_gradient_may_be_absent(world, given):
    call = short()
    results = world.run(**call)
    incoming = [d if name == given else None for name, d in zip(("out", "final_state"), along(results))]
    found, expected = gradients(results, call, incoming), precise(call, incoming)
    if given == "final_state":
        assert not found.pop("q").any()
    assert same(found, expected, call)


def test_only_what_is_needed_is_computed(world):
    fields = {"q": "dq", "k": "dk", "v": "dv", "g": "dg", "beta": "dbeta", "initial_state": "d_initial_state",
              "A_log": "d_a_log_sums", "dt_bias": "d_bias_sums"}  # fmt: skip
    for name in NAMES:
        world.launched.clear()
        call = {other: x.detach() if other in NAMES and other != name else x for other, x in short().items()}
        results = world.run(**call)
        incoming = along(results)
        assert list(gradients(results, call, incoming)) == [name]
        ((spec, a),) = told(world)
        assert {field for field in fields.values() if getattr(a, field)} == {fields[name]}
        assert spec.schedule.d_initial_state == (name == "initial_state")


def test_gradients_of_the_output_of_any_strides(world):
    call = short()
    for strided in (lambda d: d[:1, :1, :1, :1].expand_as(d), lambda d: d.transpose(1, 2).contiguous().transpose(1, 2),
                    lambda d: torch.cat([d, d], -1)[..., :128], lambda d: d.mT.contiguous().mT,
                    lambda d: torch.cat([d.flatten()[:1], d.flatten()])[1:].view(d.shape)):  # fmt: skip
        results = world.run(**call)
        d_out, d_final = along(results)
        incoming = [strided(d_out), d_final.mT.contiguous().mT]
        assert same(gradients(results, call, incoming), precise(call, incoming), call)
    call["q"].grad = None
    world.run(**call)[0].sum().backward()
    assert call["q"].grad.shape == call["q"].shape and not world.fla


def test_gradients_of_no_token(world):
    call = leaves(call_of(Case(Kind(), tail=0, before=0, regime="normal")))
    results = world.run(**call)
    incoming = along(results)
    found = gradients(results, call, incoming)
    assert torch.equal(found["initial_state"], incoming[1]) and not found["A_log"].any() and not world.launched
    packed = leaves(call_of(Case(Kind(cu_seqlens="int32"), tail=0, before=0, regime="normal")))
    found = gradients(world.run(**packed), packed, [None, torch.ones(3, 2, 128, 128)])
    assert torch.equal(found["initial_state"], torch.ones(3, 2, 128, 128)) and not found["dt_bias"].any()


def test_grouped_sums_are_rounded_once(world, monkeypatch):
    monkeypatch.setattr("fla_kda_backend.training.SLICE", 30)
    call = leaves(call_of(Case(Kind(), heads=4, **SHORT)))
    results = world.run(**call)
    incoming = along(results)
    found, expected = gradients(results, call, incoming), precise(call, incoming)
    for name in ("q", "k"):
        assert relative_error(found[name], expected[name]) < 1.05 * relative_error(expected[name].bfloat16(), expected[name])


# ---- segments ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("packed", [None, "int64"])
def test_segments_hand_states_on_forwards_and_gradients_backwards(world, monkeypatch, packed):
    call = leaves(call_of(Case(Kind(cu_seqlens=packed), tail=65, before=130, regime="normal")))
    results = world.run(**call)
    incoming = along(results)
    whole = gradients(results, call, incoming)
    world.launched.clear()
    record = FAMILIES["wy64_backward"].record
    monkeypatch.setattr(planning, "workspace_limit", lambda: record.workspace_bytes(2, 2))
    memo.clear()
    results = world.run(**call)
    assert same(gradients(results, call, incoming), {name: x.double() for name, x in whole.items()}, call, 1e-3)
    launches = told(world)
    segments = 1 + len(launches) // 2
    assert [spec.schedule.stage for spec, _ in launches] == ["states"] * (segments - 1) + ["all"] * segments
    at = [(2 * s, min(2 * s + 2, 7 if packed else 8)) for s in range(segments)]
    assert segments == 4 and [(a.slot_begin, a.slot_end) for _, a in launches] == at[:-1] + at[::-1]
    states, last_first = launches[: segments - 1], [a for _, a in launches[segments - 1 :]]
    kept = [a.carry_out for _, a in states]
    assert len(set(kept)) == segments - 1
    assert [a.carry_in for _, a in states][1:] == kept[:-1] and [a.carry_in for a in last_first][:-1] == kept[::-1]
    assert all(a.d_carry_out == b.d_carry_in != b.d_carry_out for a, b in zip(last_first, last_first[1:]))
    assert world.seen[-1].kernel == "wy64_backward" and dict(world.seen[-1].params)["segments"] == segments


def test_a_backward_out_of_memory_runs_in_shorter_segments(world, monkeypatch):
    call = leaves(call_of(Case(Kind(), tail=65, before=130, regime="normal")))
    results = world.run(**call)
    incoming = along(results)
    room = FAMILIES["wy64_backward"].record.workspace_bytes(2, 2)

    def allocate(shape, strides, dtype):
        if dtype == torch.uint8 and shape[0] > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(op.OnDevice, "_allocator", lambda self: allocate)
    assert same(gradients(results, call, incoming), precise(call, incoming), call)
    assert "out of memory, therefore in 4 segments" in world.seen[-1].message and not world.fla


# ---- memory ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("limit", ["2048", "0"])
@pytest.mark.parametrize("layout", ["whole", "transposed"])
def test_peak_is_what_is_allocated(world, monkeypatch, layout, limit, absent):
    monkeypatch.setenv(config.WORKSPACE_MIB.name, limit)
    call = leaves(call_of(Case(KIMI, layout=layout, tail=17, before=64, regime="normal")))
    parsed = parse((), call)
    known = H200._replace(grad_enabled=True)
    forward = geometry.geometry(parsed, planning.plan(parsed, known), "sm_90a")
    sizes = backward_geometry.backward_geometry(parsed, forward, facts.differentiated(parsed, known))
    results = world.run(**call)
    incoming = along(results)
    d_out = None if absent else incoming[0]
    expected = backward_geometry.backward_peak_bytes(parsed, sizes, d_out=not absent)
    monkeypatch.setattr("emulated_backward.launch", lambda spec, *arguments: None)
    made, empty, clone = [], torch.empty, torch.Tensor.clone
    launch = fla_kda_backend.training.Backward(sizes)
    launch.kernels = launch.states_kernels = lambda *arguments: None
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", lambda *a, **k: made.append(x := empty(*a, **k)) or x)
        patched.setattr(torch.Tensor, "clone", lambda *a, **k: made.append(x := clone(*a, **k)) or x)
        launch(tuple(call[name] for name in DEVICE_INPUTS), d_out, incoming[1])
        assert sum(x.nbytes for x in made) == expected


@pytest.mark.parametrize("heads", [6, 32, 96])
@pytest.mark.parametrize("tokens", [8192, 262_144])
def test_peak_of_long_calls(tokens, heads):
    """Gradients take 1.3 KB a token and head, scratch 2.8 KB up to the limit."""
    call = parse((), {name: grown(x) for name, x in prefill(1, tokens, heads, initial_state=None).items()})
    known = H200._replace(grad_enabled=True)
    forward = geometry.geometry(call, planning.plan(call, known), "sm_90a")
    sizes = backward_geometry.backward_geometry(call, forward, facts.differentiated(call, known))
    peak = backward_geometry.backward_peak_bytes(call, sizes)
    assert peak < 1300 * tokens * heads + min(2048 << 20, 2790 * tokens * heads) + len(sizes.segments) * heads * 65536 * 1.1
    assert backward_geometry.kept_bytes(call) == 0
    if tokens == 8192 and heads < 96:
        assert peak < 0.7 * 362 * 2**20 * heads / 6  # of FLA's


def grown(x):
    return x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


# ---- autograd ----------------------------------------------------------------------------------------------------------
def test_nothing_is_kept_but_the_inputs(world):
    call = short()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        results = world.run(**call)
    inputs = {call[name].data_ptr() for name in NAMES}
    assert {x.data_ptr() for x in kept} == inputs
    references = [weakref.ref(x) for x in results]
    del results
    gc.collect()
    assert not any(reference() is not None for reference in references)


def test_tensors_die_with_their_graph(world):
    call = short()
    for _ in range(3):
        results = world.run(**call)
        sum(x.sum() for x in results).backward()
    references = [weakref.ref(x) for name, x in call.items() if name in NAMES]
    del call, results
    gc.collect()
    assert not any(reference() is not None for reference in references) and len(memo._verdicts) == 1


@pytest.mark.parametrize("layout", ["whole", "fused", "transposed"])
def test_a_hook_may_give_other_memory(world, layout):
    call = leaves(call_of(Case(Kind(), layout=layout, **SHORT)))
    results = world.run(**call)
    incoming = along(results)
    plain = gradients(results, call, incoming)

    def moved(x):
        return torch.cat([x, x])[: len(x)].contiguous()

    with torch.autograd.graph.saved_tensors_hooks(moved, lambda x: x):
        results = world.run(**call)
    found = gradients(results, call, incoming)
    assert all(torch.equal(found[name], plain[name]) for name in plain) and not world.fla


def test_a_hook_that_gives_another_dtype_is_left_to_fla(world):
    call = short()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.float(), lambda x: x):
        results = world.run(**call)
    incoming = along(results)
    assert gradients(results, call, incoming) and world.fla == 1
    assert "was saved as" in world.seen[-1].message and not backend._failures._kept


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(world, reentrant):
    call = short()
    inputs = [call[name] for name in NAMES]

    def block(*inputs):
        return world.run(**{**call, **dict(zip(NAMES, inputs))})[0]

    d_out = along([block(*inputs)])[0]
    block(*inputs).backward(d_out)
    plain = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    checkpoint(block, *inputs, use_reentrant=reentrant).backward(d_out)
    assert all(torch.equal(x.grad, y) for x, y in zip(inputs, plain)) and not world.fla
    assert {outcome for outcome, _ in codes(world)} == {"accepted"}


def test_gradients_accumulate_and_graphs_can_be_kept(world):
    call = short()
    out, _ = world.run(**call)
    (d_out,) = along([out])
    out.backward(d_out, retain_graph=True)
    first = call["k"].grad.clone()
    out.backward(d_out)
    assert torch.equal(call["k"].grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward(d_out)


def test_a_second_derivative_is_an_error(world):
    call = short()
    out, _ = world.run(**call)
    (grad,) = torch.autograd.grad(out.float().square().sum(), call["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_a_change_in_place_is_an_error(world, name):
    call = short()
    call[name] = call[name] * 1
    out, _ = world.run(**call)
    with torch.no_grad():
        call[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert not world.fla and codes(world) == [("accepted", "accepted")]


def test_autocast_changes_nothing(world):
    call = short()
    plain = gradients(world.run(**call), call, [torch.ones(1, 80, 2, 128, dtype=torch.bfloat16), None])
    with torch.autocast("cpu", torch.bfloat16):
        results = world.run(**call)
        found = gradients(results, call, [torch.ones(1, 80, 2, 128, dtype=torch.bfloat16), None])
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_inside_torch_compile(world):
    call = short()
    plain = gradients(world.run(**call), call, [torch.ones(1, 80, 2, 128, dtype=torch.bfloat16), None])

    def model(call):
        return world.run(**call)[0].float().sum()

    torch.compile(model, backend="eager")(call).backward()
    assert all(torch.equal(call[name].grad, plain[name]) for name in plain) and not world.fla


# ---- the log and the switches ------------------------------------------------------------------------------------------
def test_the_log_tells_of_both_passes(world):
    call = short()
    out, _ = world.run(**call)
    out.sum().backward()
    forward, backward_ = world.seen
    assert forward.kernel == "wy64" and "gradients" in forward.message
    assert backward_.kernel == "wy64_backward" and backward_.shapes == forward.shapes
    assert dict(backward_.params) == {"max_ctas": 132, "grid": 4}


def test_training_alone_can_be_switched_off(world, monkeypatch):
    call = short()
    for value, forwards in (("1", 1), ("0", 1), ("1", 2)):
        monkeypatch.setenv(config.TRAINING.name, value)
        world.run(**call)
        assert len(told(world, "wy64")) == forwards
    with torch.no_grad():
        monkeypatch.setenv(config.TRAINING.name, "0")
        world.run(**call)
    assert world.fla == 1 and codes(world)[1] == ("declined", "training") and codes(world)[-1] == ("accepted", "accepted")


def test_exact_mode_says_that_gradients_run_as_in_auto(world, monkeypatch):
    monkeypatch.setenv(config.MODE.name, "exact")
    call = short()
    out, _ = world.run(**call)
    out.sum().backward()
    assert world.seen[0].kernel == "wy64" and "A_log requires grad" not in world.seen[0].message
    assert "this one runs on the auto kernels: q requires grad" in world.seen[0].message and len(told(world)) == 1
    with torch.no_grad():
        world.run(**call)
    assert world.seen[-1].kernel == "column_split"


def test_calls_alike_are_decided_once_and_their_kernels_bound_once(world, monkeypatch):
    made = []
    launcher = op.launcher
    monkeypatch.setattr(op, "launcher", lambda spec: made.append(spec.family) or launcher(spec))
    call = short()
    for _ in range(4):
        out, _ = world.run(**call)
        out.sum().backward()
    assert made == ["wy64", "wy64_backward"] and len(memo._verdicts) == 1
    with torch.no_grad():
        world.run(**call)
    assert len(memo._verdicts) == 2


# ---- failures ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def failing(world, monkeypatch):
    """.error() is raised where a backward is compiled (.when is "compiling") or launched; .on names the family."""
    launcher = op.launcher
    failing = types.SimpleNamespace(error=lambda: RuntimeError("broken"), when="launching", on="wy64_backward")

    def failing_launcher(spec):
        if failing.when == "compiling" and spec.family == failing.on:
            raise failing.error()
        found = launcher(spec)

        def launch(*arguments):
            if failing.when == "launching" and spec.family == failing.on:
                raise failing.error()
            found(*arguments)

        return launch

    monkeypatch.setattr(op, "launcher", failing_launcher)
    return failing


def step(world, call):
    """(gradients, what they should be) of one step."""
    results = world.run(**call)
    incoming = along(results)
    return gradients(results, call, incoming), precise(call, incoming)


def test_a_backward_that_fails_is_fla_s(world, failing, caplog):
    call = short(cu_seqlens=torch.tensor([0, 30, 80]), initial_state=torch.zeros(2, 2, 128, 128))
    assert same(*step(world, call), call)
    assert codes(world) == [("accepted", "accepted"), ("failed", "backward_exception")] and world.fla == 1
    assert len([record for record in caplog.records if "leaves a call to FLA" in record.message]) == 1
    assert same(*step(world, call), call)
    assert same(*step(world, call), call)
    assert len([record for record in caplog.records if "leaves a call to FLA" in record.message]) == 1
    step(world, call)
    assert codes(world)[-1] == ("declined", "failing") and world.fla == 4
    with torch.no_grad():  # which has not failed
        world.run(**call)
    assert codes(world)[-1] == ("accepted", "accepted")


def test_a_backward_that_fails_and_then_does_not_is_forgotten(world, failing):
    call = short()
    for _ in range(2):
        for failing.when in ("launching", "launching", None):
            step(world, call)
    assert codes(world).count(("failed", "backward_exception")) == 4
    assert codes(world)[-1] == ("accepted", "backward") and not backend._failures._kept


def test_a_backward_that_cannot_be_compiled_leaves_the_whole_step_to_fla(world, failing):
    failing.when = "compiling"
    call = short()
    assert same(*step(world, call), call)
    assert codes(world) == [("failed", "exception")] and world.fla == 1 and not world.launched


@pytest.mark.parametrize("absent", [0, 1])
def test_fla_s_gradients_without_one_of_the_results(world, failing, absent):
    call = short()
    call["v"] = call["v"].detach()
    results = world.run(**call)
    incoming = along(results)
    incoming[absent] = None
    found, expected = gradients(results, call, incoming), precise(call, incoming)
    expected.pop("v", None)
    found = {name: x for name, x in found.items() if name in expected}
    assert same(found, expected, call) and world.fla == 1


def test_in_strict_mode_a_backward_that_fails_raises(world, failing, monkeypatch):
    monkeypatch.setenv(config.STRICT.name, "1")
    call = short()
    for _ in range(5):
        with pytest.raises(RuntimeError, match="broken"):
            step(world, call)
    assert not world.fla


def test_a_dead_context_is_raised_as_it_is(world, failing):
    failing.error = lambda: RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        step(world, short())
    assert not world.fla


def test_a_backward_that_fails_in_a_capture_says_so(world, failing, monkeypatch):
    call = short()
    out, _ = world.run(**call)
    monkeypatch.setattr(backend, "capturing", lambda: True)
    with pytest.raises(RuntimeError, match="backward failed while a CUDA graph is captured: RuntimeError: broken"):
        out.sum().backward()
    assert not world.fla


def test_an_error_of_a_hook_is_its_owner_s(world):
    class Stop(Exception):
        pass

    def stop(x):
        raise Stop

    with torch.autograd.graph.saved_tensors_hooks(stop, lambda x: x), pytest.raises(Stop):
        world.run(**short())
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, stop):
        out, _ = world.run(**short())
    with pytest.raises(Stop):
        out.sum().backward()
    assert {outcome for outcome, _ in codes(world)} == {"accepted"} and not world.fla


@pytest.mark.parametrize("when", ["launching", "compiling"])
@pytest.mark.parametrize("on", ["wy64", "wy64_backward"])
def test_a_failure_keeps_no_tensor(world, failing, caplog, when, on):
    failing.when, failing.on = when, on
    call = short()
    found, expected = step(world, call)
    assert same(found, expected, call) and world.fla == 1
    references = [weakref.ref(x) for name, x in call.items() if name in NAMES]
    del call, found, expected
    caplog.clear()
    gc.collect()
    assert not any(reference() is not None for reference in references)


def test_in_the_background_a_step_waits_for_both(world, monkeypatch):
    monkeypatch.setenv(config.COMPILE.name, "background")
    ready, asked = set(), []
    monkeypatch.setattr(background, "ready", lambda spec: asked.append(spec.family) or spec.family in ready)
    call = short()
    world.run(**call)
    ready.add("wy64")
    world.run(**call)
    assert codes(world) == [("declined", "compiling")] * 2 and set(asked) == {"wy64", "wy64_backward"}
    assert "wy64_backward" in world.seen[-1].message
    ready.add("wy64_backward")
    world.run(**call)[0].sum().backward()
    assert codes(world)[2:] == [("accepted", "accepted"), ("accepted", "backward")]


# ---- the demo ----------------------------------------------------------------------------------------------------------
def test_the_demo_checks_gradients(world, monkeypatch, capsys):
    from fla_kda_backend.cli import demo

    monkeypatch.setattr(demo, "CHECKED_TOKENS", 70)
    monkeypatch.setattr(demo, "TOKENS", 70)
    monkeypatch.setattr(demo, "HEADS", 2)
    monkeypatch.setattr(demo, "interleaved_times", lambda run, device, rounds: (len(run(True)), len(run(False))))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    checks = demo.Checks()
    with torch.no_grad():
        demo.steps_on_gpu("cpu", checks)
    printed = capsys.readouterr().out
    assert checks.failed == 0 and printed.count("gradient of") == 14 and world.fla == 2 and "backward" in printed
