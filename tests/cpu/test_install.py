"""The package as a wheel and as an editable checkout, each in a fresh environment."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from interpreters import result, run

ROOT = Path(__file__).resolve().parents[2]
STATE = """
import json, fla.ops.kda, fla_kda_backend, fla_kda_backend._autoload as autoload
print(json.dumps([autoload.status()[0], fla_kda_backend.__file__]))
"""


def packages_without_ours(folder):
    """Directories of links to the packages of the running interpreter, without this package, however it is installed."""
    found = [Path(entry) for entry in sys.path if {"site-packages", "dist-packages"} & {*Path(entry).parts}]
    for number, path in enumerate(path for path in found if path.is_dir()):
        links = folder / f"packages{number}"
        links.mkdir(parents=True)
        for each in path.iterdir():
            if each.suffix != ".pth" and "fla_kda_backend" not in each.name:
                (links / each.name).symlink_to(each)
        yield links


class Environment:
    """A venv that sees the packages of the running one behind its own, except this package."""

    def __init__(self, folder):
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        self.python = folder / "venv" / "bin" / "python"
        (packages,) = (folder / "venv").glob("lib/python*/site-packages")
        (packages / "zz_outer.pth").write_text("".join(f"{path}\n" for path in packages_without_ours(folder / "outer")))
        self.packages = packages
        # A copy, so that building leaves nothing in the checkout, and the checkout can be moved.
        self.checkout = folder / "checkout"
        self.checkout.mkdir()
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, self.checkout)
        shutil.copytree(ROOT / "fla_kda_backend", self.checkout / "fla_kda_backend")

    def install(self, *what):
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", "--no-deps"]
        command += ["--no-build-isolation", "--ignore-installed", "--disable-pip-version-check"]
        done = subprocess.run([*command, *map(str, what)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path)


@pytest.mark.slow
def test_wheel(environment):
    environment.install(environment.checkout)
    shutil.rmtree(environment.checkout)
    state, file = result(STATE, python=environment.python)
    assert state == "registered"
    assert Path(file).is_relative_to(environment.packages) and Path(file).with_name("py.typed").exists()
    command = [environment.python.with_name("fla-kda"), "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0.1.0\n"


@pytest.mark.slow
def test_editable(environment):
    environment.install("-e", environment.checkout)
    state, file = result(STATE, python=environment.python)
    assert state == "registered"
    assert Path(file).is_relative_to(environment.checkout)

    # README says so, and says what to do.
    environment.checkout.rename(environment.checkout.with_name("moved"))
    broken = run("import torch", python=environment.python)
    assert broken.returncode != 0
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in broken.stderr
    assert run("import torch", python=environment.python, TORCH_DEVICE_BACKEND_AUTOLOAD="0").returncode == 0
