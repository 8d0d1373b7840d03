"""The compiled kernels that a call would launch. Its metadata decides them: tensors on the meta device will do.

A machine without the DSL gets them from one that has it (export.py).
"""

from fla_kda_backend import planning
from fla_kda_backend.call import parse
from fla_kda_backend.compiling import ARCHS
from fla_kda_backend.facts import Facts
from fla_kda_backend.geometry import geometry

H200 = Facts(capability=(9, 0), sm_count=132, grad_enabled=False, inference_mode=False, mode="auto", untested=True)


def of_mode(call, mode):
    """Specs of a chunk_kda call (keyword arguments on the meta device) in a mode of FLA_KDA_CUTE_MODE on an H200."""
    parsed = parse((), call)
    return of_plan(call, planning.plan(parsed, H200._replace(mode=mode)))


def of_plan(call, plan):
    """Specs of the call under a plan."""
    spec = geometry(parse((), call), plan, ARCHS[H200.capability]).spec
    return [] if spec is None else [spec]
