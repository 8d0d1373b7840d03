"""The gradients of chunk_kda: chunk by chunk with the roundings of the 64-token kernels, and in double precision.

    gradients(.., rounded=True)    fp32, with every rounding of kernels/wy64 and kernels/wy64/backward
    gradients(.., rounded=False)   the same formulas in fp64 without any
    precise(..)                    autograd through gold.forward, token by token: slow, and of another derivation

Formulas (a chunk's tokens i, j; S before it, dS' the gradient of the state after it; see kernels/wy64/prepare/kernel.py for
the first lines):

    V' = U - W S        S' = D S + K_end^T V'                                  chain of states
    dV' = A^T dO + K_end dS'        dS = D dS' + Q^T dO - W^T dV'              reverse chain
    X = T^T dV'   dA = lower(dO V'^T)   dM = -strict_lower(X V'^T)   dQ = dO S^T   X_w = -X S^T   dK_end = V' dS'^T
    dq = 2^G dQ + sum over j of dA_ij k_j 2^(G_i - G_j)                        times scale
    kr = 2^G X_w + sum over j of dM_ij k_j 2^(G_i - G_j)
    kc = 2^(G_63 - G) dK_end + sum over i of (dA_ij q_i + dM_ij beta_i k_i) 2^(G_i - G_j)
    dk = beta kr + kc        dv = beta X        dbeta = X . v + k . kr
    dG = q dq + beta k kr - k (the sum of kc)        e = k 2^(G_63 - G) dK_end
    dlog_t = sum over i >= t of dG_i + D . rowsum(S dS') + sum over i < t of e_i

Sums of decays that join two tokens are sums over the tokens between them, so every factor is at most 1. Tensors of chunks are
[chunks, heads, 64, 128], states [chunks, heads, keys, values].
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from . import gold

CHUNK, BAND = 64, 16
LOG2E = 1.4426950408889634
DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
BANDS = [slice(b, b + BAND) for b in range(0, CHUNK, BAND)]


# ---- arithmetic --------------------------------------------------------------------------------------------------------
class Arithmetic(NamedTuple):
    """fp32 with roundings, or fp64 without."""

    rounded: bool

    @property
    def dtype(self):
        return torch.float32 if self.rounded else torch.float64

    def bf16(self, x):
        return x.bfloat16().to(x.dtype) if self.rounded else x

    def f16(self, x):
        return x.half().to(x.dtype) if self.rounded else x

    def two(self, x):
        """bf16 lead and rest."""
        return self.bf16(x) + self.bf16(x - self.bf16(x)) if self.rounded else x

    def eleven_bits(self, x):
        """The significant bits of fp16 in any range: rows are scaled by powers of two."""
        if not self.rounded:
            return x
        bits = x.contiguous().view(torch.int32)
        return ((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


# ---- tokens and chunks -------------------------------------------------------------------------------------------------
class Chunks:
    """Where the chunks of all sequences lie, sequence after sequence.

    lengths, firsts: tokens and first row of each sequence; rows, inside [chunks, 64]: row of each token among B * T, and
    whether it is in the sequence; bases, counts: first chunk and number of chunks of each sequence.
    """

    def __init__(self, batch, tokens, cu_seqlens=None, device="cpu"):
        self.batch, self.tokens, self.packed = batch, tokens, cu_seqlens is not None
        if cu_seqlens is None:
            self.lengths, self.firsts = [tokens] * batch, [b * tokens for b in range(batch)]
        else:
            offsets = cu_seqlens.tolist()
            self.lengths, self.firsts = [max(b - a, 0) for a, b in zip(offsets, offsets[1:])], offsets[:-1]
        self.counts = [-(-length // CHUNK) for length in self.lengths]
        self.bases = [sum(self.counts[:n]) for n in range(len(self.counts))]
        starts, ends = [], []
        for first, length, count in zip(self.firsts, self.lengths, self.counts):
            starts += [first + CHUNK * n for n in range(count)]
            ends += [first + length] * count
        rows = torch.tensor(starts, dtype=torch.int64).reshape(-1, 1) + torch.arange(CHUNK)
        inside = rows < torch.tensor(ends, dtype=torch.int64).reshape(-1, 1)
        self.rows, self.inside = torch.where(inside, rows, 0).to(device), inside.to(device)

    def __len__(self):
        return len(self.rows)

    @property
    def slots(self):
        """The workspace slot of every chunk."""
        found = []
        for s, (first, count) in enumerate(zip(self.firsts, self.counts)):
            base = first // CHUNK + s if self.packed else s * count
            found += range(base, base + count)
        return found

    def take(self, x):
        """x [B, T, heads, ..] -> [chunks, heads, 64, ..], zeros past a sequence's end."""
        x = x.flatten(0, 1)
        if not len(self):
            return x.new_zeros(0, x.shape[1], CHUNK, *x.shape[2:])
        inside = self.inside.reshape(*self.inside.shape, *[1] * (x.dim() - 1))
        return torch.where(inside, x[self.rows], 0).transpose(1, 2)

    def give(self, x):
        """[chunks, heads, 64, ..] -> [B, T, heads, ..], zeros where no sequence is."""
        flat = x.new_zeros(self.batch * self.tokens, x.shape[1], *x.shape[3:])
        flat[self.rows[self.inside]] = x.transpose(1, 2)[self.inside]
        return flat.unflatten(0, (self.batch, self.tokens))

    def steps(self):
        """For n = 0, 1, ..: the sequences that have a chunk n, and these chunks."""
        for n in range(max(self.counts, default=0)):
            here = [s for s, count in enumerate(self.counts) if count > n]
            yield here, [self.bases[s] + n for s in here]


def before(x):
    """Sums over the tokens before each one."""
    return F.pad(x[..., :-1, :], (0, 0, 1, 0)).cumsum(-2)


def after(x):
    """Sums over the tokens after each one."""
    return F.pad(x[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


class Piece(NamedTuple):
    """Pairs of tokens j < i: P blocks, each of L rows i and L columns j. All pieces of a chunk cover every pair once."""

    rows: Any  # [P, L] tokens
    cols: Any
    row: Any  # [.., P, L, 128] log2 decay from the boundary between both sides up to and with i
    col: Any  # after j up to the boundary of j's band, or up to the boundary between both sides
    between: Any  # [.., P, 1, 128] that of the bands between, or None: both lie in one band

    def of_rows(self, x):
        return x[..., self.rows, :]

    def of_cols(self, x):
        return x[..., self.cols, :]

    def block(self, matrix):
        return matrix[..., self.rows[:, :, None], self.cols[:, None, :]]

    def put(self, matrix, block):
        matrix[..., self.rows[:, :, None], self.cols[:, None, :]] = block


def pieces(y, within=True):
    """The pieces of chunks with log2 decays y: six of two bands and, `within`, four of halves of bands."""
    token = torch.arange(CHUNK, device=y.device)
    for b in range(1, 4):
        for c in range(b):
            rows, cols = token[BANDS[b]][None], token[BANDS[c]][None]
            between = y[..., BAND * (c + 1) : BAND * b, :].sum(-2)[..., None, None, :]
            yield Piece(rows, cols, y[..., rows, :].cumsum(-2), after(y[..., cols, :]), between)
    for size in (8, 4, 2, 1) if within else ():
        halves = token.reshape(-1, 2, size)
        rows, cols = halves[:, 1], halves[:, 0]
        yield Piece(rows, cols, y[..., rows, :].cumsum(-2), after(y[..., cols, :]), None)


def anchored_pieces(y):
    """The pieces of chunks whose log2 decays y are bounded: six of two bands, four of a band and itself, of which the pairs
    strictly below the diagonal count. Decays of tokens start from the middle of their band; see anchored.py."""
    token = torch.arange(CHUNK, device=y.device)
    anchors = from_anchors(y)
    for b in range(4):
        for c in range(b + 1):
            rows, cols = token[BANDS[b]][None], token[BANDS[c]][None]
            between = y[..., BAND * c + BAND // 2 : BAND * b + BAND // 2, :].sum(-2)[..., None, None, :] if c < b else None
            yield Piece(rows, cols, anchors[..., rows, :], -anchors[..., cols, :], between)


def from_anchors(y):
    """log2 decay from the middle of a token's band to it."""
    bands = y.unflatten(-2, (-1, BAND))
    return (bands.cumsum(-2) - bands[..., : BAND // 2, :].sum(-2, keepdim=True)).flatten(-3, -2)


# ---- inputs ------------------------------------------------------------------------------------------------------------
class Inputs:
    """A call of chunk_kda in chunks: q, k, v, d_out, y (log2 decay) [chunks, HV, 64, 128], beta [chunks, HV, 64, 1].

    q and k are normalised, q is without the scale. What the gate and the norms need on the way back is kept beside them.
    """

    def __init__(self, arithmetic, q, k, v, g, beta, d_out=None, d_final_state=None, scale=None, initial_state=None,
                 use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
                 allow_neg_eigval=False, lower_bound=None, state_v_first=False, transpose_state_layout=False,
                 cu_seqlens=None, A_log=None, dt_bias=None, **others):  # fmt: skip
        dtype, self.arithmetic = arithmetic.dtype, arithmetic
        to = lambda x: None if x is None else x.detach().to(dtype)  # noqa: E731
        self.tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias,
                        "initial_state": initial_state}  # fmt: skip
        self.chunks = chunks = Chunks(*q.shape[:2], cu_seqlens, q.device)
        self.heads, self.group = v.shape[2], v.shape[2] // q.shape[2]
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        self.l2norm, self.v_first = use_qk_l2norm_in_kernel, state_v_first or transpose_state_layout
        self.q_given, self.k_given = chunks.take(to(q)), chunks.take(to(k))
        self.q_rate, self.k_rate = (
            torch.rsqrt(x.square().sum(-1, keepdim=True) + gold.L2_NORM_EPS) if self.l2norm else torch.ones_like(x[..., :1])
            for x in (self.q_given, self.k_given)
        )
        self.q, self.k = (
            (x * rate).repeat_interleave(self.group, 1)
            for x, rate in ((self.q_given, self.q_rate), (self.k_given, self.k_rate))
        )
        self.v, self.d_out = chunks.take(to(v)), chunks.take(torch.zeros_like(to(v)) if d_out is None else to(d_out))

        inside = chunks.inside[:, None, :, None]
        # the gate; z, a: its argument and exp(A_log)
        self.gate = ("softplus" if lower_bound is None else "bounded") if use_gate_in_kernel else "given"
        self.bound, self.z = lower_bound, chunks.take(to(g))
        self.a = torch.ones((), dtype=dtype, device=q.device)
        if self.gate != "given":
            self.a = self.a if A_log is None else to(A_log).exp().reshape(-1, 1, 1)
            self.z = self.z if dt_bias is None else self.z + to(dt_bias).reshape(-1, 1, self.z.shape[-1])
        if self.gate == "bounded":
            log = self.bound * torch.sigmoid(self.a * self.z)
        else:
            log = self.z if self.gate == "given" else -self.a * F.softplus(self.z)
        self.log = torch.where(inside, log, 0)
        self.y = self.log * LOG2E
        # beta
        raw = chunks.take(to(beta))[..., None]
        self.beta_slope, self.beta = torch.ones_like(raw), raw
        if use_beta_sigmoid_in_kernel:
            twice, s = 1 + bool(allow_neg_eigval), torch.sigmoid(raw)
            self.beta, self.beta_slope = torch.where(inside, twice * s, 0), twice * s * (1 - s)
        self.initial = self.states(initial_state)
        self.d_final = self.states(d_final_state)

    @property
    def levels(self):
        """As Variant.needs_levels."""
        return self.gate != "bounded" or not self.l2norm

    @property
    def inner(self):
        """The part of the scale that Q and A contain; dS and dV' of the chains are divided by the other part, `outer`."""
        return self.scale if self.l2norm else 1.0

    @property
    def outer(self):
        return 1.0 if self.l2norm else self.scale

    def states(self, x):
        """[sequences, heads, keys, values]; zeros for None."""
        if x is None:
            return self.v.new_zeros(len(self.chunks.lengths), self.heads, self.k.shape[-1], self.v.shape[-1])
        return (x.detach().mT if self.v_first else x.detach()).to(self.arithmetic.dtype)


# ---- prepare -----------------------------------------------------------------------------------------------------------
class Records(NamedTuple):
    """What prepare leaves: see kernels/wy64/record.py and kernels/wy64/backward/record.py."""

    Q: Any
    K_end: Any
    W: Any  # positive
    U: Any
    A: Any  # [chunks, heads, 64, 64]
    D: Any  # [chunks, heads, 128]
    T: Any  # (I + M)^-1, its off-diagonal blocks as the local gradients find them
    T_diagonal: Any  # [chunks, heads, 4 bands, 16, 16]
    N: Any  # {(b, c): [chunks, heads, 16, 16]}, c < b


def prepare(x):
    """Records of Inputs."""
    to = x.arithmetic
    y, q, k = x.y, x.q * x.inner, x.k
    y = y if x.levels else to.f16(y)
    keys = to.bf16(k)  # one rounding of a repeated key
    operand = to.bf16 if x.l2norm else to.eleven_bits
    G, tail = y.cumsum(-2), after(y)
    D = G[..., -1, :].exp2()
    Q, K_end, starts = to.bf16(q * G.exp2()), to.bf16(keys * tail.exp2()), to.bf16(k * G.exp2())
    A, KK = (k.new_zeros(*k.shape[:2], CHUNK, CHUNK) for _ in range(2))
    direct = to.rounded and not x.levels
    for p in pieces(y, within=not direct):
        col = operand(p.of_cols(keys if p.between is not None else k) * p.col.exp2())
        col = col if p.between is None else operand(col * p.between.exp2())
        row = p.row.exp2()
        p.put(A, operand(p.of_rows(q) * row) @ col.mT)
        p.put(KK, operand(p.of_rows(k) * row) @ col.mT)
    if direct:
        for band in BANDS:
            run = y[..., band, :].cumsum(-2)
            col = to.bf16(k[..., band, :] * (-run).exp2()).mT
            A[..., band, band] = to.bf16(q[..., band, :] * run.exp2()) @ col
            KK[..., band, band] = to.bf16(k[..., band, :] * run.exp2()) @ col
    else:
        A.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    A, M = to.bf16(A.tril()), x.beta * KK.tril(-1)
    return eliminated(x, Q, K_end, A, D, M, starts)


def eliminated(x, Q, K_end, A, D, M, starts):
    to, k = x.arithmetic, x.k
    eye = torch.eye(BAND, dtype=torch.float64, device=k.device)
    inverse = [torch.linalg.inv(M[..., s, s].double() + eye).to(k.dtype) for s in BANDS]
    N = {(b, c): inverse[b] @ M[..., BANDS[b], BANDS[c]] for b in range(4) for c in range(b)}
    U, W = torch.zeros_like(x.v), torch.zeros_like(k)
    for b, s in enumerate(BANDS):
        scaled = to.two(inverse[b] * x.beta[..., s, :].mT)
        for to_matrix, of in ((U, x.v), (W, starts)):
            done = scaled @ of[..., s, :]
            for c in range(b):
                done = done - to.two(N[b, c]) @ to_matrix[..., BANDS[c], :]
            to_matrix[..., s, :] = to.bf16(done)
    diagonal = torch.stack([to.f16(each) for each in inverse], 2)
    return Records(Q, K_end, W, U, A, D, inverse_of(to, diagonal, N), diagonal, N)


def inverse_of(to, diagonal, N):
    """T [.., 64, 64] from its diagonal blocks and N, each block rounded as the operand of X."""
    T = diagonal.new_zeros(*diagonal.shape[:2], CHUNK, CHUNK)
    for c in range(4):
        T[..., BANDS[c], BANDS[c]] = to.bf16(diagonal[:, :, c])
        for b in range(c + 1, 4):
            block = sum(to.two(N[b, m]) @ T[..., BANDS[m], BANDS[c]] for m in range(c, b))
            T[..., BANDS[b], BANDS[c]] = -to.bf16(block)
    return T


# ---- chains ------------------------------------------------------------------------------------------------------------
class States(NamedTuple):
    S: Any  # before each chunk
    V: Any  # V'
    last: Any  # [sequences, heads, keys, values] after the last chunk of each sequence


class Reverse(NamedTuple):
    dS: Any  # of the state after each chunk; divided by Inputs.outer, as all here
    dV: Any  # of V'
    first: Any  # [sequences, heads, keys, values] of the initial states


def states(x, r):
    """The chain of states from Records."""
    to, state = x.arithmetic, x.initial.clone()
    S, V = x.k.new_zeros(len(x.chunks), *state.shape[1:]), torch.zeros_like(x.v)
    for here, at in x.chunks.steps():
        S[at] = to.bf16(state[here])
        V[at] = to.bf16(r.U[at] - r.W[at] @ S[at])
        state[here] = r.D[at][..., None] * state[here] + r.K_end[at].mT @ V[at]
    return States(S, V, state)


def reverse(x, r):
    """The chain of gradients from Records."""
    to, grad = x.arithmetic, x.d_final / x.outer
    dS, dV = x.k.new_zeros(len(x.chunks), *grad.shape[1:]), torch.zeros_like(x.v)
    for here, at in reversed(list(x.chunks.steps())):
        dS[at] = to.bf16(grad[here])
        dV[at] = to.bf16(r.A[at].mT @ x.d_out[at] + r.K_end[at] @ dS[at])
        grad[here] = r.D[at][..., None] * grad[here] + r.Q[at].mT @ x.d_out[at] - r.W[at].mT @ dV[at]
    return Reverse(dS, dV, grad * x.outer)


# ---- local gradients ---------------------------------------------------------------------------------------------------
@dataclass
class Local:
    """Gradients of what a chunk starts from: of q, k (normalised), v, the natural log decay and beta, in chunks."""

    q: Any
    k: Any
    v: Any
    log: Any
    beta: Any


def local(x, T, s, d):
    """Local gradients from T, States and Reverse (whose dS, dV are divided by x.outer)."""
    to, q, k, v, y, beta, sx = x.arithmetic, x.q, x.k, x.v, x.y, x.beta, x.outer
    X = T.mT @ d.dV
    X_b = to.bf16(X)
    dA, dM = x.scale * (x.d_out @ s.V.mT).tril(), -sx * (X_b @ s.V.mT).tril(-1)
    G, tail = y.cumsum(-2).exp2(), after(y).exp2()
    dq, kr = x.scale * G * (x.d_out @ s.S.mT), -sx * G * (X_b @ s.S.mT)
    ends = sx * (s.V @ d.dS.mT)
    bands = y.unflatten(-2, (-1, BAND))  # what a state meets in dG is rounded as the operands between bands are
    start, end = before(bands.sum(-2)), after(bands.sum(-2))
    if x.levels:
        row, col = bands.cumsum(-2).flatten(-3, -2), after(bands).flatten(-3, -2)
    else:
        row = from_anchors(y)
        col = -row
        start, end = start + bands[..., : BAND // 2, :].sum(-2), end + bands[..., BAND // 2 :, :].sum(-2)
    start, end = (side.repeat_interleave(BAND, -2).exp2() for side in (start, end))
    dG = start * (to.bf16(q * row.exp2()) * x.scale * (x.d_out @ s.S.mT) - to.bf16(beta * k * row.exp2()) * sx * (X_b @ s.S.mT))
    e, kc, ends = to.bf16(k * col.exp2()) * end * ends, torch.zeros_like(k), tail * ends
    below = dA.tril(-1)
    for p in pieces(y) if x.levels else anchored_pieces(y):
        size = p.rows.shape[-1]
        rounded = to.bf16 if size >= 8 else (lambda t: t)
        row, col = p.row.exp2(), p.col.exp2()
        q_row, k_row = rounded(p.of_rows(q) * row), rounded(p.of_rows(beta * k) * row)
        k_col = rounded(p.of_cols(k) * col)
        if p.between is not None:
            k_col, col = k_col * p.between.exp2(), col * p.between.exp2()
        a, m = (to.two if size >= 8 and p.between is None else rounded)(p.block(below)), rounded(p.block(dM))
        Y_q, Y_k, Y_c = a @ k_col, m @ k_col, a.mT @ q_row + m.mT @ k_row
        for total, at, part in ((dq, p.rows, row * Y_q), (kr, p.rows, row * Y_k), (kc, p.cols, col * Y_c),
                                (dG, p.rows, q_row * Y_q + k_row * Y_k), (dG, p.cols, -k_col * Y_c)):  # fmt: skip
            total[..., at, :] += part
    diagonal = dA.diagonal(dim1=-2, dim2=-1)[..., None]
    dq, kc = dq + diagonal * k, kc + diagonal * q + ends
    dbeta = sx * (X * v).sum(-1, keepdim=True) + (k * kr).sum(-1, keepdim=True)
    last = sx * G[..., -1, :] * (s.S * d.dS).sum(-1)
    dlog = dG.flip(-2).cumsum(-2).flip(-2) + last[..., None, :] + before(e)
    return Local(dq, beta * kr + kc, sx * beta * X, dlog, dbeta)


def finish(x, found, d_initial):
    """{name: gradient} of chunk_kda's arguments, in their shapes, from Local and the gradients of the initial states."""
    given = x.tensors

    def back(normed, rate, grad):
        if x.group > 1:
            grad = grad.unflatten(1, (-1, x.group)).sum(2)
        return grad if not x.l2norm else (grad - (grad * normed).sum(-1, keepdim=True) * normed) * rate

    inside = x.chunks.inside[:, None, :, None]
    dlog = torch.where(inside, found.log, 0)
    dg, d_rate = dlog, None
    if x.gate == "bounded":
        s = torch.sigmoid(x.a * x.z)
        dg = dlog * x.bound * x.a * s * (1 - s)
        d_rate = dg * x.z
    elif x.gate == "softplus":
        dg, d_rate = -x.a * torch.sigmoid(x.z) * dlog, dlog * x.log
    token = {
        "q": back(x.q_given * x.q_rate, x.q_rate, found.q),
        "k": back(x.k_given * x.k_rate, x.k_rate, found.k),
        "v": found.v,
        "g": dg,
        "beta": (found.beta * x.beta_slope)[..., 0],
    }
    grads = {name: x.chunks.give(each) for name, each in token.items()}
    if x.gate != "given":
        grads["dt_bias"] = dg.sum((0, 2))
        grads["A_log"] = d_rate.sum((0, 2, 3))
    grads["initial_state"] = d_initial.mT if x.v_first else d_initial
    dtype = (lambda t: t.dtype) if x.arithmetic.rounded else (lambda t: torch.float64)
    return {
        name: grads[name].reshape(tensor.shape).to(dtype(tensor)) if name in grads else None
        for name, tensor in given.items()
        if tensor is not None
    }


def gradients(d_out=None, d_final_state=None, *, rounded=True, **call):
    """{name: gradient} of those tensors of DIFFERENTIABLE that the call has; None: the call ignores that tensor.

    Args:
        d_out: [B, T, HV, V], d_final_state: as the final state of the call; None: zeros.
        rounded: as the kernels do, gradients in the dtypes of their tensors. Otherwise all is fp64.
        call: the arguments of chunk_kda, on any device. Packed rows of no sequence may hold anything.
    """
    x = Inputs(Arithmetic(rounded), d_out=d_out, d_final_state=d_final_state, **call)
    r = prepare(x)
    d = reverse(x, r)
    return finish(x, local(x, r.T, states(x, r), d), d.first)


def precise(d_out=None, d_final_state=None, **call):
    """The same in fp64 by autograd through gold.forward; keeps all states, so small calls only."""
    leaves = {name: call[name].detach().double().requires_grad_() for name in DIFFERENTIABLE if call.get(name) is not None}
    with torch.enable_grad():
        results = gold.forward(**{**call, **leaves, "return_intermediate_states": False})
        pairs = [(x, d) for x, d in zip(results, (d_out, d_final_state)) if d is not None and x.requires_grad]
        outputs, grads = [x for x, _ in pairs], [d.double() for _, d in pairs]
        found = torch.autograd.grad(outputs, list(leaves.values()), grads, allow_unused=True)
    return dict(zip(leaves, found))
