"""`python -m benchmarks.export DIR [PART PARTS]`: compile what the benchmarks launch, for a machine without the DSL.

There FLA_KDA_CUTE_CACHE_DIR=DIR finds the kernels. PART of PARTS, from 0, splits the work over processes. Needs no GPU.
"""

import argparse
import time
from pathlib import Path

from . import bench, experiments, models, schedules


def needed_specs():
    """Everything that bench, profile, experiments, schedules and models launch, each once, in a fixed order."""
    parts = (bench, experiments, schedules, models)
    return sorted({spec for part in parts for spec in part.needed_specs()}, key=lambda spec: spec.name)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.export", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("part", type=int, nargs="?", default=0)
    parser.add_argument("parts", type=int, nargs="?", default=1)
    chosen = parser.parse_args(arguments)
    if not 0 <= chosen.part < chosen.parts:
        parser.error(f"PART must be in 0..{chosen.parts - 1}, got {chosen.part}")
    from fla_kda_backend.compiling.builder import export

    for spec in needed_specs()[chosen.part :: chosen.parts]:
        start = time.perf_counter()
        if (chosen.folder / spec.file_name).exists():
            print(f"there already: {spec}")
            continue
        export(spec, chosen.folder)
        print(f"{time.perf_counter() - start:4.1f} s  {spec}", flush=True)


if __name__ == "__main__":
    main()
