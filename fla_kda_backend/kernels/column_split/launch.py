"""The two launches of a 16-token call: prepare, then the column-split recurrence, which begins while prepare drains.

Only the recurrence is launched with programmatic overlap, and only its loader waits for prepare. That is enough for two
reasons. Prepare itself starts after everything before it has finished, the last segment's recurrence included. And every CTA
of the recurrence has a loader that waits, also where it has no chunk: the recurrence never ends before prepare.
"""

import cutlass.cute as cute

from fla_kda_backend.kernels.column_split.contract import Arguments
from fla_kda_backend.kernels.column_split.prepare import PrepareChunk16
from fla_kda_backend.kernels.column_split.recurrence import RecurrenceSplit


class ColumnSplit:
    """Both kernels of a Variant under a Schedule; called with the contract's Arguments and a stream."""

    def __init__(self, variant, schedule):
        self.prepare = PrepareChunk16(variant, schedule)
        self.recurrence = RecurrenceSplit(variant, schedule)

    def smem_bytes(self):
        """Dynamic shared memory of each kernel."""
        return {type(kernel).__name__: kernel.smem_bytes for kernel in (self.prepare, self.recurrence)}

    @cute.jit
    def __call__(self, *arguments):
        *values, stream = arguments
        a = Arguments(*values)
        self.prepare(a, stream)
        self.recurrence(a, stream)
