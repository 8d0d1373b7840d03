"""The local gradients' kernel on the CPU, against double precision.

    python local_emulator.py CASES.json REPORT.json

A case has the arguments of `run`:

    options              fields of Variant
    tail, before, heads  as in call_table.Case, with two heads of q and k
    ctas                 over which the pairs are spread
    segment              the slots [begin, end) that the launch covers; otherwise all
    spare                packed rows behind all sequences

A report: "errors", the relative errors of the gradients, by name; "failures", what else went wrong: races, and stores where
none should be.

The kernel gets what the other kernels would have left (reference.backward, in fp64, rounded to the records' dtypes) and NaN
wherever a row belongs to no token of its sequence. It needs a process of its own, see lane_emulator.py, and not the DSL.
"""

import json
import math
import sys
import types
from pathlib import Path

import numpy as np
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.path.insert(0, str(Path(__file__).parent))

import lane_emulator as emulator
from lane_emulator import LANES, Machine, bf16_bits, ptx, widened

emulator.install()

from call_table import Case, Kind  # noqa: E402
from kda_calls import call_of  # noqa: E402

from fla_kda_backend.kernels.wy64 import record as forward_record  # noqa: E402
from fla_kda_backend.kernels.wy64.backward import record  # noqa: E402
from fla_kda_backend.kernels.wy64.backward.contract import Schedule  # noqa: E402
from fla_kda_backend.kernels.wy64.backward.local import kernel as local  # noqa: E402
from fla_kda_backend.kernels.wy64.backward.local import loads, tensors  # noqa: E402
from fla_kda_backend.kernels.wy64.backward.local.memory import SMEM_BYTES, THREADS, Place  # noqa: E402
from fla_kda_backend.reference import backward as reference  # noqa: E402
from fla_kda_backend.testing import TOKEN_AXIS  # noqa: E402

BASE = 1024  # of the kernel's shared memory
ROWS = 64
FP64 = reference.Arithmetic(False)


# ---- WGMMA and tensor maps, which have no PTX text ----------------------------------------------------------------------
def half_matrix(at, rows):
    """[rows, 64] of a swizzled bf16 image, read by a WGMMA."""
    words = np.ascontiguousarray(ptx.machine.read_matrix(BASE + at, rows * 128)).view(np.uint32).reshape(rows, 8, 4)
    row = np.arange(rows)[:, None]
    words = words[row, np.arange(8) ^ (row & 7)].reshape(rows, 32)
    return np.stack(widened(words), 2).reshape(rows, 64).astype(np.float64)


def matrix(at, first, rows, of):
    """[rows, 128], rows from `first` on of an image in two halves of `of` rows each."""
    return np.concatenate([half_matrix(at + half * of * 128 + first * 128, rows) for half in range(2)], 1)


def accumulators(product):
    """[16 rows of the warp, columns] as the lanes' accumulators."""
    row, column = LANES >> 2, 2 * (LANES & 3)
    return [
        emulator.lanes(product[row + 8 * (e >> 1), 8 * n + column + (e & 1)], np.float32)
        for n in range(product.shape[1] // 8)
        for e in range(4)
    ]


class Operand:
    """An operand in shared memory: its place, and what the kernel's indices pick of it."""

    layout = iterator = None

    def __init__(self, place, picked=()):
        self.place, self.picked, self.iterator = place, picked, self

    def __getitem__(self, at):
        return Operand(self.place, [int(x) for x in at if x is not None])


class Mma:
    accumulate = False

    def set(self, field, value):
        self.accumulate = value

    def get_slice(self, thread):
        return types.SimpleNamespace(partition_shape_C=lambda shape: shape)


class Tensors(tensors.Tensors):
    """WGMMA's operands by their places. The first index that a product fixes picks a block of the B operand's rows."""

    def __init__(self, loads, memory, coord):
        self.loads, self.memory, self.coord = loads, memory, coord
        self.rs = self.ss = Mma()
        self.x_and_d_out, self.v_new_rows, self.v_new = Operand("x_and_d_out"), Operand(Place.V_NEW), Operand(Place.V_NEW)
        self.s, self.ds, self.dv_new = Operand(Place.S), Operand(Place.DS), Operand(Place.X)

    def start(self, acc, a, b):
        place = (Place.X, Place.D_OUT)[a.picked[1]] if a.place == "x_and_d_out" else a.place
        left = matrix(int(place), 16 * int(self.coord.band), 16, ROWS)
        right = matrix(int(b.place), 32 * b.picked[0], 32, ROWS if b.place == Place.V_NEW else 128)
        acc.iterator[:16] = accumulators(left @ right.T)


def gemm(mma, acc, a, b, _):
    """A k-block of X: T^T from registers, dV' [tokens][values] of a value half."""
    _, k, half = b.picked
    right = half_matrix(int(b.place) + half * ROWS * 128 + 16 * k * 128, 16)
    found = accumulators(emulator.fragment([emulator.u32(word) for word in a]) @ right)
    for i, x in enumerate(found):
        acc.iterator[i] = acc.iterator[i] + x if mma.accumulate else x


class Loads(loads.Loads):
    """Tiles of rows from arrays in place of tensor maps."""

    def rows(self, args, memory, n, tensor_map, coordinates, tensor, place, head, full):
        token, end = int(memory.info(n, loads.Info.TOKEN)), int(memory.info(n, loads.Info.ROWS))
        source = tensor_map[:, int(head)]
        tile = np.zeros((ROWS, source.shape[1]), source.dtype)
        inside = source[token : token + ROWS]
        tile[: len(inside)] = inside
        tile[end:] = np.nan if source.dtype == np.float32 else 0x7FC0
        rows, parts = np.arange(ROWS), source.shape[1] * source.itemsize // 128
        pieces = tile.reshape(ROWS, parts, 8, 16 // source.itemsize)
        swizzled = np.zeros_like(pieces)
        for p in range(8):
            swizzled[rows, :, p ^ (rows & 7)] = pieces[rows, :, p]
        data = np.ascontiguousarray(swizzled.transpose(1, 0, 2, 3)).view(np.uint8).reshape(-1)
        ptx.machine.copy(BASE + int(place), data, int(full.toint()))


class Tiles:
    def __init__(self, variant):
        self.wide_gate = variant.gate_dtype == "fp32"


loads.Tiles, local.Loads, local.Tensors, sys.modules["cutlass.cute"].gemm = Tiles, Loads, Tensors, gemm


# ---- what the other kernels leave --------------------------------------------------------------------------------------
def words16(x):
    """bf16 bits of a tensor, as uint16."""
    return bf16_bits(x.double().numpy()).astype(np.uint16)


def image(x):
    """Bytes of [rows, 128] as two swizzled halves."""
    bits, rows = words16(x), np.arange(len(x))
    out = np.zeros((2, len(x), 8, 8), np.uint16)
    for half in range(2):
        for p in range(8):
            out[half, rows, p ^ (rows & 7)] = bits[:, 64 * half + 8 * p : 64 * half + 8 * p + 8]
    return out.view(np.uint8).reshape(-1)


def inverse(diagonal, N):
    """Bytes of T and N of a chunk; diagonal [4, 16, 16], N {(b, c): [16, 16]}."""
    out = np.zeros(record.T_BYTES + record.N_BYTES, np.uint8)
    for b in range(4):
        columns = diagonal[b].T.contiguous().half().numpy().view(np.uint8).reshape(16, 2, 16)
        for c in range(16):
            for p in range(2):
                at = 512 * b + 32 * c + 16 * (p ^ (c >> 2 & 1))
                out[at : at + 16] = columns[c, p]
    n, k = LANES >> 2, 2 * (LANES & 3)
    for (b, c), block in N.items():
        lead = (-block).bfloat16().double()
        for part, x in enumerate((lead, -block - lead)):
            bits = words16(x)  # lanes hold the B fragment of the transpose: rows of it are columns here
            pairs = np.stack([bits[n + 8 * i, k + 8 * h + e] for i in range(2) for h in range(2) for e in range(2)], 1)
            at = record.T_BYTES + (b * (b - 1) // 2 + c) * 1024 + 512 * part
            out[at : at + 512] = np.ascontiguousarray(pairs).view(np.uint8).reshape(-1)
    return out


class Heap:
    """Global memory: arrays behind each other, 0xff between them."""

    def __init__(self, size):
        self.bytes, self.end = np.full(size, 0xFF, np.uint8), 4096

    def put(self, count, data=None):
        at = self.end
        self.end = (at + count + 511) // 256 * 256
        assert self.end <= len(self.bytes)
        if data is not None:
            self.bytes[at : at + count] = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        return at

    def tensor(self, x):
        if x is None:
            return 0
        data = x.numpy() if x.dtype != torch.bfloat16 else x.contiguous().view(torch.int16).numpy()
        return self.put(data.nbytes, data)

    def read(self, at, shape, dtype):
        count = math.prod(shape)
        if dtype == torch.float32:
            return torch.tensor(self.bytes[at : at + 4 * count].view(np.float32).reshape(shape).copy())
        return torch.tensor(self.bytes[at : at + 2 * count].view(np.int16).reshape(shape).copy()).view(torch.bfloat16)


def rows_of(x):
    """[tokens, heads, 128] for Loads.rows."""
    x = x.flatten(0, 1)
    return x.contiguous().numpy() if x.dtype == torch.float32 else x.contiguous().view(torch.int16).numpy().view(np.uint16)


def run(options=None, tail=64, before=0, heads=2, ctas=1, segment=None, spare=0, seed=0, regime="normal"):
    """{"errors": {gradient: relative error}, "failures": [what was wrong besides]} of a case; see the module's docstring."""
    options = dict(options or {})
    grouped = heads > 2
    kind = Kind(**options | {"final_state": None})
    case = Case(kind, regime, tail, before, heads=heads)
    call = call_of(case, seed=seed)
    call = {name: x.contiguous() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    for name in TOKEN_AXIS:
        filler = torch.full((1, spare, *call[name].shape[2:]), math.nan, dtype=call[name].dtype)
        call[name] = torch.cat([call[name], filler], 1) if spare else call[name]
    generator = torch.Generator().manual_seed(seed)
    d_out = torch.randn(call["v"].shape, generator=generator).bfloat16()
    sequences = call["v"].shape[0] if call["cu_seqlens"] is None else len(call["cu_seqlens"]) - 1
    d_final = torch.randn(sequences, heads, 128, 128, generator=generator)
    x = reference.Inputs(FP64, d_out=d_out, d_final_state=d_final, **call)
    made = reference.prepare(x)
    s, d = reference.states(x, made), reference.reverse(x, made)
    found = reference.local(x, made.T, s, d)
    wanted = reference.finish(x, found, d.first)
    if grouped:
        wanted |= {"q": x.chunks.give(found.q), "k": x.chunks.give(found.k)}

    schedule = Schedule(max_ctas=max(ctas, 2), grouped=grouped)
    batch, tokens = call["v"].shape[:2]
    chunk_slots, total = x.chunks.slots, batch * tokens
    all_slots = max(chunk_slots) + 1
    begin, end = segment or (0, all_slots)
    slots = end - begin
    heap = Heap(8192 + record.workspace_bytes(slots, heads) + total * heads * 128 * 40 + all_slots * heads * 1024 + (1 << 18))
    locals_at = heads * slots * (forward_record.RECORD_BYTES + forward_record.FLAG_BYTES)
    workspace = heap.put(record.workspace_bytes(slots, heads))
    worked_on = torch.zeros(total, dtype=torch.bool)
    for number, slot in enumerate(chunk_slots):
        if begin <= slot < end:
            worked_on[x.chunks.rows[number][x.chunks.inside[number]]] = True
            for head in range(heads):
                at = workspace + locals_at + (head * slots + slot - begin) * record.LOCAL_BYTES
                parts = [inverse(made.T_diagonal[number, head], {bc: n[number, head] for bc, n in made.N.items()})]
                parts += [image(y[number, head]) for y in (s.S, d.dS, d.dV)]
                heap.bytes[at : at + record.LOCAL_BYTES] = np.concatenate(parts)
                at = workspace + (head * slots + slot - begin) * forward_record.RECORD_BYTES + record.V_AT
                heap.bytes[at : at + 2 * record.V_HALF_BYTES] = image(s.V[number, head])
    bytes_of = {torch.float32: 4, torch.bfloat16: 2}
    dtypes = {"dq": torch.float32 if grouped else torch.bfloat16, "dk": torch.float32 if grouped else torch.bfloat16,
              "dv": torch.bfloat16, "dg": call["g"].dtype, "dbeta": call["beta"].dtype}  # fmt: skip
    shapes = {name: (total, heads, 128) for name in dtypes} | {"dbeta": (total, heads)}
    out = {name: heap.put(math.prod(shapes[name]) * bytes_of[dtype]) for name, dtype in dtypes.items()}
    sums = {
        name: heap.put(all_slots * heads * 512) if wants else 0
        for name, wants in (("d_bias_sums", kind.dt_bias), ("d_a_log_sums", kind.a_log))
    }
    args = types.SimpleNamespace(
        q_map=rows_of(call["q"]), k_map=rows_of(call["k"]), v_map=rows_of(call["v"]), g_map=rows_of(call["g"]),
        d_out_map=rows_of(d_out), coordinates=None, g_coordinates=None,
        g=heap.tensor(call["g"]), g_token=emulator.Int64(heads * 128), g_head=emulator.Int64(128),
        beta=heap.tensor(call["beta"]), beta_token=emulator.Int64(heads), beta_head=emulator.Int64(1),
        a_log=heap.tensor(call["A_log"]) if kind.a_log else 0, dt_bias=heap.tensor(call["dt_bias"]) if kind.dt_bias else 0,
        cu_seqlens=heap.tensor(call["cu_seqlens"]), workspace=emulator.Int64(workspace), **out, **sums,
        scale=emulator.Float32(x.scale), gate_scale=emulator.Float32((call["lower_bound"] or 0.0) * math.log2(math.e)),
        seq_len=emulator.Int32(tokens), num_seqs=emulator.Int32(sequences), heads=emulator.Int32(heads),
        heads_per_qk_head=heads // call["q"].shape[2], slot_begin=emulator.Int32(begin), slots=emulator.Int32(slots),
    )  # fmt: skip
    failures = []
    kernel = local.LocalGradients(kind, schedule)
    for block in range(ctas):
        ptx.machine = Machine(THREADS // 32, BASE + SMEM_BYTES, heap.bytes)
        ptx.machine.run((block, ctas), lambda: kernel.kernel(args))
        failures += ptx.machine.failures

    errors = {}
    for name, dtype in dtypes.items():
        want = wanted[name[1:]].double().flatten(0, 1).reshape(shapes[name])
        stored = heap.read(out[name], shapes[name], dtype)
        errors[name] = relative(stored[worked_on], want[worked_on])
        in_sequences = total - spare
        left = stored[:in_sequences][~worked_on[:in_sequences]]
        if not left.isnan().all() or not (stored[in_sequences:] == 0).all():
            failures.append(f"{name} of rows that are not the launch's")
    for name, want in (("d_bias_sums", "dt_bias"), ("d_a_log_sums", "A_log")):
        if sums[name]:
            stored = heap.read(sums[name], (all_slots, heads, 128), torch.float32).double()
            if stored[begin:end].isnan().any() or not (stored[:begin].isnan().all() and stored[end:].isnan().all()):
                failures.append(f"{name} of other slots than the launch's")
            if segment is None:
                over_slots = stored.sum(0) if want == "dt_bias" else stored.sum((0, 2))
                errors[name] = relative(over_slots, wanted[want].double().reshape(over_slots.shape))
    return {"errors": errors, "failures": failures}


def relative(found, wanted):
    """NaN, where one was not stored, counts as infinite."""
    error = ((found.double() - wanted).norm() / wanted.norm()).item()
    return error if error == error else math.inf


def main(cases, report):
    found = [run(**case) for case in json.loads(Path(cases).read_text())]
    Path(report).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
