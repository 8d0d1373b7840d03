"""The two halves of a (sequence, head) as a cluster of two CTAs that bring what both need once; see chain_wy64.py.

Of a record a half needs W, Q, K_end, A and the decay as the other half does, and U alone. Each CTA's loaders copy one half
of the bytes of each shared image, and the copy engine writes them into both CTAs, at the same places (multicast); U and
initial states are each CTA's own copies.

Same steps. The two CTAs have, turn by turn, the two halves of one (sequence, head) and one stretch: the grid, the number
of tasks and, in the replay, that of the spine's CTAs are even, so tasks 2i and 2i + 1 are dealt to CTAs 2j and 2j + 1, or
backwards to 2j + 1 and 2j. All that decides how many stages an item takes, and how many bytes each, depends on sequence,
head, stretch and link only. So use n of a stage is the same (item, link) or the same initial state in both CTAs.

    barrier of a stage   phase n completes with
    full, in each CTA    the arrival of its own loader, which expects the bytes of use n: its U, its own and the other
                         CTA's halves of the shared images. The other CTA's bytes may come before the arrival; they count.
    empty, in each CTA   2 * CHAIN_WARPS arrivals: of each chain warp of both CTAs, one when use n has been read.

Nothing is written into a stage that is still read: a loader copies for use n + 1 only after phase n of its own `empty`,
which says that both CTAs have read use n. No barrier gets ahead of itself: for phase n + 1 of a `full`, bytes come only
after the issuing CTA's `empty` has completed phase n, so after this CTA's warps have seen phase n of that `full`. Whenever an
`empty` completes phase n, all warps of both CTAs have read use n, in whatever order their arrivals come: if one had not, it
would have arrived at most n times, so of the 2 * CHAIN_WARPS * (n + 1) arrivals another warp would have made n + 2 and have
read use n + 1, which its CTA's loader issued after that CTA's `empty` had completed phase n: earlier, by all warps.

No deadlock: let n be the first use, in the order in which the chain warps of a CTA take stages of both rings, that some
chain warp of the cluster waits for in vain. All earlier ones are complete in both CTAs, and chain warps free a use after they
have seen the next one of the ring at the latest; with 3 and 2 stages or more, the use that n replaces is freed in both. So
both CTAs' loaders issue n: they go through the uses of their ring in order, and what else they wait for, prepare's grid or
its flags, comes by itself. What else chain warps wait for, writers of O and checkpoints and in the replay the spine's
flags, depends on no cluster that starts later.

Begin and end: a CTA's arrival at the first cluster barrier follows the initialisation of its mbarriers, and nothing remote
is done before that barrier has been passed. At the end all threads meet again. When the chain warps come there, all phases
of every `full` have completed, so all bytes have arrived, and their own arrivals in the other CTA are ordered before the
barrier. So no CTA exits while something may still come into it.

Order: what the arrivals hand over is the permission to write, no data, and what a stage held has been read by then: by
tensor cores whose products the warp has waited for, and by loads of shared memory, which are executed in order before the
arrival. So they need no release at cluster scope, which would have each link wait for the warp's stores to global memory.
Data come through `full` only, from the copy engine to the waiting thread.
"""

import cutlass.cute as cute
from cutlass import Int32, const_expr

from fla_kda_backend.kernels import ptx

CTAS = 2
BOTH = (1 << CTAS) - 1  # multicast mask


def whole_clusters(ctas):
    """So many of `ctas` that all are in clusters."""
    if ctas < CTAS:
        raise ValueError(f"needs at least {CTAS} CTAs at once, got max_ctas={ctas}")
    return ctas - ctas % CTAS


class ChainPair:
    """A chain kernel inherits it. evict_first: whether records are read for the last time: the first to leave the L2 then."""

    def readers(self):
        """Arrivals that free a stage."""
        return self.CHAIN_WARPS * CTAS

    def greet(self):
        """Tell the other CTA that this one's barriers are initialised; after the thread that did it has fenced them."""
        cute.arch.sync_warp()
        ptx.cluster_arrive_relaxed()

    def meet(self):
        """Barrier of this CTA's threads; from then on the other's barriers may be used."""
        cute.arch.sync_threads()
        ptx.cluster_wait()

    def part(self):
        """No CTA exits before the other has done with it."""
        cute.arch.sync_warp()
        ptx.cluster_arrive()
        ptx.cluster_wait()

    @cute.jit
    def free(self, empty):
        """A chain warp has read a stage; by one of its lanes."""
        cute.arch.mbarrier_arrive(empty)
        ptx.mbarrier_arrive_remote(empty.toint(), ptx.cluster_rank() ^ 1)

    @cute.jit
    def fetch(self, target, source, size, full):
        """Bulk copy of what both halves need: `size` bytes, a multiple of 32, complete at `full` (address). By one lane."""
        half = size >> 1
        at = half * ptx.cluster_rank()
        if const_expr(self.evict_first):
            ptx.bulk_load_multicast_once(target + at, source + at, half, full, Int32(BOTH))
        else:
            ptx.bulk_load_multicast(target + at, source + at, half, full, Int32(BOTH))

    @cute.jit
    def fetch_own(self, target, source, size, full):
        """The same, of what one half needs."""
        if const_expr(self.evict_first):
            ptx.bulk_load_once(target, source, size, full)
        else:
            ptx.bulk_load(target, source, size, full)
