"""The two launches of a 16-token call: prepare, then the column-split recurrence, which begins while prepare drains.

Only the recurrence is launched with programmatic overlap, and only its loader waits for prepare. That is enough because
prepare itself starts after everything before it has finished (the last segment's recurrence included), and because every
CTA of the recurrence has a loader that waits, also where it has no chunk: the recurrence never ends before prepare.
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
        self.prepare(a.q, a.k, a.g, a.beta, a.a_log, a.dt_bias, a.out, a.cu_seqlens, a.workspace, a.scale, a.gate_scale,
                     a.seq_len, a.num_seqs, a.qk_heads, a.heads, a.slot_begin, a.slot_end, stream)  # fmt: skip
        self.recurrence(a.v, a.initial_state, a.final_state, a.out, a.cu_seqlens, a.workspace, a.carry_in, a.carry_out,
                        a.intermediate_states, a.seq_len, a.num_seqs, a.heads, a.slot_begin, a.slot_end, stream)  # fmt: skip
