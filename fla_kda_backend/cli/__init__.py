"""The command `fla-kda`, the same as `python -m fla_kda_backend`.

Every module here whose name has no leading underscore is a subcommand. It imports only the standard library at its top, and
has add_parser(subparsers), which sets run(args) -> exit status as the parser's default `run`.
"""

import argparse
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module

from .. import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit status."""
    try:
        args = parser().parse_args(argv)
        return args.run(args)
    except KeyboardInterrupt:
        return 130  # what a shell reports of a program that Ctrl-C ended
    except BrokenPipeError:
        # The reader of our output is gone, as with `| head`; the interpreter would complain again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def parser() -> argparse.ArgumentParser:
    """The parser with every subcommand."""
    top = argparse.ArgumentParser(prog="fla-kda", description="Kimi Delta Attention kernels behind flash-linear-attention.")
    top.add_argument("--version", action="version", version=__version__)
    subparsers = top.add_subparsers(required=True, metavar="COMMAND")
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        if not name.startswith("_"):
            import_module(f"{__name__}.{name}").add_parser(subparsers)
    return top
