"""Every environment variable, in one table, read at each call. A bad value is warned of once, and the default holds.

FLA reads FLA_KDA_CUTE itself, by its own rules; it is here so that the table is whole.
"""

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger("fla_kda_backend")

SWITCH = {"1": True, "0": False}

_warned: set[tuple[str, str]] = set()  # (variable, value)


@dataclass(frozen=True)
class Variable:
    """An environment variable. `choices` maps the accepted values to what get() returns; None: any text is accepted."""

    name: str
    choices: dict[str, Any] | None
    default: str | None
    doc: str
    key: Any = field(init=False, repr=False, compare=False)  # the name as os.environ keeps it

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", getattr(os.environ, "encodekey", str)(self.name))

    def raw(self) -> bytes | str | None:
        """What the environment holds now, None where it is not set. Not decoded where possible, so only good to compare.

        os.environ's own look-up encodes the name each time, and raises and catches an exception where it is not set: that
        takes 25 times as long.
        """
        environ: Any = os.environ
        try:
            return environ._data.get(self.key)
        except AttributeError:  # a mapping that somebody put in its place, or that of another Python
            return environ.get(self.name)

    def get(self) -> Any:
        """The value in force now: the environment's if it is set, not empty and accepted, otherwise the default."""
        raw = self.raw()
        if raw is not None:
            raw = os.fsdecode(raw)
        if self.choices is None:
            return raw or self.default
        if raw and raw in self.choices:
            return self.choices[raw]
        if raw:
            self._warn(raw)
        return None if self.default is None else self.choices[self.default]

    @property
    def values(self) -> str:
        """What it can be set to, in words."""
        return "text" if self.choices is None else ", ".join(self.choices)

    @property
    def expected(self) -> str:
        """The same as part of a sentence."""
        return f"one of {self.values}"

    def _warn(self, raw: str) -> None:
        if (self.name, raw) not in _warned:
            _warned.add((self.name, raw))
            logger.warning("%s=%r is not %s; %r holds", self.name, raw, self.expected, self.default)


class FlaSwitch(Variable):
    """A variable that FLA reads: any value but 0 is on."""

    def get(self) -> bool:
        raw = self.raw()  # usually bytes, which need no decoding to be compared
        return (self.default if raw is None else raw) != (b"0" if type(raw) is bytes else "0")


class Count(Variable):
    """A variable that holds a whole number, 0 included; it has a default."""

    def get(self) -> int:
        raw = os.fsdecode(self.raw() or b"")
        if raw and not (raw.isascii() and raw.isdigit()):
            self._warn(raw)
            raw = ""
        return int(raw or self.default or 0)

    @property
    def values(self) -> str:
        return "a whole number"

    @property
    def expected(self) -> str:
        return self.values


ENABLED = FlaSwitch(
    "FLA_KDA_CUTE",
    SWITCH,
    "1",
    "0 turns the backend off. FLA reads it at each call; while it is 0, FLA does not ask us and nothing is logged.",
)
MODE = Variable(
    "FLA_KDA_CUTE_MODE",
    {"auto": "auto", "exact": "exact"},
    "auto",
    "auto: the fastest kernel that is right for the call, with the robust inverse. exact: FlashKDA's bits for FlashKDA's own "
    "call; every other call runs as in auto, and the log says so.",
)
STRICT = Variable(
    "FLA_KDA_CUTE_STRICT",
    SWITCH,
    "0",
    "1: a call that the backend declines, or fails on, raises instead of falling back. For benchmarks and CI.",
)
LOG = Variable(
    "FLA_KDA_CUTE_LOG",
    None,
    None,
    "A file: one JSON line is appended for each decision. Read it with fla-kda log FILE.",
)
UNTESTED = Variable(
    "FLA_KDA_CUTE_UNTESTED",
    SWITCH,
    "1",
    "0: decline on GPUs that the kernels are compiled for but were never run on, without checking them first.",
)
DETERMINISTIC = Variable(
    "FLA_KDA_CUTE_DETERMINISTIC",
    SWITCH,
    "0",
    "1: a sequence's bits depend neither on its batch nor on the number of heads. "
    "All kernels of this version keep that anyway.",
)
CACHE_DIR = Variable(
    "FLA_KDA_CUTE_CACHE_DIR",
    None,
    None,
    "Directory of compiled kernels, or off. By default fla_kda_backend in $XDG_CACHE_HOME, or in ~/.cache.",
)
CACHE_MIB = Count(
    "FLA_KDA_CUTE_CACHE_MIB",
    None,
    "1024",
    "Size that the directory may grow to, in MiB: whoever adds a kernel removes those not used for the longest time.",
)
COMPILE = Variable(
    "FLA_KDA_CUTE_COMPILE",
    {"in_place": "in_place", "background": "background"},
    "in_place",
    "What a call does whose kernel must first be compiled. in_place: wait. background: run elsewhere until it is ready.",
)

WORKSPACE_MIB = Count(
    "FLA_KDA_CUTE_WORKSPACE_MIB",
    None,
    "2048",
    "Size that the workspace of a call may have, in MiB: a call that needs more runs in segments of the time axis, of at "
    "least one chunk, with the same bits. The schedule follows from it, so it should not change from call to call.",
)

VARIABLES = (ENABLED, MODE, STRICT, LOG, UNTESTED, DETERMINISTIC, CACHE_DIR, CACHE_MIB, COMPILE, WORKSPACE_MIB)


def cache_dir() -> Path | None:
    """The directory of compiled kernels, which need not exist; None: nothing is kept."""
    chosen = CACHE_DIR.get()
    if chosen == "off":
        return None
    if chosen is not None:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fla_kda_backend"
