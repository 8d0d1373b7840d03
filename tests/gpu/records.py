"""The workspace of a launch as the tables of reference.exact, read by the layout that prepare_chunk16 documents."""

import torch

from fla_kda_backend import op
from fla_kda_backend.kernels.column_split import record as record16
from fla_kda_backend.reference import exact


def workspaces(monkeypatch):
    """The list that every workspace allocated from now on is added to."""
    empty, kept = torch.empty, []

    def keep(*arguments, **keywords):
        made = empty(*arguments, **keywords)
        if made.dtype == torch.uint8:
            kept.append(made)
        return made

    monkeypatch.setattr(op.torch, "empty", keep)
    return kept


def slots_of(batch, tokens, cu_seqlens):
    """The workspace slot of every chunk, in the order of the sequences."""
    slots = []
    for s, (first, end) in enumerate(exact.sequence_bounds(batch, tokens, cu_seqlens)):
        chunks = -(-(end - first) // record16.CHUNK)
        base = s * chunks if cu_seqlens is None else first // record16.CHUNK + s
        slots += range(base, base + chunks)
    return slots


def unpack(workspace, heads, slots):
    """workspace: uint8, [heads, all slots, RECORD_BYTES] in memory -> dict of [heads, len(slots), ...]."""
    records = workspace.view(heads, -1, record16.RECORD_BYTES)[:, slots]

    def part(begin, size, dtype, *shape):
        return records[..., begin : begin + size].contiguous().view(dtype).view(heads, len(slots), *shape)

    tables = {}
    row = torch.arange(16, device=workspace.device)
    piece = row[None, :] ^ (row[:, None] & 7)  # where piece p of row r lies
    for name, begin in (("k_start", record16.K_START), ("q_start", record16.Q_START), ("k_end", record16.K_END)):
        swizzled = part(begin, 16 * record16.ROW_BYTES, torch.bfloat16, 16, 16, 8)
        tables[name] = swizzled.gather(3, piece[:, :, None].expand_as(swizzled)).flatten(-2)
    lane = torch.arange(32, device=workspace.device)
    for name, begin in (("scores", record16.SCORES), ("inverse", record16.INVERSE)):
        fragment = part(begin, 512, torch.bfloat16, 32, 4, 2)  # lane, register, half: an m16n8k16 A operand
        matrix = torch.empty(heads, len(slots), 16, 16, dtype=torch.bfloat16, device=workspace.device)
        for register in range(4):
            for half in range(2):
                i, j = lane // 4 + 8 * (register % 2), 2 * (lane % 4) + half + 8 * (register // 2)
                matrix[:, :, i, j] = fragment[..., register, half]
        tables[name] = matrix
    k = torch.arange(128, device=workspace.device)
    decay = part(record16.DECAY, 512, torch.float32, 128)
    tables["decay_total"] = decay[..., (k % 8) * 16 + (k // 16) * 2 + (k // 8) % 2]
    return tables
