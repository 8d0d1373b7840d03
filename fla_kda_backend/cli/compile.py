"""`fla-kda compile`: fill a directory with compiled kernels, on any machine with the CuTe DSL and a C compiler, without a GPU.

Without --for, these are the kernels that FLA's KDA layers with a bounded gate call, whatever their number of heads: in auto
and exact mode, with int32, int64 or no cu_seqlens, with and without initial and final state, from one long sequence to many
short ones (_calls.USUAL, SEQUENCES, STATES and OFFSETS). Calls that need more than 2 GiB of workspace are not among them.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..compiling import KernelSpec
    from ..compiling.disk import Directory

SM_COUNTS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 160, "sm_120a": 188}  # of H100 SXM and H200, B200, B300, RTX PRO 6000


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("compile", help="compile kernels into a directory; needs no GPU")
    parser.add_argument("--arch", default="sm_90a", help=f"one or more of {','.join(SM_COUNTS)} (default: sm_90a)")
    parser.add_argument("--out", type=Path, help="the directory (default: the cache directory)")
    parser.add_argument("--for", dest="model", metavar="CONFIG", help="what a model calls: its config.json or directory")
    parser.add_argument("--mode", choices=("auto", "exact", "all"), help="the mode (default: all; with --for: auto)")
    parser.add_argument("--sms", type=int, help="multiprocessors of the GPU (default: those of the arch's data centre GPU)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile at once (default: 1)")
    parser.add_argument("--list", action="store_true", help="only say what would be compiled")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .. import config
    from ..compiling import disk, linking

    archs = list(dict.fromkeys(args.arch.split(",")))
    folder = args.out or config.cache_dir()
    if not set(archs) <= set(SM_COUNTS):
        return _stop(f"--arch takes {', '.join(SM_COUNTS)}, got {args.arch}")
    if folder is None:
        return _stop("--out is needed where FLA_KDA_CUTE_CACHE_DIR=off")
    try:
        specs = needed_specs(archs, args)
    except (OSError, ValueError) as error:
        return _stop(f"--for {args.model}: {error}")
    directory = disk.Directory(folder)
    if args.list:
        print("\n".join(f"{spec}" for spec in specs))
        return 0
    missing = [spec for spec in specs if not _there(directory, spec)]
    print(f"{len(specs)} kernels, {len(specs) - len(missing)} of them in {folder} already", flush=True)
    if missing and (lacking := linking.missing()) is not None:
        return _stop(f"nothing can be linked here, set CC to a C compiler that can: {' '.join(lacking.split())}")
    failed = compile_all(missing, folder, args.jobs) if missing else 0
    size = sum(kernel.size for kernel in directory.stored())
    print(f"{len(specs) - failed} of {len(specs)} kernels are in {folder}, {size / 2**20:.0f} MiB in all")
    return 1 if failed or not specs else 0


def needed_specs(archs: Sequence[str], args: argparse.Namespace) -> list["KernelSpec"]:
    """The specs of all archs, in order. Prints which calls are declined."""
    from . import _calls

    layers: tuple[_calls.Layer, ...]
    sequences: tuple[tuple[int, int], ...]
    modes: tuple[str, ...]
    if args.model is None:
        layers, sequences, modes = _calls.USUAL, _calls.SEQUENCES, ("auto", "exact")
    else:
        layer, longest = _calls.layer_of(args.model)
        layers = (layer,)
        whole = min(longest, _calls.LONGEST)
        sequences = (*_calls.SEQUENCES, (1, 512), (1, whole), (8, max(1, whole // 8)), (64, max(1, whole // 64)))
        modes = ("auto",)
    if args.mode is not None:
        modes = ("auto", "exact") if args.mode == "all" else (args.mode,)
    specs: list[KernelSpec] = []
    arguments = [call for layer in layers for call in _calls.calls(layer, sequences)]
    for arch in archs:
        found, refusals = _calls.specs_of(arguments, arch, args.sms or SM_COUNTS[arch], modes)
        specs += found
        for (code, message), count in refusals.items():
            print(f"{arch}: {count} of {len(arguments) * len(modes)} calls are left to FLA: {code}: {message}")
    return specs


def compile_all(specs: Sequence["KernelSpec"], folder: Path, jobs: int) -> int:
    """Compile in at most `jobs` processes at once, each for one arch; how many kernels failed."""
    groups: dict[str, list[KernelSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.arch, []).append(spec)
    parts = max(1, jobs // len(groups))
    shares = [share for group in groups.values() for part in range(parts) if (share := group[part::parts])]
    printing = threading.Lock()
    done = 0

    def tell(spec: "KernelSpec", seconds: float, failure: str | None) -> None:
        nonlocal done
        with printing:
            done += 1
            text = f"FAILED: {failure}" if failure else f"{seconds:.1f} s"
            print(f"[{done}/{len(specs)}] {spec}: {text}", flush=True)

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        return sum(pool.map(lambda share: _compile_share(share, folder, tell), shares))


def _compile_share(specs: Sequence["KernelSpec"], folder: Path, tell: Callable[..., None]) -> int:
    """Compile specs of one arch in one process; how many failed. Where the process dies, all that are left have failed."""
    environment = {**os.environ, "CUTE_DSL_ARCH": specs[0].arch}
    command = [sys.executable, "-m", "fla_kda_backend.compiling", str(folder)]
    failed, begin = 0, time.perf_counter()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None
        for spec in specs:
            try:
                process.stdin.write(json.dumps(spec.to_dict()) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = ""
            answer = json.loads(line) if line else {"seconds": time.perf_counter() - begin, "failure": "the compiler died"}
            failed += answer["failure"] is not None
            tell(spec, **answer)
        try:
            process.stdin.close()
        except BrokenPipeError:
            pass
    return failed


def _there(directory: "Directory", spec: "KernelSpec") -> bool:
    from ..compiling.disk import Unusable

    try:
        return directory.find(spec) is not None
    except Unusable as error:
        print(f"{spec} is compiled again: {error}")
        return False


def _stop(text: str) -> int:
    print(f"fla-kda compile: {text}", file=sys.stderr)
    return 2
