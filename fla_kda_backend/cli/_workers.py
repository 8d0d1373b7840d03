"""Compile variants in processes of their own, and tell how far that is."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..compiling import KernelSpec

PATIENCE = 3.0  # seconds that processes have to end by themselves: one compiles a variant in about as many


class Workers:
    """Processes that compile `total` variants into a folder, and what became of them."""

    def __init__(self, folder: Path, total: int) -> None:
        self.folder, self.total = folder, total
        self.done = self.failed = 0
        self._begin = time.monotonic()
        self._lock = threading.Lock()  # of everything above and below
        self._live: set[subprocess.Popen[str]] = set()
        self._stopping = False

    def compile(self, specs: Sequence["KernelSpec"], jobs: int) -> int:
        """Compile in at most `jobs` processes at once, each for one arch; how many variants failed."""
        groups: dict[str, list[KernelSpec]] = {}
        for spec in specs:
            groups.setdefault(spec.arch, []).append(spec)
        parts = max(1, jobs // len(groups))
        shares = [share for group in groups.values() for part in range(parts) if (share := group[part::parts])]
        with ThreadPoolExecutor(max(1, jobs)) as pool:
            try:
                list(pool.map(self._compile_share, shares))
            except BaseException:  # Ctrl-C above all
                self._stop()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return self.failed

    def _compile_share(self, specs: Sequence["KernelSpec"]) -> None:
        """Compile specs of one arch. A process that dies is started again, and the variant that it died of tried once more."""
        process, answered, died = None, 0, ""
        for number, spec in enumerate(specs):
            answer = None
            for last in (False, True):
                begin = time.monotonic()
                process = process or self._start(spec.arch)
                if process is None:  # we are stopping
                    return
                answer = _ask(process, spec)
                if answer is not None:
                    break
                died, process = self._bury(process), None
                if not self._stopping and not last:
                    self._say(f"{spec}: the compiler died ({died}); it is started again", sys.stderr)
            if self._stopping:
                break
            if answer is None:
                answer = {"seconds": time.monotonic() - begin, "failure": f"the compiler died again ({died})"}
                self._tell(spec, **answer)
                if not answered:  # it would die of the others, too
                    for other in specs[number + 1 :]:
                        self._tell(other, 0.0, "not tried: the compiler dies before it has compiled anything")
                    return
            else:
                answered += 1
                self._tell(spec, **answer)
        if process is not None:
            self._bury(process)

    def _start(self, arch: str) -> "subprocess.Popen[str] | None":
        # In a session of its own, where Ctrl-C does not reach it: it is ended from here, without a traceback.
        environment = {**os.environ, "CUTE_DSL_ARCH": arch}
        command = [sys.executable, "-m", "fla_kda_backend.compiling", str(self.folder)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with self._lock:
            if self._stopping:
                return None
            process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
            self._live.add(process)
            return process

    def _bury(self, process: "subprocess.Popen[str]") -> str:
        """Let a process end that has nothing more to do; how it ended."""
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()
        status = process.wait()
        with self._lock:
            self._live.discard(process)
        if status == -signal.SIGKILL:
            return "killed by SIGKILL, as when memory runs out: fewer --jobs need less"
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    def _stop(self) -> None:
        with self._lock:
            self._stopping = True
            live = list(self._live)
        for process in live:
            process.terminate()  # it removes its scratch files
        limit = time.monotonic() + PATIENCE
        for process in live:
            try:
                process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()

    def _tell(self, spec: "KernelSpec", seconds: float, failure: str | None) -> None:
        with self._lock:
            self.done += 1
            self.failed += failure is not None
            left = (time.monotonic() - self._begin) / self.done * (self.total - self.done)
            text = f"FAILED: {' '.join(failure.split())}" if failure else f"{seconds:.1f} s"
            estimate = f", {duration(left)} left" if self.done < self.total else ""
            line = f"[{self.done}/{self.total}] {spec}: {text}{estimate}"
            print(line, file=sys.stderr if failure else sys.stdout, flush=True)

    def _say(self, text: str, where: Any) -> None:
        with self._lock:
            print(text, file=where, flush=True)


def _ask(process: "subprocess.Popen[str]", spec: "KernelSpec") -> dict[str, Any] | None:
    """What compiling/__main__ answers; None where it died."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(OSError):
        process.stdin.write(json.dumps(spec.to_dict()) + "\n")
        process.stdin.flush()
        for line in iter(process.stdout.readline, ""):
            with suppress(ValueError):  # a line that somebody printed while the interpreter started
                if isinstance(answer := json.loads(line), dict):
                    return answer
    return None


def duration(seconds: float) -> str:
    """An estimate in words."""
    return f"about {seconds / 60:.0f} min" if seconds >= 90 else f"about {max(1, round(seconds))} s"
