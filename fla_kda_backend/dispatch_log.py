"""Which calls of chunk_kda ran on these kernels, and why others did not.

There is one log record per call that FLA asks about. The last RING_SIZE are kept. All are counted by distinct decision, handed
to the logger `fla_kda_backend` (a distinct decision at INFO the first time, then at DEBUG), and appended to the file that
FLA_KDA_CUTE_LOG names. The replay of a CUDA graph is no call of chunk_kda and leaves no record.

    with dispatch_log.capture() as seen:
        model(tokens)
    assert all(record.outcome == "accepted" for record in seen)
"""

import errno
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from . import config

if TYPE_CHECKING:  # it imports torch
    from .call import Call

logger = logging.getLogger("fla_kda_backend")

RING_SIZE = 1024
MAX_DISTINCT = 1024  # decisions counted apart; messages hold values, so there may be any number of distinct ones

ACCEPTED = "accepted"  # ran on these kernels
DECLINED = "declined"  # FLA went on to its next backend, or raised its own error
FAILED = "failed"  # accepted, but raised here; then FLA's own implementation ran, or in strict mode nothing

TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens", "A_log", "dt_bias")
Q, CU_SEQLENS = TENSORS.index("q"), TENSORS.index("cu_seqlens")
PLAIN = frozenset((bool, int, float, str, type(None)))
ARGUMENTS = (
    "scale",
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "safe_gate",
    "lower_bound",
    "state_v_first",
    "return_intermediate_states",
    "chunk_size",
    "use_graph",
)


class Record(NamedTuple):
    """One decision on one call. Holds no tensor."""

    time: float  # seconds since the epoch
    outcome: str  # ACCEPTED, DECLINED or FAILED
    code: str  # of the rule that decided
    message: str
    kernel: str | None
    params: tuple[tuple[str, Any], ...]  # of what is launched: schedule, what the variant changes, grid, segments
    num_sequences: int | None
    device: Any  # of q, a torch.device
    shapes: tuple[Any, ...]  # of TENSORS, None where one is not given
    dtypes: tuple[Any, ...]  # of TENSORS
    arguments: tuple[Any, ...]  # the values of ARGUMENTS

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON can hold it. Tensors and arguments are by name, without tensors that are not given."""
        present = [i for i, shape in enumerate(self.shapes) if shape is not None]
        return {
            "time": self.time,
            "pid": os.getpid(),
            "outcome": self.outcome,
            "code": self.code,
            "message": self.message,
            "kernel": self.kernel,
            "params": dict(self.params),
            "num_sequences": self.num_sequences,
            "device": None if self.device is None else str(self.device),
            "shapes": {TENSORS[i]: list(self.shapes[i]) for i in present},
            "dtypes": {TENSORS[i]: str(self.dtypes[i]).removeprefix("torch.") for i in present},
            "arguments": dict(zip(ARGUMENTS, self.arguments)),
        }


class Count(NamedTuple):
    """How often one distinct decision was taken."""

    count: int  # type: ignore[assignment]  # tuple has a method of this name
    outcome: str
    code: str
    message: str
    kernel: str | None
    params: tuple[tuple[str, Any], ...]


_lock = threading.Lock()
_ring: deque[tuple[float, tuple[Any, ...]]] = deque(maxlen=RING_SIZE)  # a Record's time, and its other fields
_counts: dict[tuple[Any, ...], list[int]] = {}  # decision -> [how often]; clear() makes a new dict, so old counters are void
_captures: tuple[list[Record], ...] = ()
_file: "_File | None" = None
_unwritable: set[str] = set()


def _after_fork() -> None:
    # Another thread of the parent may have held the lock.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def record(outcome: str, code: str, message: str, call: "Call", plan: Any = None) -> None:
    """Record one decision on a parsed call; plan is a Plan or Geometry, where there is one. Never raises."""
    entry(outcome, code, message, call, plan).record()


def entry(outcome: str, code: str, message: str, call: "Call", plan: Any = None) -> "Entry":
    """The Entry of a decision on a parsed call. Never raises."""
    try:
        return Entry(_content(outcome, code, message, call, plan))
    except Exception as error:
        logger.debug("a decision could not be logged: %r", error)
        return Entry(None)


class Entry:
    """A decision that many calls may meet: every field of their records but the time. Holds no tensor."""

    __slots__ = ("content", "counter", "counters")

    def __init__(self, content: tuple[Any, ...] | None) -> None:
        self.content = content  # a Record's fields after the time; None: nothing is recorded
        self.counters: dict[tuple[Any, ...], list[int]] | None = None  # the _counts that `counter` is from
        self.counter: list[int] = [0]

    def instead(self, outcome: str, code: str, message: str, launched: Any = None) -> "Entry":
        """The Entry of another decision on the same call; launched: what ran, as in `entry`, where that is something else."""
        if self.content is None:
            return Entry(None)
        _, _, _, kernel, params, *rest = self.content
        if launched is not None:
            kernel, params = launched.kernel, tuple(launched.params.items())
        return Entry((outcome, code, message, kernel, params, *rest))

    def record(self) -> None:
        """Record the decision on one more call. Never raises."""
        content = self.content
        if content is None:
            return
        try:
            now = time.time()
            with _lock:
                _ring.append((now, content))
                for seen in _captures:
                    seen.append(Record(now, *content))
                if self.counters is not _counts:
                    self.counter, self.counters = _counter(content), _counts
                self.counter[0] += 1
                first_of_its_kind = self.counter[0] == 1
            level = logging.INFO if first_of_its_kind else logging.DEBUG
            if logger.isEnabledFor(level):
                logger.log(level, "%s", _Line(Record(now, *content)))
            if config.LOG.raw() and (path := config.LOG.get()) is not None:
                _append(path, Record(now, *content))
        except Exception as error:
            logger.debug("a decision could not be logged: %r", error)


def records() -> list[Record]:
    """The last RING_SIZE records, oldest first."""
    with _lock:
        kept = list(_ring)
    return [Record(now, *content) for now, content in kept]


def summary() -> list[Count]:
    """A Count per distinct decision since the start or the last clear(), the most frequent first."""
    with _lock:
        counts = [Count(counter[0], *decision) for decision, counter in _counts.items()]
    return sorted(counts, key=lambda row: -row.count)


def clear() -> None:
    """Forget records and counts. The file and open captures keep theirs."""
    global _counts
    with _lock:
        _ring.clear()
        _counts = {}


@contextmanager
def capture() -> Iterator[list[Record]]:
    """Collects the records of all threads while it is open into the list that it gives, which may grow without bound."""
    global _captures
    seen: list[Record] = []
    with _lock:
        _captures = (*_captures, seen)
    try:
        yield seen
    finally:
        with _lock:
            _captures = tuple(other for other in _captures if other is not seen)


class _Line:
    """Formats a Record only where a handler asks for the text."""

    def __init__(self, of: Record) -> None:
        self.of = of

    def __str__(self) -> str:
        of = self.of
        params = " ".join(f"{name}={value}" for name, value in of.params)
        kernel = f" {of.kernel} {params}".rstrip() if of.kernel else ""
        q = of.shapes[Q]
        shape = f" q={list(q)}" if q is not None else ""
        sequences = f" sequences={of.num_sequences}" if of.num_sequences is not None else ""
        return f"chunk_kda {of.outcome}{kernel} [{of.code}] {of.message};{shape}{sequences} on {of.device}"


def _content(outcome: str, code: str, message: str, call: "Call", plan: Any) -> tuple[Any, ...]:
    """The fields of a Record after its time."""
    tensors = (
        call.q,
        call.k,
        call.v,
        call.g,
        call.beta,
        call.initial_state,
        call.cu_seqlens,
        call.A_log,
        call.dt_bias,
    )
    arguments: tuple[Any, ...] = (
        call.scale,
        call.output_final_state,
        call.use_qk_l2norm_in_kernel,
        call.use_gate_in_kernel,
        call.use_beta_sigmoid_in_kernel,
        call.allow_neg_eigval,
        call.safe_gate,
        call.lower_bound,
        call.state_v_first,
        call.return_intermediate_states,
        call.chunk_size,
        call.use_graph,
    )
    shapes: tuple[Any, ...] = tuple([getattr(x, "shape", None) for x in tensors])
    if not PLAIN.issuperset(map(type, arguments)):  # for example a tensor, which a record must not keep alive
        arguments = tuple([x if type(x) in PLAIN else type(x).__name__ for x in arguments])
    if shapes[CU_SEQLENS]:
        num_sequences = shapes[CU_SEQLENS][0] - 1
    else:
        num_sequences = shapes[Q][0] if shapes[Q] else None
    return (
        outcome,
        code,
        message,
        None if plan is None else plan.kernel,
        () if plan is None else tuple(plan.params.items()),
        num_sequences,
        getattr(call.q, "device", None),
        shapes,
        tuple([getattr(x, "dtype", None) for x in tensors]),
        arguments,
    )


def _counter(content: tuple[Any, ...]) -> list[int]:
    """The counter of a decision, [number], or the one that the rest share once MAX_DISTINCT are counted apart."""
    decision = content[: len(Count._fields) - 1]
    if decision not in _counts and len(_counts) >= MAX_DISTINCT:
        outcome, code, _, kernel, _ = decision
        decision = (outcome, code, "(decisions past the first 1024 kinds)", kernel, ())
    return _counts.setdefault(decision, [0])


class _File:
    """The file that lines go to. It is opened anew once another one, or none, is under its path: logs are rotated so.

    No call waits for it. What a pipe without a reader, or with a slow one, does not take at once is lost.
    """

    def __init__(self, path: str) -> None:
        # Without O_NONBLOCK, opening a pipe waits for a reader, and writing to a full one or to a stopped terminal waits, too.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        self.path, self.descriptor = path, os.open(path, flags, 0o644)
        status = os.fstat(self.descriptor)
        self.identity = status.st_dev, status.st_ino
        self.torn = False  # the last line lacks its end

    def current(self, path: str) -> bool:
        """Whether lines for `path` go here."""
        if path != self.path:
            return False
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return False
        return (status.st_dev, status.st_ino) == self.identity

    def write(self, line: bytes) -> None:
        """In one write, to a file opened for appending: lines stay whole, whoever else writes to it."""
        line = b"\n" + line if self.torn else line
        written = os.write(self.descriptor, line)
        self.torn = written < len(line) if written else self.torn

    def close(self) -> None:
        os.close(self.descriptor)


def _append(path: str, taken: Record) -> None:
    global _file
    line = (json.dumps(taken.to_dict(), default=str) + "\n").encode()
    with _lock:
        try:
            if _file is None or not _file.current(path):
                if _file is not None:
                    old, _file = _file, None
                    old.close()
                _file = _File(path)
            _file.write(line)
        except OSError as error:
            if path not in _unwritable:
                _unwritable.add(path)
                reason = "nobody reads from it" if error.errno in (errno.ENXIO, errno.EPIPE) else error
                logger.warning("%s=%s cannot be written, decisions go on without it: %s", config.LOG.name, path, reason)
