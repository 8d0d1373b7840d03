"""What was decided about calls, kept for later calls that no rule, plan or log line could tell from them.

Of calls of `fwd`, about which nothing is decided, it keeps what launches them.

A fingerprint names a call by everything that those read: metadata of tensors, plain values, the names they came by,
torch's modes and the environment. What the memo keeps holds no tensor.
"""

from operator import attrgetter, itemgetter
from typing import Any

import torch

from . import config, facts

ENVIRONMENT = slice(2, 7)  # where in a fingerprint its `environment` lies
LIMIT = 256  # calls; the layers of a model agree, so few are in use at a time
PLAIN = frozenset((bool, int, str, type(None)))  # equal and of one type: the same to everybody; float is not, see below
# Dtypes of negative views: torch makes them of the imaginary parts of complex tensors. To ask each tensor would cost 1 us.
COMPLEX = [getattr(torch, name) for name in ("complex64", "bcomplex32") if hasattr(torch, name)]
NEGATABLE = frozenset(dtype.to_real() for dtype in COMPLEX)
# What is read only after the decision is not among them.
DECIDING = (config.MODE, config.UNTESTED, config.WORKSPACE_MIB, config.TRAINING)

_verdicts: dict[Any, Any] = {}

try:  # torch.compile's own check of tensors: one call for all of them, in C++
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # another torch: fingerprints alone
    TensorGuards: Any = None  # type: ignore[no-redef]


# The last call with a verdict: the layers of a model agree, so the next call mostly fits it too. One tuple, replaced as a
# whole, so threads may share it: what `recent` unpacks.
is_nested = attrgetter("is_nested")
_recent: tuple[Any, ...] | None = None
_candidate: Any = None  # the last verdict that was looked up


def recent(names: list[Any], values: list[Any]) -> Any:
    """The verdict, if the call is like the last one in everything that a fingerprint holds; otherwise None."""
    last = _recent
    if last is None:
        return None
    known, grad, inference, variables, plain, kinds, expected, tensors, check, verdict = last
    if names != known or torch.is_grad_enabled() is not grad or torch.is_inference_mode_enabled() is not inference:
        return None
    if facts.dispatch_modes():  # torch's check sees transforms of torch.func, but not every such mode
        return None
    # Types before values: a tensor where there was none is not to be compared, which would wait for a GPU.
    if [*map(type, values)] != kinds or plain(values) != expected or environment() != variables:
        return None
    found = tensors(values)
    # The check ends the process if a tensor has no strides, which a nested one may be without its type telling.
    return verdict if not any(map(is_nested, found)) and check(*found) else None


def looked_up(names: list[Any], values: list[Any], key: tuple[Any, ...], verdict: Any) -> None:
    """A verdict that is looked up twice in a row becomes the recent one: a check costs more to make than a look-up."""
    global _candidate
    if verdict is _candidate:
        keep_recent(names, values, key, verdict)
    _candidate = verdict


def keep_recent(names: list[Any], values: list[Any], key: tuple[Any, ...], verdict: Any) -> None:
    """Have `recent` give the verdict to the next such call. key: the call's fingerprint."""
    global _recent
    tensors = [i for i, x in enumerate(values) if isinstance(x, torch.Tensor)]
    plain = [i for i in range(len(values)) if i not in tensors]
    zero = any(type(values[i]) is float and values[i] == 0 for i in plain)  # 0.0 equals -0.0
    if TensorGuards is None or zero or len(tensors) < 2 or len(plain) < 2:  # of one index itemgetter makes no tuple
        return
    if any(values[i].layout is not torch.strided or values[i].is_nested for i in tensors):
        return
    pick, rest = itemgetter(*tensors), itemgetter(*plain)
    try:
        check = TensorGuards(*pick(values), dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except Exception:
        return
    _recent = names, key[0], key[1], key[ENVIRONMENT], rest, [*map(type, values)], rest(values), pick, check, verdict


def fingerprint(names: list[Any], values: list[Any]) -> tuple[Any, ...] | None:
    """What stands for a call's arguments `values`, named by `names`: hashable, and the same for calls of one verdict only.

    None where an argument can be more than it shows. Never raises. It tells a negative view from its base, of which the
    metadata are the same. Other tensors without plain memory, and memory that was freed, it does not know: the rules' Decision
    on those is not to be kept, and a launch looks at the addresses.
    """
    try:
        if facts.dispatch_modes() or facts.transform() is not None:
            return None
        key = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *environment(), *names]
        for value in values:
            kind = type(value)
            if kind is torch.Tensor or kind is torch.nn.Parameter:
                strides, dtype = value.stride() if value.layout is torch.strided else None, value.dtype
                key += (kind, value.shape, strides, dtype, value.device, value.layout, value.requires_grad)
                if dtype in NEGATABLE:
                    key.append(value.is_neg())
            elif kind in PLAIN:
                key += (kind, value)
            elif kind is float:
                key += (kind, value or repr(value))  # 0.0 equals -0.0
            else:
                return None
        return tuple(key)
    except Exception:  # a nested tensor has no shape
        return None


def environment() -> tuple[Any, ...]:
    """What else decides, as it is now: variables, and whether tensors may carry tangents."""
    mode, untested, workspace, training = DECIDING
    return mode.raw(), untested.raw(), workspace.raw(), training.raw(), facts.forward_ad_level()


def find(key: tuple[Any, ...] | None) -> Any:
    """The verdict kept under a fingerprint, or None."""
    return _verdicts.get(key)


def keep(key: tuple[Any, ...], verdict: Any) -> None:
    """Keep the verdict on the calls of a fingerprint; what is full starts anew.

    Not if another thread has changed the environment since: the verdict may be that of another fingerprint.
    """
    if environment() != key[ENVIRONMENT]:
        return
    if len(_verdicts) >= LIMIT:
        _verdicts.clear()
    _verdicts[key] = verdict


def clear() -> None:
    """Forget everything: for who replaces what the verdicts came from."""
    global _recent, _candidate
    _verdicts.clear()
    _recent = _candidate = None
