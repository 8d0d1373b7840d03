"""`fla-kda compile` and `fla-kda cache`."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from calls import prefill

from fla_kda_backend import cli, eligibility, planning
from fla_kda_backend.call import PARAMETERS
from fla_kda_backend.cli import _calls, _workers, cache, compile, doctor, log
from fla_kda_backend.compiling import KernelSpec, disk, linking, spec
from fla_kda_backend.compiling.spec import dsl_version
from fla_kda_backend.kernels.variant import Variant

ROOT = Path(cli.__file__).parents[2]
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


def refused(capsys, *arguments):
    """The one line of an error, with exit status 2."""
    assert cli.main(["compile", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("fla-kda compile: ") and not printed.out
    return line.removeprefix("fla-kda compile: ")


@pytest.mark.parametrize(("text", "problem"), [
    ("{", "is no JSON: Expecting property name"),
    ("", "is no JSON: Expecting value"),
    ("\xff", "is no JSON: 'utf-8' codec can't decode"),
    ("[" * 100_000, "is no JSON: "),
    ("[]", "holds [], not an object: give a model's config.json"),
    ("null", "holds null, not an object"),
    ('{"model_type": "llama"}', "model_type names no model with KDA layers that is known here: --for takes FLA's kda models"),
    ('{"model_type": ["kda"]}', 'it is ["kda"]'),
    ("{}", "it is null"),
    ('{"model_type": "kimi_linear"}', "has no number of heads: write linear_attn_config.num_heads, linear_num_heads or"),
])  # fmt: skip
def test_what_is_no_such_model(text, problem, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(text, encoding="latin-1")
    for given in (path, tmp_path):
        line = refused(capsys, "--for", given)
        assert line.startswith(f"--for {path}: ") and problem in line


ODD = [
    (KDA, {"expand_v": None}, "expand_v must be a number above 0, at most 65536, or be left out for FLA's default, 1; it is "
                               "null"),
    (KDA, {"expand_v": "2"}, 'expand_v must be a number above 0, at most 65536, or be left out for FLA\'s default, 1; it '
                              'is "2"'),
    (KDA, {"expand_v": 0}, "expand_v must be a number above 0"),
    (KDA, {"expand_v": 1e-9}, "expand_v leaves no value column of head_dim 128"),
    (KDA, {"expand_v": 1e300}, "expand_v must be a number above 0, at most 65536"),
    (KDA, {"expand_v": float("nan")}, "expand_v must be a number above 0"),
    (KDA, {"num_heads": "sixteen"}, 'num_heads must be a whole number from 1 to 65536, or be left out for FLA\'s default, 16; '
                                    'it is "sixteen"'),
    (KDA, {"num_heads": 0}, "num_heads must be a whole number"),
    (KDA, {"num_heads": True}, "num_heads must be a whole number"),
    (KDA, {"num_heads": 10**20}, "num_heads must be a whole number"),
    (KDA, {"num_v_heads": [16]}, "num_v_heads must be a whole number from 1 to 65536; it is [16]"),
    (KDA, {"head_dim": 128.5}, "head_dim must be a whole number"),
    (KDA, {"dtype": "bf16"}, 'dtype must be one of bfloat16, float16, float32, float64: write the one that the model runs in; '
                             'it is "bf16"'),
    (KDA, {"dtype": None, "torch_dtype": 16}, "torch_dtype must be one of"),
    (KDA, {"dtype": {"": "bfloat16"}}, "dtype must be one of"),
    (KDA, {"lower_bound": "-5"}, 'lower_bound must be a number; it is "-5"'),
    (KDA, {"lower_bound": 10**400}, "lower_bound must be a number; it is 1000"),
    (KDA, {"safe_gate": "yes"}, "safe_gate must be true or false, or be left out for FLA's default, false"),
    (KDA, {"max_position_embeddings": "long"}, "max_position_embeddings must be a number above 0"),
    (KIMI, {"linear_attn_config": [3]}, "linear_attn_config must be an object with num_heads and head_dim; it is [3]"),
    (KIMI, {"linear_attn_config": {"num_heads": "32"}}, 'linear_attn_config.num_heads must be a whole number'),
    (KIMI, {"linear_attn_config": None, "num_attention_heads": 1.5}, "num_attention_heads must be a whole number"),
    (KIMI, {"torch_dtype": "half"}, 'torch_dtype must be one of'),
]  # fmt: skip


@pytest.mark.parametrize(("config", "change", "problem"), ODD, ids=[json.dumps(change)[:60] for _, change, _ in ODD])
def test_odd_fields_are_named(config, change, problem, config_file, capsys):
    path = config_file(**{**config, **change})
    assert refused(capsys, "--list", "--for", path).startswith(f"--for {path}: {problem}")


@pytest.mark.parametrize("change", [
    {"model_max_length": 1e30}, {"max_position_embeddings": None}, {"max_position_embeddings": 0.5}, {"num_v_heads": None},
    {"lower_bound": -5}, {"expand_v": 1.0}, {"torch_dtype": "torch.bfloat16"}, {"text_config": None},
], ids=json.dumps)  # fmt: skip
def test_fields_that_are_merely_unusual(change, config_file, capsys):
    status, lines = listed(capsys, "--for", config_file(**{**KDA, **change}))
    assert status == 0 and any(line.startswith("wy64 (") for line in lines)


def test_a_model_of_the_hub(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, "--for", "moonshotai/Kimi-Linear")
    assert "downloaded first: hf download moonshotai/Kimi-Linear config.json --local-dir Kimi-Linear" in line
    assert "no such file: give a model's config.json, or its directory" in refused(capsys, "--for", "gpt2")
    assert f"{tmp_path}/config.json: no such file" in refused(capsys, "--for", tmp_path)
    assert "File name too long" in refused(capsys, "--for", "x" * 300)


def test_a_model_none_of_whose_calls_runs_here(config_file, tmp_path, capsys):
    path = config_file(**{**KDA, "head_dim": 64})
    assert cli.main(["compile", "--for", str(path), "--out", str(tmp_path / "kernels")]) == 1
    assert "none of these calls runs on the kernels" in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--jobs", "0"), ("--jobs", "many"), ("--sms", "-1")])
def test_numbers_of_options(option, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["compile", *option])
    assert stop.value.code == 2 and f"takes a whole number above 0, got '{option[1]}'" in capsys.readouterr().err


# ---- what is checked before anything is compiled -------------------------------------------------------------------------
@pytest.mark.parametrize("place", ["a file", "in a file", "others can write", "read-only", "no DSL"])
def test_a_bad_place_is_found_at_once(place, tmp_path, monkeypatch, capsys):
    """Before torch is imported, but for the DSL: kernels that are there already need none."""
    folder = tmp_path / "kernels"
    if place == "others can write":
        folder.mkdir()
        folder.chmod(0o777)
    elif place == "read-only":

        def fail(*arguments, **options):
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(os, "makedirs", fail)
    elif place != "no DSL":
        folder.write_text("")
    specs = [KernelSpec.of("column_split", "sm_90a")] if place == "no DSL" else pytest.fail
    monkeypatch.setattr(compile, "needed_specs", lambda *args: specs if specs is not pytest.fail else pytest.fail("too late"))
    if place == "no DSL":
        monkeypatch.setattr(spec, "dsl_version", lambda: None)
        monkeypatch.setattr(disk, "dsl_version", lambda: None)
    assert cli.main(["compile", "--out", str(folder / "x" if place == "in a file" else folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert {
        "a file": "kernels is no directory, and cannot be made: give another --out",
        "in a file": "x is no directory, and cannot be made",
        "others can write": f"can be written by others (mode 777): chmod go-w {folder}",
        "read-only": "kernels: Read-only file system",
        "no DSL": "the CuTe DSL is not installed here",
    }[place] in line  # fmt: skip


def test_specs_are_those_that_calls_launch():
    call = prefill(tokens=4096, batch=1)
    specs, refusals = _calls.specs_of([call, prefill(dim=64)], "sm_90a", 132, ("auto", "exact"))
    assert [spec.family for spec in specs] == ["wy64", "column_split"] and list(specs)[0].schedule.replay
    assert [(code, count) for (code, _), count in refusals.items()] == [("head_dim", 2)]
    assert eligibility.RUN == ((9, 0),)


def test_training_steps_add_forward_and_backward(capsys):
    def listed(*options):
        assert cli.main(["compile", "--list", *options]) == 0
        return capsys.readouterr().out.splitlines()

    plain, training = listed(), listed("--training")
    added = [line for line in training if line not in plain]
    assert [line for line in training if line in plain] == plain
    assert {line.split()[0] for line in added} == {"wy64_backward"}  # the forwards are those of prefills
    assert len([line for line in added if "segmented" not in line]) == 6  # by cu_seqlens and `beside`
    assert any("computes gradients on compute capability 9.0" in line for line in listed("--training", "--arch", "sm_100a"))


# ---- compiling -------------------------------------------------------------------------------------------------------
def test_where_nothing_can_be_linked_nothing_is_compiled(tmp_path, monkeypatch, capsys):
    """One line says so, and names CC; what is there already needs no linker."""
    spec = KernelSpec.of("column_split", "sm_90a")
    monkeypatch.setattr(compile, "needed_specs", lambda *args: [spec])
    monkeypatch.setattr(_workers.Workers, "compile", lambda *args: pytest.fail("compiled"))
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
    monkeypatch.setattr(compile, "needed_specs", lambda *args: specs)
    folder = str(tmp_path / "kernels")
    assert cli.main(["compile", "--arch", "sm_90a,sm_120a", "--out", folder, "--jobs", "2"]) == 0
    out = capsys.readouterr().out
    digest = hashlib.sha256((tmp_path / "kernels" / disk.MANIFEST).read_bytes()).hexdigest()
    assert out.endswith(f"FLA_KDA_CUTE_CACHE_MANIFEST={digest}\n")
    assert "2 kernels, 0 of them" in out and "[2/2] column_split" in out and "2 of 2 kernels are in" in out
    assert {entry.spec for entry in disk.Directory(folder).stored()} == {*specs}
    assert cli.main(["compile", "--out", folder]) == 0
    assert "2 kernels, 2 of them" in capsys.readouterr().out
    assert cli.main(["cache", "--dir", folder]) == 0
    out = capsys.readouterr().out
    assert "sm_120a" in out and "initial_state=fp32" in out and out.count(" ok ") == 2 and dsl_version() in out


def test_what_was_compiled_is_signed_off(tmp_path, monkeypatch, capsys):
    """Into --out alone: the cache directory grows by itself."""
    specs = [KernelSpec.of("column_split", arch) for arch in ("sm_90a", "sm_120a")]
    monkeypatch.setattr(compile, "needed_specs", lambda *args: specs)
    folder = tmp_path / "kernels"
    monkeypatch.setenv("FLA_KDA_CUTE_CACHE_DIR", str(folder))
    for each in specs:
        disk.Directory(folder).add(each, b"library")
    assert cli.main(["compile"]) == 0 and not (folder / disk.MANIFEST).exists()
    assert cli.main(["compile", "--out", str(folder)]) == 0
    name, _, digest = capsys.readouterr().out.splitlines()[-1].partition("=")
    folder.chmod(0o777)
    with pytest.raises(disk.Unusable):
        disk.Directory(folder).find(specs[0])
    monkeypatch.setenv(name, digest)
    assert all(bytes(disk.Directory(folder).find(each).library) == b"library" for each in specs)
    assert cli.main(["cache", "--verify"]) == 0
    (folder / specs[0].file_name).write_bytes(b"evil")
    assert cli.main(["cache", "--verify"]) == 1


FAKE = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
for line in sys.stdin:
    spec = json.loads(line)
    assert spec["arch"] == os.environ["CUTE_DSL_ARCH"]
    stages = dict(spec["options"])["stages"]
    if stages == 6:
        (folder / f"begun {os.getpid()}").touch()
        time.sleep(600)
    if stages == 7 or (stages == 8 and not (folder / "died").exists()):
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    print(json.dumps({"seconds": 0.1, "failure": "no\\nregisters left" if stages == 5 else None}), flush=True)
"""


@pytest.fixture
def workers(monkeypatch, tmp_path):
    """Compiles variants with these numbers of stages, in processes that run FAKE, or another script; how many failed."""

    def compile_all(stages, jobs=1, archs=("sm_90a",), script=FAKE):
        def popen(command, **options):
            return real([sys.executable, "-c", script, command[-1]], **options)

        monkeypatch.setattr(_workers.subprocess, "Popen", popen)
        specs = [KernelSpec.of("column_split", arch, stages=n) for arch in archs for n in stages]
        return _workers.Workers(tmp_path, len(specs)).compile(specs, jobs)

    real = _workers.subprocess.Popen
    return compile_all


@pytest.mark.parametrize("jobs", [1, 3, 8])
def test_failures_are_told_and_counted(jobs, workers, capsys):
    """On one line each, on standard error."""
    assert workers((2, 3, 5), jobs, ("sm_90a", "sm_100a")) == 2
    printed = capsys.readouterr()
    assert len(printed.err.splitlines()) == printed.err.count("FAILED: no registers left") == 2
    assert printed.out.count("0.1 s") == 4 and "[6/6]" in printed.out + printed.err


def test_progress_says_how_long_it_will_take(workers, capsys):
    workers((2, 3, 9))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" left")[1] for line in lines] == [" left", " left", ""] and "about 1 s left" in lines[0]
    assert [_workers.duration(seconds) for seconds in (0.1, 59, 100, 3600)] == ["about 1 s", "about 59 s", "about 2 min",
                                                                                "about 60 min"]  # fmt: skip


def test_a_compiler_that_died_is_started_again(workers, capsys):
    """Once, for the variant that it died of, which is named; and for the others."""
    assert workers((2, 8, 3)) == 0
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert "stages=8" in line and "the compiler died (killed by SIGSEGV); it is started again" in line
    assert printed.out.count("0.1 s") == 3


def test_a_variant_that_kills_its_compiler_twice_has_failed(workers, capsys):
    assert workers((2, 7, 3)) == 1
    printed = capsys.readouterr()
    assert "stages=7" in printed.err and "FAILED: the compiler died again (killed by SIGSEGV)" in printed.err
    assert printed.out.count("0.1 s") == 2


@pytest.mark.parametrize(
    "script", ["raise SystemExit(3)", "print('hello'); raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)"]
)
def test_a_compiler_that_compiles_nothing_is_given_up(script, workers, capsys):
    assert workers((2, 3, 4), script=script) == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and all("not tried" in line for line in lines[2:])
    assert ("SIGKILL, as when memory runs out" if "kill" in script else "exit status 3") in lines[0]


INTERRUPTED = """
import signal, subprocess, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
import fla_kda_backend.cli as cli
from fla_kda_backend.cli import _workers, compile
from fla_kda_backend.compiling import KernelSpec, linking, spec
archs = ("sm_90a", "sm_100a", "sm_120a")
compile.needed_specs = lambda *args: [KernelSpec.of("column_split", arch, stages=6) for arch in archs]
linking.missing, spec.dsl_version = lambda: None, lambda: "4.8.1"
real = subprocess.Popen
_workers.subprocess.Popen = lambda command, **options: real([sys.executable, "-c", sys.argv[2], command[-1]], **options)
sys.exit(cli.main(["compile", "--out", sys.argv[1], "--jobs", "2"]))
"""


@pytest.mark.parametrize("whom", ["the process", "its group"])
def test_ctrl_c_is_quiet(whom, tmp_path):
    """Sent by kill, or by a terminal to all of the group. No process is left."""
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path), FAKE]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, start_new_session=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes)
    limit = time.monotonic() + 60
    while len(begun := list(tmp_path.glob("begun *"))) < 2 and time.monotonic() < limit and process.poll() is None:
        time.sleep(0.02)
    (os.kill if whom == "the process" else os.killpg)(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == "" and out.startswith("3 kernels, 0 of them")
    assert len(begun) == 2 and not any(os.path.exists(f"/proc/{path.name.split()[1]}") for path in begun)


@pytest.mark.parametrize("command", ["doctor", "log", "cache"])
def test_ctrl_c_ends_every_command_quietly(command, monkeypatch, capsys, tmp_path):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    for name, function in (("examine", doctor), ("count", log), ("lines", cache)):
        monkeypatch.setattr(function, name, interrupt)
    (tmp_path / "log").touch()
    assert cli.main([command, *([str(tmp_path / "log")] if command == "log" else [])]) == 130
    assert capsys.readouterr().err == ""


NOISY = """
import sys
from fla_kda_backend.compiling import __main__ as worker

def export(spec, folder):
    print("a compiler that talks", flush=True)
    if spec.schedule.stages == 3:
        raise ValueError("two\\nlines")

worker.export = export
worker.main(sys.argv[1])
"""


def test_what_a_compiler_prints_is_no_answer(workers, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert workers((2, 3, 4), script=NOISY) == 1
    out, err = capfd.readouterr()
    assert out.count(" s, about") + out.count(" s\n") == 2 and "talks" not in out
    assert err.count("a compiler that talks") == 3 and "FAILED: ValueError: two lines" in err


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


def test_clear_names_what_it_leaves(filled, capsys):
    """Also in a directory of somebody's own libraries."""
    foreign = ("extension.cpython-311-x86_64-linux-gnu.so", "module.so", ".x.lock", ".x.tmp")
    for name in foreign:
        (filled[0].parent / name).write_bytes(b"something")
    filled[0].write_bytes(b"broken")
    assert cli.main(["cache", "--clear", "--dir", str(filled[0].parent)]) == 0
    assert {*os.listdir(filled[0].parent)} == {*foreign, filled[0].name}
    out = capsys.readouterr().out
    assert "1 kernels removed" in out and f"{filled[0].name} is left" in out and "module.so" not in out


@pytest.mark.parametrize("what", ["missing", "empty", "foreign", "stale", "off"])
def test_verify_fails_on_nothing(what, filled, capsys, monkeypatch):
    folder = filled[0].parent
    if what == "missing":
        folder = folder / "none"
    elif what == "stale":
        monkeypatch.setattr(spec, "__version__", "9.9")
    else:
        for path in filled:
            path.unlink()
    if what == "foreign":
        (folder / "module.so").write_bytes(b"something")
    monkeypatch.setenv("FLA_KDA_CUTE_CACHE_DIR", "off" if what == "off" else str(folder))
    assert cli.main(["cache", "--verify"]) == 1 and cli.main(["cache"]) == 0
    reason = {"missing": "no such directory", "off": ""}.get(what, "no kernel that this version of the package can use")
    assert reason in capsys.readouterr().err


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
