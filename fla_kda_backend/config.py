"""Every environment variable, in one table, read at each call. A bad value is warned of once, and the default holds."""

import functools
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger("fla_kda_backend")

PREFIX = "FLA_KDA_CUTE"  # of the names of all of them
SWITCH = {"1": True, "0": False}
WORDS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}  # what a switch takes as well

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
        text = os.fsdecode(self.raw() or b"")
        if text and self.accepts(text):
            return self.meaning(text)
        if text:
            self._warn(text)
        return None if self.default is None else self.meaning(self.default)

    def accepts(self, text: str) -> bool:
        """Whether a text that is not empty is a value."""
        return self.choices is None or text in self.choices

    def meaning(self, text: str) -> Any:
        """What get() returns for an accepted text."""
        return text if self.choices is None else self.choices[text]

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


class Switch(Variable):
    """A variable that is 1 or 0, or one of WORDS in upper or lower case."""

    def __init__(self, name: str, default: str, doc: str) -> None:
        super().__init__(name, SWITCH, default, doc)

    def get(self) -> bool:
        raw = self.raw()
        if raw is None:
            return self.default == "1"
        if type(raw) is bytes and raw in (b"1", b"0"):  # no decoding
            return raw == b"1"
        return super().get()

    def accepts(self, text: str) -> bool:
        return text in SWITCH or text.lower() in WORDS

    def meaning(self, text: str) -> bool:
        return SWITCH[text] if text in SWITCH else WORDS[text.lower()]

    @property
    def expected(self) -> str:
        return f"one of {', '.join((*SWITCH, *WORDS))}"


class Count(Variable):
    """A variable that holds a whole number, 0 included; it has a default."""

    def accepts(self, text: str) -> bool:
        return text.isascii() and text.isdigit()

    def meaning(self, text: str) -> int:
        return int(text)

    @property
    def values(self) -> str:
        return "a whole number"

    @property
    def expected(self) -> str:
        return self.values


ENABLED = Switch(
    PREFIX,
    "1",
    "0 turns the backend off. While it is 0, FLA does not ask us and nothing is logged.",
)
MODE = Variable(
    "FLA_KDA_CUTE_MODE",
    {"auto": "auto", "exact": "exact"},
    "auto",
    "auto: the fastest kernel that is right for the call, with the robust inverse. exact: FlashKDA's bits for FlashKDA's own "
    "call; every other call runs as in auto, and the log says so.",
)
STRICT = Switch(
    "FLA_KDA_CUTE_STRICT",
    "0",
    "1: a call that the backend declines, or fails on, raises instead of falling back. For benchmarks and CI.",
)
TRAINING = Switch(
    "FLA_KDA_CUTE_TRAINING",
    "1",
    "0: decline calls that need gradients, and no others.",
)
LOG = Variable(
    "FLA_KDA_CUTE_LOG",
    None,
    None,
    "A file: one JSON line is appended for each decision. Read it with fla-kda log FILE.",
)
UNTESTED = Switch(
    "FLA_KDA_CUTE_UNTESTED",
    "1",
    "0: decline on GPUs that the kernels are compiled for but were never run on, without checking them first.",
)
DETERMINISTIC = Switch(
    "FLA_KDA_CUTE_DETERMINISTIC",
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
CACHE_MANIFEST = Variable(
    "FLA_KDA_CUTE_CACHE_MANIFEST",
    None,
    None,
    "The sha256 that fla-kda compile --out printed. A directory that others may write is then used for exactly these kernels, "
    "and never written to.",
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

VARIABLES = (
    ENABLED,
    MODE,
    STRICT,
    TRAINING,
    LOG,
    UNTESTED,
    DETERMINISTIC,
    CACHE_DIR,
    CACHE_MIB,
    CACHE_MANIFEST,
    COMPILE,
    WORKSPACE_MIB,
)


def unknown() -> list[str]:
    """Names in the environment that look like ours and are not in the table."""
    known = {variable.name for variable in VARIABLES}
    return sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)


@functools.cache
def warn_of_unknown() -> None:
    """Warn of unknown(), in the first call of a process."""
    names = unknown()
    if names:
        logger.warning("%s: no such variable; there are %s", ", ".join(names), ", ".join(v.name for v in VARIABLES))


def find_cache_dir() -> tuple[Path | None, str | None]:
    """(cache_dir(), None), or (None, why it cannot be found)."""
    try:
        return cache_dir(), None
    except (RuntimeError, OSError) as error:  # no home directory, of this user or of the one that is named
        return None, f"{error} {CACHE_DIR.name} can name a directory."


def cache_dir() -> Path | None:
    """The directory of compiled kernels, which need not exist; None: nothing is kept.

    Raises:
        RuntimeError: there is no home directory.
    """
    chosen = CACHE_DIR.get()
    if chosen == "off":
        return None
    if chosen is not None:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fla_kda_backend"
