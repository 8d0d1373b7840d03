"""Which team prepares which (chunk, head) pair, and, where the chain runs beside prepare, the flags of the records.

Each team works through the pairs team, team + teams, ... Where prepare runs before the chain, the last chunks go first: the
chain begins with the first chunks and then finds them in the L2. Where the chain runs beside it, pairs go group after group of
chains and in order of time (groups.py), and a flag per record says that it is written. After some rounds some CTAs end, so
that the chain runs on their SMs while the others go on.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from fla_kda_backend.kernels import ptx, sequences
from fla_kda_backend.kernels.wy64 import groups
from fla_kda_backend.kernels.wy64.cluster import CTAS, whole_clusters
from fla_kda_backend.kernels.wy64.prepare.memory import TEAM_THREADS, ChunkInfo
from fla_kda_backend.kernels.wy64.prepare.teams import TEAMS_PER_SM
from fla_kda_backend.kernels.wy64.record import CHUNK, LOG2_CHUNK, READY_AT
from fla_kda_backend.kernels.wy64.workspace import clear_flags, flag_address

STAGGER = 3000  # ns; the first records are there sooner, and the two teams of an SM come to need different units of it


class Distribution(NamedTuple):
    """How a launch is spread over its CTAs."""

    rounds: Any  # after so many chunks per team all CTAs but `staying` end; overlapped only, as the rest
    staying: Any  # CTAs that go on, the first ones
    grid: Any  # CTAs
    chains_per_group: Any  # (sequence, head) pairs whose chains run at once


class Assignment:
    """chains_per_group: function of the number of chains; link_time: ns per link of a chain, see `distribute`. Both say how
    the chain runs beside an overlapped prepare, which covers all slots. Its cu_seqlens holds one sequence."""

    def __init__(self, variant, schedule, teams, chains_per_group, link_time):
        self.cu_dtype, self.overlap, self.teams = variant.cu_seqlens, schedule.overlap, teams
        self.chains_per_group, self.link_time = chains_per_group, link_time
        # CTAs leave their SMs to the chain, whose CTAs are clusters, by clusters
        self.sms = whole_clusters(schedule.max_ctas) if schedule.overlap else schedule.max_ctas

    @cute.jit
    def distribute(self, pairs, num_seqs, heads):
        """The Distribution of a launch. The CTAs that end leave their SMs to the chain so early that it ends soon after the
        last chunk is prepared."""
        rounds = staying = chains_per_group = Int32(0)
        ctas = const_expr(self.sms * self.teams.ctas_per_sm)
        grid = cutlass.min((pairs + (self.teams.per_cta - 1)) // self.teams.per_cta, ctas)
        if const_expr(self.overlap):
            grid = (grid + 1) // CTAS * CTAS
            chains = num_seqs * heads
            chains_per_group = self.chains_per_group(chains)
            staying = cutlass.max(cutlass.min(self.sms - 2 * chains_per_group, grid), Int32(CTAS))
            # links that a chain CTA does one after the other
            links = (chains + chains_per_group - 1) // chains_per_group * (pairs // chains)
            meanwhile = links * self.link_time * TEAMS_PER_SM * staying // 1000
            rounds = cutlass.max(pairs - meanwhile, Int32(0)) // (TEAMS_PER_SM * self.sms)
            if rounds == 0:
                grid = staying
        return Distribution(rounds=rounds, staying=staying, grid=grid, chains_per_group=chains_per_group)

    def task(self, args, n, team):
        """Number in the launch of the team's pair number n; past the last pair where the team's CTA has ended before."""
        worker, workers = self.teams.worker(team)
        task = n * workers + worker
        if const_expr(self.overlap):
            block, _, _ = cute.arch.block_idx()
            later = args.rounds * workers + ((n - args.rounds) * TEAMS_PER_SM + team) * args.staying + block
            later = ptx.less_b32(block, args.staying, later, args.slots * args.heads)
            task = ptx.less_b32(n, args.rounds, task, later)
        return task

    def next_task(self, args, memory, n):
        """Number in the launch of the team's pair after number n."""
        if const_expr(self.overlap):
            return self.task(args, n + 1, self.teams.team())
        _, workers = self.teams.worker(self.teams.team())
        return memory.info(n, ChunkInfo.TASK) + workers

    @cute.jit
    def locate_task(self, args, task, seq_len, heads):
        """(sequence, head, slot) of a pair where the chain runs beside; sequence -1: there are not so many pairs."""
        base, length = Int32(0), seq_len
        if const_expr(self.cu_dtype is not None):  # one sequence, which may not fill the slots: its chunks alone are counted
            _, length, base = sequences.sequence(Int32(0), args.cu_seqlens, seq_len, LOG2_CHUNK, self.cu_dtype)
        chunks = (length + (CHUNK - 1)) >> LOG2_CHUNK
        chains = args.num_seqs * heads
        seq, head, slot = Int32(-1), Int32(0), Int32(0)
        if task < chains * chunks:
            chain, chunk = groups.locate_task(task, chains, args.chains_per_group, chunks, cutlass.min)
            seq = chain // heads
            head = chain - seq * heads
            slot = base + seq * chunks + chunk
        return seq, head, slot

    @cute.jit
    def write_chunk_info(self, args, memory, n, task, sequences_left, behind):
        """Write the ChunkInfo of the team's pair number n, except for BETA; by warp 0. task: its number in the launch. It
        lies in one of the first `sequences_left` sequences, and `behind` chunks lie behind these."""
        # pinned here: nothing computed from them is kept in a register over the loop
        seq_len, heads, heads_per_qk_head = ptx.pin([args.seq_len, args.heads, args.heads_per_qk_head])
        if const_expr(self.overlap):
            s, head, slot = self.locate_task(args, task, seq_len, heads)
        else:
            number = task // heads
            head = task - number * heads
            slot, s = args.slots - 1 - number, Int32(-1)
            if const_expr(self.cu_dtype is None):
                if slot >= 0:
                    s = sequences.sequence_of_slot(
                        args.slot_begin + slot, args.num_seqs, args.cu_seqlens, seq_len, LOG2_CHUNK, None
                    )
            else:
                s, behind = sequences.sequence_from_end(
                    number, behind, sequences_left, args.slot_begin, args.slot_begin + args.slots, args.cu_seqlens, seq_len,
                    LOG2_CHUNK, self.cu_dtype,
                )  # fmt: skip
        rows, token, index = Int32(0), Int32(0), Int32(0)
        if s >= 0:
            begin, length, base = sequences.sequence(s, args.cu_seqlens, seq_len, LOG2_CHUNK, self.cu_dtype)
            base -= args.slot_begin
            if const_expr(self.cu_dtype is not None and not self.overlap):
                end = cutlass.min(base + ((length + (CHUNK - 1)) >> LOG2_CHUNK), args.slots)
                slot = end - 1 - (number - behind)
            index = slot - base
            rows, token = length - index * CHUNK, begin + index * CHUNK
        ptx.sts_v4_b32(memory.chunk_info(n), [rows, task, head, slot])
        ptx.sts_v4_b32(memory.chunk_info(n) + ChunkInfo.TOKEN, [token, index, s + 1, behind])
        ptx.sts_b32(memory.chunk_info(n) + ChunkInfo.QK_HEAD, head // heads_per_qk_head)
        cute.arch.sync_warp()

    # ---- flags, where the chain runs beside
    @cute.jit
    def clear_own_flags(self, args):
        """Clear the flags of the records that this team will write. All teams do so before the chain may start."""
        thread = ptx.thread_index()
        n, team = thread & (TEAM_THREADS - 1), thread // TEAM_THREADS  # not Teams.team: lanes leave the loop one by one
        task = self.task(args, n, team)
        while task < args.slots * args.heads:
            seq, head, slot = self.locate_task(args, task, args.seq_len, args.heads)
            if seq >= 0:
                clear_flags(args.workspace, args.heads, args.slots, head, slot)
            n += TEAM_THREADS
            task = self.task(args, n, team)
        ptx.fence_gpu()

    @cute.jit
    def let_chain_start(self, team):
        """After all threads of the CTA have cleared their flags."""
        ptx.dependency_launch()
        if team == 1:
            ptx.nanosleep(Int32(STAGGER))

    @cute.jit
    def publish_record(self, args, memory, n):
        """Set the flag of the record before the team's number n; by the thread that stores the records."""
        ptx.bulk_wait()
        if n > 0:
            head, slot = ptx.lds_v2_b32(memory.chunk_info(n - 1) + ChunkInfo.HEAD)
            ptx.fence_proxy_async_global()
            ptx.stg_release_b32(flag_address(args.workspace, args.heads, args.slots, head, slot) + READY_AT, Int32(1))
