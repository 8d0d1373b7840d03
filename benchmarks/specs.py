"""Which compiled kernels a call would launch, which its metadata tells: tensors on the meta device will do.

A machine without the DSL gets them from one that has it (export.py).
"""

from fla_kda_backend import op, planning
from fla_kda_backend.call import parse
from fla_kda_backend.compiling import ARCHS
from fla_kda_backend.facts import Facts

H200 = Facts(capability=(9, 0), sm_count=132, grad_enabled=False, inference_mode=False, mode="auto", untested=True)


def of_mode(call, mode):
    """Specs of a chunk_kda call (keyword arguments on the meta device) in a mode of FLA_KDA_CUTE_MODE on an H200."""
    parsed = parse((), call)
    return of_plan(call, planning.plan(parsed, H200._replace(mode=mode)))


def of_plan(call, plan):
    """Specs of the call under a plan."""
    spec = op.spec_of(parse((), call), plan, arch=ARCHS[H200.capability])
    return [] if spec is None else [spec]
