"""What the launches of every kind of call are told, and what comes back: strides, grouped values, intermediate states."""

from dataclasses import replace

import emulated_launch
import pytest
import torch
from call_table import BY_GATE, KIMI, Case, Kind
from calls import INFERENCE, prefill
from emulated_launch import STRIDES, named
from golden import relative_error
from kda_calls import call_of
from kda_inputs import TOKEN_AXIS

from fla_kda_backend import geometry, op, planning
from fla_kda_backend.call import DEVICE_INPUTS, parse
from fla_kda_backend.kernels.families import FAMILIES
from fla_kda_backend.kernels.variant import Variant
from fla_kda_backend.reference import gold

FACTS = {"wy64": INFERENCE, "column_split": INFERENCE._replace(capability=(10, 0))}
EACH_FAMILY = pytest.mark.parametrize("family", FACTS)
SHORT = {"tail": 17, "before": 64, "regime": "normal"}


@pytest.fixture
def launched(monkeypatch):
    return emulated_launch.without_gpu(monkeypatch)


def run(call, family="wy64"):
    """What op returns for the keyword arguments of a call, under the plan of a GPU of the family."""
    parsed = parse((), call)
    return op.run(parsed, planning.plan(parsed, FACTS[family]))


def told(launched):
    """The arguments of the only launch."""
    (one,) = launched
    return named(*one)


def close(found, call, limit=5e-3):
    return all(a is None or relative_error(a, b) < limit for a, b in zip(found, gold.forward(**call)))


KINDS = {
    **BY_GATE,
    "kimi": KIMI,
    "no parameters": Kind(a_log=None, dt_bias=None),
    "bf16 parameters": Kind(gate="softplus", a_log="bf16", dt_bias="bf16", beta="twice", cu_seqlens="int32"),
    "direct": Kind(beta="twice", a_log=None, initial_state=None, cu_seqlens="int32"),
    "fp32 inputs": Kind(gate_dtype="fp32", beta_dtype="fp32", l2norm=False, initial_state=None),
    "no final state": Kind(gate="given", a_log=None, dt_bias=None, beta="given", final_state=None, cu_seqlens="int64"),
}


@EACH_FAMILY
@pytest.mark.parametrize("layout", ["whole", "fused", "transposed", "unaligned"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_call(launched, kind, layout, family):
    call = call_of(Case(KINDS[kind], layout=layout, heads=4, **SHORT))
    before = {name: x.clone() for name, x in call.items() if isinstance(x, torch.Tensor)}
    found = run(call, family)
    assert found[0].dtype == torch.bfloat16 and found[0].is_contiguous()
    assert (found[1] is None) == (not call["output_final_state"]) and close(found, call)
    assert all(torch.equal(call[name], x) for name, x in before.items())
    a = told(launched)
    assert (a.qk_heads, a.heads) == (2, 4)
    for name, key in (("a_log", "A_log"), ("dt_bias", "dt_bias"), ("initial_state", "initial_state")):
        assert (getattr(a, name) == 0) == (call[key] is None)


@pytest.mark.parametrize("tokens, direct", [(0, False), (1, True), (64, True), (65, False)])
@pytest.mark.parametrize("packed", [False, True])
def test_prompts_of_one_chunk_are_direct(launched, packed, tokens, direct):
    call = prefill(1 if packed else 2, 2 * tokens if packed else tokens, 2, device="cpu", initial_state=None)
    call["cu_seqlens"] = torch.tensor([0, 2 * tokens, 2 * tokens]) if packed else None
    for name in (*TOKEN_AXIS, "A_log", "dt_bias"):
        call[name].normal_()
    found = run(call)
    assert tokens == 0 or close(found, call, 2e-2)
    assert [spec.schedule.direct for spec, _ in launched] == [direct] * len(launched)
    assert not planning.plan(parse((), call | {"initial_state": torch.zeros(2, 2, 128, 128)}), INFERENCE).params.get("direct")


def test_segments_run_on_the_kernel_of_calls_that_are_not_direct(launched, monkeypatch):
    case = Case(KINDS["direct"], **SHORT)
    parsed = parse((), call_of(case))
    plan = planning.wy64(98, 3, 2, 132, Variant.of(parsed))
    monkeypatch.setattr(planning, "workspace_limit", lambda: FAMILIES["wy64"].record.workspace_bytes(1, 2))
    direct = plan._replace(schedule=replace(plan.schedule, direct=True))
    assert geometry.geometry(parsed, direct, "sm_90a").spec == geometry.geometry(parsed, plan, "sm_90a").spec


@EACH_FAMILY
def test_what_no_gate_reads_is_not_given_to_it(launched, family):
    call = call_of(Case(BY_GATE["given"], **SHORT), A_log=torch.zeros(7), dt_bias=torch.zeros(3, 5).mT, lower_bound="x")
    assert close(run(call, family), call | {"lower_bound": None})
    a = told(launched)
    assert (a.a_log, a.dt_bias, a.gate_scale) == (0, 0, 0)


# ---- strides -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_slices_of_fused_projections_are_read_where_they_lie(launched, dtype):
    call = call_of(Case(replace(KIMI, gate_dtype=dtype, beta_dtype=dtype), layout="fused", heads=4, **SHORT))
    assert close(run(call), call)
    a = told(launched)
    assert all(getattr(a, name) == call[name].data_ptr() for name in TOKEN_AXIS)
    assert [getattr(a, name) for name in STRIDES] == [8 * 128, 128, 8 * 128, 128, 8 * 128, 128, 5 * 128, 128, 5, 1]


def test_the_column_split_reads_contiguous_tensors_alone(launched):
    call = call_of(Case(KIMI, layout="fused", heads=4, **SHORT))
    assert close(run(call, "column_split"), call)
    a = told(launched)
    assert not any(getattr(a, name) == call[name].data_ptr() for name in TOKEN_AXIS)


def view(*shape, strides, dtype=torch.bfloat16, offset=0):
    """Memory that is seen with strides of its own."""
    count = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
    return torch.randn(count).to(dtype)[offset:].as_strided(shape, strides)


READ = [  # shape, strides, dtype, offset in elements; (token, head) that is told, or None where a copy is
    ((2, 3, 2, 128), (768, 256, 128, 1), torch.bfloat16, 0, (256, 128)),
    ((2, 3, 2, 128), (1536, 512, 256, 1), torch.bfloat16, 8, (512, 256)),
    ((2, 3, 2, 128), (1536, 512, 256, 1), torch.bfloat16, 1, None),  # not on 16 bytes
    ((2, 3, 2, 128), (780, 260, 128, 1), torch.bfloat16, 0, None),  # nor each token
    ((2, 3, 2, 128), (780, 260, 128, 1), torch.float32, 0, (260, 128)),  # but here it is
    ((2, 3, 2, 128), (796, 264, 132, 1), torch.bfloat16, 0, None),  # nor each head
    ((2, 3, 2, 128), (800, 256, 128, 1), torch.bfloat16, 0, None),  # a gap between sequences
    ((1, 3, 2, 128), (800, 256, 128, 1), torch.bfloat16, 0, (256, 128)),  # of which there is one
    ((2, 1, 2, 128), (800, 256, 128, 1), torch.bfloat16, 0, (800, 128)),  # of one token each
    ((1, 1, 2, 128), (8, 4, 128, 1), torch.bfloat16, 0, (256, 128)),  # strides that nothing steps by
    ((2, 3, 1, 128), (768, 256, 3, 1), torch.bfloat16, 0, (256, 128)),
    ((2, 3, 2, 128), (1536, 512, 256, 2), torch.bfloat16, 0, None),  # channels apart
    ((1, 3, 2, 128), (384, 128, 384, 1), torch.bfloat16, 0, (128, 384)),  # [B, H, T, K] in memory
    ((2, 3, 2, 128), (768, 128, 384, 1), torch.bfloat16, 0, None),
    ((2, 3, 2, 128), (0, 0, 128, 1), torch.bfloat16, 0, None),  # expanded
    ((1, 3, 2, 128), (768, 256, 0, 1), torch.bfloat16, 0, None),
    ((2, 3, 2), (0, 0, 1), torch.bfloat16, 0, (0, 1)),
    ((2, 3, 2), (6, 2, 1), torch.bfloat16, 0, (2, 1)),
    ((2, 3, 2), (15, 5, 1), torch.bfloat16, 3, (5, 1)),  # numbers may lie anywhere
    ((2, 3, 2), (33, 11, 5), torch.float32, 1, (11, 5)),
    ((2, 3, 2), (16, 5, 1), torch.bfloat16, 0, None),
]


@pytest.mark.parametrize("shape, strides, dtype, offset, wanted", READ)
def test_how_a_tensor_is_read(shape, strides, dtype, offset, wanted):
    """As what it is told says, it is the tensor; the column split is told nothing, and reads contiguous ones."""
    x = view(*shape, strides=strides, dtype=dtype, offset=offset)
    as_it_is, as_a_copy, unaligned = geometry.reading(x, True)
    copied = as_it_is is None or bool(x.data_ptr() & unaligned)
    assert (None if copied else as_it_is) == wanted
    for told, memory in ((wanted, x), (as_a_copy, x.clone(memory_format=torch.contiguous_format))):
        if told is not None:
            rows = memory.as_strided((shape[0] * shape[1], *shape[2:]), (*told, 1)[: len(shape) - 1], memory.storage_offset())
            assert torch.equal(rows, x.flatten(0, 1))
    as_it_is, as_a_copy, unaligned = geometry.reading(x, False)
    assert as_a_copy == () and unaligned == 15 and (as_it_is == ()) == x.is_contiguous()


@pytest.mark.parametrize("layout", ["whole", "fused", "transposed"])
def test_addresses_are_looked_at_in_each_call(launched, layout):
    """A launch has the strides of the call that it was prepared for; where its tensors lie may change."""
    call = call_of(Case(KIMI, layout=layout, **SHORT))
    parsed = parse((), call)
    launch = op.bind(parsed, planning.plan(parsed, INFERENCE))
    first = run(call)
    strides = strides_of(launched.pop())
    for moved in ((), ("q",), ("g", "v"), (), ("k", "beta"), ("beta",)):
        other = call | {name: elsewhere(call[name]) for name in moved}
        found = launch(*(other[name] for name in DEVICE_INPUTS), None)
        assert all(torch.equal(a, b) for a, b in zip(found, first))
        copied = {*moved} - {"beta"}  # whose numbers may lie anywhere
        assert layout != "fused" or (strides_of(launched[-1]) == strides) == (not copied)
        a = named(*launched.pop())
        assert all((getattr(a, name) == other[name].data_ptr()) == (name not in copied) for name in TOKEN_AXIS)


def strides_of(one):
    a = named(*one)
    return [getattr(a, name) for name in STRIDES]


def elsewhere(x):
    """The same values and strides, off the 16 bytes."""
    count = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return torch.empty(count + 1, dtype=x.dtype)[1:].as_strided(x.shape, x.stride(), 1).copy_(x)


# ---- intermediate states -------------------------------------------------------------------------------------------------
STATES = {
    "batch": Kind(intermediate_states=64),
    "packed": replace(KIMI, intermediate_states=64),
    "no final state": Kind(gate="softplus", final_state=None, initial_state=None, cu_seqlens="int32", intermediate_states=64),
}


@EACH_FAMILY
@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize("kind", STATES)
def test_intermediate_states(launched, kind, chunk_size, family):
    case = Case(STATES[kind], heads=4, **SHORT)
    call = call_of(case, chunk_size=chunk_size)
    found = run(call, family)
    chunks = [-(-length // chunk_size) for length in case.lengths]
    packed = call["cu_seqlens"] is not None
    assert found[2].shape == ((1, sum(chunks)) if packed else (2, chunks[0])) + (4, 128, 128)
    assert found[2].dtype == torch.bfloat16 and close(found, call)
    assert launched[0][0].family == ("column_split" if chunk_size == 32 else family)


@EACH_FAMILY
@pytest.mark.parametrize("chunks", [1, 3])
def test_intermediate_states_in_segments(launched, monkeypatch, chunks, family):
    call = call_of(Case(STATES["packed"], **SHORT))
    whole = run(call, family)
    monkeypatch.setattr(planning, "workspace_limit", lambda: FAMILIES[family].record.workspace_bytes(chunks, 2))
    launched.clear()
    found = run(call, family)
    assert len(launched) > 1 and len({named(*one).intermediate_states for one in launched}) == 1
    assert all(relative_error(a, b) < 1e-4 for a, b in zip(found, whole))  # carried in fp32, a few bf16 outputs round otherwise


def test_states_are_counted_as_the_kernels_count_them(monkeypatch, launched):
    """Offsets outside the tokens are inside for the kernels, and falling ones are empty sequences."""
    call = call_of(Case(STATES["packed"], **SHORT))
    parsed = parse((), call)
    launch = op.bind(parsed, planning.plan(parsed, INFERENCE))
    tokens = call["q"].shape[1]
    for offsets, chunks in (([0, 17, 17, tokens], 3), ([0, tokens, 5, 500], 4), ([-9, 1, 65, tokens], 3), ([tokens] * 4, 0)):
        assert launch._count_chunks(torch.tensor(offsets)) == chunks


def test_states_are_counted_on_the_host_where_it_can_be(launched, monkeypatch):
    call = call_of(Case(STATES["packed"], **SHORT))
    offsets, read = call["cu_seqlens"], []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: read.append(x.data_ptr()) or tolist(x))
    monkeypatch.setattr(emulated_launch, "launch", lambda spec, *arguments: None)
    copy = offsets.clone()
    assert run(call | {"cu_seqlens_cpu": copy})[2].shape[1] == 3 and read == [copy.data_ptr()]
    assert run(call)[2].shape[1] == 3 and read.pop() == offsets.data_ptr()
    read.clear()
    # 98 tokens, three sequences: whatever cu_seqlens holds at a replay
    for changes in ({}, {"cu_seqlens_cpu": copy}, {"max_num_seqs": 3}):
        assert run(call | {"use_graph": True, **changes})[2].shape[1] == 2 + 3 - 1
    assert read == []


def test_every_cu_seqlens_keeps_the_bound_of_a_graph(launched, monkeypatch):
    monkeypatch.setattr(emulated_launch, "launch", lambda spec, *arguments: None)
    for tokens in (1, 5, 63, 64, 65, 130):
        for sequences in (1, 2, 3, 7):
            call = prefill(1, tokens, 2, device="cpu", initial_state=None, return_intermediate_states=True, use_graph=True)
            call["cu_seqlens"] = torch.zeros(sequences + 1, dtype=torch.int64)
            bound = run(call)[2].shape[1]
            short = min(sequences - 1, tokens - 1)  # sequences of one token, a long one and empty ones
            assert short + -(-(tokens - short) // 64) <= bound


def test_counting_in_a_graph_fails_before_it_waits(launched, monkeypatch):
    call = parse((), call_of(Case(STATES["packed"], **SHORT)))
    launch = op.bind(call, planning.plan(call, INFERENCE))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    class OnGpu:
        is_cuda = True

        def tolist(self):
            raise AssertionError("waits for the GPU")

    with pytest.raises(RuntimeError, match="give cu_seqlens_cpu, or use_graph=True"):
        launch._count_chunks(OnGpu())


@EACH_FAMILY
@pytest.mark.parametrize("packed", [False, True])
def test_states_of_no_tokens(launched, packed, family):
    call = prefill(1 if packed else 2, 0, 2, device="cpu", return_intermediate_states=True)
    call["initial_state"] = torch.randn(2, 2, 128, 128)
    call["cu_seqlens"] = torch.tensor([0, 0, 0]) if packed else None
    out, state, states = run(call, family)
    assert out.numel() == 0 and states.shape == (1 if packed else 2, 0, 2, 128, 128)
    assert torch.equal(state, call["initial_state"])
