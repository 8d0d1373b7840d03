"""The launches of the backward pass of a 64-token call on SM90.

    prepare   the forward's records again, and T and N
    states    the forward chain without outputs: S and V' of each chunk
    reverse   the chain of gradients, from the last chunk to the first: dS and dV' of each chunk
    local     everything else, all chunks side by side

The reverse chain needs nothing of the chain of states, and runs beside it.

With few heads both chains leave most SMs idle, and `local` can run beside them, too: Schedule.beside. A CTA of either chain
then counts each chunk of which it has left its part in the local record (workspace.publish), and a CTA of `local` loads a local
record once all four parts are there. What makes this right:

    start     A CTA of `states` lets `reverse` start once it has waited for prepare, and a CTA of `reverse` lets `local` start.
              So when the first CTA of `local` runs, prepare has finished, and every CTA of either chain is on its SM or done.
              Before it lets anything start, block 0 of `states` clears the number of the next pair; prepare clears the counts.
              So no count is left over from what the workspace held before.
    progress  The chains wait for nothing that `local` does, and all their CTAs have SMs, clusters included, before a CTA of
              `local` has one. So each chain comes to its end and every count to four, and a CTA of `local`, which waits for
              counts alone, comes to its end, however many of them find an SM at a time: one on which a chain has ended, too.
              None is needed for another. Where SMs are few, CTAs of a chain start when others end, and what is behind them in
              the stream starts later; where programmatic overlap is off, `local` finds all counts complete.
    end       Every CTA of `local` waits for `reverse` before it ends, as every CTA of `reverse` does for `states`. So whatever
              comes next in the stream comes after all four, and prepare, an ordinary launch, comes after the `local` before it.
    data      A part is counted after its bulk stores are complete and a fence. The count is read with acquire semantics, by the
              warp that then has the copy engine read the record, or by another one before a barrier of the CTA. Both sides pass
              a proxy fence in between.

Which CTA of `local` takes a pair, and when, changes no bit.
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
