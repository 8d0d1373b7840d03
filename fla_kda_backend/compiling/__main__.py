"""`python -m fla_kda_backend.compiling DIR`: compile the variants that standard input names, for one architecture.

Each line of input is a KernelSpec.to_dict() in JSON. Each line of output tells, in the same order, what became of one:
{"seconds": .., "failure": a text or null}. There is one process per architecture, because the DSL takes its target at import.
What the compiler prints goes to standard error.
"""

import json
import os
import signal
import sys
import time

from .builder import export
from .spec import KernelSpec


def main(folder: str) -> None:
    failure: str | None
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        begin = time.perf_counter()
        try:
            export(KernelSpec.from_dict(json.loads(line)), folder)
            failure = None
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        print(json.dumps({"seconds": time.perf_counter() - begin, "failure": failure}), file=answers, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that scratch files are removed
    try:
        main(sys.argv[1])
    except BrokenPipeError:  # nobody waits for the answer
        os._exit(1)
