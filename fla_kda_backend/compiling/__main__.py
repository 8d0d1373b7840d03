"""`python -m fla_kda_backend.compiling DIR`: compile the variants that standard input names, for one architecture.

Each line of input is a KernelSpec.to_dict() in JSON. Each line of output tells, in the same order, what became of one:
{"seconds": .., "failure": a text or null}. There is one process per architecture, because the DSL takes its target at import.
"""

import json
import sys
import time

from .builder import export
from .spec import KernelSpec


def main(folder: str) -> None:
    failure: str | None
    for line in sys.stdin:
        begin = time.perf_counter()
        try:
            export(KernelSpec.from_dict(json.loads(line)), folder)
            failure = None
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        print(json.dumps({"seconds": time.perf_counter() - begin, "failure": failure}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
