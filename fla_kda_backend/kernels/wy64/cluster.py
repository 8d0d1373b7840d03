"""The two value halves of a (sequence, head) as a cluster of two CTAs that bring once what both need; see chain/kernel.py.

Both halves need W, Q, K_end, A and the decay of a record; each needs a U of its own. Each CTA's loaders copy one half of
the bytes of each shared image, and the copy engine writes them into both CTAs, at the same address (multicast). Each CTA
copies its own U and its own half of an initial state.

Same steps. The two CTAs have, turn by turn, the two value halves of one (sequence, head) and the same chunks: the grid, the
number of tasks and, in the replay, the number of spine CTAs are even, so tasks 2i and 2i + 1 are dealt to CTAs 2j and
2j + 1, or backwards to 2j + 1 and 2j. How many stages an item takes, and how many bytes each stage, depends on sequence,
head, chunks and link only. So use n of a stage is the same (item, link), or the same initial state, in both CTAs.

    barrier of a stage   phase n completes with
    full, in each CTA    the arrival of its own loader, which expects the bytes of use n: its U, its own and the other
                         CTA's halves of the shared images. The other CTA's bytes may come before the arrival; they count.
    empty, in each CTA   2 * (chain warps of a CTA) arrivals: one of each chain warp of both CTAs, when it has read use n.

Nothing is written into a stage that is still read: a loader copies for use n + 1 only after phase n of its own `empty`,
which says that both CTAs have read use n.

No barrier gets ahead of itself. For phase n + 1 of a `full`, bytes come only after the issuing CTA's `empty` has completed
phase n, so after this CTA's warps have seen phase n of that `full`. Whenever an `empty` completes phase n, all warps of both
CTAs have read use n, in whatever order their arrivals come. For suppose that one warp had not: it would have arrived at most
n times, so of the 2 * (chain warps) * (n + 1) arrivals another warp would have made at least n + 2. That warp would have
read use n + 1, which its CTA's loader issued after that CTA's `empty` had completed phase n: at an earlier time, and with
all warps having read use n.

No deadlock. Let n be the first use, in the order in which the chain warps of a CTA take stages of both rings, that some
chain warp of the cluster waits for in vain. All earlier uses are complete in both CTAs, and chain warps free a use at the
latest after they have seen the next one of the ring; with 3 stages (chain ring) and 2 (output ring) or more, the use that n
replaces is freed in both CTAs. So both CTAs' loaders issue n: they go through the uses of their ring in order, and what
else they wait for, prepare's grid or its flags, comes by itself. What else chain warps wait for does not depend on a
cluster that starts later: the writers of O, the publisher of checkpoints and, in the replay, the spine's flags.

Begin and end. A CTA's arrival at the first cluster barrier follows the initialisation of its mbarriers, and nothing remote
is done before that barrier has been passed. At the end all threads of the cluster meet again. When the chain warps come
there, all phases of every `full` have completed, so all bytes have arrived, and their own arrivals in the other CTA are
ordered before the barrier. So no CTA exits while something may still come into it.

Order. What the arrivals hand over is the permission to write, not data. What a stage held has been read by then: by tensor
cores whose products the warp has waited for, and by loads of shared memory whose results the warp has used, or behind which it
has fenced. That they stand before the arrival is not enough: it passes by loads that wait for the memory pipe, see
docs/lab/once_other_bits.md. Whether a use stands before an arrival ptxas decides; tests/outstanding.py looks.
So the arrivals need no release at cluster scope, which would have each link wait for the warp's stores to global memory.
Data come through `full` only, from the copy engine to the waiting thread.
"""

import cutlass.cute as cute
from cutlass import Int32, const_expr

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.contract import CLUSTER_CTAS as CTAS

BOTH = (1 << CTAS) - 1  # multicast mask


def whole_clusters(ctas):
    """The largest number up to `ctas` that makes whole clusters."""
    return ctas - ctas % CTAS


class Cluster:
    """What a CTA does together with the other CTA of its cluster.

    Args:
        readers: warps of a CTA that read a stage and free it.
        evict_first: records are read for the last time here, and are the first to leave the L2 then.
    """

    def __init__(self, readers, evict_first):
        self.arrivals_to_free = readers * CTAS  # arrivals that complete a phase of `empty`
        self.evict_first = evict_first

    def cluster_arrive(self):
        """Tell the other CTA that this one's barriers are initialised; after the thread that did it has fenced them."""
        cute.arch.sync_warp()
        ptx.cluster_arrive_relaxed()

    def cluster_wait(self):
        """Barrier of this CTA's threads; from then on the other CTA's barriers may be used."""
        cute.arch.sync_threads()
        ptx.cluster_wait()

    def cluster_exit(self):
        """Wait until the other CTA has done with this one."""
        cute.arch.sync_warp()
        ptx.cluster_arrive()
        ptx.cluster_wait()

    @cute.jit
    def free(self, empty):
        """Say in both CTAs that a chain warp has read a stage; `empty` is the stage's mbarrier. By one lane of the warp."""
        cute.arch.mbarrier_arrive(empty)
        ptx.mbarrier_arrive_remote(empty.toint(), ptx.cluster_rank() ^ 1)

    @cute.jit
    def fetch(self, target, source, size, full):
        """Bulk copy of what both value halves need, by one lane: `size` bytes, a multiple of 32, from global memory at
        `source` to shared memory at `target` of both CTAs. They complete on the mbarrier at address `full`."""
        share = size >> 1
        at = share * ptx.cluster_rank()
        if const_expr(self.evict_first):
            ptx.bulk_load_multicast_once(target + at, source + at, share, full, Int32(BOTH))
        else:
            ptx.bulk_load_multicast(target + at, source + at, share, full, Int32(BOTH))

    @cute.jit
    def fetch_own(self, target, source, size, full):
        """The same, of what this CTA's value half alone needs."""
        if const_expr(self.evict_first):
            ptx.bulk_load_once(target, source, size, full)
        else:
            ptx.bulk_load(target, source, size, full)
