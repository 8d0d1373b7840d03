"""The two launches of a 64-token call on SM90: prepare, then the chain, which begins while prepare drains, or, overlapped,
as soon as the first records are written.

Only the chain is launched with programmatic overlap, and only what touches the workspace waits for prepare. That is
enough because prepare itself starts after everything before it has finished (the last segment's chain included), and
because every CTA of the chain has a loader that waits, also where it has no chunk: the chain never ends before prepare.

Overlapped, a loader waits for the flag of each record instead, and for prepare at its end. Every CTA of prepare has cleared
the flags of its own records before the first CTA of the chain can start, and is on its SM by then, or done: it goes on to
its end whatever the chain does, so each flag is set. A CTA of the chain takes its tasks one after the other and waits for
nothing but flags, so it does not matter how many of them find an SM: any one of them comes to its end. Where programmatic
overlap is off, the chain finds all flags set. A
cluster of the chain starts where two SMs of one neighbourhood are free, so CTAs of prepare that leave theirs to it leave
them by clusters, too.
"""

import cutlass.cute as cute

from fla_kda_backend.kernels.chain_replay_wy64 import ChainReplayWY64
from fla_kda_backend.kernels.chain_wy64 import ChainWY64
from fla_kda_backend.kernels.prepare_wy64 import PrepareWY64


class WY64:
    """Compile-time facts: those of PrepareWY64 and ChainWY64; replay: ChainReplayWY64, which takes no segments; overlap: for
    sequences of equal length, or one packed one; no segments; direct: see PrepareDirect, for calls without an initial state,
    in one segment, of a bounded bf16 gate and normalised q and k, whose states are not all asked for.

    Workspace: record64.workspace_bytes. carry_in, carry_out: heads * 2 * record64.STATE_BYTES bytes each.
    """

    arguments = "l" * 25 + "f" * 2 + "i" * 6  # Int64 addresses and strides, Float32, Int32

    def __init__(self, cu_dtype=None, initial=None, final="fp32", segmented=False, replay=False, state_v_first=True,
                 states=False, gate="bounded", gate_dtype="bf16", a_log="fp32", dt_bias="fp32", beta="sigmoid",
                 beta_dtype="bf16", l2norm=True, max_ctas=132, overlap=False, direct=False):  # fmt: skip
        options = dict(cu_dtype=cu_dtype, initial=initial, final=final, state_v_first=state_v_first, states=states,
                       max_ctas=max_ctas)  # fmt: skip
        if replay and segmented:
            raise ValueError("replay=True needs segmented=False: a checkpoint must lie in the same launch")
        if overlap and segmented:
            raise ValueError("overlap=True needs segmented=False")
        options |= {"overlap": overlap, "scaled": not l2norm}
        self.chain = ChainReplayWY64(**options) if replay else ChainWY64(segmented=segmented, direct=direct, **options)
        if direct and not (self.chain.zero_start and gate == "bounded" and gate_dtype == "bf16" and l2norm and not states):
            raise ValueError("direct=True is for a bounded bf16 gate, l2norm, no initial state, no segments, replay or states")
        self.prepare = PrepareWY64(cu_dtype, max_ctas, self.chain.zero_start, self.chain if overlap else None, gate=gate,
                                   gate_dtype=gate_dtype, a_log=a_log, dt_bias=dt_bias, beta=beta, beta_dtype=beta_dtype,
                                   l2norm=l2norm, direct=(final, state_v_first) if direct else None)  # fmt: skip

    def smem_bytes(self):
        """Dynamic shared memory of each kernel."""
        return {type(kernel).__name__: kernel.smem_bytes for kernel in (self.prepare, self.chain)}

    @cute.jit
    def __call__(self, q, k, v, g, beta, a_log, dt_bias, initial_state, final_state, out, cu_seqlens, workspace, carry_in,
                 carry_out, states, q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, beta_token,
                 beta_head, scale, gate_scale, seq_len, num_seqs, qk_heads, heads, slot_begin, slot_end, stream):  # fmt: skip
        """Addresses and strides (in elements) are Int64, scale and gate_scale Float32, counts Int32."""
        self.prepare(q, k, v, g, beta, a_log, dt_bias, final_state, out, cu_seqlens, workspace, q_token, q_head, k_token,
                     k_head, v_token, v_head, g_token, g_head, beta_token, beta_head, scale, gate_scale, seq_len, num_seqs,
                     qk_heads, heads, slot_begin, slot_end, stream)  # fmt: skip
        self.chain(initial_state, final_state, out, cu_seqlens, workspace, carry_in, carry_out, states, scale, seq_len,
                   num_seqs, heads, slot_begin, slot_end, stream)  # fmt: skip
