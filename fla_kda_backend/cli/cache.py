"""`fla-kda cache`: what compiled kernels there are, whether they are whole, and an end to them."""

import sys
import time
from pathlib import Path

from ._table import table


def add_parser(subparsers):
    parser = subparsers.add_parser("cache", help="list, verify or clear the compiled kernels")
    parser.add_argument("--dir", type=Path, help="the directory (default: the cache directory)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--verify", action="store_true", help="exit status 1 if a file is not whole or not to be used")
    what.add_argument("--clear", action="store_true", help="remove all compiled kernels")
    parser.set_defaults(run=run)


def run(args):
    from .. import config
    from ..compiling import disk

    folder = args.dir or config.cache_dir()
    if folder is None:
        print("FLA_KDA_CUTE_CACHE_DIR=off: nothing is kept")
        return 0
    directory = disk.Directory(folder)
    try:
        if args.clear:
            print(f"{directory.clear()} kernels removed from {folder}")
            return 0
        entries = directory.entries()
    except (OSError, disk.Unusable) as error:
        print(f"fla-kda cache: {folder}: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines(entries)))
    size = sum(entry.size for entry in entries)
    print(f"{len(entries)} kernels, {size / 2**20:.1f} of {config.CACHE_MIB.get()} MiB, in {folder}")
    bad = [entry for entry in entries if entry.problem is not None and not entry.problem.startswith("stale")]
    return 1 if args.verify and bad else 0


def lines(entries):
    """A table of disk.Entry."""
    rows = []
    for entry in entries:
        about = entry.description
        kernel, arch, options, dsl = "?", "?", entry.path.name, "?"
        if about is not None:
            kernel, arch, dsl = about["family"], about["arch"], about.get("dsl")
            options = " ".join(f"{name}={value}" for name, value in about["options"])
        size, state = f"{entry.size / 1024:.0f} KiB", entry.problem or "ok"
        rows.append((kernel, arch, age(time.time() - entry.used), dsl, size, state, options))
    return table(("kernel", "arch", "used", "DSL", "size", "state", "options"), rows)


def age(seconds):
    """Roughly: the largest unit that fits."""
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {name} ago"
    return "now"
