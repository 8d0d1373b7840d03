"""The two launches of a 16-token call: prepare, then the column-split recurrence, which begins while prepare drains.

Only the recurrence is launched with programmatic overlap, and only its loader waits for prepare. That is enough because
prepare itself starts after everything before it has finished (the last segment's recurrence included), and because every
CTA of the recurrence has a loader that waits, also where it has no chunk: the recurrence never ends before prepare.
"""

import cutlass.cute as cute

from fla_kda_backend.kernels.prepare_chunk16 import PrepareChunk16
from fla_kda_backend.kernels.recurrence_split import RecurrenceSplit
from fla_kda_backend.kernels.shared.inputs16 import InputOptions


class ColumnSplit:
    """Compile-time facts: those of PrepareChunk16, with InputOptions, and RecurrenceSplit.

    The exact arithmetic takes FlashKDA's call only: the defaults from state_v_first on.
    """

    arguments = "l" * 15 + "f" * 2 + "i" * 6  # Int64 addresses, Float32, Int32

    def __init__(self, arithmetic="exact", bv=32, warps=4, stages=4, initial=None, final="fp32", cu_dtype=None,
                 segmented=False, state_v_first=True, states=False, state_chunk=64, gate="bounded", gate_dtype="bf16",
                 a_log="fp32", dt_bias="fp32", beta="sigmoid", beta_dtype="bf16", l2norm=True):  # fmt: skip
        inputs = InputOptions(gate, gate_dtype, a_log, dt_bias, beta, beta_dtype, l2norm)
        self.prepare = PrepareChunk16(arithmetic, cu_dtype, inputs)
        self.recurrence = RecurrenceSplit(arithmetic, bv, warps, stages, initial, final, cu_dtype, segmented, state_v_first,
                                          states, state_chunk)  # fmt: skip

    def smem_bytes(self):
        """Dynamic shared memory of each kernel."""
        return {"PrepareChunk16": self.prepare.smem_bytes, "RecurrenceSplit": self.recurrence.smem_bytes}

    @cute.jit
    def __call__(self, q, k, v, g, beta, a_log, dt_bias, initial_state, final_state, out, cu_seqlens, workspace, carry_in,
                 carry_out, states, scale, gate_scale, seq_len, num_seqs, qk_heads, heads, slot_begin, slot_end,
                 stream):  # fmt: skip
        """Addresses are Int64, scale and gate_scale Float32, counts Int32; tensors are contiguous."""
        self.prepare(q, k, g, beta, a_log, dt_bias, out, cu_seqlens, workspace, scale, gate_scale, seq_len, num_seqs, qk_heads,
                     heads, slot_begin, slot_end, stream)  # fmt: skip
        self.recurrence(v, initial_state, final_state, out, cu_seqlens, workspace, carry_in, carry_out, states, seq_len,
                        num_seqs, heads, slot_begin, slot_end, stream)  # fmt: skip
