"""The reverse chain: gradients of the states of a sequence, from its last chunk to its first, on WGMMA (SM90).

A task is (sequence, head, value half) as in ../../chain/kernel.py, and a link is the step over one chunk. With dS' [128 keys,
64 values], the gradient of the state after the chunk, kept as dS'^T:

    dV' = A^T dO             tensor core: A = dO^T, from registers; B = A; accumulator `acc_v`; during the link before
    dV' += K_end dS'         tensor core: A = dS'^T in bf16, from registers; B = K_end; half of the keys during the link before
    dS  = diag(decay) dS'    CUDA cores: a column scale of the fp32 accumulators `acc_s`, while the products above run
    dS += Q^T dO             tensor core: the same A; B = Q; while dV' is rounded
    dS -= W^T dV'            tensor core: A = dV'^T in bf16, from registers; B = -W

dS' and dV' as rounded go to the local record of the chunk. The gradient stays fp32 for the whole sequence. Without l2norm, Q
and A are free of the scale; then everything in the chain is divided by it.

Layout: that of the forward chain. -W and K_end have changed places: the one has tokens as depth here, the other keys.
dO lies in shared memory by tokens, as swizzled rows of 64 values, of which rows past the end of the sequence are zeros; it is
transposed on its way into registers. Products would read it from there three times, and shared memory is busy as it is.

Warps of a CTA:

    0 to 3   chain warps: the links (links.py)
    4        loads both rings, {K_end, A, decay} and {W, Q}, but for d_out (loaders.py)
    5, 6     load d_out, into the stages of the first ring (loaders.py)
    7        copies images of dS and dV' to the local records (writer.py)

The cluster's protocol is that of ../../cluster.py. d_out adds to it, per stage of the first ring, one arrival at `full` that a
warp of the same CTA makes: for use n + 1 after it has seen phase n of `empty`, as the loader. So no barrier gets ahead of
itself. A warp has brought one use of d_out before it waits for the stage of another, so every use comes once its stage is free.
A chain warp frees a use of either ring before it waits for the next but one.

The images of dV' and dS, each half a dS, go out by way of a ring. A link takes up to three of its four stages in turn.
The writer frees each when it has begun to copy the next one, which at that time waits for nothing but chain warps.

Launch. The reverse chain needs prepare's records and nothing of the chain of states, beside which it runs: a CTA of the latter
lets it start only after having waited for prepare. So records are read without a wait. But the local gradients come after this
grid alone, so every CTA waits for the chain of states before it ends. Where they run beside both chains, each CTA lets them
start as soon as its cluster is there; see ../launch.py.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fla_kda_backend.kernels.wy64.backward.reverse.arguments import Cta, ReverseArguments
from fla_kda_backend.kernels.wy64.backward.reverse.links import ChainWarps
from fla_kda_backend.kernels.wy64.backward.reverse.loaders import OutputGradientLoader, RecordLoader
from fla_kda_backend.kernels.wy64.backward.reverse.shared import SMEM_BYTES, Shared
from fla_kda_backend.kernels.wy64.backward.reverse.writer import Writer
from fla_kda_backend.kernels.wy64.cluster import CTAS, Cluster, whole_clusters
from fla_kda_backend.kernels.wy64.tasks import Tasks
from fla_kda_backend.kernels.wy64.workspace import Workspace


class ReverseChain:
    """dS and dV' of all chunks from the 64-token records; see the module's docstring.

    The two value halves of a head are a cluster, see cluster.py.

    Args:
        variant: its cu_seqlens, state_v_first and l2norm matter.
        schedule: see ../contract.py.
    """

    CHAIN_WARPS = 4  # from warp 0 on
    RECORD_LOADER, WRITER = 4, 7
    D_OUT_LOADERS = (5, 6)
    THREADS = 256  # 255 registers per thread
    smem_bytes = SMEM_BYTES

    def __init__(self, variant, schedule):
        self.variant, self.schedule = variant, schedule
        self.max_ctas = whole_clusters(schedule.max_ctas)  # CTAs to spread the tasks over
        assert len(self.D_OUT_LOADERS) == OutputGradientLoader.WARPS

    @cute.jit
    def __call__(self, a, stream):
        """Launch with the Arguments of the family's contract."""
        self.kernel(ReverseArguments.of(a)).launch(
            grid=[cutlass.min(a.num_seqs * a.heads * 2, Int32(self.max_ctas)), 1, 1],
            block=[self.THREADS, 1, 1],
            cluster=[CTAS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, args: ReverseArguments):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        shared = Shared.allocate()
        workspace = Workspace(args.workspace, args.heads, args.slot_begin, args.slot_end)
        tasks = Tasks(self.variant, self.schedule, args, shared.order)
        cluster = Cluster(self.CHAIN_WARPS, evict_first=False)  # the chain of states reads the same records
        cta = Cta(self.variant, self.schedule, args, workspace, shared, tasks, cluster)

        shared.init_barriers(tid, self.CHAIN_WARPS, cluster.arrivals_to_free)
        cluster.cluster_arrive()
        shared.clear_above_diagonal(tid)
        tasks.sort(tid, cute.recast_ptr(shared.images, dtype=Int32))
        cluster.cluster_wait()
        if warp == self.RECORD_LOADER:
            RecordLoader(cta).run()
        elif warp == self.D_OUT_LOADERS[0] or warp == self.D_OUT_LOADERS[1]:
            OutputGradientLoader(cta, warp - self.D_OUT_LOADERS[0]).run()
        elif warp == self.WRITER:
            Writer(cta).run()
        elif warp < self.CHAIN_WARPS:
            ChainWarps(cta, tid, warp).run()
        cluster.cluster_exit()
