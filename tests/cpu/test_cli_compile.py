"""`fla-kda compile` and `fla-kda cache`."""

import json
import os
import sys

import pytest
import torch
from calls import prefill

from fla_kda_backend import cli, eligibility, planning
from fla_kda_backend.call import PARAMETERS
from fla_kda_backend.cli import _calls, cache, compile, doctor
from fla_kda_backend.compiling import KernelSpec, disk, linking, spec
from fla_kda_backend.compiling.spec import dsl_version
from fla_kda_backend.kernels.variant import Variant

KDA = {"model_type": "kda", "num_heads": 16, "head_dim": 128, "safe_gate": True, "lower_bound": -5.0, "dtype": "bfloat16"}
KIMI = {"model_type": "kimi_linear", "linear_attn_config": {"num_heads": 32, "head_dim": 128}, "torch_dtype": "bfloat16"}


@pytest.fixture
def config_file(tmp_path):
    def write(**config):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return path

    return write


def listed(capsys, *arguments):
    """(exit status, lines) of `fla-kda compile --list`."""
    status = cli.main(["compile", "--list", *map(str, arguments)])
    return status, capsys.readouterr().out.splitlines()


# ---- what is compiled ------------------------------------------------------------------------------------------------
def test_the_usual_set(capsys):
    """As README says."""
    counts = {arch: len(listed(capsys, "--arch", arch)[1]) for arch in compile.SM_COUNTS}
    assert counts == {"sm_90a": 66, "sm_100a": 54, "sm_103a": 54, "sm_120a": 54}
    _, lines = listed(capsys, "--mode", "auto")
    assert len(lines) == 39 and all(line.startswith("wy64 (") for line in lines)
    for option in ("replay=True", "overlap=True", "cu_seqlens=int32", "cu_seqlens=int64", "initial_state=fp32",
                   "final_state=None", "direct=True"):  # fmt: skip
        assert any(option in line for line in lines), option


HEADS = (*range(1, 68), 96, 128, 129, 160)
PROMPTS = [(number, tokens) for number in (*range(1, 23), 33, 34, 66, 67, 100) for tokens in (1, 64, 65, 2047, 2048, 8192)]


def schedules(layer, prompts):
    """Plans of calls on an H200 and on a B200 as their specs see them, workspace aside."""
    found = set()
    kinds = [Variant(cu_seqlens=offsets, initial_state=initial) for offsets in (None, "int32") for initial in (None, "fp32")]
    for number, tokens in prompts:
        tasks = number * layer.heads
        for kind in kinds:
            found.add((kind, planning.wy64(number * tokens, number, layer.heads, 132, kind).schedule))
        for arithmetic, sms in (("exact", 132), ("robust", 148)):
            found.add(planning.column_split(arithmetic, tasks, 1, sms, Variant()).schedule)
    return found


@pytest.mark.parametrize("heads", HEADS)
def test_the_prompts_that_are_counted_on_have_all_schedules(heads):
    """Of a layer with so many heads; the usual set has them for any."""
    layer = _calls.USUAL[0]._replace(heads=heads, value_heads=heads)
    needed = schedules(layer, PROMPTS)
    assert needed <= schedules(layer, _calls.SEQUENCES)
    assert needed <= set.union(*(schedules(usual, _calls.SEQUENCES) for usual in _calls.USUAL))


def test_all_archs_are_those_that_can_be_compiled_for(capsys):
    _, lines = listed(capsys, "--arch", ",".join(compile.SM_COUNTS))
    assert {line.rpartition(" ")[2] for line in lines} == {*compile.SM_COUNTS}
    assert cli.main(["compile", "--arch", "sm_80"]) == 2
    assert "takes sm_90a" in capsys.readouterr().err


def test_sms_are_in_what_depends_on_them(capsys):
    assert all("max_ctas=114" in line for line in listed(capsys, "--mode", "auto", "--sms", 114)[1])


@pytest.mark.parametrize("layout", ["file", "directory", "nested"])
def test_a_kda_model(layout, config_file, tmp_path, capsys):
    path = config_file(**(KDA if layout != "nested" else {"model_type": "vlm", "text_config": KDA}))
    status, lines = listed(capsys, "--for", tmp_path if layout == "directory" else path)
    kernels = [line for line in lines if line.startswith("wy64 (")]
    assert status == 0 and len(kernels) >= 18
    assert not any("column_split" in line for line in lines)  # auto mode; exact is asked for
    _, lines = listed(capsys, "--for", path, "--mode", "exact")
    assert any(line.startswith("column_split (") and "arithmetic=robust" not in line for line in lines)


def test_calls_are_those_of_the_layer(config_file):
    """Of the layer's own keywords, with the shapes that the configuration says."""
    layer, longest = _calls.layer_of(config_file(**KDA, num_v_heads=32, expand_v=2, max_position_embeddings=4096))
    assert longest == 4096
    for call in _calls.calls(layer):
        assert set(call) <= set(PARAMETERS) and call["q"].is_meta
        assert call["q"].shape[2:] == (16, 128) and call["v"].shape[2:] == (32, 256) and call["g"].shape[2:] == (32, 128)
        assert call["beta"].shape[2:] == (32,) and call["A_log"].numel() * 128 == call["dt_bias"].numel() == 32 * 128
        assert call["initial_state"] is None or call["initial_state"].shape[1:] == (32, 256, 128)
        assert call["cu_seqlens"] is None or len(call["q"]) == 1


def test_the_calls_of_flas_layer(config_file, monkeypatch):
    """What FLA's layer really passes is among the calls that its configuration is taken to make."""
    from fla.layers import kda as module

    seen = []
    monkeypatch.setattr(module, "chunk_kda", lambda **call: seen.append(call) or (torch.zeros_like(call["v"]), None))
    options = {"num_heads": 2, "head_dim": 128, "safe_gate": True, "lower_bound": -5.0}
    layer = module.KimiDeltaAttention(hidden_size=64, use_short_conv=False, **options)
    monkeypatch.setattr(module.FusedRMSNormGated, "forward", lambda self, o, gate: o)
    with torch.no_grad():
        layer.eval().bfloat16()(torch.zeros(1, 128, 64, dtype=torch.bfloat16), use_cache=True)
    (real,) = seen
    ours, _ = _calls.layer_of(config_file(model_type="kda", **options))

    def form(call):
        tensors = {name: (x.dtype, x.ndim) for name, x in call.items() if isinstance(x, torch.Tensor)}
        return tensors, {name: x for name, x in call.items() if name not in tensors and x is not None}

    assert form(real) in [form(call) for call in _calls.calls(ours)]


def test_kimi_linear_computes_its_gate_outside(config_file):
    layer, _ = _calls.layer_of(config_file(**KIMI))
    calls = list(_calls.calls(layer))
    assert {call["g"].dtype for call in calls} == {torch.float32}
    assert {call["beta"].dtype for call in calls} == {torch.bfloat16, torch.float32}
    assert all(call["A_log"] is None and "use_gate_in_kernel" not in call and "state_v_first" not in call for call in calls)
    assert {call["q"].shape[2] for call in calls} == {32}


def test_refused_calls_are_told(config_file, capsys):
    status, lines = listed(capsys, "--for", config_file(**{**KDA, "head_dim": 64}))
    assert not any(line.endswith(" for sm_90a") for line in lines)
    assert any("calls are left to FLA: head_dim: requires K = V = 128" in line for line in lines)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "llama"}', '{"model_type": "kimi_linear"}'])
def test_what_is_no_such_model(text, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert cli.main(["compile", "--for", str(path)]) == 2 and f"--for {path}: " in capsys.readouterr().err
    assert cli.main(["compile", "--for", str(tmp_path / "none")]) == 2


def test_specs_are_those_that_calls_launch():
    call = prefill(tokens=4096, batch=1)
    specs, refusals = _calls.specs_of([call, prefill(dim=64)], "sm_90a", 132, ("auto", "exact"))
    assert [spec.family for spec in specs] == ["wy64", "column_split"] and list(specs)[0].schedule.replay
    assert [(code, count) for (code, _), count in refusals.items()] == [("head_dim", 2)]
    assert eligibility.RUN == ((9, 0),)


# ---- compiling -------------------------------------------------------------------------------------------------------
def test_where_nothing_can_be_linked_nothing_is_compiled(tmp_path, monkeypatch, capsys):
    """One line says so, and names CC; what is there already needs no linker."""
    spec = KernelSpec.of("column_split", "sm_90a")
    monkeypatch.setattr(compile, "needed_specs", lambda archs, args: [spec])
    monkeypatch.setattr(compile, "compile_all", lambda *args: pytest.fail("compiled"))
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("CC", "")
    assert cli.main(["compile", "--out", str(tmp_path / "kernels")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fla-kda compile: nothing can be linked here, set CC to a C compiler") and "neither CC" in line
    disk.Directory(tmp_path / "kernels").add(spec, b"library")
    assert cli.main(["compile", "--out", str(tmp_path / "kernels")]) == 0


@pytest.mark.slow
@pytest.mark.skipif(dsl_version() is None or linking.missing() is not None, reason="needs the CuTe DSL and a linker")
def test_compile_two_archs_and_list_them(tmp_path, monkeypatch, capsys):
    specs = [KernelSpec.of("column_split", arch, initial_state="fp32") for arch in ("sm_90a", "sm_120a")]
    monkeypatch.setattr(compile, "needed_specs", lambda archs, args: specs)
    folder = str(tmp_path / "kernels")
    assert cli.main(["compile", "--arch", "sm_90a,sm_120a", "--out", folder, "--jobs", "2"]) == 0
    out = capsys.readouterr().out
    assert "2 kernels, 0 of them" in out and "[2/2] column_split" in out and "2 of 2 kernels are in" in out
    assert {entry.spec for entry in disk.Directory(folder).stored()} == {*specs}
    assert cli.main(["compile", "--out", folder]) == 0
    assert "2 kernels, 2 of them" in capsys.readouterr().out
    assert cli.main(["cache", "--dir", folder]) == 0
    out = capsys.readouterr().out
    assert "sm_120a" in out and "initial_state=fp32" in out and out.count(" ok ") == 2 and dsl_version() in out


FAKE = """
import json, os, sys
for line in sys.stdin:
    spec = json.loads(line)
    assert spec["arch"] == os.environ["CUTE_DSL_ARCH"]
    stages = dict(spec["options"])["stages"]
    if stages == 7:
        os._exit(1)
    print(json.dumps({"seconds": 0.1, "failure": "no registers left" if stages == 5 else None}), flush=True)
"""


@pytest.mark.parametrize("jobs", [1, 3, 8])
def test_failures_are_told_and_counted(jobs, monkeypatch, tmp_path, capsys):
    def popen(command, **options):
        return real([sys.executable, "-c", FAKE], **options)

    real = compile.subprocess.Popen
    monkeypatch.setattr(compile.subprocess, "Popen", popen)
    specs = [KernelSpec.of("column_split", arch, stages=n) for arch in ("sm_90a", "sm_100a") for n in (2, 3, 5)]
    assert compile.compile_all(specs, tmp_path, jobs) == 2
    out = capsys.readouterr().out
    assert out.count("FAILED: no registers left") == 2 and out.count("0.1 s") == 4 and "[6/6]" in out
    specs = [KernelSpec.of("column_split", "sm_90a", stages=n) for n in (2, 7, 3)]
    assert compile.compile_all(specs, tmp_path, 1) == 2 and "the compiler died" in capsys.readouterr().out


# ---- the cache -------------------------------------------------------------------------------------------------------
@pytest.fixture
def filled(tmp_path, monkeypatch):
    folder = tmp_path / "kernels"
    monkeypatch.setenv("FLA_KDA_CUTE_CACHE_DIR", str(folder))
    specs = [KernelSpec.of("wy64", "sm_90a", initial_state=dtype) for dtype in (None, "fp32")]
    return [disk.Directory(folder).add(spec, b"library") for spec in specs]


def test_verify(filled, capsys):
    assert cli.main(["cache", "--verify"]) == 0
    filled[0].write_bytes(b"broken")
    assert cli.main(["cache", "--verify"]) == 1 and cli.main(["cache"]) == 0
    out = capsys.readouterr().out
    assert "it is no kernel, or only part of one" in out and filled[0].name in out
    assert "2 kernels, 0.0 of 1024 MiB" in out


def test_clear(filled, capsys):
    assert cli.main(["cache", "--clear"]) == 0 and os.listdir(filled[0].parent) == []
    assert "2 kernels removed" in capsys.readouterr().out
    assert cli.main(["cache", "--verify"]) == 0


def test_a_directory_that_others_can_write(filled, capsys):
    filled[0].parent.chmod(0o777)
    assert cli.main(["cache", "--verify"]) == 1
    assert "can be written by others" in capsys.readouterr().err


def test_doctor_tells_what_the_cache_holds_and_how_kernels_come(filled, monkeypatch):
    filled[0].write_bytes(b"broken")
    found = doctor.cache()
    assert (found["kernels"], found["not usable"], found["limit"], found["writable"]) == (2, 1, "1024 MiB", True)
    assert found["for"] == f"sm_90a by DSL {dsl_version()}" and found["folder"] == str(filled[0].parent)
    filled[0].parent.chmod(0o777)
    assert "can be written by others" in doctor.cache()["not used"]
    monkeypatch.setenv("FLA_KDA_CUTE_CACHE_DIR", "off")
    assert doctor.cache()["folder"] == "off"


def test_doctor_names_each_way_of_compiling(monkeypatch, tmp_path):
    monkeypatch.setenv("FLA_KDA_CUTE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(spec, "dsl_version", lambda: "4.8.1")
    monkeypatch.setattr(linking, "missing", lambda: None)
    monkeypatch.setattr(linking, "linker", lambda: ["/usr/bin/gcc"])
    assert doctor.how_compiled() == "once, into the folder, linked by gcc and loaded by tvm-ffi"
    monkeypatch.setattr(linking, "missing", lambda: "libcudart_static.a not found")
    assert doctor.how_compiled().startswith("in each process, in memory, because nothing can be linked here: libcudart")
    monkeypatch.setattr(spec, "dsl_version", lambda: None)
    assert doctor.how_compiled().startswith("no CuTe DSL here: runs the kernels in the folder")


def test_no_cache(monkeypatch, capsys):
    monkeypatch.setenv("FLA_KDA_CUTE_CACHE_DIR", "off")
    assert cli.main(["cache"]) == 0 and "nothing is kept" in capsys.readouterr().out
    assert cli.main(["compile"]) == 2


@pytest.mark.parametrize("seconds, text", [(5, "now"), (120, "2 min ago"), (7200, "2 h ago"), (3 * 86400, "3 d ago")])
def test_age(seconds, text):
    assert cache.age(seconds) == text
