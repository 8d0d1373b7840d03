"""The two launches of a 64-token call on SM90: prepare, then the chain.

The chain begins while prepare drains or, overlapped, as soon as the first records are written. It alone is launched with
programmatic overlap, and only what touches the workspace waits for prepare. That is enough because prepare itself starts
after everything before it has finished (the last segment's chain included), and because every CTA of the chain has a
loader that waits, also where it has no chunk: the chain never ends before prepare.

Overlapped, a loader waits for the flag of each record instead, and for prepare at its end. Every CTA of prepare has cleared
the flags of its own records before the first CTA of the chain can start. By then it is on its SM, or done, and it goes on to
its end whatever the chain does; so each flag is set. A CTA of the chain takes its tasks one after the other and waits for
nothing but flags. So it does not matter how many of them find an SM: any one of them comes to its end. Where programmatic
overlap is off, the chain finds all flags set. A cluster of the chain starts where two SMs of one GPC are free, so
CTAs of prepare that leave their SMs to it leave them by clusters, too.
"""

import cutlass.cute as cute

from fla_kda_backend.kernels.wy64.chain.kernel import ChainWY64
from fla_kda_backend.kernels.wy64.chain.replay import ChainReplayWY64
from fla_kda_backend.kernels.wy64.contract import Arguments
from fla_kda_backend.kernels.wy64.prepare.kernel import PrepareWY64


class WY64:
    """Both kernels of a Variant under a Schedule; called with the contract's Arguments and a stream.

    Workspace: record.workspace_bytes. carry_in, carry_out: heads * 2 * record.STATE_BYTES bytes each.
    """

    def __init__(self, variant, schedule):
        self.chain = (ChainReplayWY64 if schedule.replay else ChainWY64)(variant, schedule)
        self.prepare = PrepareWY64(variant, schedule, self.chain.chains_per_group, self.chain.link_time)

    def smem_bytes(self):
        """Dynamic shared memory of each kernel."""
        return {type(kernel).__name__: kernel.smem_bytes for kernel in (self.prepare, self.chain)}

    @cute.jit
    def __call__(self, *arguments):
        *values, stream = arguments
        a = Arguments(*values)
        self.prepare(a, stream)
        self.chain(a, stream)
