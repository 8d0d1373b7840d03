"""Run a script in a fresh interpreter."""

import json
import os
import subprocess
import sys

SWITCHES = ("TORCH_DEVICE_BACKEND_AUTOLOAD", "FLA_DISABLE_BACKEND_DISPATCH", "PYTHONPATH", "PYTHONWARNINGS")


def run(script, *arguments, python=sys.executable, cwd=None, timeout=120, **environment):
    """CompletedProcess of `python -c script`, not in the checkout and without the switches that the shell has set."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in SWITCHES and not name.startswith(("FLA_KDA_CUTE", "PYTEST"))
    }
    return subprocess.run(
        [str(python), "-c", script, *map(str, arguments)],
        cwd=cwd or "/",
        env={**inherited, **{name: str(value) for name, value in environment.items()}},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def result(script, *arguments, **options):
    """The last line that the script printed, read as JSON; the script must succeed."""
    done = run(script, *arguments, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
