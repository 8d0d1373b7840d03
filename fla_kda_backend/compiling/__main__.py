"""`python -m fla_kda_backend.compiling DIR`: compile the variants that standard input names, for one architecture.

Each line of input is a JSON list [family, arch, options]; each line of output tells what became of one, in their order. A
process of its own for each architecture, because the DSL takes its target at import.
"""

import json
import sys
import time

from .builder import export
from .spec import KernelSpec


def main(folder):
    for line in sys.stdin:
        family, arch, options = json.loads(line)
        begin = time.perf_counter()
        try:
            export(KernelSpec.of(family, arch, **dict(options)), folder)
            failure = None
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        print(json.dumps({"seconds": time.perf_counter() - begin, "failure": failure}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
