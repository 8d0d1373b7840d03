"""The launches of the backward pass of a 64-token call on SM90.

    prepare   the forward's records again, and T and N
    states    the forward chain without outputs: S and V' of each chunk
    reverse   the chain of gradients, from the last chunk to the first: dS and dV' of each chunk
    local     everything else, all chunks side by side

The reverse chain needs nothing of the chain of states, and runs beside it.
"""

import cutlass.cute as cute
from cutlass import const_expr

from fla_kda_backend.kernels.wy64.backward.contract import Arguments
from fla_kda_backend.kernels.wy64.backward.local.kernel import LocalGradients
from fla_kda_backend.kernels.wy64.backward.reverse.kernel import ReverseChain
from fla_kda_backend.kernels.wy64.backward.states import ChainStates
from fla_kda_backend.kernels.wy64.prepare.kernel import PrepareWY64


class WY64Backward:
    """All kernels of a Variant under a Schedule; called with the contract's Arguments and a stream."""

    def __init__(self, variant, schedule):
        self.whole = schedule.stage == "all"
        self.prepare = PrepareWY64(variant, schedule, keeps_inverse=self.whole)
        self.states = ChainStates(variant, schedule)
        self.reverse, self.local = ReverseChain(variant, schedule), LocalGradients(variant, schedule)

    def smem_bytes(self):
        """Dynamic shared memory of each kernel."""
        kernels = (self.prepare, self.states, self.reverse, self.local) if self.whole else (self.prepare, self.states)
        return {type(kernel).__name__: kernel.smem_bytes for kernel in kernels}

    @cute.jit
    def __call__(self, *arguments):
        *values, stream = arguments
        a = Arguments(*values)
        self.prepare(a, stream)
        self.states(a, stream)
        if const_expr(self.whole):
            self.reverse(a, stream)
            self.local(a, stream)
