"""The threads of prepare: teams of 256, two on an SM, that each prepare one chunk at a time.

Where prepare runs before the chain, a team is a CTA. Where the chain runs beside it, both teams of an SM are one CTA,
because only then does an SM come free as a whole.
"""

from enum import IntEnum

import cutlass.cute as cute
from cutlass import const_expr

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.prepare.memory import TEAM_THREADS, Header, ThreadCoord

TEAMS_PER_SM = 2
BARRIERS_PER_TEAM = 8


class TeamBarrier(IntEnum):
    """Named barriers of a team, of BARRIERS_PER_TEAM."""

    ALL = 0  # all threads of the team
    BAND_1 = 1  # the two warps of band 1, and so on; band 0 has no blocks below the diagonal
    BAND_2 = 2
    BAND_3 = 3
    V_TAKEN = 4  # v and K_start are in registers

    @classmethod
    def of_band(cls, band):
        return (None, cls.BAND_1, cls.BAND_2, cls.BAND_3)[band]


class Teams:
    """short_of_registers: whether values that cost nothing to make are made again and again, to keep them out of registers."""

    def __init__(self, overlap, short_of_registers):
        self.per_cta = TEAMS_PER_SM if overlap else 1
        self.ctas_per_sm = TEAMS_PER_SM // self.per_cta
        self.threads_per_cta = self.per_cta * TEAM_THREADS
        self.short_of_registers = short_of_registers
        assert self.per_cta * BARRIERS_PER_TEAM <= 16 and len(TeamBarrier) <= BARRIERS_PER_TEAM

    def team(self):
        """Number of this thread's team in its CTA."""
        if const_expr(self.per_cta == 1):
            return 0
        return cute.arch.make_warp_uniform(ptx.thread_index() // TEAM_THREADS)

    def worker(self, team):
        """(number of the team in the launch, number of teams)."""
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        return team * grid + block, self.per_cta * grid

    def thread(self):
        """Number of the thread in its team, read again."""
        thread = ptx.thread_index()
        return thread & (TEAM_THREADS - 1) if self.per_cta > 1 else thread

    def warp(self):
        return cute.arch.make_warp_uniform(self.thread() >> 5)

    def barrier(self, which):
        """Id of a TeamBarrier of this thread's team."""
        return BARRIERS_PER_TEAM * self.team() + which

    def sync(self):
        """Barrier of the team."""
        cute.arch.barrier(barrier_id=self.barrier(TeamBarrier.ALL), number_of_threads=TEAM_THREADS)

    # ---- fewer registers
    def rematerialize(self, memory, x):
        """x. Where registers are short, plus a 0 from shared memory: what is computed from the result, ptxas cannot compute
        before this point, so it keeps no registers over the loop."""
        return x + ptx.lds_b32(memory.header + Header.ZERO) if self.short_of_registers else x

    def coord(self, memory, n, begun=True):
        """The thread's coordinates, made again, so that what depends on them takes no registers over the loop. begun: the
        team's first chunk has got this far, so its number may be read from the header."""
        if self.short_of_registers and begun:
            n = ptx.lds_b32(memory.header + Header.CHUNK_NUMBER)
        thread = self.rematerialize(memory, self.thread())
        warp = cute.arch.make_warp_uniform(thread >> 5)
        return ThreadCoord(n=n, warp=warp, band=warp & 3, half=warp >> 2, lane=thread & 31)
