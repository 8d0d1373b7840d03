"""The way from a call to its launches, without a GPU: checks of fwd, workspace, segments, copies, empty calls."""

import importlib.util
import re
import types

import emulated_launch
import kda_inputs
import pytest
import torch
from kda_inputs import random_inputs
from torch._subclasses.fake_tensor import FakeTensorMode

import fla_kda_backend
from fla_kda_backend import op, planning
from fla_kda_backend.call import parse
from fla_kda_backend.kernels.column_split import contract as column_split
from fla_kda_backend.kernels.column_split import record as record16
from fla_kda_backend.kernels.variant import DTYPE_NAMES, Variant
from fla_kda_backend.kernels.wy64 import contract as wy64
from fla_kda_backend.kernels.wy64 import record as record64
from fla_kda_backend.reference import exact

bf16, fp32 = torch.bfloat16, torch.float32


# ---- what fwd refuses ----------------------------------------------------------------------------------------------
def arguments(**changes):
    """A call that fwd accepts, on a GPU that is not there; B=1, T=48, H=2, three sequences."""

    def make(*shape, dtype=bf16):
        return torch.empty(shape, dtype=dtype, device="cuda")

    wide = {name: make(1, 48, 2, 128) for name in ("q", "k", "v", "g", "out")}
    return {
        **wide,
        "beta": make(1, 48, 2),
        "scale": 0.1,
        "A_log": make(2, dtype=fp32),
        "dt_bias": make(256, dtype=fp32),
        "lower_bound": -5.0,
        "initial_state": make(3, 2, 128, 128, dtype=fp32),
        "final_state": make(3, 2, 128, 128),
        "cu_seqlens": make(4, dtype=torch.int32),
    } | {name: value(make) if callable(value) else value for name, value in changes.items()}


REFUSED = [
    ({"q": None}, "q must be a tensor, got NoneType"),
    ({"cu_seqlens": [0, 48]}, "cu_seqlens must be a tensor, got list"),
    ({"q": lambda make: make(48, 2, 128)}, "q must be [B, T, H, 128], got [48, 2, 128]"),
    ({"q": lambda make: make(1, 48, 2, 64)}, "q must be [B, T, H, 128], got [1, 48, 2, 64]"),
    ({"k": lambda make: make(1, 32, 2, 128)}, "k must have q's shape [1, 48, 2, 128], got [1, 32, 2, 128]"),
    ({"v": lambda make: make(1, 48, 4, 128)}, "v must have q's shape [1, 48, 2, 128], got [1, 48, 4, 128]"),
    ({"out": lambda make: make(1, 48, 2, 64)}, "out must have q's shape [1, 48, 2, 128], got [1, 48, 2, 64]"),
    ({"beta": lambda make: make(1, 48, 1)}, "beta must be [1, 48, 2], got [1, 48, 1]"),
    ({"g": lambda make: make(1, 48, 2, 128, dtype=fp32)}, "g must be bfloat16, got torch.float32"),
    ({"beta": lambda make: make(1, 48, 2, dtype=fp32)}, "beta must be bfloat16, got torch.float32"),
    ({"A_log": lambda make: make(2)}, "A_log must be float32, got torch.bfloat16"),
    ({"A_log": lambda make: make(1, dtype=fp32)}, "A_log must have 2 elements, got 1"),
    ({"dt_bias": lambda make: make(128, dtype=fp32)}, "dt_bias must have 256 elements, got 128"),
    ({"k": lambda make: make(1, 48, 2, 128).cpu()}, "k must be on cuda:0 like q, got cpu"),
    ({"scale": None}, "scale must be a float, got NoneType"),
    ({"lower_bound": -5.5}, "lower_bound must be in [-5, 0), got -5.5"),
    ({"lower_bound": 0.0}, "lower_bound must be in [-5, 0), got 0.0"),
    ({"lower_bound": float("nan")}, "lower_bound must be in [-5, 0), got nan"),
    ({"lower_bound": None}, "lower_bound must be in [-5, 0), got None"),
    ({"cu_seqlens": lambda make: make(4)}, "cu_seqlens must be int32 or int64, got torch.bfloat16"),
    ({"cu_seqlens": lambda make: make(2, 2, dtype=torch.int32)}, "cu_seqlens must be [N + 1], got [2, 2]"),
    ({"cu_seqlens": lambda make: make(1, dtype=torch.int32)}, "cu_seqlens must be [N + 1], got [1]"),
    ({"initial_state": lambda make: make(1, 2, 128, 128)}, "[N, H, V, K] = [3, 2, 128, 128], got [1, 2, 128, 128]"),
    ({"final_state": lambda make: make(3, 1, 128, 128)}, "[N, H, V, K] = [3, 2, 128, 128], got [3, 1, 128, 128]"),
    ({"initial_state": lambda make: make(3, 2, 128, 128, dtype=torch.float16)},
     "initial_state must be float32 or bfloat16, got torch.float16"),
    ({"final_state": lambda make: make(3, 2, 128, 128).mT}, "final_state must be contiguous, got strides"),
    ({"out": lambda make: make(1, 2, 48, 128).transpose(1, 2)}, "out must be contiguous, got strides"),
]  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    return emulated_launch.without_gpu(monkeypatch)


@pytest.mark.parametrize("changes, message", REFUSED, ids=[f"{next(iter(c))}-{i}" for i, (c, _) in enumerate(REFUSED)])
def test_fwd_refuses(changes, message, launched):
    with FakeTensorMode(), pytest.raises(ValueError, match=re.escape(message)):
        fla_kda_backend.fwd(**arguments(**changes))
    assert launched == []


def test_fwd_refuses_a_batch_with_packed_sequences(launched):
    with FakeTensorMode(), pytest.raises(ValueError, match="with cu_seqlens the batch must be 1, got 2"):
        wide = {name: torch.empty(2, 48, 2, 128, dtype=bf16, device="cuda") for name in ("q", "k", "v", "g", "out")}
        op.fwd(**arguments(beta=lambda make: make(2, 48, 2), **wide))


def test_fwd_refuses_an_unaligned_output(launched, monkeypatch):
    """The kernels store 16 bytes at a time; the address is known only of real memory, so the device is made up."""
    inputs = random_inputs(16, 1)
    out = torch.empty(inputs["v"].numel() + 1, dtype=bf16)[1:].view(inputs["v"].shape)
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda", 0))
    with pytest.raises(ValueError, match="out must be 16-byte aligned, got an address 2 bytes past that"):
        op.fwd(**inputs, out=out)


def test_fwd_refuses_cpu_tensors_and_other_gpus(launched, monkeypatch):
    inputs = random_inputs(16, 1)
    with pytest.raises(ValueError, match="q must be on a CUDA device, got cpu"):
        op.fwd(**inputs, out=torch.empty_like(inputs["v"]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with FakeTensorMode(), pytest.raises(ValueError, match=r"must be one of .*\(9, 0\).*, got \(8, 0\)"):
        op.fwd(**arguments())


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_what_is_refused_nowhere_else_is_accepted():
    """The call that the refused ones differ from passes the checks itself, and so do other forms of it."""
    names = ("q", "k", "v", "g", "beta", "scale", "out", "A_log", "dt_bias", "lower_bound", "initial_state",
             "final_state", "cu_seqlens")  # fmt: skip
    with FakeTensorMode(), pytest.MonkeyPatch.context() as monkeypatch:
        emulated_launch.without_gpu(monkeypatch)
        for changes in ({}, {"scale": 1}, {"lower_bound": -1}, {"initial_state": None, "final_state": None},
                        {"dt_bias": lambda make: make(2, 128, dtype=fp32)},
                        {"q": lambda make: make(1, 2, 48, 128).transpose(1, 2)},
                        {"cu_seqlens": lambda make: make(4, dtype=torch.int64)}):  # fmt: skip
            call = arguments(**changes)
            op._check_fwd(*(call[name] for name in names))


# ---- what a launch is told -----------------------------------------------------------------------------------------
SETTINGS = ("exact", "robust", "wy64", "wy64 replay")


def plan_of(setting, call):
    sequences, heads, variant = call.num_sequences, call.heads, Variant.of(call)
    if setting in ("exact", "robust"):
        return planning.column_split(setting, sequences, heads, 132, variant)
    return planning.Plan("wy64", variant, wy64.Schedule(replay=setting == "wy64 replay"), 132)


def record_of(setting):
    return record64 if setting.startswith("wy64") else record16


def run(inputs, *, setting="exact", final=fp32):
    """(out, final_state) by op's own way, NaN where nothing was written."""
    sequences = len(inputs["q"]) if inputs["cu_seqlens"] is None else len(inputs["cu_seqlens"]) - 1
    heads = inputs["q"].shape[2]
    out = torch.full(inputs["v"].shape, float("nan"), dtype=bf16)
    state = None if final is None else torch.full((sequences, heads, 128, 128), float("nan"), dtype=final)
    call = parse((), kda_inputs.chunk_kda_arguments(inputs))
    op.into(call, plan_of(setting, call), out, state)
    return out, state


def expected(inputs, setting="exact"):
    """What the emulated kernels give, whatever the segments."""
    return exact.forward(**inputs, arithmetic="exact" if setting == "exact" else "robust")


PACKED = [0, 0, 5, 21, 53, 53, 54, 150, 150]
SEVERAL_CHUNKS = [0, 0, 5, 70, 200, 200, 201, 400, 400]


@pytest.mark.parametrize("cu_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("state", [None, bf16, fp32])
@pytest.mark.parametrize("final", [None, bf16, fp32])
def test_every_dtype_is_in_the_variant(launched, cu_dtype, state, final):
    inputs = random_inputs(150, 1, cu_seqlens=PACKED, cu_dtype=cu_dtype, state=state)
    out, state_out = run(inputs, final=final)
    out_ref, state_ref = exact.forward(**inputs)
    assert torch.equal(out, out_ref)
    assert (state_out is None and final is None) or torch.equal(state_out, state_ref.to(final))
    (spec, _), *more = launched
    assert more == [] and spec.arch == "sm_90a" and spec.family == "column_split"
    assert spec.variant == Variant(
        cu_seqlens=DTYPE_NAMES[str(cu_dtype)],
        initial_state=DTYPE_NAMES.get(str(state)),
        final_state=DTYPE_NAMES.get(str(final)),
    )
    assert spec.schedule == column_split.Schedule("exact", bv=32, warps=4)


@pytest.mark.parametrize("state, final", [(None, None), (None, fp32), (fp32, fp32), (bf16, bf16), (fp32, bf16)])
@pytest.mark.parametrize("replay", [False, True])
def test_every_dtype_is_in_the_variant_of_the_64_token_kernels(launched, state, final, replay):
    inputs = random_inputs(400, 1, cu_seqlens=SEVERAL_CHUNKS, cu_dtype=torch.int32, state=state)
    out, state_out = run(inputs, setting="wy64 replay" if replay else "wy64", final=final)
    out_ref, state_ref = expected(inputs, "wy64")
    assert torch.equal(out, out_ref)
    assert (state_out is None and final is None) or torch.equal(state_out, state_ref.to(final))
    (spec, arguments), *more = launched
    assert more == [] and len(arguments) == 34 and (spec.family, spec.arch) == ("wy64", "sm_90a")
    assert spec.variant == Variant(
        cu_seqlens="int32", initial_state=DTYPE_NAMES.get(str(state)), final_state=DTYPE_NAMES.get(str(final))
    )
    assert spec.schedule == wy64.Schedule(replay=replay)


def test_fwd_runs_the_exact_setting(launched, monkeypatch):
    monkeypatch.setattr(op, "_check_fwd", lambda *arguments: None)
    inputs = random_inputs(70, 3, batch=2, state=bf16)
    out, state = torch.full_like(inputs["v"], float("nan")), torch.full((2, 3, 128, 128), float("nan"), dtype=bf16)
    op.fwd(**inputs, out=out, final_state=state)
    out_ref, state_ref = exact.forward(**inputs)
    assert torch.equal(out, out_ref) and torch.equal(state, state_ref)
    assert launched[0][0].schedule.arithmetic == "exact"


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("wanted", [False, True])
def test_run_returns_what_chunk_kda_returns(launched, wanted, setting):
    inputs = random_inputs(70, 2, batch=2)
    call = parse((), kda_inputs.chunk_kda_arguments(inputs, output_final_state=wanted))
    out, state = op.run(call, plan_of(setting, call))
    out_ref, state_ref = expected(inputs, setting)
    assert torch.equal(out, out_ref)
    assert torch.equal(state, state_ref) if wanted else state is None


def test_slices_and_unaligned_tensors_are_copied(launched):
    inputs = random_inputs(37, 2)
    reference = run(inputs)
    moved = dict(inputs)
    fused = torch.cat([inputs["q"], inputs["k"], inputs["v"]], -1)
    moved["q"], moved["k"], moved["v"] = fused.split(128, -1)
    storage = torch.empty(inputs["g"].numel() + 1, dtype=bf16)
    moved["g"] = storage[1:].view(inputs["g"].shape).copy_(inputs["g"])  # 2 bytes off
    moved["beta"] = inputs["beta"].transpose(1, 2).contiguous().transpose(1, 2)
    moved["A_log"] = inputs["A_log"].repeat_interleave(2)[::2]
    moved["initial_state"] = inputs["initial_state"].mT.contiguous().mT
    before = {name: x.clone() for name, x in moved.items() if isinstance(x, torch.Tensor)}
    assert all(torch.equal(a, b) for a, b in zip(run(moved), reference))
    assert all(torch.equal(moved[name], x) for name, x in before.items())


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("state", [None, bf16, fp32])
@pytest.mark.parametrize("final", [None, bf16, fp32])
def test_no_tokens(launched, state, final, setting):
    """No slot to launch over; the final state is the initial one, or zeros."""
    inputs = random_inputs(0, 2, batch=3, state=state)
    out, state_out = run(inputs, setting=setting, final=final)
    assert out.shape == (3, 0, 2, 128) and launched == []
    if final is not None:
        initial = inputs["initial_state"]
        assert torch.equal(state_out, torch.zeros(3, 2, 128, 128).to(final) if state is None else initial.to(final))


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_tokens_in_packed_sequences(launched, setting):
    inputs = random_inputs(0, 2, cu_seqlens=[0, 0, 0])
    out, state = run(inputs, setting=setting)
    assert out.numel() == 0 and len(launched) == 1
    initial = inputs["initial_state"]
    assert torch.equal(state, initial.bfloat16().float() if setting == "exact" else initial)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("offsets", [[7, 20, 50], [0, 0, 0], [64, 64, 64], [3, 140, 140]])
@pytest.mark.parametrize("chunks", [1, 3, 100])
def test_rows_of_no_sequence_become_zero(launched, monkeypatch, offsets, chunks, setting):
    inputs = random_inputs(170, 1, cu_seqlens=offsets)
    segmented(monkeypatch, chunks, heads=1, setting=setting)
    assert all(torch.equal(a, b) for a, b in zip(run(inputs, setting=setting), expected(inputs, setting)))


# ---- workspace and segments ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tokens, sequences, heads, seq_len, slots", [
    (1, 1, 2, 1, 1), (16, 1, 2, 16, 1), (17, 1, 2, 17, 2), (3 * 41, 3, 2, 41, 9),
    (210, 6, 2, None, 19), (0, 2, 1, None, 2), (8192, 2, 64, None, 514),
])  # fmt: skip
def test_workspace_bytes(tokens, sequences, heads, seq_len, slots):
    assert op.workspace_bytes(tokens, sequences, heads, seq_len) == slots * heads * 13888


@pytest.mark.parametrize("tokens, sequences, heads, seq_len, slots", [
    (1, 1, 2, 1, 1), (64, 1, 2, 64, 1), (65, 1, 2, 65, 2), (3 * 150, 3, 2, 150, 9), (210, 6, 2, None, 9), (0, 2, 1, None, 2),
])  # fmt: skip
def test_workspace_bytes_of_the_64_token_kernels(tokens, sequences, heads, seq_len, slots):
    assert op.workspace_bytes(tokens, sequences, heads, seq_len, kernel="wy64") == slots * heads * 71184
    checkpoints = -(-slots // 16) * heads * 65536
    assert op.workspace_bytes(tokens, sequences, heads, seq_len, "wy64", True) == slots * heads * 71184 + checkpoints


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("limit", [None, 2])
def test_what_is_allocated_is_what_a_launch_needs(launched, monkeypatch, setting, limit):
    """A launch lays its workspace out for the slots it is given; the kernels write nowhere else."""
    heads, record, empty, sizes = 2, record_of(setting), torch.empty, []

    def keep(*shape, **keywords):
        if keywords.get("dtype") == torch.uint8:
            sizes.append(shape[0])
        return empty(*shape, **keywords)

    if limit:
        segmented(monkeypatch, limit, heads, setting)
    monkeypatch.setattr(op.torch, "empty", keep)
    run(random_inputs(1111, heads), setting=setting)
    (size,) = sizes
    for spec, arguments in launched:
        begin, end = arguments[-3:-1]
        replay = getattr(spec.schedule, "replay", False)
        needed = record.workspace_bytes(end - begin, heads, replay)
        assert needed <= size and (needed == size or limit)
        assert replay == (setting == "wy64 replay" and not limit)


def test_workspace_is_bounded():
    assert record16.RECORD_BYTES == 13888
    for tokens, heads in ((1 << 20, 96), (1 << 20, 1), (174_763, 96), (16, 10_000)):
        size = op.workspace_bytes(tokens, 1, heads, tokens)
        record = heads * record16.RECORD_BYTES
        assert size % record == 0 and 0 < size <= max(planning.workspace_limit(), record)
        assert size + record > planning.workspace_limit() or size == -(-tokens // 16) * record
    assert op.workspace_bytes(16, 1, 100_000) == 100_000 * 13888  # one chunk of every head is the least
    assert op.workspace_bytes(1 << 20, 1, 96, 1 << 20, kernel="wy64") <= planning.workspace_limit()


def segmented(monkeypatch, chunks, heads, setting="exact"):
    """Let a workspace hold so many chunks of each head."""
    limit = record_of(setting).workspace_bytes(chunks, heads) + 5
    monkeypatch.setattr(planning, "workspace_limit", lambda: limit)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
@pytest.mark.parametrize("case", ["packed", "batch", "one"])
def test_segments_change_no_bit(launched, monkeypatch, setting, chunks, case):
    inputs = {
        "packed": lambda: random_inputs(400, 1, cu_seqlens=SEVERAL_CHUNKS),
        "batch": lambda: random_inputs(150, 1, batch=3),
        "one": lambda: random_inputs(450, 1, state=None),
    }[case]()
    whole = run(inputs, setting=setting)
    assert len(launched) == 1
    slots = launched.pop()[1][-2]
    segmented(monkeypatch, chunks, heads=1, setting=setting)
    assert all(torch.equal(a, b) for a, b in zip(run(inputs, setting=setting), whole))
    assert all(torch.equal(a, b) for a, b in zip(whole, expected(inputs, setting)))

    assert len(launched) == -(-slots // chunks)
    spans = [arguments[-3:-1] for _, arguments in launched]
    assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])] and spans[-1][1] == slots
    assert all(end - begin <= chunks for begin, end in spans)
    assert all(spec.schedule.segmented and not getattr(spec.schedule, "replay", False) for spec, _ in launched)
    carries = [arguments[12:14] for _, arguments in launched]
    for (_, left), (taken, other) in zip(carries, carries[1:]):
        assert taken == left != other  # what one leaves the next takes, and never writes where it reads


def test_one_segment_is_not_called_segmented(launched, monkeypatch):
    inputs = random_inputs(48, 1)
    segmented(monkeypatch, 3, heads=1)
    run(inputs)
    assert [spec.schedule.segmented for spec, _ in launched] == [False]


# ---- where it is launched --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cheap", [True, False])
def test_stream_and_device_are_those_of_the_tensors(monkeypatch, cheap):
    """By torch's internal functions where it has them, by the public ones elsewhere."""

    def absent(*arguments):
        raise AssertionError("not to be asked")

    public = lambda index: types.SimpleNamespace(cuda_stream=100 + index)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", absent if cheap else public)
    monkeypatch.setattr(torch.cuda, "current_device", absent if cheap else lambda: 1)
    for name, internal in (("_cuda_getCurrentRawStream", lambda index: 100 + index), ("_cuda_getDevice", lambda: 1)):
        if cheap:
            monkeypatch.setattr(torch._C, name, internal, raising=False)
        else:
            monkeypatch.delattr(torch._C, name, raising=False)
    fresh = importlib.util.module_from_spec(importlib.util.find_spec(op.__name__))
    fresh.__spec__.loader.exec_module(fresh)
    assert [fresh._stream_handle(0), fresh._stream_handle(1), fresh._current_device()] == [100, 101, 1]
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert isinstance(fresh._on(first), torch.cuda.device) and not isinstance(fresh._on(second), torch.cuda.device)
