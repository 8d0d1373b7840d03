"""The recurrence of the 64-token WY form on WGMMA, with the state in registers (SM90).

A task is (sequence, head, value half); a CTA works through its tasks one after the other. A link is the step over one
chunk of 64 tokens. With the images that the prepare kernel left in the chunk's record (`S` [128 keys, 64 values] is kept as
S^T):

    V' = U - W S          tensor core: A = S^T in bf16, from registers; B = -W; accumulator `acc_v` starts at U
    O  = Q S              tensor core: the same A; B = Q; accumulator `acc_o`
    S  = diag(decay) S    CUDA cores: a column scale of the fp32 accumulators `acc_s`, while the products above run
    S += K_end^T V'       tensor core: A = V'^T in bf16, from registers; B = K_end; accumulators `acc_s`
    O += A V'             tensor core: the same A; B = A; written one chunk later, under the next products

Where every task begins with a state zero, its first link is V' = U, S = K_end^T U, O = A U, and neither W nor Q of that
chunk is read.

Rounding: the products take bf16 operands and accumulate in fp32. S and V' are rounded to bf16 for use as operands, O
once on its way out. The state stays fp32 for the whole sequence.

Layout: one warpgroup holds the 64 value rows of S^T. An accumulator of a 64 x N product and the A operand of a
product over those N columns have the same order in registers (8 values per 16 columns), so operands are made by
rounding alone and no warp waits for another on the chain. B operands are the swizzled images of the record, brought in
by one-dimensional bulk copies. A comes without its blocks above the diagonal; zeros stand there from the start. U and
the decay come in accumulator order.

Warps of a CTA:

    0 to 3   chain warps: the links (links.py)
    4        loads the chain ring {W, U, decay} (loaders.py)
    5, 6     write O (writer.py)
    7        loads the output ring {Q, K_end, A} (loaders.py)

There are two rings because W is needed half a chunk before K_end and freed as much earlier. An initial state takes a stage
of the output ring before the sequence's first chunk, so that it comes while the CTA's last task still runs.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fla_kda_backend.kernels.wy64 import groups
from fla_kda_backend.kernels.wy64.chain.arguments import ChainArguments, Cta
from fla_kda_backend.kernels.wy64.chain.links import ChainWarps
from fla_kda_backend.kernels.wy64.chain.loaders import ChainLoader, OutputLoader
from fla_kda_backend.kernels.wy64.chain.shared import A_COLUMN, QK_BYTES, SMEM_BYTES, Shared
from fla_kda_backend.kernels.wy64.chain.writer import Writers
from fla_kda_backend.kernels.wy64.cluster import CTAS, Cluster, whole_clusters
from fla_kda_backend.kernels.wy64.states import image_bytes
from fla_kda_backend.kernels.wy64.tasks import Tasks
from fla_kda_backend.kernels.wy64.workspace import Workspace


class ChainWY64:
    """State recurrence and outputs from the 64-token records; see the module's docstring.

    The two value halves of a head are a cluster, see cluster.py.

    Args:
        variant: its cu_seqlens, initial_state, final_state, intermediate_states, state_v_first and l2norm matter: without
            l2norm, O is multiplied by `scale`, which Q and A are then free of.
        schedule: see contract.py.
    """

    CHAIN_WARPS = 4  # from warp 0 on
    CHAIN_LOADER, OUTPUT_LOADER = 4, 7
    O_WRITERS = (5, 6)
    THREADS = 256  # 255 registers per thread; between 288 and 384 threads ptxas would cap them at 168

    tasks, chain_warps, output_loader, writers = Tasks, ChainWarps, OutputLoader, Writers  # the replay has others
    link_time = 110  # beside an overlapped prepare, see launch.py; 24 and 40 heads on an H200 want it, others do not mind
    smem_bytes = SMEM_BYTES

    def __init__(self, variant, schedule):
        self.variant, self.schedule = variant, schedule
        self.max_ctas = whole_clusters(schedule.max_ctas)  # CTAs to spread the tasks over
        # the image of an initial state does not reach the zeros of A
        assert image_bytes(variant.initial_state, variant.state_v_first) <= QK_BYTES + A_COLUMN

    def chains_per_group(self, chains):
        """How many of so many chains, of two tasks each, run at once beside an overlapped prepare; see groups.py."""
        return groups.chains_per_group(chains, self.max_ctas, cutlass.max)

    def grid(self, tasks):
        """CTAs for so many tasks."""
        return 2 * self.chains_per_group(tasks // 2) if self.schedule.overlap else cutlass.min(tasks, Int32(self.max_ctas))

    @cute.jit
    def __call__(self, a, stream):
        """Launch with the Arguments of the family's contract."""
        self.kernel(ChainArguments.of(a)).launch(
            grid=[self.grid(a.num_seqs * a.heads * 2), 1, 1],
            block=[self.THREADS, 1, 1],
            cluster=[CTAS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, args: ChainArguments):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        shared = Shared.allocate()
        workspace = Workspace(args.workspace, args.heads, args.slot_begin, args.slot_end)
        tasks = self.tasks(self.variant, self.schedule, args, shared.order)
        # The spine and the replay read records twice.
        cluster = Cluster(self.CHAIN_WARPS, evict_first=not self.schedule.replay)
        cta = Cta(self.variant, self.schedule, args, workspace, shared, tasks, cluster)

        shared.init_barriers(tid, self.CHAIN_WARPS, len(self.O_WRITERS), cluster.arrivals_to_free)
        cluster.cluster_arrive()
        shared.clear_above_diagonal(tid)
        tasks.sort(tid, cute.recast_ptr(shared.o_image, dtype=Int32))
        cluster.cluster_wait()
        if warp == self.CHAIN_LOADER:
            ChainLoader(cta).run()
        elif warp == self.OUTPUT_LOADER:
            self.output_loader(cta).run()
        elif warp == self.O_WRITERS[0] or warp == self.O_WRITERS[1]:
            self.writers(cta, tid - 32 * self.O_WRITERS[0]).run()
        elif warp < self.CHAIN_WARPS:
            self.chain_warps(cta, tid, warp).run()
        cluster.cluster_exit()
