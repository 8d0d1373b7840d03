"""The kernels' launch contract on a CPU: what a compiled variant does with its 22 arguments, done by reference.exact.

Lets op run without a GPU down to the launch: addresses, segments of the time axis, carried states.
"""

import contextlib
import ctypes
import types

import torch
from kda_inputs import ROBUST

from fla_kda_backend import op
from fla_kda_backend.compiling import ARCHS
from fla_kda_backend.kernels.shared import record16, record64
from fla_kda_backend.reference import exact

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int32": torch.int32, "int64": torch.int64}
CHUNKS = {"column_split": record16.CHUNK, "wy64": record64.CHUNK}  # tokens of a slot
LOG2_E = exact.LOG2_E


def at(address, shape, dtype):
    """The memory at an address as a tensor that shares it."""
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    assert address % 16 == 0, "the kernels load 16 bytes at a time"
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def launch(spec, q, k, v, g, beta, A_log, dt_bias, initial_state, final_state, out, cu_seqlens, workspace, carry_in,
           carry_out, scale, gate_scale, seq_len, num_seqs, heads, slot_begin, slot_end, stream):  # fmt: skip
    """The part of a call that lies in the workspace slots [slot_begin, slot_end).

    The 64-token kernels are played by the column split's robust arithmetic: it knows no chunk longer than 16 tokens, and
    what is launched for which slots, with which addresses, does not depend on it.
    """
    options = dict(spec.options)
    chunk = CHUNKS[spec.family]
    kinds = {name: options[name] for name in ("initial", "final")}
    settings = {} if options.get("arithmetic") == "exact" else ROBUST
    if options["segmented"]:
        assert not (options.get("replay") or options.get("overlap")), "all records must lie in the same launch"
    if options.get("overlap"):
        assert cu_seqlens == 0 or num_seqs == 1, "prepare must know every chunk's place in time"
    assert (cu_seqlens == 0) == (options["cu_dtype"] is None)
    assert (initial_state == 0) == (kinds["initial"] is None) and (final_state == 0) == (kinds["final"] is None)
    assert (carry_in == 0) == (carry_out == 0) == (not options["segmented"])
    assert workspace != 0 and 0 <= slot_begin < slot_end and num_seqs * heads > 0

    if cu_seqlens:
        ends = at(cu_seqlens, (num_seqs + 1,), DTYPES[options["cu_dtype"]]).tolist()
        bounds = list(zip(ends, ends[1:]))
        bases = [first // chunk + s for s, (first, _) in enumerate(bounds)]
        assert 0 <= min(ends) and max(ends) <= seq_len and ends == sorted(ends)
    else:
        bounds = [(s * seq_len, (s + 1) * seq_len) for s in range(num_seqs)]
        bases = [s * -(-seq_len // chunk) for s in range(num_seqs)]
    tokens = seq_len if cu_seqlens else seq_len * num_seqs
    wide = (1, tokens, heads, 128)
    q, k, v, g, out = (at(address, wide, torch.bfloat16) for address in (q, k, v, g, out))
    beta = at(beta, wide[:3], torch.bfloat16)
    A_log, dt_bias = at(A_log, (heads,), torch.float32), at(dt_bias, (heads, 128), torch.float32)
    states = (num_seqs, heads, 128, 128)
    initial = at(initial_state, states, DTYPES[kinds["initial"]]) if initial_state else None
    final = at(final_state, states, DTYPES[kinds["final"]]) if final_state else None
    carry_in, carry_out = (at(x, states[1:], torch.float32) if x else None for x in (carry_in, carry_out))

    for row in range(chunk * slot_begin, min(chunk * slot_end, tokens)):
        if row < bounds[0][0] or row >= bounds[-1][1]:
            out[:, row] = 0
    for s, ((first, end), base) in enumerate(zip(bounds, bases)):
        last = base - (first - end) // chunk
        if base >= slot_end or (base < slot_begin and last <= slot_begin):
            continue
        if base < slot_begin:
            state = carry_in
        else:
            state = torch.zeros(states[1:]) if initial is None else initial[s].float()
        state = state.to(settings.get("state_dtype", torch.bfloat16)).float()[None]
        low, high = max(base, slot_begin), min(last, slot_end)
        here = slice(first + chunk * (low - base), min(first + chunk * (high - base), end))
        if high > low:
            out[:, here], state = exact.forward(
                *(x[:, here] for x in (q, k, v, g, beta)), scale, A_log, dt_bias, round(gate_scale / LOG2_E, 12), state,
                **settings,
            )  # fmt: skip
        if last > slot_end:
            carry_out.copy_(state[0])
        elif final is not None:
            final[s] = state[0]


def without_gpu(monkeypatch, sm_count=132):
    """Let op launch on CPU tensors as on a GPU of capability 9.0; returns the list of (spec, arguments) launched."""
    launched = []

    def launcher(spec):
        def call(*arguments):
            launched.append((spec, arguments))
            launch(spec, *arguments)

        return call

    assert (9, 0) in ARCHS
    monkeypatch.setattr(op, "launcher", launcher)
    monkeypatch.setattr(op, "_on", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: types.SimpleNamespace(cuda_stream=0))
    properties = types.SimpleNamespace(multi_processor_count=sm_count, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    return launched
