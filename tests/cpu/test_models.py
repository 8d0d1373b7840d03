"""FLA models by what their layers ask of chunk_kda, and the benchmark of them; nothing here runs a model."""

from dataclasses import replace

import pytest
import torch
from calls import H200
from gpu import models as gpu_models
from gpu import specs as gpu_specs

from benchmarks import models as bench
from benchmarks import specs
from fla_kda_backend import dispatch_log, eligibility
from fla_kda_backend.call import parse
from fla_kda_backend.cli import _models, demo


def calls_of(config, tokens):
    """Keyword arguments of chunk_kda, layer by layer."""
    with _models.attention():
        return list(_models.layer_calls(config, tokens).values())


# ---- what the layers ask -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", _models.MODELS)
def test_every_layers_call_is_accepted(name):
    calls = [parse((), call) for call in calls_of(gpu_models.small_config(name), 300)]
    assert len(calls) == gpu_models.LAYERS[name] - (name == "hybrid")
    for call in calls:
        assert eligibility.check(call, H200).accepted
        assert call.initial_state is None and call.output_final_state and call.cu_seqlens is None
        assert (call.qk_heads, call.heads) == (gpu_models.HEADS, gpu_models.HEADS * (1 + (name == "gva")))


@pytest.mark.parametrize("name", _models.MODELS)
def test_the_listed_variants_are_what_the_gpu_tests_launch(name):
    kind = gpu_models.KINDS[name]
    config = gpu_models.small_config(name)
    short, long = (calls_of(config, tokens)[-1] for tokens in (300, 8192))
    if kind.a_log == "bf16":  # the model is converted
        short, long = (call | {name: call[name].bfloat16() for name in ("A_log", "dt_bias")} for call in (short, long))
    packed = short | {"cu_seqlens": torch.empty(4, dtype=torch.int32, device="meta")}
    cases = [("wy64", kind, short), ("wy64", replace(kind, cu_seqlens="int32"), packed), ("wy64 overlap replay", kind, long)]
    if name == "kda":
        state = torch.empty(1, gpu_models.HEADS, 128, 128, device="meta")
        cases.append(("wy64", replace(kind, initial_state="fp32"), short | {"initial_state": state}))
    for setting, expected, call in cases:
        assert specs.of_mode(call, "auto") == [gpu_specs.spec_of(expected, setting)]
        assert (setting, expected) in gpu_models.VARIANTS or (name, setting) == ("gva", "wy64 overlap replay")


def test_other_dtypes_of_the_gates_parameters():
    """FLA creates them in fp32 whatever the model's dtype; model.bfloat16() converts them."""
    model = _models.build(gpu_models.small_config("gva"), "meta")
    layer = model.model.layers[0].attn
    assert (layer.A_log.dtype, layer.dt_bias.dtype, layer.q_proj.weight.dtype) == (*[torch.float32] * 2, torch.bfloat16)
    assert model.bfloat16().model.layers[0].attn.A_log.dtype == torch.bfloat16


def test_models_of_the_gpu_tests():
    assert set(gpu_models.KINDS) == set(gpu_models.LAYERS) == set(_models.MODELS)
    assert {("wy64", kind) for kind in gpu_models.KINDS.values()} <= set(gpu_models.VARIANTS)


# ---- attention in place of flash_attn ----------------------------------------------------------------------------------
def plain_attention(q, k, v):
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    later = torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (1, 9), (4, 9)])
def test_attention_without_flash_attn(queries, keys):
    q = torch.randn(2, queries, 4, 16)
    k, v = torch.randn(2, 2, keys, 2, 16)
    torch.testing.assert_close(_models.causal_attention(q, k, v, causal=True), plain_attention(q, k, v))


def test_packed_attention():
    q, k, v = torch.randn(9, 4, 16), *torch.randn(2, 9, 2, 16)
    offsets = torch.tensor([0, 4, 4, 9])
    found = _models.packed_attention(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True)
    alone = [plain_attention(q[None, first:end], k[None, first:end], v[None, first:end])[0] for first, end in ((0, 4), (4, 9))]
    torch.testing.assert_close(found, torch.cat(alone))


def test_attention_is_replaced_only_where_it_is_missing(monkeypatch):
    from fla.layers import attn

    monkeypatch.setattr(attn, "flash_attn_func", None)
    with _models.attention():
        assert attn.flash_attn_func is _models.causal_attention
    assert attn.flash_attn_func is None
    monkeypatch.setattr(attn, "flash_attn_func", "theirs")
    with _models.attention():
        assert attn.flash_attn_func == "theirs"


# ---- the benchmark -----------------------------------------------------------------------------------------------------
def test_kernels_that_the_benchmark_launches():
    found = bench.needed_specs()
    assert len(found) == len(set(found)) and all("wy64" in spec.name for spec in found)
    gates = {spec.variant.gate for spec in found}
    assert gates == {"softplus", "bounded"}
    assert {len(bench.layer_calls(shape)) for shape in bench.SHAPES.values()} == {1, 3, 4}


class Model:
    """Logits of the implementation that FLA would run, one layer, and the log's record of it."""

    device = "cpu"
    config = _models.config("kda", layers=1)

    def __init__(self, ours, outcome=dispatch_log.ACCEPTED):
        self.ours, self.outcome = ours, outcome

    def __call__(self, ids, use_cache, logits_to_keep):
        import os
        from types import SimpleNamespace

        if os.environ["FLA_KDA_CUTE"] == "0":
            return SimpleNamespace(logits=torch.ones(4))
        dispatch_log.record(self.outcome, "code", "because", parse((), {}))
        return SimpleNamespace(logits=self.ours)


@pytest.mark.parametrize(("model", "wrong"), [
    (Model(torch.full((4,), 1.01)), []),
    (Model(torch.full((4,), 1.5)), ["logits differ by 5.0e-01"]),
    (Model(torch.full((4,), torch.nan)), ["logits differ by nan"]),
    (Model(torch.ones(4), dispatch_log.DECLINED), ["declined: code: because"]),
])  # fmt: skip
def test_nothing_is_timed_before_it_is_checked(model, wrong, monkeypatch):
    monkeypatch.setattr(_models, "kda_layers", lambda model: [0])
    monkeypatch.setattr(demo, "interleaved_times", lambda prefill, device, rounds: (50.0, 100.0))
    measured, failures = bench.measure(model)
    assert len(failures) == len(wrong) and all(text in line for text, line in zip(wrong, failures))
    assert measured[:2] == ((None, None) if wrong else (50.0, 100.0))


def test_lines_of_the_benchmark(tmp_path):
    run = dict.fromkeys(bench.COLUMNS[:5], "x")
    rows = [{**run, **bench.row(name, shape, 50.0, 100.0, 1e-2)} for name, shape in bench.SHAPES.items()]
    for each in rows:
        bench.append(tmp_path / "models.csv", [each])
    lines = (tmp_path / "models.csv").read_text().splitlines()
    assert lines[0] == "date,gpu,torch,fla,version,model,layers,heads,tokens,us_on,us_off,ratio,logits_rel_diff"
    assert lines[1] == "x,x,x,x,x,kda,4,16,8192,50.0,100.0,2.000,1.00e-02" and len(lines) == 1 + len(rows)
    assert lines[-1].split(",")[5:8] == ["kimi", "1", "32"]
    assert bench.summary(rows)[0].split() == bench.COLUMNS[5:]
