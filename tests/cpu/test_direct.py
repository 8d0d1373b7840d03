"""prepare's own results of sequences of one chunk: where every element of the fragments comes from and goes to.

The methods run as they stand in the source, for all lanes of a warp at once, on an emulated shared and global memory.
"""

import types

import pytest
import torch

pytest.importorskip("cutlass", reason="needs the CuTe DSL, nvidia-cutlass-dsl")

from fla_kda_backend.kernels.variant import Variant  # noqa: E402
from fla_kda_backend.kernels.wy64 import record  # noqa: E402
from fla_kda_backend.kernels.wy64.contract import Schedule  # noqa: E402
from fla_kda_backend.kernels.wy64.prepare import direct, fragments, memory  # noqa: E402
from fla_kda_backend.kernels.wy64.prepare.memory import TILE_BYTES, ChunkInfo, Header, Table, Tensor  # noqa: E402
from fla_kda_backend.kernels.wy64.prepare.tiles import Tiles  # noqa: E402

ROWS, HEADS, TOKEN, SEQ, HEAD = 50, 3, 7, 2, 1
HEADER, OUT, FINAL = 1 << 30, 1 << 32, 1 << 33  # addresses
CHUNK_INFO = {ChunkInfo.ROWS: ROWS, ChunkInfo.TOKEN: TOKEN, ChunkInfo.HEAD: HEAD, ChunkInfo.INDEX: 0,
              ChunkInfo.SEQUENCES: SEQ + 1}  # fmt: skip


class Machine:
    """Shared memory in bf16 elements; global memory by address."""

    def __init__(self):
        self.shared = torch.full((memory.TILES_AND_TABLES_BYTES // 2,), float("nan"))
        self.out, self.final = {}, {}
        self.lane = torch.arange(32)
        self.group, self.quad = self.lane // 4, self.lane % 4

    def rows_of(self, address):
        """[4 tiles, 8 rows, 8 elements] of shared memory."""
        return (torch.as_tensor(address).view(4, 8, 1) + 2 * torch.arange(8)) // 2

    def ldmatrix_x4(self, address, transposed=False):
        tiles = self.shared[self.rows_of(address)]
        if transposed:
            tiles = tiles.mT
        return [torch.stack([tile[self.group, 2 * self.quad + e] for e in range(2)], -1) for tile in tiles]

    def ldmatrix_x4_trans(self, address):
        return self.ldmatrix_x4(address, transposed=True)

    def stmatrix_x4_trans(self, address, words):
        tiles = torch.empty(4, 8, 8)
        for tile, word in zip(tiles, words):
            for e in range(2):
                tile[self.group, 2 * self.quad + e] = word[:, e]
        self.shared[self.rows_of(address)] = tiles.mT

    def mma_bf16(self, a, b, c):
        left, right, result = torch.empty(16, 16), torch.empty(16, 8), torch.empty(16, 8)
        for e in range(2):
            for w, word in enumerate(a):
                left[self.group + 8 * (w % 2), 2 * self.quad + 8 * (w // 2) + e] = word[:, e]
            for w, word in enumerate(b):
                right[2 * self.quad + 8 * w + e, self.group] = word[:, e]
            for r in range(2):
                result[self.group + 8 * r, 2 * self.quad + e] = torch.as_tensor(c[2 * r + e], dtype=torch.float32)
        result = result + left @ right
        return [result[self.group + 8 * (i // 2), 2 * self.quad + i % 2] for i in range(4)]

    def pack_bf16x2(self, low, high):
        return torch.stack([low, high], -1).bfloat16().float()

    def lds_b32(self, address):
        return CHUNK_INFO[address - HEADER - Header.CHUNK_INFO]

    def lds_v4_b32(self, address):
        return self.shared[(address + 2 * torch.arange(8)) // 2]

    def store(self, memory, address, values, size):
        for at, row in zip(address.tolist(), values.tolist()):
            for i, value in enumerate(row):
                assert at + i * size not in memory
                memory[at + i * size] = value

    def ptx(self):
        names = ("ldmatrix_x4", "ldmatrix_x4_trans", "stmatrix_x4_trans", "mma_bf16", "pack_bf16x2", "lds_b32", "lds_v4_b32")
        stores = {
            "stg_v2_f32": lambda at, low, high: self.store(self.final, at, torch.stack([low, high], -1), 4),
            "stg_f32": lambda at, x: self.store(self.final, at, x[:, None], 4),
            "stg_b32": lambda at, word: self.store(self.final, at, word, 2),
            "stg_b16": lambda at, word: self.store(self.final, at, word.view(32, -1)[:, :1], 2),
            "stg_once_words": lambda at, row: self.store(self.out, torch.tensor([at]), row[None], 2),
        }
        return types.SimpleNamespace(
            **{name: getattr(self, name) for name in names}, **stores, pin=lambda x: x, fence_proxy_async=lambda: None,
            less_b32=lambda i, j, x, y: x if i < j else y,
        )  # fmt: skip


class Plain(direct.Direct):
    """Its methods as they stand in the source, before the DSL compiles them."""

    results, store_final, store_out = (
        getattr(direct.Direct, name).__wrapped__ for name in ("results", "store_final", "store_out")
    )


def eliminate(base, x, u_at, w_at, lane):
    """U is what is given as V."""
    assert u_at is None
    return [(words,) for words in x]


def image_address(tile, row, channel):
    """Of an element of a record's tile of 64 rows x 128 channels."""
    return tile + channel // 64 * (TILE_BYTES // 2) + row * 128 + ((channel % 64 // 8) ^ (row % 8)) * 16 + channel % 8 * 2


@pytest.mark.parametrize("final, state_v_first", [("fp32", True), ("fp32", False), ("bf16", True), (None, True)])
def test_outputs_and_states_have_their_places(final, state_v_first, monkeypatch):
    machine = Machine()
    cutlass = types.SimpleNamespace(range_constexpr=range, range=lambda n, unroll: range(n))
    fakes = {"ptx": machine.ptx(), "Int32": lambda x: x, "Int64": lambda x: x, "const_expr": lambda x: x, "cutlass": cutlass}
    for name, fake in (fakes | {"eliminate": eliminate}).items():
        monkeypatch.setattr(direct, name, fake)
    monkeypatch.setattr(memory, "ptx", machine.ptx())
    monkeypatch.setattr(fragments, "Float32", float)
    teams = types.SimpleNamespace(thread=lambda: teams.number)
    variant = Variant(final_state=final, state_v_first=state_v_first)
    part = Plain(variant, Schedule(direct=True), teams, Tiles(variant))
    args = types.SimpleNamespace(heads=HEADS, out=OUT, final_state=FINAL)
    team_memory = memory.TeamMemory(mbarriers=None, tiles=None, header=HEADER, base=0)

    normal = torch.Generator().manual_seed(0)
    u, k_end, a = (torch.randn(64, n, generator=normal).bfloat16().float() for n in (128, 128, 64))
    a = a.tril()
    row, channel = torch.arange(64)[:, None], torch.arange(128)
    machine.shared[image_address(Tensor.K * TILE_BYTES, row, channel) // 2] = k_end
    for i in range(4):
        for j in range(i + 1):
            for r in range(16):
                for c in range(16):
                    at = Table.A_IMAGE + record.a_block(i, j) + r * 32 + ((c // 8) ^ (r >> 2 & 1)) * 16 + c % 8 * 2
                    machine.shared[at // 2] = a[16 * i + r, 16 * j + c]
    lane = machine.lane
    for warp in range(8):
        band, half = warp & 3, warp >> 2
        w_at = half * (TILE_BYTES // 2) + ((lane & 7) + 8 * (lane >> 4)) * 128
        w_at = w_at + (((2 * band + (lane >> 3 & 1)) ^ (lane & 7)) << 4)
        channels = 64 * half + 16 * band + machine.group
        x = [[torch.stack([u[16 * i + 2 * machine.quad + 8 * (w // 2) + e, channels + 8 * (w % 2)] for e in range(2)], -1)
              for w in range(4)] for i in range(4)]  # fmt: skip
        part.results(args, team_memory, x, w_at, memory.ThreadCoord(n=0, warp=warp, band=band, half=half, lane=lane))
    for teams.number in range(memory.TEAM_THREADS):
        part.store_out(args, team_memory, 0)

    expected = (a @ u).bfloat16().float()
    found = torch.full((64, HEADS, 128), float("nan"))
    for at, value in machine.out.items():
        found.view(-1)[(at - OUT) // 2 - TOKEN * HEADS * 128] = value
    assert len(machine.out) == ROWS * 128
    assert torch.allclose(found[:ROWS, HEAD], expected[:ROWS], atol=0.05, rtol=0.01)
    size = {"fp32": 4, "bf16": 2, None: 1}[final]
    assert len(machine.final) == (0 if final is None else 128 * 128)
    if final is not None:
        state = torch.full((128 * 128,), float("nan"))
        for at, value in machine.final.items():
            state[(at - FINAL) // size - (SEQ * HEADS + HEAD) * 128 * 128] = value
        state = state.view(128, 128) if state_v_first else state.view(128, 128).mT
        assert torch.allclose(state, u.mT @ k_end, atol=0.3 if final == "bf16" else 1e-3)
