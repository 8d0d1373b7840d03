"""The kernels' launch contract on a CPU: what a compiled variant does with its arguments, done by the references.

Lets op run without a GPU down to the launch: addresses, strides, options, segments of the time axis, carried states.
"""

import ctypes
import types

import torch

from fla_kda_backend import op
from fla_kda_backend.compiling import ARCHS
from fla_kda_backend.kernels.arguments import Real, joined
from fla_kda_backend.kernels.families import FAMILIES
from fla_kda_backend.reference import exact, gold

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int32": torch.int32, "int64": torch.int64}
STRIDED = ("q", "k", "v", "g", "beta")
STRIDES = tuple(f"{name}_{of}" for name in STRIDED for of in ("token", "head"))


def named(spec, arguments):
    """A launch's arguments by name, without the stream."""
    family = FAMILIES[spec.family]
    a = joined(family.addresses, family.numbers)(*arguments[:-1])
    for (name, kind), value in zip(a.__annotations__.items(), a):
        assert type(value) is (float if kind is Real else int), name
    return a


def at(address, shape, dtype, strides=None, aligned=16):
    """The memory at an address as a tensor that shares it; strides in elements, contiguous where not given."""
    if torch.Size(shape).numel() == 0:
        return torch.empty(shape, dtype=dtype)
    assert address != 0 and address % aligned == 0, "the kernels load 16 bytes at a time"
    if strides is None:
        strides = torch.empty(shape, device="meta").stride()
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def maybe(address, shape, kind):
    """The same, where a kind of tensor is announced; both or neither must be."""
    empty = torch.Size(shape).numel() == 0
    assert empty or (address == 0) == (kind is None)
    return None if kind is None else at(address, shape, DTYPES[kind])


def launch(spec, *arguments):
    """The part of a call that lies in the workspace slots [slot_begin, slot_end).

    FlashKDA's call is played by the bits of exact.forward, which the column split has on a GPU; the 64-token kernels by its
    robust arithmetic, since it knows no chunk longer than 16 tokens, and what is launched for which slots, with which
    addresses, does not depend on it. Every other call is played by the recurrence in double precision.
    """
    family, variant, schedule, a = FAMILIES[spec.family], spec.variant, spec.schedule, named(spec, arguments)
    chunk = family.record.CHUNK
    arithmetic = getattr(schedule, "arithmetic", "robust")
    if getattr(schedule, "overlap", False):
        assert a.cu_seqlens == 0 or a.num_seqs == 1, "prepare must know every chunk's place in time"
    assert arithmetic == "robust" or a.qk_heads == a.heads, "FlashKDA's own call alone"
    assert (a.cu_seqlens == 0) == (variant.cu_seqlens is None)
    assert (a.carry_in == 0) == (a.carry_out == 0) == (not schedule.segmented)
    assert a.workspace != 0 and 0 <= a.slot_begin < a.slot_end and a.num_seqs * a.heads > 0 and a.heads % a.qk_heads == 0
    assert variant.gate == "bounded" or a.gate_scale == 0

    seq_len, num_seqs, heads = a.seq_len, a.num_seqs, a.heads
    if a.cu_seqlens:
        ends = at(a.cu_seqlens, (num_seqs + 1,), DTYPES[variant.cu_seqlens]).tolist()
        bounds = list(zip(ends, ends[1:]))
        bases = [first // chunk + s for s, (first, _) in enumerate(bounds)]
        assert 0 <= min(ends) and max(ends) <= seq_len and ends == sorted(ends)
    else:
        bounds = [(s * seq_len, (s + 1) * seq_len) for s in range(num_seqs)]
        bases = [s * -(-seq_len // chunk) for s in range(num_seqs)]
    tokens = seq_len if a.cu_seqlens else seq_len * num_seqs
    inputs = {}
    for name in ("q", "k", "v", "g", "beta"):
        width = () if name == "beta" else (128,)
        count = a.qk_heads if name in ("q", "k") else heads
        kind = {"g": variant.gate_dtype, "beta": variant.beta_dtype}.get(name, "bf16")
        dtype, strides, aligned = DTYPES[kind], None, 16
        if family.takes_strides:
            strides = (getattr(a, f"{name}_token"), getattr(a, f"{name}_head"), *(1 for _ in width))
            aligned = 16 if width else dtype.itemsize
            assert not width or all(stride * dtype.itemsize % 16 == 0 for stride in strides[:2])
        inputs[name] = at(getattr(a, name), (tokens, count, *width), dtype, strides, aligned)[None]
    inputs["A_log"] = maybe(a.a_log, (heads,), variant.a_log)
    inputs["dt_bias"] = maybe(a.dt_bias, (heads, 128), variant.dt_bias)
    out = at(a.out, (1, tokens, heads, 128), torch.bfloat16)
    shape = (num_seqs, heads, 128, 128)
    initial, final = (maybe(getattr(a, name), shape, getattr(variant, name)) for name in ("initial_state", "final_state"))
    carry_in, carry_out = (at(x, shape[1:], torch.float32) if x else None for x in (a.carry_in, a.carry_out))
    every = variant.intermediate_states or 64
    before = [sum(-(-(end - first) // every) for first, end in bounds[:s]) for s in range(num_seqs + 1)]
    states = maybe(a.intermediate_states, (before[-1], *shape[1:]), "bf16" if variant.intermediate_states else None)

    for row in range(chunk * a.slot_begin, min(chunk * a.slot_end, tokens)):
        if row < bounds[0][0] or row >= bounds[-1][1]:
            out[:, row] = 0
    for s, ((first, end), base) in enumerate(zip(bounds, bases)):
        last = base - (first - end) // chunk
        if base >= a.slot_end or (base < a.slot_begin and last <= a.slot_begin):
            continue
        if base < a.slot_begin:
            state = carry_in
        else:
            state = torch.zeros(shape[1:]) if initial is None else initial[s].float()
        state = (state.to(torch.bfloat16).float() if arithmetic == "exact" else state)[None]
        low, high = max(base, a.slot_begin), min(last, a.slot_end)
        start = chunk * (low - base)
        here = slice(first + start, min(first + chunk * (high - base), end))
        if high > low:
            part = {name: x[:, here] if name in ("q", "k", "v", "g", "beta") else x for name, x in inputs.items()}
            part |= {"scale": a.scale, "initial_state": state}
            bound = round(a.gate_scale / exact.LOG2_E, 12) if variant.gate == "bounded" else None
            if not variant.changes and a.qk_heads == heads:
                out[:, here], state = exact.forward(**part, lower_bound=bound, arithmetic=arithmetic)
            else:
                out[:, here], state, chunks = precisely(part, variant, bound, chunk)
                for number, x in enumerate(chunks):
                    if states is not None and (start + chunk * number) % every == 0:
                        states[before[s] + (start + chunk * number) // every] = x
        if last > a.slot_end:
            carry_out.copy_(state[0])
        elif final is not None:
            final[s] = state[0]


def precisely(part, variant, lower_bound, chunk):
    """out, final state and the states before each chunk, in double precision."""
    out, state, (chunks,) = gold.forward(
        **part,
        lower_bound=lower_bound,
        use_gate_in_kernel=variant.gate != "given",
        use_beta_sigmoid_in_kernel=variant.beta != "given",
        allow_neg_eigval=variant.beta == "twice",
        use_qk_l2norm_in_kernel=variant.l2norm,
        state_v_first=variant.state_v_first,
        return_intermediate_states=True,
        chunk_size=chunk,
    )
    return out, state, chunks


def without_gpu(monkeypatch, sm_count=132):
    """Let op launch on CPU tensors as on a GPU of capability 9.0; returns the list of (spec, arguments) launched."""
    launched = []

    from emulated_backward import launch as launch_backward

    def launcher(spec):
        play = launch_backward if spec.family == "wy64_backward" else launch

        def call(*arguments):
            launched.append((spec, arguments))
            play(spec, *arguments)

        return call

    assert (9, 0) in ARCHS
    monkeypatch.setattr(op, "launcher", launcher)
    monkeypatch.setattr(op, "_current_device", lambda: None)  # as the index of a CPU
    monkeypatch.setattr(op, "_stream_handle", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    properties = types.SimpleNamespace(multi_processor_count=sm_count, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    return launched
