"""Who prepares what, and in which order, beside the chain: the kernels' own arithmetic, run on plain integers."""

import types

import pytest

pytest.importorskip("cutlass", reason="needs the CuTe DSL, nvidia-cutlass-dsl")

from fla_kda_backend import planning  # noqa: E402
from fla_kda_backend.kernels import chain_replay_wy64, chain_wy64, prepare_wy64  # noqa: E402
from fla_kda_backend.kernels.wy64 import groups  # noqa: E402
from fla_kda_backend.kernels.wy64 import record as record64
from fla_kda_backend.kernels.wy64 import tasks as wy64
from fla_kda_backend.kernels.wy64.cluster import CTAS  # noqa: E402
from fla_kda_backend.kernels.wy64.prepare import teams as prepare_teams  # noqa: E402

TEAMS, TEAM, CHUNK = prepare_teams.TEAMS, prepare_teams.TEAM, record64.CHUNK


def plain(kernel):
    """The class with its methods as they stand in the source, before the DSL compiles them."""
    methods = {name: f.__wrapped__ for base in reversed(kernel.__mro__) for name, f in vars(base).items()
               if hasattr(f, "__wrapped__")}  # fmt: skip
    return type(kernel.__name__, (kernel,), methods)


PREPARE, CHAIN = plain(prepare_wy64.PrepareWY64), plain(chain_wy64.ChainWY64)
REPLAY = plain(chain_replay_wy64.ChainReplayWY64)


class Launch:
    """Overlapped launches of `heads` heads on a GPU of some SMs: sequences of `tokens` tokens, or one packed one, between
    the offsets cu_seqlens."""

    def __init__(self, monkeypatch, num_seqs, heads, tokens, max_ctas, cu_seqlens=None, replay=False):
        self.at = types.SimpleNamespace(block=0, grid=0, thread=0)
        arch = types.SimpleNamespace(block_idx=lambda: (self.at.block, 0, 0), grid_dim=lambda: (self.at.grid, 1, 1))
        ptx = types.SimpleNamespace(
            less_b32=lambda i, j, x, y: x if i < j else y, thread_index=lambda: self.at.thread, fence_gpu=lambda: None
        )
        begin, end = cu_seqlens or (0, tokens)
        sequences = types.SimpleNamespace(sequence=lambda *_: (begin, end - begin, begin // CHUNK))
        for module in (prepare_teams, wy64):
            monkeypatch.setattr(module, "cute", types.SimpleNamespace(arch=arch))
            monkeypatch.setattr(module, "ptx", ptx)
            monkeypatch.setattr(module, "sequences", sequences)
            monkeypatch.setattr(module, "const_expr", lambda x: x)
            monkeypatch.setattr(module, "Int32", int)
        monkeypatch.setattr(prepare_teams, "clear_flags", lambda *of: self.cleared.append(of[3:]))
        cu_dtype = cu_seqlens and "int32"
        self.chain = (REPLAY if replay else CHAIN)(cu_dtype=cu_dtype, max_ctas=max_ctas, overlap=True)
        self.prepare = PREPARE(cu_dtype, max_ctas, beside=self.chain)
        self.first_slot, self.chunks = begin // CHUNK, -((begin - end) // CHUNK)
        slots = record64.slots(tokens, num_seqs, None if cu_seqlens else tokens)
        rounds, stay, grid, at_once = self.prepare.schedule(slots * heads, num_seqs, heads)
        self.grid, self.chains = grid, num_seqs * heads
        self.p = types.SimpleNamespace(
            num_seqs=num_seqs, heads=heads, seq_len=tokens, slots=slots, cu_seqlens=0, workspace=0, rounds=rounds, stay=stay,
            at_once=at_once, ordered=lambda: range(num_seqs),
        )  # fmt: skip

    def place(self, task):
        return self.prepare.place_of(self.p, task, self.p.seq_len, self.p.heads)

    def prepared(self, block):
        """Tasks of a CTA of prepare, one list a team; a team ends where it finds none."""
        self.at.block, self.at.grid = block, self.grid
        teams = []
        for team in range(TEAMS):
            tasks = []
            while self.place(task := self.prepare.task_of(self.p, len(tasks), team))[0] >= 0:
                tasks.append(task)
            teams.append(tasks)
        return teams

    def cleared_by(self, block):
        """(head, slot) of the flags that a CTA clears."""
        self.at.block, self.at.grid, self.cleared = block, self.grid, []
        for thread in range(TEAMS * TEAM):
            self.at.thread = thread
            self.prepare.clear_own_flags(self.p)
        return self.cleared

    def records(self):
        """(head, slot) of every record that the chain reads."""
        slots = [s * self.chunks + self.first_slot + c for s in range(self.p.num_seqs) for c in range(self.chunks)]
        return {(head, slot) for head in range(self.p.heads) for slot in slots}

    def chain_turns(self):
        """Tasks (sequence, head, half) of all CTAs of the chain, turn by turn."""
        self.at.grid = self.chain.grid(2 * self.chains)
        turns = []
        for turn in range(self.chain.rounds(self.p)):
            tasks = []
            for block in range(self.at.grid):
                self.at.block = block
                tasks.append(self.chain.task(self.p, turn))
            turns.append([task for task in tasks if task[0] >= 0])
        return turns


SHAPES = [  # sequences, heads, tokens, SMs
    (1, 1, 1, 132), (1, 6, 8192, 132), (3, 5, 700, 132), (1, 24, 2048, 132), (1, 25, 2048, 132), (1, 32, 1000, 132),
    (1, 40, 2048, 132), (1, 48, 2048, 132), (2, 24, 2048, 132), (2, 24, 4100, 114), (1, 96, 2048, 132), (5, 19, 640, 132),
    (1, 128, 3000, 132), (1, 96, 8192, 132), (1, 7, 900, 16), (2, 3, 2048, 3), (4, 33, 200, 78),
]  # fmt: skip
PACKED = [  # heads, tokens, offsets of the sequence, SMs
    (48, 2048, (0, 2048), 132), (48, 3000, (70, 2950), 132), (48, 3000, (1500, 3000), 132), (96, 2048, (0, 100), 132),
    (2, 3000, (63, 64), 132), (48, 3000, (300, 300), 132), (96, 8192, (0, 8192), 132), (20, 2048, (64, 2000), 16),
]  # fmt: skip
LAUNCHES = [dict(zip(("num_seqs", "heads", "tokens", "max_ctas"), shape)) for shape in SHAPES]
LAUNCHES += [dict(zip(("heads", "tokens", "cu_seqlens", "max_ctas"), row), num_seqs=1) for row in PACKED]
EVERY = pytest.mark.parametrize("shape", LAUNCHES, ids=lambda shape: "-".join(str(value) for value in shape.values()))


@EVERY
@pytest.mark.parametrize("replay", [False, True])
def test_every_record_is_prepared_once_by_who_clears_its_flags(shape, replay, monkeypatch):
    launch = Launch(monkeypatch, **shape, replay=replay)
    found = []
    for block in range(launch.grid):
        teams = launch.prepared(block)
        own = [launch.place(task)[1:] for tasks in teams for task in tasks]
        assert sorted(launch.cleared_by(block)) == sorted(own)
        assert block < launch.p.stay or all(len(tasks) <= launch.p.rounds for tasks in teams)
        assert all(tasks == sorted(tasks) for tasks in teams)
        found += own
    assert len(found) == len(set(found)) and set(found) == launch.records()


@EVERY
def test_the_chain_reads_in_the_order_in_which_prepare_writes(shape, monkeypatch):
    """Group after group, and in order of time within one."""
    launch = Launch(monkeypatch, **shape)
    places = [launch.place(task) for task in range(launch.chains * launch.chunks)]
    assert launch.place(len(places))[0] == -1
    written = iter(places)
    turns = launch.chain_turns()
    for turn in turns:
        assert len(turn) == len(set(turn)) <= 2 * launch.p.at_once
        chains = {(seq, head) for seq, head, _ in turn}
        assert {(seq, head, half) for seq, head in chains for half in range(2)} == set(turn)
        for chunk in range(launch.chunks):
            together = [next(written) for _ in chains]
            assert {(seq, head) for seq, head, _ in together} == chains
            assert all(slot == launch.first_slot + seq * launch.chunks + chunk for seq, _, slot in together)
    assert next(written, None) is None
    assert sum(map(len, turns)) == 2 * launch.chains


@EVERY
def test_sms_are_shared(shape, monkeypatch):
    """Prepare leaves as many as the chain has CTAs, where there are more; a replay's spine does everything at once."""
    launch = Launch(monkeypatch, **shape)
    chain, sms = launch.chain.grid(2 * launch.chains), shape["max_ctas"]
    needed = -(-launch.p.slots * launch.p.heads // TEAMS)
    assert launch.p.stay == max(CTAS, min(sms // CTAS * CTAS - chain, -(-needed // CTAS) * CTAS))
    assert launch.p.stay % CTAS == launch.grid % CTAS == 0
    assert launch.grid == launch.p.stay if launch.p.rounds == 0 else launch.grid >= launch.p.stay
    plan = planning.wy64(8192 * shape["num_seqs"], shape["num_seqs"], shape["heads"], sms, "cu_seqlens" in shape)
    assert not plan.params["overlap"] or plan.params["replay"] or plan.grid == chain
    assert REPLAY(max_ctas=sms, overlap=True).at_once(launch.chains) == launch.chains


@pytest.mark.parametrize("sms", [3, 4, 16, 66, 78, 114, 132])
def test_groups_are_alike(sms):
    share = max(groups.TASKS * sms // groups.SMS, 2)
    for chains in range(1, 300):
        at_once = groups.chains_at_once(chains, sms)
        assert 1 <= at_once <= chains and 2 * at_once < max(1.75 * share + 2, 4)
        assert 2 * at_once < sms
        turns = -(-chains // at_once)
        assert (turns > 1) == (2 * chains > 2 * share - max(share // 4, 1))


def test_groups_on_an_h200():
    assert [groups.chains_at_once(chains, 132) for chains in (1, 6, 12, 24, 28, 29, 32, 40, 48, 64, 96)] == [
        1, 6, 12, 24, 28, 15, 16, 20, 16, 16, 16,
    ]  # fmt: skip
