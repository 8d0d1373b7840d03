"""Who prepares what, and in which order, beside the chain: the kernels' own arithmetic, run on plain integers."""

import types

import pytest

pytest.importorskip("cutlass", reason="needs the CuTe DSL, nvidia-cutlass-dsl")

from fla_kda_backend import planning  # noqa: E402
from fla_kda_backend.kernels.variant import Variant  # noqa: E402
from fla_kda_backend.kernels.wy64 import groups, record, tasks  # noqa: E402
from fla_kda_backend.kernels.wy64.chain.kernel import ChainWY64  # noqa: E402
from fla_kda_backend.kernels.wy64.chain.replay import ChainReplayWY64  # noqa: E402
from fla_kda_backend.kernels.wy64.cluster import CTAS  # noqa: E402
from fla_kda_backend.kernels.wy64.contract import Schedule  # noqa: E402
from fla_kda_backend.kernels.wy64.prepare import assignment, teams  # noqa: E402
from fla_kda_backend.kernels.wy64.prepare.memory import TEAM_THREADS  # noqa: E402

TEAMS, CHUNK = teams.TEAMS_PER_SM, record.CHUNK


def plain(part):
    """The class with its methods as they stand in the source, before the DSL compiles them."""
    methods = {name: f.__wrapped__ for base in reversed(part.__mro__) for name, f in vars(base).items()
               if hasattr(f, "__wrapped__")}  # fmt: skip
    return type(part.__name__, (part,), methods)


ASSIGNMENT, TASKS = plain(assignment.Assignment), plain(tasks.Tasks)


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
        fakes = {"cute": types.SimpleNamespace(arch=arch), "ptx": ptx, "sequences": sequences, "const_expr": lambda x: x,
                 "Int32": int}  # fmt: skip
        for module in (assignment, teams, tasks):
            for name in fakes.keys() & vars(module).keys():
                monkeypatch.setattr(module, name, fakes[name])
        monkeypatch.setattr(assignment, "clear_flags", lambda *of: self.cleared.append(of[3:]))
        variant = Variant(cu_seqlens=cu_seqlens and "int32")
        schedule = Schedule(max_ctas=max_ctas, overlap=True, replay=replay)
        self.chain = (ChainReplayWY64 if replay else ChainWY64)(variant, schedule)
        both = teams.Teams(overlap=True, short_of_registers=False)
        self.prepare = ASSIGNMENT(variant, schedule, both, self.chain.chains_per_group, self.chain.link_time)
        self.first_slot, self.chunks = begin // CHUNK, -((begin - end) // CHUNK)
        slots = record.slots(tokens, num_seqs, None if cu_seqlens else tokens)
        distribution = self.prepare.distribute(slots * heads, num_seqs, heads)
        self.grid, self.chains = distribution.grid, num_seqs * heads
        self.args = types.SimpleNamespace(
            num_seqs=num_seqs, heads=heads, seq_len=tokens, slots=slots, cu_seqlens=0, workspace=0, rounds=distribution.rounds,
            staying=distribution.staying, chains_per_group=distribution.chains_per_group,
        )  # fmt: skip
        self.tasks = TASKS(variant, schedule, self.args, range(num_seqs))

    def locate(self, task):
        """(sequence, head, slot) of prepare's (chunk, head) pair of that number."""
        return self.prepare.locate_task(self.args, task, self.args.seq_len, self.args.heads)

    def prepared(self, block):
        """Tasks of a CTA of prepare, one list per team; a team ends where it finds none."""
        self.at.block, self.at.grid = block, self.grid
        teams = []
        for team in range(TEAMS):
            tasks = []
            while self.locate(task := self.prepare.task(self.args, len(tasks), team))[0] >= 0:
                tasks.append(task)
            teams.append(tasks)
        return teams

    def cleared_by(self, block):
        """(head, slot) of the flags that a CTA clears."""
        self.at.block, self.at.grid, self.cleared = block, self.grid, []
        for thread in range(TEAMS * TEAM_THREADS):
            self.at.thread = thread
            self.prepare.clear_own_flags(self.args)
        return self.cleared

    def records(self):
        """(head, slot) of every record that the chain reads."""
        slots = [s * self.chunks + self.first_slot + c for s in range(self.args.num_seqs) for c in range(self.chunks)]
        return {(head, slot) for head in range(self.args.heads) for slot in slots}

    def chain_turns(self):
        """Tasks (sequence, head, value half) of all CTAs of the chain, turn by turn."""
        self.at.grid = self.chain.grid(2 * self.chains)
        turns = []
        for turn in range(self.tasks.rounds()):
            tasks = []
            for block in range(self.at.grid):
                self.at.block = block
                tasks.append(self.tasks.task(turn))
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
EVERY_LAUNCH = pytest.mark.parametrize("shape", LAUNCHES, ids=lambda shape: "-".join(str(value) for value in shape.values()))


@EVERY_LAUNCH
@pytest.mark.parametrize("replay", [False, True])
def test_every_record_is_prepared_once_by_the_team_that_clears_its_flags(shape, replay, monkeypatch):
    launch = Launch(monkeypatch, **shape, replay=replay)
    found = []
    for block in range(launch.grid):
        teams = launch.prepared(block)
        own = [launch.locate(task)[1:] for tasks in teams for task in tasks]
        assert sorted(launch.cleared_by(block)) == sorted(own)
        assert block < launch.args.staying or all(len(tasks) <= launch.args.rounds for tasks in teams)
        assert all(tasks == sorted(tasks) for tasks in teams)
        found += own
    assert len(found) == len(set(found)) and set(found) == launch.records()


@EVERY_LAUNCH
def test_the_chain_reads_in_the_order_in_which_prepare_writes(shape, monkeypatch):
    """Group after group, and in order of time within one."""
    launch = Launch(monkeypatch, **shape)
    located = [launch.locate(task) for task in range(launch.chains * launch.chunks)]
    assert launch.locate(len(located))[0] == -1
    written = iter(located)
    turns = launch.chain_turns()
    for turn in turns:
        assert len(turn) == len(set(turn)) <= 2 * launch.args.chains_per_group
        chains = {(seq, head) for seq, head, _ in turn}
        assert {(seq, head, half) for seq, head in chains for half in range(2)} == set(turn)
        for chunk in range(launch.chunks):
            together = [next(written) for _ in chains]
            assert {(seq, head) for seq, head, _ in together} == chains
            assert all(slot == launch.first_slot + seq * launch.chunks + chunk for seq, _, slot in together)
    assert next(written, None) is None
    assert sum(map(len, turns)) == 2 * launch.chains


@EVERY_LAUNCH
def test_sms_are_shared(shape, monkeypatch):
    """Prepare leaves as many as the chain has CTAs, where there are more; a replay's spine does everything at once."""
    launch = Launch(monkeypatch, **shape)
    chain, sms = launch.chain.grid(2 * launch.chains), shape["max_ctas"]
    needed = -(-launch.args.slots * launch.args.heads // TEAMS)
    assert launch.args.staying == max(CTAS, min(sms // CTAS * CTAS - chain, -(-needed // CTAS) * CTAS))
    assert launch.args.staying % CTAS == launch.grid % CTAS == 0
    assert launch.grid == launch.args.staying if launch.args.rounds == 0 else launch.grid >= launch.args.staying
    variant = Variant(cu_seqlens="int32" if "cu_seqlens" in shape else None)
    plan = planning.wy64(8192 * shape["num_seqs"], shape["num_seqs"], shape["heads"], sms, variant)
    assert not plan.schedule.overlap or plan.schedule.replay or plan.grid == chain
    replay = ChainReplayWY64(variant, Schedule(max_ctas=sms, overlap=True, replay=True))
    assert replay.chains_per_group(launch.chains) == launch.chains


@pytest.mark.parametrize("sms", [3, 4, 16, 66, 78, 114, 132])
def test_groups_are_alike(sms):
    share = max(groups.TASKS * sms // groups.SMS, 2)
    for chains in range(1, 300):
        per_group = groups.chains_per_group(chains, sms)
        assert 1 <= per_group <= chains and 2 * per_group < max(1.75 * share + 2, 4)
        assert 2 * per_group < sms
        turns = -(-chains // per_group)
        assert (turns > 1) == (2 * chains > 2 * share - max(share // 4, 1))


def test_groups_on_an_h200():
    assert [groups.chains_per_group(chains, 132) for chains in (1, 6, 12, 24, 28, 29, 32, 40, 48, 64, 96)] == [
        1, 6, 12, 24, 28, 15, 16, 20, 16, 16, 16,
    ]  # fmt: skip
