"""Which compiled kernels a call would launch: found by running op.run on the meta device, where nothing is launched.

A machine without the DSL gets them from one that has it (export.py).
"""

from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import torch

from fla_kda_backend import op, planning
from fla_kda_backend.call import parse
from fla_kda_backend.compiling import library
from fla_kda_backend.facts import Facts

H200 = Facts(capability=(9, 0), sm_count=132, grad_enabled=False, inference_mode=False, mode="auto", untested=True)


def of_mode(call, mode):
    """Specs of a chunk_kda call (keyword arguments on the meta device) in a mode of FLA_KDA_CUTE_MODE on an H200."""
    parsed = parse((), call)
    return of_plan(call, planning.plan(parsed, H200._replace(mode=mode)))


def of_plan(call, plan):
    """Specs of the call under a plan."""
    seen = []

    def load(spec):
        seen.append(spec)
        return lambda *arguments: None, "nowhere"

    fake = {
        "get_device_capability": lambda device=None: H200.capability,
        "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=H200.sm_count),
        "current_device": lambda: None,
        "current_stream": lambda device=None: SimpleNamespace(cuda_stream=0),
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **fake))
        stack.enter_context(mock.patch.multiple(library, _functions={}, _sources={}, _load=load))
        op.run(parse((), call), plan)
    return seen
