"""The 16-token kernels' arithmetic in torch, rounding by rounding: "exact", which is FlashKDA's, and "robust".

A sequence is cut into chunks of 16 tokens. `prepare` treats all chunks at once. `recur` walks all sequences and heads
together, chunk by chunk. With R a rounding to bf16, c the running sum of the log2 decay in a chunk, and k, q normalised and
rounded:

    exact                                               robust
    k_start = R(k R(2^c))                               R(k 2^c)
    q_start = R(R(q R(2^c)) R(scale))                   R(q (2^c scale))
    k_inv   = R(k R(2^-c))                              R(k 2^-c)
    k_end   = R(k_inv R(2^c_15))                        R(k 2^(c_15 - c))
    L       = strict lower part of k_start . k_inv^T, rows times beta; exact rounds both to fp16
    inverse = R((I + L)^-1), by powers of L in fp16     I + M + R((I + L)^-1 - I - M), M = R((I + L)^-1 - I)
    scores  = lower part of R(q_start . k_inv^T)        the same; on the diagonal R(scale q . k)

    u  = R(R(v - R(k_start . S)) R(beta))               (v - k_start . R(S)) beta
    U  = R(inverse . u)                                 R(u + (inverse - I) . R(u))
    o  = R(R(q_start . S) + R(scores . U))              R(q_start . R(S) + scores . U)
    S' = R(2^c_15 S + k_end^T . U)                      2^c_15 S + k_end^T . U

What is not rounded to bf16 is fp32. On a GPU every step uses the instructions that the kernels use (device_math). The bits
of "exact" are then the kernels' own; "robust" sums in another order where a tensor core adds to an accumulator. On a CPU
host_math comes close. The robust kernels are described for FlashKDA's call alone, where 2^-c has a bound.
"""

import torch

CHUNK = 16
HEAD_DIM = 128
LOG2_E_FP32 = 1.44269502  # the fp32 constant of the kernel, for exp(A_log)
LOG2_E = 1.4426950408889634  # the double constant, for the gate's scale
WORKSPACE = ("k_start", "q_start", "k_end", "decay_total", "inverse", "scores")

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


def forward(
    q,  # [B, T, H, 128] bf16
    k,  # [B, T, H, 128] bf16
    v,  # [B, T, H, 128] bf16
    g,  # [B, T, H, 128] bf16, raw gate
    beta,  # [B, T, H] bf16, logits
    scale,
    A_log,  # [H] fp32
    dt_bias,  # [H, 128] or [H * 128] fp32
    lower_bound,
    initial_state=None,  # [N, H, V, K] fp32 or bf16
    cu_seqlens=None,  # [N + 1] int32 or int64
    *,
    arithmetic="exact",
    return_workspace=False,
):
    """KDA forward with the L2 norm, the bounded gate and the beta sigmoid inside, in the kernels' rounding order.

    arithmetic: "exact" or "robust". The state is carried as bf16, or robust: fp32.

    Returns out [B, T, H, 128] bf16 and final_state [N, H, V, K], N being the number of sequences (B without cu_seqlens). The
    state has the dtype of initial_state, fp32 without one. With return_workspace a dict of what the prepare kernel leaves
    comes third: k_start, q_start, k_end [H * C, 16, 128] bf16, decay_total [H * C, 128] fp32, inverse, scores
    [H * C, 16, 16] bf16, at index head * C + chunk. The C chunks of all sequences follow each other without gaps. In the
    robust inverse, M lies below the diagonal and the transpose of the second term above it.

    Rows past a sequence's end count as zero in q, k, v and beta.

    Raises:
        ValueError: another head dimension, a lower_bound outside [-5, 0), or an unknown arithmetic.
    """
    batch, tokens, heads, dim = q.shape
    if dim != HEAD_DIM or v.shape[-1] != HEAD_DIM:
        raise ValueError(f"requires K = V = {HEAD_DIM}, got K={dim}, V={v.shape[-1]}")
    if not -5.0 <= lower_bound < 0.0:
        raise ValueError(f"requires -5 <= lower_bound < 0, got {lower_bound}")
    if arithmetic not in ("exact", "robust"):
        raise ValueError(f'requires arithmetic "exact" or "robust", got {arithmetic!r}')
    robust = arithmetic == "robust"
    math = _math_for(q.device)
    bounds = sequence_bounds(batch, tokens, cu_seqlens)
    rows, inside, first_chunk = chunk_rows(bounds, q.device)

    def chunks_of(x):  # [B, T, H, ...] -> [H, C, 16, ...], zero past the end
        picked = x.reshape(batch * tokens, *x.shape[2:])[rows]
        picked = torch.where(inside.reshape(*inside.shape, *[1] * (x.dim() - 2)), picked, torch.zeros_like(picked))
        return picked.movedim(2, 0).contiguous()

    beta_chunks = chunks_of(beta).float()
    beta_chunks = logistic(math, math.mul(beta_chunks, -LOG2_E_FP32)) if robust else sigmoid(math, beta_chunks)
    workspace = prepare(
        math,
        *(chunks_of(x) for x in (q, k, g)),
        beta_chunks,
        inside,
        scale,
        A_log.reshape(heads).float(),
        dt_bias.reshape(heads, HEAD_DIM).float(),
        lower_bound,
        robust,
    )
    state_dtype = fp32 if robust else bf16
    if initial_state is None:
        state = torch.zeros(len(bounds), heads, HEAD_DIM, HEAD_DIM, dtype=state_dtype, device=q.device)
    else:
        state = initial_state.to(state_dtype)
    out_chunks, state = recur(math, workspace, chunks_of(v), beta_chunks, state, first_chunk, robust)

    out = torch.zeros(batch * tokens, heads, HEAD_DIM, dtype=bf16, device=q.device)
    out[rows[inside]] = out_chunks.movedim(0, 2)[inside]
    out = out.reshape(batch, tokens, heads, HEAD_DIM)
    final_state = state.to(fp32 if initial_state is None else initial_state.dtype)
    if not return_workspace:
        return out, final_state
    return out, final_state, {name: workspace[name].flatten(0, 1) for name in WORKSPACE}


def _math_for(device):
    if device.type == "cuda":
        from fla_kda_backend.reference import device_math as math
    else:
        from fla_kda_backend.reference import host_math as math
    return math


def sequence_bounds(batch, tokens, cu_seqlens=None):
    """(first, end) of each sequence, in rows of the flattened [B * T] token axis."""
    if cu_seqlens is None:
        return [(b * tokens, (b + 1) * tokens) for b in range(batch)]
    ends = cu_seqlens.tolist()
    return list(zip(ends[:-1], ends[1:]))


def chunk_rows(bounds, device=None):
    """The token row of every chunk's rows [C, 16], which of them lie inside the sequence [C, 16], and the first chunk
    of each sequence (N + 1 integers, the last one C)."""
    starts, ends, first_chunk = [], [], [0]
    for first, end in bounds:
        sequence_starts = range(first, end, CHUNK)
        starts += sequence_starts
        ends += [end] * len(sequence_starts)
        first_chunk.append(len(starts))
    rows = torch.tensor(starts, dtype=torch.int64, device=device)[:, None] + torch.arange(CHUNK, device=device)
    ends = torch.tensor(ends, dtype=torch.int64, device=device)[:, None]
    return torch.minimum(rows, ends - 1), rows < ends, first_chunk


def sigmoid(math, x):
    """The sigmoid of x as FlashKDA computes it."""
    return math.fma(math.tanh(math.mul(x, 0.5)), 0.5, 0.5)


def logistic(math, exponent):
    """The robust sigmoid of x, from exponent = -x log2(e)."""
    return math.rcp(math.add(math.ex2(exponent), 1.0))


def dot(math, x, y):
    """Sums of x y over the last dimension, [.., 128] fp32 -> [.., 1]: 16 lanes sum 8 channels each, a butterfly adds them."""
    x, y = x.unflatten(-1, (16, 8)), y.unflatten(-1, (16, 8))
    total = torch.zeros_like(x[..., 0])
    for i in range(8):
        total = math.fma(x[..., i], y[..., i], total)
    for distance in (8, 4, 2, 1):
        total = math.add(total[..., :distance], total[..., distance:])
    return total


def normalise(math, x):
    """Rows of x [..., 128] bf16 divided by their length."""
    x = x.float()
    return math.mul(x, math.rsqrt(math.add(dot(math, x, x), 1e-6))).to(bf16)


def log2_decay(math, g, inside, A_log, dt_bias, lower_bound, robust=False):
    """Running sum of the log2 decay over a chunk's rows, from g [H, C, 16, 128] bf16, in fp32; rows past the end add 0."""
    gate_scale = torch.tensor(lower_bound * LOG2_E, dtype=torch.float64).float().item()
    steepness = math.ex2(math.mul(A_log, LOG2_E_FP32))[:, None, None, None]
    x = math.add(g.float(), dt_bias[:, None, None, :])
    if robust:
        y = logistic(math, math.mul(x, math.mul(steepness, -LOG2_E_FP32)))
    else:
        y = sigmoid(math, math.mul(x, steepness))
    y = math.mul(y, gate_scale)
    y = torch.where(inside[..., None], y, torch.zeros_like(y))
    running, rows = torch.zeros_like(y[:, :, 0]), []
    for row in range(CHUNK):
        running = math.add(running, y[:, :, row])
        rows.append(running)
    return torch.stack(rows, dim=2)


def prepare(math, q, k, g, beta, inside, scale, A_log, dt_bias, lower_bound, robust=False):
    """All that needs no state, as a dict of [H, C, ...] tensors; q, k, g [H, C, 16, 128] bf16, beta [H, C, 16] fp32."""
    q, k = normalise(math, q), normalise(math, k)
    c = log2_decay(math, g, inside, A_log, dt_bias, lower_bound, robust)
    k_start, q_start, k_inv, k_end = (rows_robust if robust else rows_exact)(math, q, k, c, scale)
    lower, scores = math.product(k_start, k_inv.mT), math.product(q_start, k_inv.mT)
    if robust:
        inverse = two_terms(invert_by_substitution(math, lower, beta))
        diagonal = math.mul(dot(math, q.float(), k.float()), scale)
        scores = scores.tril(-1) + diagonal[..., 0].diag_embed()
    else:
        inverse = invert_neumann(math, lower.to(fp16), beta.to(fp16))
    values = (k_start, q_start, k_end, math.ex2(c[:, :, -1]), inverse, scores.to(bf16).tril())
    return dict(zip(WORKSPACE, values))


def rows_exact(math, q, k, c, scale):
    """k_start, q_start, k_inv, k_end; every factor is rounded."""
    shrink, grow, total = (math.ex2(x).to(bf16) for x in (c, -c, c[:, :, -1:]))
    factor = torch.tensor(scale, dtype=fp32, device=q.device).to(bf16)
    k_inv = multiply(math, k, grow)
    return (
        multiply(math, k, shrink),
        multiply(math, multiply(math, q, shrink), factor),
        k_inv,
        multiply(math, k_inv, total),
    )


def rows_robust(math, q, k, c, scale):
    """As rows_exact, but only results are rounded."""
    shrink, rest = math.ex2(c), math.ex2(math.add(c[:, :, -1:], -c))
    return (
        multiply(math, k, shrink),
        multiply(math, q, math.mul(shrink, scale)),
        multiply(math, k, math.ex2(-c)),
        multiply(math, k, rest),
    )


def multiply(math, x, y):
    """R(x y); subnormal fp32 products are flushed."""
    return math.mul(x.float(), y.float()).to(bf16)


def invert_neumann(math, lower, beta):
    """(I + L)^-1 = (I - L)(I + L^2)(I + L^4)(I + L^8) in fp16; accurate only while the powers of L stay small."""
    power = (lower * beta[..., None]).tril(-1)
    total = torch.eye(CHUNK, dtype=fp16, device=lower.device) - power
    for _ in range(3):
        power = math.product(power, power, fp16)
        total = total + math.product(total, power, fp16)
    return total.to(bf16)


def invert_by_substitution(math, lower, beta):
    """(I + L)^-1 row by row in fp32: X_i = I_i - sum over j < i of L_ij X_j, one fused step per j."""
    lower = math.mul(lower, beta[..., None])
    rows = []
    for i in range(CHUNK):
        row = torch.zeros_like(lower[..., 0, :])
        row[..., i] = 1.0
        for j, solved in enumerate(rows):
            row = math.fma(-lower[..., i, j, None], solved, row)
        rows.append(row)
    return torch.stack(rows, dim=-2)


def two_terms(inverse):
    """inverse - I as bf16 below the diagonal, and the rounded rest, transposed, above it."""
    inverse = inverse.tril(-1)
    lead = inverse.to(bf16)
    return lead + (inverse - lead.float()).to(bf16).mT


def recur(math, workspace, v, beta, state, first_chunk, robust=False):
    """The recurrence. v [H, C, 16, V] bf16, beta [H, C, 16] after the sigmoid, state [N, H, V, K] bf16, robust: fp32.

    Returns out [H, C, 16, V] bf16 and the state after each sequence's last chunk.
    """
    state, out = state.clone(), torch.zeros_like(v)
    first = torch.tensor(first_chunk[:-1], dtype=torch.int64, device=v.device)
    chunks = torch.tensor([b - a for a, b in zip(first_chunk, first_chunk[1:])], dtype=torch.int64, device=v.device)
    for step in range(max((b - a for a, b in zip(first_chunk, first_chunk[1:])), default=0)):
        running = (chunks > step).nonzero()[:, 0]  # sequences that still have a chunk
        index = first[running] + step
        tables = [workspace[name][:, index] for name in WORKSPACE]
        s = state[running].transpose(0, 1)  # [H, n, V, K]
        step_of = step_robust if robust else step_exact
        out[:, index], s = step_of(math, *tables, v[:, index], beta[:, index, :, None], s)
        state[running] = s.transpose(0, 1)
    return out, state


def step_exact(math, k_start, q_start, k_end, decay_total, inverse, scores, v, beta, s):
    """Output of a chunk and the state [.., V, K] after it."""
    operand = s.mT
    read = math.product(k_start, operand).to(bf16)
    out_state = math.product(q_start, operand).to(bf16)
    u = math.product(inverse, (v - read) * beta.to(bf16)).to(bf16)
    out = out_state + math.product(scores, u).to(bf16)
    update = math.product(u.mT, k_end)
    return out, math.fma(decay_total[:, :, None, :], s.float(), update).to(bf16)


def step_robust(math, k_start, q_start, k_end, decay_total, inverse, scores, v, beta, s):
    """As step_exact; `inverse` is what two_terms gives."""
    operand = s.to(bf16).mT
    u = math.mul(math.add(v.float(), -math.product(k_start, operand)), beta)
    rounded = u.to(bf16)
    for term in (inverse.triu(1).mT, inverse.tril(-1)):
        u = math.add(u, math.product(term, rounded))
    u = u.to(bf16)
    out = math.add(math.product(q_start, operand), math.product(scores, u)).to(bf16)
    kept = math.mul(s, decay_total[:, :, None, :])
    return out, math.add(kept, math.product(u.mT, k_end))


def comparable_rows(name, batch, tokens, cu_seqlens=None):
    """Which rows of a workspace array (one of WORKSPACE) the inputs define: bool [C, 16], or [C] for decay_total.

    In a tail chunk, rows of q_start and scores past the sequence's end depend on what the kernel finds there.
    """
    _, inside, _ = chunk_rows(sequence_bounds(batch, tokens, cu_seqlens))
    if name == "decay_total":
        return torch.ones(len(inside), dtype=torch.bool)
    return inside if name in ("q_start", "scores") else torch.ones_like(inside)
