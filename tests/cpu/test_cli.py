"""The command line: doctor, demo, log."""

import json
import os
import subprocess
import sys

import pytest
import torch
from calls import TRAINING, prefill
from interpreters import run

from fla_kda_backend import cli, dispatch_log
from fla_kda_backend.call import parse
from fla_kda_backend.cli import demo, doctor


def test_module_and_console_script_are_the_same():
    outputs = [
        subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
        for command in ([sys.executable, "-m", "fla_kda_backend"], [f"{sys.prefix}/bin/fla-kda"])
    ]
    assert outputs[0] == outputs[1]
    for name in ("doctor", "demo", "log"):
        assert name in outputs[0]


def test_starting_imports_no_torch():
    script = "import sys, fla_kda_backend.cli as cli; cli.parser(); print('torch' in sys.modules, 'fla' in sys.modules)"
    assert run(script).stdout.split() == ["False", "False"]


def test_no_command_is_an_error(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([])
    assert stop.value.code == 2


def test_doctor_json(capsys, monkeypatch):
    monkeypatch.setenv("FLA_KDA_CUTE_MODE", "exact")
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"versions", "gpus", "cuda_match", "registration", "switches", "cache"}
    assert report["versions"]["torch"] == torch.__version__
    assert report["registration"]["after import fla.ops.kda"] == "registered"
    assert report["switches"]["FLA_KDA_CUTE_MODE"] == "exact (set to 'exact')"
    assert report["switches"]["FLA_KDA_CUTE"] == "1 (default)"
    assert {"FLA_DISABLE_BACKEND_DISPATCH", "TORCH_DEVICE_BACKEND_AUTOLOAD"} <= set(report["switches"])
    assert len(report["gpus"]) == torch.cuda.device_count()


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("FLA_KDA_CUTE", "off", "0 (set to 'off')"),
        (
            "FLA_KDA_CUTE",
            "disable",
            "1 (set to 'disable', which is not one of 1, 0, true, on, yes, false, off, no: the default holds)",
        ),
        ("FLA_KDA_CUTE_CACHE_MIB", "1 GiB", "1024 (set to '1 GiB', which is not a whole number: the default holds)"),
        ("FLA_KDA_CUTE_STIRCT", "1", "no such variable (set to '1')"),
    ],
)
def test_doctor_shows_what_a_value_does(monkeypatch, name, value, shown):
    monkeypatch.setenv(name, value)
    assert doctor.switches()[name] == shown


@pytest.mark.parametrize(
    "driver, verdict", [("12.6", "mismatch: calls are left to FLA"), ("13.0", "ok"), (None, "ok"), ("14.1", "ok")]
)
def test_doctor_tells_of_an_older_driver(monkeypatch, driver, verdict):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(doctor, "driver_cuda", lambda: driver)
    monkeypatch.setattr(doctor, "versions", lambda: {name: "1" for name in doctor.PACKAGES})
    assert doctor.cuda_match()["verdict"].startswith(verdict)


@pytest.fixture
def no_home(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "FLA_KDA_CUTE_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])  # no such entry


@pytest.mark.parametrize("command, status", [("cache", 1), ("cache --verify", 1), ("compile", 2)])
def test_without_a_home_directory_a_line_says_so(no_home, capsys, command, status):
    assert cli.main(command.split()) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fla-kda") and "FLA_KDA_CUTE_CACHE_DIR can name a directory" in line


def test_doctor_without_a_home_directory(no_home):
    found = doctor.cache()
    assert found["folder"].startswith("none: ") and found["compiling"] == "in each process, in memory"


def test_doctor_tells_whether_training_is_on(monkeypatch):
    assert (doctor.trains((9, 0)), doctor.trains((10, 0))) == ("runs", "left to FLA")
    monkeypatch.setenv("FLA_KDA_CUTE_TRAINING", "0")
    assert doctor.trains((9, 0)) == "switched off by FLA_KDA_CUTE_TRAINING"


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("fla.ops.kda", "fla_kda_backend.eligibility")]


@pytest.mark.parametrize("module", ["torch", "fla_kda_backend.config", *SLOW])
def test_doctor_prints_whatever_is_broken(module):
    script = f"""
import sys
sys.modules[{module!r}] = None
from fla_kda_backend.cli import main
sys.exit(main(["doctor"]))
"""
    done = run(script)
    assert done.returncode == 0
    for name in ("versions:", "gpus:", "cuda match:", "registration:", "switches:", "cache:"):
        assert name in done.stdout
    assert "error" in done.stdout


def test_doctor_tells_why_registration_failed(monkeypatch):
    from fla_kda_backend import registration

    monkeypatch.setattr(registration, "failure", "FLA is too old")
    assert "FLA is too old" in "\n".join(doctor.text(doctor.examine()))


def test_log_table(tmp_path, monkeypatch, capsys):
    path = tmp_path / "log.jsonl"
    monkeypatch.setenv("FLA_KDA_CUTE_LOG", str(path))
    call = parse((), prefill())
    for _ in range(3):
        dispatch_log.record("accepted", "accepted", "all rules hold", call)
    dispatch_log.record("declined", "head_dim", "requires K = V = 128, got K=64, V=64", call)
    dispatch_log.record("failed", "exception", "RuntimeError: no", call)
    with path.open("a") as file:
        file.write('half a li\n{"outcome": "accepted"}\n[]\n')
    assert cli.main(["log", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "calls  ran on      outcome   kernel, or why not",
        "-----  ----------  --------  ----------------------------------------------",
        "    3  kda_cute    accepted",
        "    1  FLA's next  declined  head_dim: requires K = V = 128, got K=64, V=64",
        "    1  FLA's own   failed    exception: RuntimeError: no",
        "3 of 5 calls ran on kda_cute",
    ]
    assert "3 lines are no decisions" in printed.err


def test_log_of_a_missing_file(tmp_path, capsys):
    assert cli.main(["log", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


def test_log_of_an_empty_file(tmp_path, capsys):
    (tmp_path / "empty").touch()
    assert cli.main(["log", str(tmp_path / "empty")]) == 0
    assert capsys.readouterr().out == "0 of 0 calls ran on kda_cute\n"


def demo_without_a_gpu(*options):
    done = subprocess.run(
        [sys.executable, "-m", "fla_kda_backend", "demo", *options],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No GPU here" in done.stdout
    assert "FAIL" not in done.stdout
    assert done.stdout.rstrip().endswith("All checks hold.")
    return done.stdout


@pytest.mark.slow
def test_demo_without_a_gpu():
    printed = demo_without_a_gpu()
    assert printed.count("compiled column_split") == 2
    assert "for sm_90a" in printed


@pytest.mark.parametrize(
    ("model", "layers"),
    [pytest.param("kda", "0123", marks=pytest.mark.slow), pytest.param("hybrid", "013", marks=pytest.mark.slow)],
)
def test_demo_of_a_model_without_a_gpu(model, layers):
    """What the rules decide for each KDA layer's own call; nothing is compiled."""
    printed = demo_without_a_gpu("--model", model)
    rows = [line.split() for line in printed.splitlines() if "wy64" in line]
    assert [row[:2] for row in rows] == [[layer, "accepted"] for layer in layers]
    assert all("gate=softplus" in row for row in rows)
    assert "compiled" not in printed


def test_demo_of_no_such_model(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", "--model", "kimi"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert all(name in message for name in ("kda", "kda-safe", "gva", "hybrid"))


def test_demo_of_a_model_fails_where_a_layers_call_is_declined(monkeypatch, capsys):
    monkeypatch.setattr(demo, "h200", lambda: TRAINING._replace(capability=(8, 0)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cli.main(["demo", "--model", "kda-safe"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("declined  capability") == 4 and "1 checks FAILED" in printed


def test_demo_fails_where_a_check_does_not_hold(capsys):
    checks = demo.Checks()
    checks.close("right", torch.ones(4), torch.ones(4))
    assert checks.failed == 0
    checks.close("wrong", torch.ones(4), torch.full((4,), 2.0))
    checks.close("not a number", torch.full((4,), torch.nan), torch.ones(4))
    checks(False, "no")
    assert checks.failed == 3


def test_demo_exit_status_is_that_of_its_checks(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in ("compile_kernels", "check_reference", "show_rules"):
        monkeypatch.setattr(demo, name, lambda *arguments: None)
    assert cli.main(["demo"]) == 0
    monkeypatch.setattr(demo, "compile_kernels", lambda checks, train: checks(False, "compiled nothing"))
    assert cli.main(["demo"]) == 1
    assert "1 checks FAILED" in capsys.readouterr().out


@pytest.mark.gpu
def test_demo_on_a_gpu(cuda_device, capsys):
    assert cli.main(["demo"]) == 0
    printed = capsys.readouterr().out
    assert "x as long" in printed
    assert "calls ran on kda_cute" in printed
