"""KDA token by token in double precision: the errors of all kernels are measured against it.

    S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_(t-1) + beta_t k_t v_t^T        o_t = scale S_t^T q_t

(Kimi Linear, arXiv 2510.26692), with the gates and flags of `fla.ops.kda.chunk_kda`. Gate forms stand in `log_decay` alone.
"""

import torch
import torch.nn.functional as F

L2_NORM_EPS = 1e-6


def forward(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V], HV a multiple of H
    g,  # [B, T, HV, K]
    beta,  # [B, T, HV]
    scale=None,  # K^-0.5 if None
    initial_state=None,  # [N, HV, K, V], or [N, HV, V, K] with state_v_first
    output_final_state=True,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    safe_gate=False,
    lower_bound=None,
    disable_recompute=False,
    return_intermediate_states=False,
    state_v_first=False,
    cu_seqlens=None,  # [N + 1] integers, with B = 1
    cu_seqlens_cpu=None,
    use_graph=False,
    max_num_seqs=None,
    A_log=None,  # HV values of any shape
    dt_bias=None,  # HV * K values of any shape
    chunk_size=64,
    transpose_state_layout=False,
):
    """The arguments of chunk_kda, of any float dtype and on any device.

    output_final_state, safe_gate, disable_recompute, cu_seqlens_cpu, use_graph and max_num_seqs change nothing here;
    chunk_size changes only the number of intermediate states.

    Returns out [B, T, HV, V] and final_state in the layout of initial_state, both fp64. The final state of an empty
    sequence is its initial state, or zeros. With return_intermediate_states the states before each chunk of chunk_size
    tokens come third, [B, NT, HV, K, V] or [B, NT, HV, V, K], sequence after sequence.
    """
    batch, tokens, heads, dim_k = q.shape
    value_heads, dim_v = v.shape[2:]
    v_first = state_v_first or transpose_state_layout
    scale = dim_k**-0.5 if scale is None else scale

    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS) for x in (q, k))
    q, k = (x.repeat_interleave(value_heads // heads, dim=2) for x in (q * scale, k))
    if use_gate_in_kernel:
        g = log_decay(g, A_log, dt_bias, lower_bound)
    if use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta) * (2.0 if allow_neg_eigval else 1.0)

    if cu_seqlens is None:
        lengths, starts = [tokens] * batch, [b * tokens for b in range(batch)]
    else:
        starts = cu_seqlens.tolist()
        lengths = [end - first for first, end in zip(starts[:-1], starts[1:])]
    # Longest first, so that the sequences still running at any step are a prefix of the state.
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    state = torch.zeros(len(order), value_heads, dim_v, dim_k, dtype=torch.float64, device=q.device)
    if initial_state is not None:
        state += (initial_state if v_first else initial_state.mT)[order]
    q, k, v, decay, beta = (x.flatten(0, 1) for x in (q, k, v, g.exp(), beta[..., None]))
    out = torch.zeros_like(v)
    firsts = torch.tensor([starts[n] for n in order], dtype=torch.int64, device=q.device)
    chunks = [-(-max(length, 0) // chunk_size) for length in lengths]
    bases = torch.tensor([sum(chunks[:n]) for n in order], dtype=torch.int64, device=q.device)
    states = state.new_zeros(sum(chunks) if return_intermediate_states else 0, value_heads, dim_v, dim_k)
    running = len(order)
    for t in range(max(lengths, default=0)):
        while lengths[order[running - 1]] <= t:
            running -= 1
        row = firsts[:running] + t
        s = state[:running]
        if return_intermediate_states and t % chunk_size == 0:
            states[bases[:running] + t // chunk_size] = s
        s = s * decay[row][:, :, None, :]  # not in place: autograd keeps the states
        key = k[row]
        error = v[row] - (s @ key[..., None])[..., 0]
        s = s + (beta[row] * error)[..., None] * key[:, :, None, :]
        out[row] = (s @ q[row][..., None])[..., 0]
        state = s if running == len(state) else torch.cat([s, state[running:]])

    final_state = torch.empty_like(state)
    final_state[order] = state
    if not v_first:
        final_state, states = final_state.mT.contiguous(), states.mT.contiguous()
    out = out.reshape(batch, tokens, value_heads, dim_v)
    if return_intermediate_states:
        return out, final_state, states.unflatten(0, (batch, sum(chunks) // max(batch, 1)))
    return out, final_state


def log_decay(g, A_log, dt_bias, lower_bound):
    """The log decay of the gate in the kernel, from raw g [..., HV, K] fp64.

    With a bound lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), and A_log may be None for exp(A_log) = 1; without one
    -exp(A_log) * softplus(g + dt_bias).
    """
    if dt_bias is not None:
        g = g + dt_bias.double().reshape(g.shape[-2:])
    steepness = 1.0 if A_log is None else A_log.double().exp().reshape(-1, 1)
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(steepness * g)
    return -steepness * F.softplus(g)
