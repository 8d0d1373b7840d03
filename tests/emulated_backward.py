"""The backward kernels' launch contract on a CPU: gradients by autograd through gold.forward, chunk by chunk.

A launch covers slots as emulated_launch's does, and is told states and their gradients between segments.
"""

import torch
from emulated_launch import DTYPES, at, maybe, named

from fla_kda_backend.kernels.families import FAMILIES
from fla_kda_backend.reference import gold

CHUNK = 64
TOKENWISE = ("q", "k", "v", "g", "beta", "d_out")
NOT_WANTED = ("dq", "dk", "dv", "dg", "dbeta", "d_initial_state", "d_bias_sums", "d_a_log_sums")


class Sequences:
    """Where the sequences of a launch lie, in tokens and in slots."""

    def __init__(self, a, variant):
        if a.cu_seqlens:
            ends = at(a.cu_seqlens, (a.num_seqs + 1,), DTYPES[variant.cu_seqlens]).tolist()
            self.bounds = list(zip(ends, ends[1:]))
            self.bases = [first // CHUNK + s for s, (first, _) in enumerate(self.bounds)]
        else:
            self.bounds = [(s * a.seq_len, (s + 1) * a.seq_len) for s in range(a.num_seqs)]
            self.bases = [s * -(-a.seq_len // CHUNK) for s in range(a.num_seqs)]
        self.tokens = a.seq_len if a.cu_seqlens else a.seq_len * a.num_seqs

    def parts(self, a):
        """(sequence, its slots of the launch, whether it began before them, whether it goes on after them)."""
        for s, ((first, end), base) in enumerate(zip(self.bounds, self.bases)):
            last = base - (first - end) // CHUNK
            if base >= a.slot_end or (base < a.slot_begin and last <= a.slot_begin):
                continue
            yield s, range(max(base, a.slot_begin), min(last, a.slot_end)), base < a.slot_begin, last > a.slot_end

    def rows(self, s, slot):
        first, end = self.bounds[s]
        begin = first + CHUNK * (slot - self.bases[s])
        return slice(begin, min(begin + CHUNK, end))


def launch(spec, *arguments):
    family, variant, schedule, a = FAMILIES[spec.family], spec.variant, spec.schedule, named(spec, arguments)
    whole, heads, states = schedule.stage == "all", a.heads, (a.heads, 128, 128)
    assert (a.cu_seqlens == 0) == (variant.cu_seqlens is None) and a.workspace != 0
    assert (a.carry_in == 0) == (a.carry_out == 0) == (not schedule.segmented) and (a.carry_in != a.carry_out or not a.carry_in)
    assert (a.d_carry_in == 0) == (a.d_carry_out == 0) == (not (schedule.segmented and whole))
    assert (a.d_out != 0) == (whole and a.seq_len > 0) and (a.d_final_state != 0) == schedule.d_final_state
    assert whole or not any(getattr(a, name) for name in NOT_WANTED)
    assert schedule.grouped == (a.heads != a.qk_heads) or not whole
    assert schedule.d_initial_state == (a.d_initial_state != 0)
    where = Sequences(a, variant)
    slots = family.record.slots(where.tokens, a.num_seqs, None if a.cu_seqlens else a.seq_len)
    assert 0 <= a.slot_begin < a.slot_end <= slots and (schedule.segmented or a.slot_end - a.slot_begin == slots)

    x = {}
    for name in TOKENWISE if whole else TOKENWISE[:-1]:
        width = () if name == "beta" else (128,)
        kind = {"g": variant.gate_dtype, "beta": variant.beta_dtype}.get(name, "bf16")
        strides = (getattr(a, f"{name}_token"), getattr(a, f"{name}_head"), *(1 for _ in width))
        assert not width or all(stride > 0 and stride * DTYPES[kind].itemsize % 16 == 0 for stride in strides[:2])
        shape = (where.tokens, a.qk_heads if name in ("q", "k") else heads, *width)
        aligned = 16 if width else DTYPES[kind].itemsize
        x[name] = at(getattr(a, name), shape, DTYPES[kind], strides, aligned)
    parameters = {"A_log": maybe(a.a_log, (heads,), variant.a_log), "dt_bias": maybe(a.dt_bias, (heads, 128), variant.dt_bias)}
    initial = maybe(a.initial_state, (a.num_seqs, *states), variant.initial_state)
    carry_in, carry_out, d_carry_in, d_carry_out = (
        at(address, states, torch.float32) if address else None
        for address in (a.carry_in, a.carry_out, a.d_carry_in, a.d_carry_out)
    )

    def result(address, shape, dtype):
        return at(address, shape, dtype) if address else None

    qk, dtype = ((where.tokens, heads, 128), torch.float32) if schedule.grouped else (tuple(x["q"].shape), torch.bfloat16)
    per_head, sums = (where.tokens, heads, 128), (slots, heads, 128)
    results = {
        "q": result(a.dq, qk, dtype),
        "k": result(a.dk, qk, dtype),
        "v": result(a.dv, per_head, torch.bfloat16),
        "g": result(a.dg, per_head, x["g"].dtype),
        "beta": result(a.dbeta, per_head[:2], x["beta"].dtype),
    }
    d_initial = result(a.d_initial_state, (a.num_seqs, *states), torch.float32)
    d_final = result(a.d_final_state, (a.num_seqs, *states), torch.float32)
    in_slots = {"dt_bias": result(a.d_bias_sums, sums, torch.float32), "A_log": result(a.d_a_log_sums, sums, torch.float32)}
    for found in in_slots.values():
        if found is not None:
            found[a.slot_begin : a.slot_end] = 0
    for row in range(CHUNK * a.slot_begin, min(CHUNK * a.slot_end, where.tokens)):
        if row < where.bounds[0][0] or row >= where.bounds[-1][1]:
            for found in filter(lambda found: found is not None, results.values()):
                found[row] = 0

    for s, here, began, goes_on in where.parts(a):
        before = []
        state = carry_in if began else torch.zeros(states) if initial is None else initial[s]
        for slot in here:
            before.append(state)
            with torch.no_grad():
                _, state = forward(chunk(x, where.rows(s, slot)), parameters, state, variant, a, False)
        if goes_on:
            carry_out.copy_(state)
        if not whole:
            continue
        d_state = d_carry_in.clone() if goes_on else torch.zeros(states) if d_final is None else d_final[s].clone()
        for slot, state in reversed(list(zip(here, before))):
            rows = where.rows(s, slot)
            found = gradients(chunk(x, rows), parameters, state, d_state, variant, a, schedule.grouped)
            for name, into in results.items():
                if into is not None:
                    into[rows] = found[name].to(into.dtype)
            if in_slots["dt_bias"] is not None:
                in_slots["dt_bias"][slot] = found["dt_bias"]
            if in_slots["A_log"] is not None:
                in_slots["A_log"][slot, :, 5] = found["A_log"]
            d_state = found["state"].float()
        if began:
            d_carry_out.copy_(d_state)
        elif d_initial is not None:
            d_initial[s] = d_state


def chunk(x, rows):
    return {name: part[rows].double() for name, part in x.items()}


def forward(x, parameters, state, variant, a, grouped):
    """(out, state after) of a chunk, tensors of [tokens, heads, ..]; grouped: q and k are those of value heads."""
    out, state = gold.forward(
        **{name: x[name][None] for name in TOKENWISE[:-1]},
        **parameters,
        scale=a.scale,
        initial_state=state[None],
        lower_bound=a.gate_scale / 1.4426950408889634 if variant.gate == "bounded" else None,
        use_gate_in_kernel=variant.gate != "given",
        use_beta_sigmoid_in_kernel=variant.beta != "given",
        allow_neg_eigval=variant.beta == "twice",
        use_qk_l2norm_in_kernel=variant.l2norm and not grouped,
        state_v_first=variant.state_v_first,
    )
    return out[0], state[0]


def gradients(x, parameters, state, d_state, variant, a, grouped):
    """Of a chunk, by name; "state" is that of the state before it."""
    x = {name: part.detach().clone() for name, part in x.items()}
    d_out = x.pop("d_out")
    if grouped:
        for name in ("q", "k"):
            if variant.l2norm:
                x[name] *= torch.rsqrt(x[name].square().sum(-1, keepdim=True) + gold.L2_NORM_EPS)
            x[name] = x[name].repeat_interleave(a.heads // a.qk_heads, dim=1)
    parameters = {name: None if p is None else p.double() for name, p in parameters.items()}
    state = state.double().clone()
    leaves = {**x, **{name: p for name, p in parameters.items() if p is not None}, "state": state}
    with torch.enable_grad():
        for leaf in leaves.values():
            leaf.requires_grad_()
        out, after = forward(x, parameters, state, variant, a, grouped)
        found = torch.autograd.grad([out, after], list(leaves.values()), [d_out, d_state.double()])
    return dict(zip(leaves, found))
