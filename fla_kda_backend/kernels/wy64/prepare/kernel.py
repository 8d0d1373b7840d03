"""Prepare kernel for chunks of 64 tokens in WY form: everything of KDA that does not depend on the state.

A chunk's tokens are four bands of 16. With i, j tokens, b, c bands, G the sum of log2 decays from the chunk's start, l the sum
from the start of the token's own band and t[b] the sum over band b:

    y        = gate_scale * sigmoid(exp(A_log) * (g + dt_bias))      gate "bounded"
               -log2(e) * exp(A_log) * softplus(g + dt_bias)         gate "softplus"
               log2(e) * g                                           gate "given"; 0 past the end
    l        = running sum of y in a band                            tensor cores: a triangle of ones; fp32
    q^, k^   = x * rsqrt(sum x^2 + 1e-6)                             sum: diagonal of x x^T on the tensor cores; fp32
    q_band   = bf16(scale * q^ * 2^l)  k_band = bf16(k^ * 2^l)       CUDA cores; operands of A and M
    k_inv    = bf16(k^ * 2^-l)       k_next = bf16(k~ * 2^(t[b]-l))  the same; k_inv see below
    Q        = bf16(scale * q^ * 2^G)                                image in place of q
    K_end    = bf16(k~ * 2^(G_63 - G))                               image in place of k; k~ = bf16(k^)
    K_start  = bf16(-k^ * 2^G)                                       image in place of g
    A_ij     = bf16(scale * q_i k_j 2^(G_i - G_j)), j <= i           tensor cores, fp32 accumulators; zeros above
    M_ij     = beta_i * k_i k_j 2^(G_i - G_j), j < i                 tensor cores, fp32
    T_bb     = (I + M_bb)^-1                                         16x16 blocks: fp32 substitution, one lane per column
    N_bc     = T_bb M_bc, c < b                                      tensor cores, T and M in fp16 lead + rest
    U_b      = bf16(T_bb diag(beta) V_b - sum over c < b of N_bc U_c)        tensor cores, T diag(beta) and N in bf16
    -W_b     = bf16(T_bb diag(beta) K_start_b - sum over c < b of N_bc (-W_c))   lead + rest; as U^T, W^T
    d        = 2^G_63                                                fp32

U and W solve (I + M) X = diag(beta) [V, -K_start] block by block. The U_c and W_c that are taken off are the rounded ones of
the record. The bands below thereby make up for the rounding of a band: with correlated keys the errors of the chain are smaller
than with U and W each rounded from a product with (I + M)^-1. Where a key repeats and decay is slow, the V' of neighbouring
tokens nearly cancel in the state. So K_end of these tokens is made of one rounded key, which a factor near 1 does not change,
and not of several different roundings of it.

Every factor that joins two bands is at most 1, whatever the gate: blocks of neighbouring bands take k_next, blocks further
apart k_next times the decay of the bands between. The diagonal blocks of a bounded gate and keys of norm 1 take 2^l and 2^-l,
with y in one fp16 term (images.py): over 16 tokens 2^-l is at most 2^115.4 with lower_bound >= -5. All other variants
(`Variant.needs_levels`, levels.py) keep y in two fp16 terms down to -511 (2^-160 is 0 as it is). For them t[b] - l is a sum
of its own, and a diagonal block is halved down to single tokens. With m the boundary between two neighbouring blocks of
L = 8, 4, 2, 1 tokens, i in the upper and j in the lower one,

    A_ij = bf16(scale * q_i 2^(G_i - G_m)) . bf16(k_j 2^(G_m - G_j)), M_ij likewise;  A_ii = scale * q_i . k_i

Each exponent is a sum of y over tokens on one side of m, made on the tensor cores, and no difference of sums. So nothing
overflows, an underflow is a true one, and no later token reaches an earlier output.

Where q and k are not normalised, the operands of A and M are fp16 instead of bf16: three more bits, as many as tf32 has, in
which FLA's kernels multiply then. (FLA multiplies normalised q and k in bf16, too.) Each row of q and of k is multiplied by a
power of two first, so that fp16 holds q and k of any size; the accumulators are divided by the powers of their row and column
(operands.py). The images are made from the same fp32 values, without these factors. A and Q are then made without `scale`; the
chain multiplies O by it. So where a channel does not decay, Q has the very bits of q.

Rows past the sequence's end are zeros with y = beta = 0: they vanish from every product, and d is the decay of the real rows.

Threads: teams of 256, two on an SM, work through the (chunk, head) pairs (teams.py, assignment.py). In a team, warp w has band
w % 4 and channel half w // 4. It holds its 16 rows x 64 channels in m16n8k16 A-fragment order from the tiles to the products. A
and M are sums over both halves, which the two warps of a band swap (blocks.py). For U and W a warp computes 16 channels of each
(elimination.py).

Tiles: four of 16 KB hold g, q, k and v of a chunk (tiles.py), and the next chunk's rows move in as soon as one is free. Warp 0
loads g and q of chunk n + 1 into the tiles of q and k once the images there are stored, k into the tile of v once v is in
registers, v into the tile of g once W is stored. It does so while it has no blocks to compute, and finds out then which chunk
n + 1 is. Where g is fp32 and takes two tiles, v comes into the second one once y is in registers, and K_start stands in the
first; g of chunk n + 1 goes where q and k were, its q where v was, its k where W was. Several heads may share a head of q, k.

Steps of a chunk (a line: barrier of the team):

    step   all warps                             warp 0                            half 1              bands 1 to 3
    1      y and its sums, from g
    2      sums of squares of q and k
    ------------------------------------------------------------------------------------------------------------------
    3      decays that join bands;               load v
           Q, K_end, K_start, k_next,
           sums of the diagonal blocks
    ------------------------------------------------------------------------------------------------------------------
    4      wait for v                            store Q, K_end                    A and T on the      A and N below
                                                 find the next chunk               diagonal            the diagonal
                                                 load its g, q and tables
    ------------------------------------------------------------------------------------------------------------------
    5      v and K_start into registers          store A
           U, W                                  load the next k
    ------------------------------------------------------------------------------------------------------------------
                                                 store W

The record that prepare leaves per (head, slot) is described in record.py. For the backward pass it also leaves the T_bb and the
N_bc, in the chunk's local record (backward/record.py): warp 0 stores them beside A in step 5, and waits at the end of the step
until the copy engine has read them, since the next chunk's step 1 writes where N stood.
"""

import dataclasses
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from fla_kda_backend.kernels import ptx, sequences
from fla_kda_backend.kernels.wy64.backward.record import N_AT, N_BYTES, T_AT, T_BYTES
from fla_kda_backend.kernels.wy64.backward.workspace import local_record
from fla_kda_backend.kernels.wy64.cluster import CTAS
from fla_kda_backend.kernels.wy64.prepare.assignment import Assignment
from fla_kda_backend.kernels.wy64.prepare.blocks import Blocks
from fla_kda_backend.kernels.wy64.prepare.decays import Decays
from fla_kda_backend.kernels.wy64.prepare.direct import Direct
from fla_kda_backend.kernels.wy64.prepare.elimination import eliminate
from fla_kda_backend.kernels.wy64.prepare.images import Images
from fla_kda_backend.kernels.wy64.prepare.levels import Levels
from fla_kda_backend.kernels.wy64.prepare.loads import Loads
from fla_kda_backend.kernels.wy64.prepare.memory import (
    DIAGONAL_BYTES,
    HEADER_BYTES,
    TEAM_STRIDE,
    TEAM_THREADS,
    TILE_BYTES,
    ChunkInfo,
    DiagonalPart,
    Header,
    Table,
    TeamMemory,
    Tensor,
)
from fla_kda_backend.kernels.wy64.prepare.operands import Operands
from fla_kda_backend.kernels.wy64.prepare.teams import TeamBarrier, Teams
from fla_kda_backend.kernels.wy64.prepare.tiles import Tiles, block_offset, zero_past_end
from fla_kda_backend.kernels.wy64.record import (
    A_AT,
    A_BYTES,
    BANDS,
    CHUNK,
    K_END_AT,
    Q_AT,
    RECORD_BYTES,
    U_AT,
    U_BYTES,
    W_AT,
)


class PrepareArguments(NamedTuple):
    """The kernel's parameters, in their order. Addresses and strides are Int64, strides in elements."""

    g_map: cute.CopyAtom  # of [tokens, H, 128], before the gate
    q_map: cute.CopyAtom  # of [tokens, H / heads_per_qk_head, 128] bf16
    k_map: cute.CopyAtom
    v_map: cute.CopyAtom  # of [tokens, H, 128] bf16
    g_coordinates: cute.Tensor
    v_coordinates: cute.Tensor  # and of q and k
    beta: Int64  # [tokens, H], before the sigmoid
    beta_token: Int64
    beta_head: Int64
    a_log: Int64  # [H]
    dt_bias: Int64  # [H, 128], 16-byte aligned
    final_state: Int64  # [num_seqs, H] states
    out: Int64  # [tokens, H, 128] bf16; rows outside every packed sequence become 0
    cu_seqlens: Int64  # [num_seqs + 1] int32 or int64
    workspace: Int64  # [H, slots, RECORD_BYTES], then the records' flags
    scale: Float32
    gate_scale: Float32  # lower_bound * log2(e)
    seq_len: Int32
    num_seqs: Int32
    heads: Int32  # H
    heads_per_qk_head: Int32
    slot_begin: Int32
    slots: Int32
    rounds: Int32  # as in Distribution, see assignment.py
    staying: Int32
    chains_per_group: Int32

    def map(self, tensor):
        return (self.g_map, self.q_map, self.k_map, self.v_map)[tensor]

    def coordinates(self, tensor):
        return self.g_coordinates if tensor == Tensor.G else self.v_coordinates


class PrepareWY64:
    """The kernel of a Variant under a Schedule. chains_per_group, link_time: how the chain runs beside it, see Assignment; only
    used where the schedule overlaps the two. keeps_inverse: leave T and N in the local records, too; without overlap only."""

    def __init__(self, variant, schedule, chains_per_group=None, link_time=None, keeps_inverse=False):
        self.cu_dtype, self.overlap, self.keeps_inverse = variant.cu_seqlens, schedule.overlap, keeps_inverse
        assert not (keeps_inverse and (schedule.overlap or schedule.direct))
        # the chain needs neither W nor Q of a sequence's first chunk, which are then not written
        self.starts_from_zero = schedule.starts_from_zero(variant)
        # the levels' products take all the registers that there are
        self.teams = Teams(schedule.overlap, short_of_registers=variant.needs_levels)
        self.assignment = Assignment(variant, schedule, self.teams, chains_per_group, link_time)
        self.tiles, self.operands, self.decays = Tiles(variant), Operands(variant), Decays(variant)
        self.loads = Loads(variant, schedule, self.tiles, self.decays.gate)
        if variant.needs_levels:
            self.images = Levels(self.decays, self.operands, self.teams)
        else:
            self.images = Images(self.decays)
        self.blocks = Blocks(self.operands)
        self.direct = Direct(variant, schedule, self.teams, self.tiles)
        self.smem_bytes = self.teams.per_cta * (HEADER_BYTES + TEAM_STRIDE)

    @cute.jit
    def __call__(self, a, stream):
        """Launch over slots [slot_begin, slot_end) and all heads; a: the Arguments of the forward's or the backward's contract.
        Those of the backward have no outputs of the forward."""
        self.has_out = hasattr(a, "out")
        tokens = a.seq_len
        if const_expr(self.cu_dtype is None):
            tokens = a.seq_len * a.num_seqs
        tensor_map = self.tiles.tensor_map
        g_map, g_coordinates = tensor_map(Tensor.G, a.g, a.g_token, a.g_head, tokens, a.heads)
        q_map, _ = tensor_map(Tensor.Q, a.q, a.q_token, a.q_head, tokens, a.qk_heads)
        k_map, _ = tensor_map(Tensor.K, a.k, a.k_token, a.k_head, tokens, a.qk_heads)
        v_map, v_coordinates = tensor_map(Tensor.V, a.v, a.v_token, a.v_head, tokens, a.heads)
        slots = a.slot_end - a.slot_begin
        distribution = self.assignment.distribute(slots * a.heads, a.num_seqs, a.heads)
        self.kernel(
            PrepareArguments(
                g_map=g_map,
                q_map=q_map,
                k_map=k_map,
                v_map=v_map,
                g_coordinates=g_coordinates,
                v_coordinates=v_coordinates,
                beta=a.beta,
                beta_token=a.beta_token,
                beta_head=a.beta_head,
                a_log=a.a_log,
                dt_bias=a.dt_bias,
                final_state=getattr(a, "final_state", Int64(0)),
                out=getattr(a, "out", Int64(0)),
                cu_seqlens=a.cu_seqlens,
                workspace=a.workspace,
                scale=a.scale,
                gate_scale=a.gate_scale,
                seq_len=a.seq_len,
                num_seqs=a.num_seqs,
                heads=a.heads,
                heads_per_qk_head=a.heads // a.qk_heads,
                slot_begin=a.slot_begin,
                slots=slots,
                rounds=distribution.rounds,
                staying=distribution.staying,
                chains_per_group=distribution.chains_per_group,
            )
        ).launch(
            grid=[distribution.grid, 1, 1],
            block=[self.teams.threads_per_cta, 1, 1],
            cluster=[CTAS, 1, 1] if self.overlap else None,  # as the chain's, see launch.py
            stream=stream,
            min_blocks_per_mp=self.teams.ctas_per_sm,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, args: PrepareArguments):
        if const_expr(not self.overlap):
            ptx.dependency_launch()
        team = self.teams.team()
        memory = self.allocate(team)
        warp = self.teams.warp()
        if const_expr(self.cu_dtype is not None and self.has_out):
            self.clear_outside(args)
        if const_expr(self.overlap):
            self.assignment.clear_own_flags(args)
            cute.arch.sync_threads()
            self.assignment.let_chain_start(team)
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(len(Tensor)):
                    cute.arch.mbarrier_init(memory.mbarriers + i, 1)
            cute.arch.mbarrier_init_fence()
            n = Int32(0)
            ptx.sts_v4_b32(memory.header + Header.CHUNK_NUMBER, [n] * 4)
            self.assignment.write_chunk_info(args, memory, n, self.assignment.task(args, n, team), args.num_seqs, n)
            for tensor in (Tensor.G, Tensor.Q, Tensor.K):
                self.loads.load(args, memory, n, tensor)
            self.loads.load_tables(args, memory, n)
        self.teams.sync()
        n = Int32(0)
        rows = memory.info(n, ChunkInfo.ROWS)
        while rows > 0:
            self.chunk(args, memory, n, rows)
            n += 1
            rows = memory.info(n, ChunkInfo.ROWS)
        if const_expr(self.overlap):
            if warp == 0:
                with cute.arch.elect_one():
                    self.assignment.publish_record(args, memory, n)
        else:
            ptx.bulk_wait_read()

    def allocate(self, team):
        """The shared memory of this thread's team: per CTA all headers, then all tiles and tables."""
        teams, allocator = self.teams.per_cta, SmemAllocator()
        mbarriers = allocator.allocate_array(Int64, teams * HEADER_BYTES // 8)
        tiles = allocator.allocate_array(BFloat16, teams * TEAM_STRIDE // 2, byte_alignment=1024)
        if teams > 1:
            mbarriers += team * (HEADER_BYTES // 8)
            tiles += cute.assume(team * (TEAM_STRIDE // 2), divby=512)
        return TeamMemory(mbarriers=mbarriers, tiles=tiles, header=mbarriers.toint(), base=tiles.toint())

    @cute.jit
    def clear_outside(self, args):
        """Zero this team's part of the output rows that no sequence covers."""
        first, end = sequences.span(args.num_seqs, args.cu_seqlens, self.cu_dtype)
        if first > 0 or end < args.seq_len:
            worker, workers = self.teams.worker(self.teams.team())
            thread = ptx.thread_index() & (TEAM_THREADS - 1)
            for task in cutlass.range(worker, args.slots * args.heads, workers, unroll=1):
                slot = task // args.heads
                row, head = (args.slot_begin + slot) * CHUNK, task - slot * args.heads
                sequences.clear_rows(args.out, row, CHUNK, first, end, args.seq_len, head, args.heads, thread, TEAM_THREADS)

    # ---- one chunk
    @cute.jit
    def chunk(self, args, memory, n, rows):
        """Prepare the team's chunk number n. rows: from its first row to the sequence's end."""
        base = memory.base
        parity = n & 1
        coord = self.teams.coord(memory, n, begun=False)
        # steps 1 and 2
        at = block_offset(coord.band, coord.half, coord.lane)
        g_tile, q_tile, k_tile = (self.tiles.address(memory, n, tensor) for tensor in (Tensor.G, Tensor.Q, Tensor.K))
        rows_band = rows - 16 * coord.band
        cute.arch.mbarrier_wait(memory.mbarrier(Tensor.G), parity)
        decays = self.images.sum_decays(base, g_tile, args.gate_scale, rows_band, coord)
        cute.arch.mbarrier_wait(memory.mbarrier(Tensor.Q), parity)
        cute.arch.mbarrier_wait(memory.mbarrier(Tensor.K), parity)
        zero_past_end(q_tile, rows_band, coord)
        zero_past_end(k_tile, rows_band, coord)
        self.images.sum_squares(base, q_tile, k_tile, at, decays, coord)
        if const_expr(self.tiles.wide_gate):
            ptx.fence_proxy_async()  # the reads of g before v, which the copy engine brings into its second tile
        self.teams.sync()
        if coord.warp == 0:
            with cute.arch.elect_one():
                if const_expr(self.overlap):
                    self.assignment.publish_record(args, memory, n)
                else:
                    ptx.bulk_wait_read()  # of W, whose tile becomes v's, and of A
            self.loads.load(args, memory, n, Tensor.V)
        # step 3
        self.decays.write_band_tables(base, self.record(args, memory, n), coord)
        cute.arch.sync_warp()
        coord = self.teams.coord(memory, n)
        at = block_offset(coord.band, coord.half, coord.lane)
        image_at = [self.tiles.address(memory, coord.n, tensor) + at for tensor in (Tensor.G, Tensor.Q, Tensor.K)]
        q_band, k_band, a, m = self.images.write(memory, image_at, decays, args.scale, coord)
        if const_expr(self.teams.short_of_registers):
            coord = self.teams.coord(memory, coord.n)
        self.blocks.share_diagonal(base, a, m, coord)
        ptx.fence_proxy_async()
        self.teams.sync()
        # step 4
        coord = self.teams.coord(memory, coord.n)
        if coord.warp == 0:
            self.store_images_and_load_next(args, memory, coord.n)
        # pinned: the addresses of tiles are computed again
        coord = dataclasses.replace(coord, n=ptx.pin([coord.n])[0])
        base = self.teams.rematerialize(memory, base)
        if coord.half == 1:
            self.blocks.finish_diagonal(base, a, m, memory.beta(coord.n), coord)
        for b in cutlass.range_constexpr(1, BANDS):
            if coord.band == b:
                barrier = self.teams.barrier(TeamBarrier.of_band(b))
                self.blocks.blocks_below(base, b, barrier, memory.beta(coord.n), coord, q_band, k_band)
        cute.arch.mbarrier_wait(memory.mbarrier(Tensor.V), coord.n & 1)
        v_tile = self.tiles.address(memory, coord.n, Tensor.V)
        zero_past_end(v_tile, memory.info(coord.n, ChunkInfo.ROWS) - 16 * coord.band, coord)
        ptx.fence_proxy_async()
        self.teams.sync()
        if coord.warp == 0:
            with cute.arch.elect_one():
                self.store_unless_whole(args, memory, coord.n, A_AT, memory.base + Table.A_IMAGE, A_BYTES)
                if const_expr(self.keeps_inverse):
                    self.store_inverse(args, memory, coord.n)
                ptx.bulk_commit()
        # step 5
        self.solve(args, memory, coord)

    @cute.jit
    def store_images_and_load_next(self, args, memory, n):
        """Q and K_end to the record; find out about the next chunk, and load its g and q into their tiles. By warp 0."""
        with cute.arch.elect_one():
            self.store_unless_first(args, memory, n, Q_AT, self.tiles.address(memory, n, Tensor.Q))
            self.store_unless_whole(args, memory, n, K_END_AT, self.tiles.address(memory, n, Tensor.K), TILE_BYTES)
            ptx.bulk_commit()
        task = self.assignment.next_task(args, memory, n)
        left, behind = ptx.lds_v2_b32(memory.chunk_info(n) + ChunkInfo.SEQUENCES)
        self.assignment.write_chunk_info(args, memory, n + 1, task, left, behind)
        with cute.arch.elect_one():
            ptx.bulk_wait_read()
        self.loads.load(args, memory, n + 1, Tensor.G)
        if const_expr(not self.tiles.wide_gate):
            if const_expr(self.direct.enabled):
                if self.direct.is_whole(memory, n) == 0:  # whose K_end is still needed
                    self.loads.load(args, memory, n + 1, Tensor.Q)
            else:
                self.loads.load(args, memory, n + 1, Tensor.Q)
        self.loads.load_tables(args, memory, n + 1)

    @cute.jit
    def solve(self, args, memory, coord):
        """U and W of the chunk; or, of a whole sequence that prepare computes itself, O and the final state."""
        n, band, half, lane = coord.n, coord.band, coord.half, coord.lane
        row8, upper = lane & 7, (lane >> 3) & 1
        channels = half * (TILE_BYTES // 2) + (row8 + 8 * (lane >> 4)) * 128 + (((2 * band + upper) ^ row8) << 4)
        v_at, w_at = (self.tiles.address(memory, n, tensor) + channels for tensor in (Tensor.V, Tensor.G))
        x = [[ptx.ldmatrix_x4_trans(tile + b * 2048) for tile in (v_at, w_at)] for b in range(BANDS)]
        ptx.fence_proxy_async()  # the reads of v before the next k, which the copy engine brings into its tile
        if coord.warp == 0:
            cute.arch.barrier(barrier_id=self.teams.barrier(TeamBarrier.V_TAKEN), number_of_threads=TEAM_THREADS)
            self.loads.load(args, memory, n + 1, Tensor.Q if self.tiles.wide_gate else Tensor.K)
        else:
            cute.arch.barrier_arrive(barrier_id=self.teams.barrier(TeamBarrier.V_TAKEN), number_of_threads=TEAM_THREADS)
        u_at = self.record(args, memory, n) + Int64(U_AT + half * U_BYTES + (band * 32 + lane) * 16)
        if const_expr(self.direct.enabled):
            if self.direct.is_whole(memory, n) > 0:
                self.direct.results(args, memory, [v[:1] for v in x], w_at, coord)
            else:
                eliminate(memory.base, x, u_at, w_at, lane)
        else:
            eliminate(memory.base, x, u_at, w_at, lane)
        if const_expr(self.keeps_inverse):
            if coord.warp == 0:
                with cute.arch.elect_one():
                    ptx.bulk_wait_read()  # of N, whose place the next chunk's step 1 writes
        ptx.fence_proxy_async()
        self.teams.sync()
        if const_expr(self.direct.enabled):
            if self.direct.is_whole(memory, n) > 0:
                if coord.warp == 0:
                    self.loads.load(args, memory, n + 1, Tensor.Q)
                self.direct.store_out(args, memory, n)
        if coord.warp == 0:
            with cute.arch.elect_one():
                self.store_unless_first(args, memory, n, W_AT, self.tiles.address(memory, n, Tensor.G))
                ptx.bulk_commit()
                if const_expr(self.teams.short_of_registers):
                    ptx.sts_b32(memory.header + Header.CHUNK_NUMBER, n + 1)
            if const_expr(self.tiles.wide_gate):
                with cute.arch.elect_one():
                    ptx.bulk_wait_read()
                self.loads.load(args, memory, n + 1, Tensor.K)

    # ---- the records
    def record(self, args, memory, n):
        """Address of the record of the team's chunk number n."""
        head, slot = ptx.lds_v2_b32(memory.chunk_info(n) + ChunkInfo.HEAD)
        (workspace,) = ptx.pin([args.workspace])  # no sum of it and a constant is kept over the loop
        return workspace + (Int64(head) * Int64(args.slots) + Int64(slot)) * RECORD_BYTES

    @cute.jit
    def store_unless_first(self, args, memory, n, at: cutlass.Constexpr, tile):
        """W or Q to the record, unless the state that it would meet is zero."""
        used = Int32(1)
        if const_expr(self.starts_from_zero):
            used = memory.info(n, ChunkInfo.INDEX)
        if used > 0:
            ptx.bulk_store(self.record(args, memory, n) + at, tile, Int32(TILE_BYTES))

    @cute.jit
    def store_unless_whole(self, args, memory, n, at: cutlass.Constexpr, source, size: cutlass.Constexpr):
        """K_end or A to the record, unless no chain will read it."""
        if const_expr(self.direct.enabled):
            if self.direct.is_whole(memory, n) == 0:
                ptx.bulk_store(self.record(args, memory, n) + at, source, Int32(size))
        else:
            ptx.bulk_store(self.record(args, memory, n) + at, source, Int32(size))

    @cute.jit
    def store_inverse(self, args, memory, n):
        """The leading parts of the T_bb, and the -N_bc, to the local record; by the lane that commits the bulk stores."""
        head, slot = ptx.lds_v2_b32(memory.chunk_info(n) + ChunkInfo.HEAD)
        (workspace,) = ptx.pin([args.workspace])
        local = local_record(workspace, args.heads, args.slots, head, slot)
        size = const_expr(T_BYTES // BANDS)
        for band in cutlass.range_constexpr(BANDS):
            t = memory.base + Table.DIAGONAL + band * DIAGONAL_BYTES + DiagonalPart.T_LEAD * size
            ptx.bulk_store(local + (T_AT + band * size), t, Int32(size))
        ptx.bulk_store(local + N_AT, memory.base + Table.BELOW, Int32(N_BYTES))
