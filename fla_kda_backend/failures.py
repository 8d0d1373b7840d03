"""What is remembered of failures: a text, a number and a time each. An exception would keep its frames, and their tensors.

Three kinds are told apart. A passing cause (no memory, no space, no place to write) may be gone a minute later. A lasting one
is not tried for ever. After a sticky CUDA error nothing can run in this process, on any implementation.
"""

import math
import re
import time
from collections.abc import Hashable
from typing import NamedTuple

ATTEMPTS = 3  # so often something is tried before it counts as failing
RETRY = 60  # seconds until what fails for a passing cause is tried again
LIMIT = 256  # failures kept; what is full starts anew
LONGEST = 4000  # characters of a text

# From cudaError_t and CUresult: the context is corrupt, or gone, and each later call returns the same error.
STICKY_CODES = frozenset((4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721))
STICKY_TEXTS = re.compile(
    r"illegal memory access|device-side assert|unspecified launch failure|misaligned address|illegal instruction"
    r"|invalid program counter|operation not supported on global/shared address space|hardware stack error"
    r"|launch timed out|uncorrectable (ecc|nvlink|tensor memory)|driver shutting down|context is destroyed"
    r"|cudaErrorIllegalAddress|cudaErrorAssert|cudaErrorLaunchFailure|cudaErrorLaunchTimeout|cudaErrorMisalignedAddress"
    r"|cudaErrorIllegalInstruction|cudaErrorInvalidAddressSpace|cudaErrorInvalidPc|cudaErrorHardwareStackError"
    r"|cudaErrorECCUncorrectable|cudaErrorNvlinkUncorrectable|cudaErrorContextIsDestroyed|cudaErrorCudartUnloading"
    r"|CUDA_ERROR_(ILLEGAL_|ASSERT|LAUNCH_FAILED|LAUNCH_TIMEOUT|MISALIGNED_|INVALID_PC|INVALID_ADDRESS_SPACE|HARDWARE_STACK"
    r"|ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE|CONTEXT_IS_DESTROYED|DEINITIALIZED)",
    re.IGNORECASE,
)
CUDA_TEXT = re.compile("cuda", re.IGNORECASE)  # what tells such an error from another one with the same words
CODE = re.compile(r"CUDA error[: (]*(\d+)\b", re.IGNORECASE)
PASSING_TEXTS = re.compile(
    r"out of memory|out_of_memory|cannot allocate memory|no space left|disk quota exceeded|too many open files"
    r"|read-only file system|no usable temporary directory|resource temporarily unavailable",
    re.IGNORECASE,
)
DRIVER_CODE = 35
DRIVER_TEXTS = re.compile(r"driver version is insufficient|cudaErrorInsufficientDriver", re.IGNORECASE)
DRIVER_REASON = "the NVIDIA driver is older than the CUDA 13 that these kernels are built with, which needs driver 580"


class Failure(NamedTuple):
    text: str
    times: int
    again: float  # by the monotonic clock, when it may be tried again; infinite: never

    @property
    def lasting(self) -> bool:
        return self.again == math.inf


class StillFailing(RuntimeError):
    """Raised in place of an attempt that would fail once more."""

    def __init__(self, text: str, lasting: bool) -> None:
        super().__init__(text)
        self.passing = not lasting


class NotPlainMemory(RuntimeError):
    """A tensor of the caller has no memory. This says nothing of the kernels, so it is remembered of none."""


class Failures:
    """The failures of some kind of attempt, by what was attempted."""

    def __init__(self, lasting_after: int = ATTEMPTS) -> None:
        """lasting_after: attempts that something may take whose cause does not pass."""
        self.lasting_after = lasting_after
        self._kept: dict[Hashable, Failure] = {}

    def note(self, key: Hashable, error: BaseException) -> Failure:
        """An attempt at `key` has failed."""
        last = self._kept.get(key)
        times = 1 if last is None else last.times + 1
        if is_passing(error):
            again = now() + RETRY if times >= ATTEMPTS else now()
        else:
            again = math.inf if times >= self.lasting_after or is_driver_mismatch(error) else now()
        if len(self._kept) >= LIMIT and key not in self._kept:
            self._kept.clear()
        failure = self._kept[key] = Failure(text_of(error), times, again)
        return failure

    def standing(self, key: Hashable) -> Failure | None:
        """The failure because of which `key` is not to be tried now, or None."""
        failure = self._kept.get(key)
        return failure if failure is not None and now() < failure.again else None

    def forget(self, key: Hashable) -> None:
        """An attempt at `key` has succeeded."""
        self._kept.pop(key, None)

    def clear(self) -> None:
        self._kept.clear()


def now() -> float:
    return time.monotonic()


def text_of(error: BaseException) -> str:
    """What is kept of an error."""
    text = f"{type(error).__name__}: {_said(error)}"
    return f"{DRIVER_REASON}: {text}" if is_driver_mismatch(error) else text


def is_sticky(error: BaseException) -> bool:
    """Whether a CUDA error has left a context in which nothing can run, FLA's kernels no more than these."""
    code = _code(error)
    if code is not None:
        return code in STICKY_CODES
    text = _said(error)
    return bool(STICKY_TEXTS.search(text) and CUDA_TEXT.search(f"{type(error).__name__} {text}"))


def is_passing(error: BaseException) -> bool:
    """Whether the cause may be gone after a while: no memory, no space, nowhere to write."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:  # a compiler may wrap what it met
        passing = getattr(each, "passing", None)
        if isinstance(passing, bool):
            return passing
        if isinstance(each, MemoryError) or (isinstance(each, OSError) and each.errno is not None):
            return True
        if PASSING_TEXTS.search(_said(each)):
            return True
        seen.add(id(each))
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return False


def is_driver_mismatch(error: BaseException) -> bool:
    """Whether the driver is too old for the CUDA runtime of the kernels. FLA's own kernels may run all the same."""
    return _code(error) == DRIVER_CODE or bool(DRIVER_TEXTS.search(_said(error)))


def _said(error: BaseException) -> str:
    return str(error)[:LONGEST]


def _code(error: BaseException) -> int | None:
    """The number of a CUDA error, where it has one."""
    code = getattr(error, "error_code", None)  # torch.AcceleratorError's
    if isinstance(code, int):
        return code
    found = CODE.search(_said(error))
    return int(found[1]) if found else None
