"""Who prepares which chunk: teams of 256 threads, two on an SM, and, where the chain runs beside them, its flags.

Each team works through the (chunk, head) pairs team, team + teams, ... Not overlapped, a team is a CTA, and the last chunks
go first: the chain begins with the first ones and finds them in the L2. Overlapped, both teams of an SM are one CTA, for
only then does an SM come free as a whole; pairs go group after group of chains and in order of time (groups.py), a flag says
of each record that it is written, and after some rounds some CTAs end, so that the chain runs on their SMs while the others
go on.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from fla_kda_backend.kernels import ptx, sequences
from fla_kda_backend.kernels.wy64 import groups
from fla_kda_backend.kernels.wy64.cluster import CTAS
from fla_kda_backend.kernels.wy64.prepare.loads import HEAD, TASK, TEAM
from fla_kda_backend.kernels.wy64.record import CHUNK, LOG2_CHUNK, READY_AT
from fla_kda_backend.kernels.wy64.tasks import clear_flags, flag_address

TEAMS = 2  # on an SM
STAGGER = 3000  # ns; the first records are there the sooner, and the teams of an SM come to differ in what they need of it
# named barriers of a team, of 8: all its threads; 1 to 3, the two warps of a band; v and K_start are in registers
ALL, V_TAKEN = 0, 4


class PrepareTeams:
    """A kernel inherits it. max_ctas: the number of SMs; beside: the chain that runs beside it, None without overlap; where
    its CTAs are clusters, these are too, see wy64.py; teams: of a CTA."""

    def __init__(self, max_ctas, beside):
        self.max_ctas, self.beside, self.overlap = max_ctas, beside, beside is not None
        if self.overlap:
            self.max_ctas = beside.max_ctas
        self.teams = TEAMS if self.overlap else 1
        self.threads = self.teams * TEAM

    @cute.jit
    def schedule(self, pairs, num_seqs, heads):
        """(rounds, stay, grid, at_once). Of the overlapped kernel: after `rounds` chunks all CTAs but the first `stay` end and
        leave their SMs to the chain, which then ends soon after the last chunk is prepared; groups of `at_once` chains."""
        rounds = stay = at_once = Int32(0)
        ctas = const_expr(self.max_ctas * TEAMS // self.teams)
        grid = cutlass.min((pairs + (self.teams - 1)) // self.teams, ctas)
        if const_expr(self.overlap):
            grid = (grid + 1) // CTAS * CTAS
            chains = num_seqs * heads
            at_once = self.beside.at_once(chains)
            stay = cutlass.max(cutlass.min(self.max_ctas - 2 * at_once, grid), Int32(CTAS))
            links = (chains + at_once - 1) // at_once * (pairs // chains)  # of a chain CTA, one after the other
            meanwhile = links * self.beside.link_time * TEAMS * stay // 1000
            rounds = cutlass.max(pairs - meanwhile, Int32(0)) // (TEAMS * self.max_ctas)
            if rounds == 0:
                grid = stay
        return rounds, stay, grid, at_once

    def team(self):
        if const_expr(self.teams == 1):
            return 0
        return cute.arch.make_warp_uniform(ptx.thread_index() // TEAM)

    def worker(self, team):
        """Number of the team in the launch, and of teams."""
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        return team * grid + block, self.teams * grid

    def barrier(self, which):
        """Number of a named barrier of the team."""
        return 8 * self.team() + which

    def sync(self):
        """Barrier of the team."""
        cute.arch.barrier(barrier_id=self.barrier(ALL), number_of_threads=TEAM)

    def thread(self):
        """Number of the thread in its team, read anew."""
        thread = ptx.thread_index()
        return thread & (TEAM - 1) if self.teams > 1 else thread

    def warp(self):
        return cute.arch.make_warp_uniform(self.thread() >> 5)

    @cute.jit
    def let_chain_start(self, team):
        """After all threads of the CTA have cleared their flags."""
        ptx.dependency_launch()
        if team == 1:
            ptx.nanosleep(Int32(STAGGER))

    def task_of(self, p, n, team):
        """Number n of the team's (chunk, head) pairs; beyond all of them where its CTA has left before."""
        worker, workers = self.worker(team)
        task = n * workers + worker
        if const_expr(self.overlap):
            block, _, _ = cute.arch.block_idx()
            later = p.rounds * workers + ((n - p.rounds) * TEAMS + team) * p.stay + block
            later = ptx.less_b32(block, p.stay, later, p.slots * p.heads)
            task = ptx.less_b32(n, p.rounds, task, later)
        return task

    def next_task(self, p, n):
        """The one after number n."""
        if const_expr(self.overlap):
            return self.task_of(p, n + 1, self.team())
        _, workers = self.worker(self.team())
        return ptx.lds_b32(p.plan(n) + TASK) + workers

    @cute.jit
    def place_of(self, p, task, seq_len, heads):
        """(sequence, head, slot) of a (chunk, head) pair of the overlapped kernel; sequence -1: there are not so many."""
        base, length = Int32(0), seq_len
        if const_expr(self.cu_dtype is not None):  # one sequence, which may not fill the slots: its chunks alone are counted
            _, length, base = sequences.sequence(Int32(0), p.cu_seqlens, seq_len, LOG2_CHUNK, self.cu_dtype)
        chunks = (length + (CHUNK - 1)) >> LOG2_CHUNK
        chains = p.num_seqs * heads
        seq, head, slot = Int32(-1), Int32(0), Int32(0)
        if task < chains * chunks:
            chain, chunk = groups.place(task, chains, p.at_once, chunks, cutlass.min)
            seq = chain // heads
            head = chain - seq * heads
            slot = base + seq * chunks + chunk
        return seq, head, slot

    # ---- flags of the overlapped kernel

    @cute.jit
    def clear_own_flags(self, p):
        """Clear the flags of the records that this team will write. All do so before the chain may start."""
        thread = ptx.thread_index()
        n, team = thread & (TEAM - 1), thread // TEAM  # not by self.team(): lanes leave the loop one by one
        task = self.task_of(p, n, team)
        while task < p.slots * p.heads:
            seq, head, slot = self.place_of(p, task, p.seq_len, p.heads)
            if seq >= 0:
                clear_flags(p.workspace, p.heads, p.slots, head, slot)
            n += TEAM
            task = self.task_of(p, n, team)
        ptx.fence_gpu()

    @cute.jit
    def release(self, p, n):
        """By the thread that stores: the record of the team's chunk before number n is written."""
        ptx.bulk_wait()
        if n > 0:
            head, slot = ptx.lds_v2_b32(p.plan(n - 1) + HEAD)
            ptx.fence_proxy_async_global()
            ptx.stg_release_b32(flag_address(p.workspace, p.heads, p.slots, head, slot) + READY_AT, Int32(1))
