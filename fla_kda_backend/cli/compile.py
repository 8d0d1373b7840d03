"""`fla-kda compile`: fill a directory with compiled kernels, on any machine with the CuTe DSL and a C compiler, without a GPU.

Without --for, these are the kernels that FLA's KDA layers with a bounded gate call, whatever their number of heads: in auto
and exact mode, with int32, int64 or no cu_seqlens, with and without initial and final state, from one long sequence to many
short ones (_calls.USUAL, SEQUENCES, STATES and OFFSETS). Calls that need more than 2 GiB of workspace are not among them.

With --training, those of training steps follow, forward and backward, without states (_calls.TRAINING).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ..compiling import KernelSpec
    from ..compiling.disk import Directory
    from ._calls import Layer

SM_COUNTS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 160, "sm_120a": 188}  # of H100 SXM and H200, B200, B300, RTX PRO 6000


class Wanted(NamedTuple):
    """Which calls the kernels are for."""

    layers: tuple["Layer", ...]
    sequences: tuple[tuple[int, int], ...]
    modes: tuple[str, ...]
    training: bool  # also for training steps


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("compile", help="compile kernels into a directory; needs no GPU")
    parser.add_argument("--arch", default="sm_90a", help=f"one or more of {','.join(SM_COUNTS)} (default: sm_90a)")
    parser.add_argument("--out", type=Path, help="the directory, which also gets a manifest (default: the cache directory)")
    parser.add_argument("--for", dest="model", metavar="CONFIG", help="what a model calls: its config.json or directory")
    parser.add_argument("--training", action="store_true", help="also what training steps call (sm_90a alone)")
    parser.add_argument("--mode", choices=("auto", "exact", "all"), help="the mode (default: all; with --for: auto)")
    parser.add_argument(
        "--sms", type=positive, help="multiprocessors of the GPU (default: those of the arch's data centre GPU)"
    )
    parser.add_argument("--jobs", type=positive, default=1, help="processes that compile at once (default: 1)")
    parser.add_argument("--list", action="store_true", help="only say what would be compiled")
    parser.set_defaults(run=run)


def positive(text: str) -> int:
    """The type of an option: a whole number above 0."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"takes a whole number above 0, got {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Everything that can be checked at once is checked before anything that takes long."""
    from .. import config
    from ..compiling import disk
    from ._config import Unfit
    from ._workers import Workers

    archs = list(dict.fromkeys(args.arch.split(",")))
    if not set(archs) <= set(SM_COUNTS):
        return _stop(f"--arch takes {', '.join(SM_COUNTS)}, got {args.arch}")
    try:
        wanted = wanted_of(args)
    except Unfit as error:
        return _stop(f"--for {error}")
    if args.list:
        print("\n".join(f"{spec}" for spec in needed_specs(archs, wanted, args.sms)))
        return 0
    folder, reason = (args.out, None) if args.out else config.find_cache_dir()
    if reason is not None:
        return _stop(f"--out is needed: {reason}")
    if folder is None:
        return _stop("--out is needed where there is no cache directory, as with FLA_KDA_CUTE_CACHE_DIR=off")
    directory = disk.Directory(folder)
    try:
        directory.require_writable()
    except (OSError, disk.Unusable) as error:
        return _stop(_reason(folder, error))
    specs = needed_specs(archs, wanted, args.sms)
    if not specs:
        _stop("none of these calls runs on the kernels, for the reasons above")
        return 1
    missing = [spec for spec in specs if not _there(directory, spec)]
    print(f"{len(specs)} kernels, {len(specs) - len(missing)} of them in {folder} already", flush=True)
    if missing and (lacking := _lacking()) is not None:
        return _stop(lacking)
    failed = Workers(folder, len(missing)).compile(missing, args.jobs) if missing else 0
    try:
        size = sum(kernel.size for kernel in directory.stored())
        print(f"{len(specs) - failed} of {len(specs)} kernels are in {folder}, {size / 2**20:.0f} MiB in all")
        if args.out:
            digest = directory.sign()
            print(f"Where others can write to the directory, this accepts the kernels that {disk.MANIFEST} names there:")
            print(f"{config.CACHE_MANIFEST.name}={digest}")
    except (OSError, disk.Unusable) as error:
        return _stop(_reason(folder, error))
    return 1 if failed else 0


def wanted_of(args: argparse.Namespace) -> Wanted:
    """What the options ask for; raises _config.Unfit."""
    from . import _calls

    layers: tuple[Layer, ...] = _calls.USUAL
    sequences: tuple[tuple[int, int], ...] = _calls.SEQUENCES
    modes: tuple[str, ...] = ("auto", "exact")
    if args.model is not None:
        layer, whole = _calls.layer_of(args.model)
        layers, modes = (layer,), ("auto",)
        sequences += ((1, 512), (1, whole), (8, max(1, whole // 8)), (64, max(1, whole // 64)))
    if args.mode is not None:
        modes = ("auto", "exact") if args.mode == "all" else (args.mode,)
    return Wanted(layers, sequences, modes, args.training)


def needed_specs(archs: Sequence[str], wanted: Wanted, sm_count: int | None) -> list["KernelSpec"]:
    """The specs of all archs, in order. Prints which calls are declined."""
    from . import _calls

    specs: list[KernelSpec] = []
    arguments = [call for layer in wanted.layers for call in _calls.calls(layer, wanted.sequences)]
    if wanted.training:
        arguments += [call for layer in wanted.layers for call in _calls.steps(layer, wanted.sequences)]
    for arch in archs:
        found, refusals = _calls.specs_of(arguments, arch, sm_count or SM_COUNTS[arch], wanted.modes)
        specs += found
        for (code, message), count in refusals.items():
            print(f"{arch}: {count} of {len(arguments) * len(wanted.modes)} calls are left to FLA: {code}: {message}")
    return specs


def _lacking() -> str | None:
    """What this machine lacks to compile, in a line."""
    from ..compiling import linking, spec

    if spec.dsl_version() is None:
        return "the CuTe DSL is not installed here, which compiles the kernels: pip install 'nvidia-cutlass-dsl[cu13]'"
    lacking = linking.missing()
    return lacking and f"nothing can be linked here, set CC to a C compiler that can: {' '.join(lacking.split())}"


def _there(directory: "Directory", spec: "KernelSpec") -> bool:
    from ..compiling.disk import Unusable

    try:
        return directory.find(spec) is not None
    except Unusable as error:
        print(f"{spec} is compiled again: {error}", file=sys.stderr)
        return False


def _reason(folder: Path, error: Exception) -> str:
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return f"{folder} is no directory, and cannot be made: give another --out"
    return f"{folder}: {(isinstance(error, OSError) and error.strerror) or error}"


def _stop(text: str) -> int:
    """Say in one line what is wrong; the exit status."""
    print("fla-kda compile:", *text.split(), file=sys.stderr)
    return 2
