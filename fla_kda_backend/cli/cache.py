"""`fla-kda cache`: list the compiled kernels, verify that they are whole, or remove them."""

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._table import table

if TYPE_CHECKING:
    from ..compiling.disk import StoredKernel


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("cache", help="list, verify or clear the compiled kernels")
    parser.add_argument("--dir", type=Path, help="the directory (default: the cache directory)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--verify", action="store_true", help="exit status 1 if a file is not to be used, or none is")
    what.add_argument("--clear", action="store_true", help="remove all compiled kernels")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .. import config
    from ..compiling import disk

    folder, reason = (args.dir, None) if args.dir else config.find_cache_dir()
    if reason is not None:
        print(f"fla-kda cache: {reason}", file=sys.stderr)
        return 1
    if folder is None:
        print("FLA_KDA_CUTE_CACHE_DIR=off: nothing is kept")
        return 1 if args.verify else 0
    directory = disk.Directory(folder)
    try:
        if args.clear:
            count, left = directory.clear()
            print(f"{count} kernels removed from {folder}")
            for name in left:
                print(f"{name} is left: it has a kernel's name, but is none, or only part of one")
            return 0
        kernels = directory.stored()
    except (OSError, disk.Unusable) as error:
        print(f"fla-kda cache: {folder}: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines(kernels)))
    size = sum(kernel.size for kernel in kernels)
    print(f"{len(kernels)} kernels, {size / 2**20:.1f} of {config.CACHE_MIB.get()} MiB, in {folder}")
    bad = [kernel for kernel in kernels if kernel.problem not in (None, disk.STALE)]
    if args.verify and not any(kernel.problem is None for kernel in kernels):
        what = "no kernel that this version of the package can use" if folder.is_dir() else "no such directory"
        print(f"fla-kda cache: {folder}: {what}", file=sys.stderr)
        return 1
    return 1 if args.verify and bad else 0


def lines(kernels: Iterable["StoredKernel"]) -> list[str]:
    """Lines of a table, one row per kernel."""
    rows = []
    for kernel in kernels:
        about, spec = kernel.description or {}, kernel.spec
        options = kernel.path.name if spec is None else " ".join(f"{name}={value}" for name, value in spec.options)
        size, used = f"{kernel.size / 1024:.0f} KiB", age(time.time() - kernel.used)
        described = [about.get(name, "?") for name in ("family", "arch", "dsl")]
        rows.append((*described[:2], used, described[2], size, kernel.problem or "ok", options))
    return table(("kernel", "arch", "used", "DSL", "size", "state", "options"), rows)


def age(seconds: float) -> str:
    """In the largest unit that fits."""
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {name} ago"
    return "now"
