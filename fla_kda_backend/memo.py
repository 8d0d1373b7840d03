"""What was decided about calls, kept for later calls that no rule, plan or log line could tell from them.

A fingerprint names a call by everything that those read: metadata of tensors, plain values, the names they came by,
torch's modes and the environment. What the memo keeps holds no tensor.
"""

import torch

from . import config

LIMIT = 256  # calls; the layers of a model agree, so few are in use at a time
PLAIN = frozenset((bool, int, str, type(None)))  # equal and of one type: the same to everybody; float is not, see below
DECIDING = (config.MODE, config.UNTESTED, config.COST)  # what is read only after the decision is not among them

_verdicts: dict[tuple, object] = {}


def fingerprint(names, values):
    """What stands for a call's arguments `values`, named by `names`: hashable, and the same for calls of one verdict only.

    None where an argument can be more than it shows. Never raises.
    """
    try:
        key = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *environment(), *names]
        for value in values:
            kind = type(value)
            if kind is torch.Tensor or kind is torch.nn.Parameter:
                key += (kind, value.shape, value.dtype, value.device, value.layout, value.requires_grad)
            elif kind in PLAIN:
                key += (kind, value)
            elif kind is float:
                key += (kind, value or repr(value))  # 0.0 equals -0.0
            else:
                return None
        return tuple(key)
    except Exception:  # a nested tensor has no shape
        return None


def environment():
    """The variables that decide, as they are now."""
    mode, untested, cost = DECIDING
    return mode.raw(), untested.raw(), cost.raw()


def find(key):
    """The verdict kept under a fingerprint, or None."""
    return _verdicts.get(key)


def keep(key, verdict):
    """Keep the verdict on the calls of a fingerprint; what is full starts anew.

    Not if another thread has changed the environment since: the verdict may be that of another fingerprint.
    """
    if environment() != key[2:5]:
        return
    if len(_verdicts) >= LIMIT:
        _verdicts.clear()
    _verdicts[key] = verdict


def clear():
    """Forget everything: for who replaces what the verdicts came from."""
    _verdicts.clear()
