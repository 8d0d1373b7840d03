"""Prepare kernel for chunks of 64 tokens in WY form: everything of KDA that does not depend on the state.

Teams of 256 threads, two on an SM, work through the (chunk, head) pairs (prepare_teams.py). A chunk's tokens are four
bands of 16. With i, j tokens, b, c bands, G the sum of log2 decays from the chunk's start, l the same from the start of
the token's own band and t[b] the sum over band b:

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
    T_bb     = (I + M_bb)^-1                                         16x16 blocks: fp32 substitution, a lane a column
    N_bc     = T_bb M_bc, c < b                                      tensor cores, T and M in fp16 lead + rest
    U_b      = bf16(T_bb diag(beta) V_b - sum over c < b of N_bc U_c)        tensor cores, T diag(beta) and N in bf16
    -W_b     = bf16(T_bb diag(beta) K_start_b - sum over c < b of N_bc (-W_c))   lead + rest; as U^T, W^T
    d        = 2^G_63                                                fp32

U and W solve (I + M) X = diag(beta) [V, -K_start] block by block. The U_c, W_c taken off are the rounded ones of the
record: what rounding does to a band is then made up for in the bands below it, so that with correlated keys the
errors of the chain come out smaller than with U and W each rounded from a product with (I + M)^-1. Where a key repeats and
decay is slow, V' of neighbouring tokens nearly cancel in the state: so K_end of these tokens is made of one rounded key,
which a factor near 1 does not change, and not of as many roundings of it.

Every factor that joins two bands is at most 1 whatever the gate: blocks of neighbouring bands take k_next, blocks
further apart k_next times the decay of the bands between. The diagonal blocks of a bounded gate and keys of norm 1 take 2^l
and 2^-l (16 tokens: at most 2^115.4 with lower_bound >= -5), y being one fp16 term. Otherwise: y is two fp16 terms
down to -511 (2^-160 is 0 as it is), t[b] - l is a sum of its own, and a diagonal block is halved down to single tokens.
With m the boundary between two neighbouring blocks of L = 8, 4, 2, 1 tokens, i in the upper and j in the lower one,

    A_ij = bf16(scale * q_i 2^(G_i - G_m)) . bf16(k_j 2^(G_m - G_j)), M_ij likewise;  A_ii = scale * q_i . k_i

where each exponent is a sum of y over tokens on one side of m, made on the tensor cores: no difference of sums. So
nothing overflows, an underflow is a true one, and no later token reaches an earlier output.

Where q and k are not normalised, the operands of A and M are fp16 instead of bf16: three more bits, as many as those of
the tf32 that FLA's kernels multiply then. (Normalised q and k are bf16 there too.) Each row of q and of k is multiplied by
a power of two first, so that fp16 holds q and k of any size; the accumulators are divided by those of their row and column
(operands.py). The images are made from the same fp32 values, without these factors. A and Q are then made without `scale`,
by which the chain multiplies O: where a channel does not decay, Q has the very bits of q.

Rows past the sequence's end are zeros with y = beta = 0: they vanish from every product and d is the decay of the
real rows.

Warps: band w = warp % 4, channel half h = warp // 4. A warp holds its 16 rows x 64 channels in m16n8k16 A-fragment
order from the tiles to the products. A and M are sums over both halves, which the two warps of a band swap. For U and
W a warp computes 16 channels of each.

Four tiles of 16 KB hold g, q, k and v of a chunk, and the next chunk's rows move in as soon as one is free: chunk n has
its g in tile n % 4, q, k, v in those after it. Warp 0 loads g and q of chunk n + 1 into the tiles of q and k once the
images there are stored, k into that of v once v is in registers, v into that of g once W is stored. It does so while
it has no blocks to compute, and plans chunk n + 1 then. Where g is fp32 it takes two tiles, 0 and 1 or 2 and 3 in turn: v
comes into the second once y is in registers, K_start stands in the first; g of chunk n + 1 goes where q and k were, its q
where v was, its k where W was. Loads are tensor copies, whatever the strides of the inputs: rows past the end of the
tensor arrive as zeros, rows of the next sequence are zeroed after they arrive. Several heads may share a head of q and k.

The workspace holds one record of RECORD_BYTES per (head, slot):

    -W, Q, K_end   64 rows of 128 channels, as two tiles [64 rows][64 channels] with 128-byte swizzle: 16-byte piece p
                   of row r lies at piece p ^ (r & 7)
    A              per 16 columns j the rows i from the diagonal block down, 32 bytes each with 32-byte swizzle: piece p
                   of row i lies at piece p ^ (i >> 2 & 1)
    U              per value half: accumulators of U^T [64 channels x 64 tokens], [16-token block][128 threads][8 bf16]
    d              fp32, channel 16a + 8b + 2c + e at 16a + 4c + 2b + e
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from fla_kda_backend.kernels import ptx, sequences
from fla_kda_backend.kernels.wy64.cluster import CTAS
from fla_kda_backend.kernels.wy64.prepare.direct import PrepareDirect
from fla_kda_backend.kernels.wy64.prepare.gates import Gates
from fla_kda_backend.kernels.wy64.prepare.levels import Levels
from fla_kda_backend.kernels.wy64.prepare.loads import (
    HEADER_BYTES,
    INDEX,
    NUMBER,
    ROWS,
    SEQUENCES,
    TEAM,
    G,
    K,
    PrepareLoads,
    Problem,
    Q,
    V,
)
from fla_kda_backend.kernels.wy64.prepare.operands import Operands
from fla_kda_backend.kernels.wy64.prepare.steps import A_TILE, TILE_BYTES, TILES_BYTES, PrepareSteps
from fla_kda_backend.kernels.wy64.prepare.teams import TEAMS, V_TAKEN, PrepareTeams
from fla_kda_backend.kernels.wy64.record import (
    A_AT,
    A_BYTES,
    BANDS,
    CHUNK,
    K_END_AT,
    Q_AT,
    U_AT,
    U_BYTES,
    W_AT,
)

STRIDE = -(-TILES_BYTES // 1024) * 1024  # from team to team, of tiles


class PrepareWY64(PrepareDirect, PrepareTeams, PrepareLoads, Gates, Levels, Operands, PrepareSteps):
    """Compile-time facts: the dtype of cu_seqlens (None: equal lengths); max_ctas: the number of SMs; zero_start: the chain
    needs neither W nor Q of a sequence's first chunk, which are then not written; beside: see PrepareTeams. Overlapped,
    cu_seqlens holds one sequence, and the launch covers all slots.

    gate: "bounded", "softplus" or "given"; gate_dtype: that of g. a_log, dt_bias: their dtypes; None: exp(A_log) is 1,
    dt_bias 0; both None where the decay is given. beta: "sigmoid", "twice" (2 * sigmoid) or "given"; beta_dtype. l2norm:
    whether q and k are normalised. Dtypes are "bf16" or "fp32".
    """

    def __init__(self, variant, schedule, beside=None):
        super().__init__(schedule.max_ctas, beside)
        self.direct, self.zero_start = schedule.direct, schedule.starts_from_zero(variant)
        self.final, self.state_v_first = variant.final_state, variant.state_v_first
        self.smem_bytes = self.teams * (HEADER_BYTES + STRIDE)
        self.cu_dtype, self.gate, self.gate_dtype = variant.cu_seqlens, variant.gate, variant.gate_dtype
        self.a_log, self.dt_bias = variant.a_log, variant.dt_bias
        self.beta, self.beta_dtype, self.l2norm = variant.beta, variant.beta_dtype, variant.l2norm
        self.wide_gate = variant.gate_dtype == "fp32"
        # Of keys of any size 2^-l could make infinities, and their products err more than those of the levels.
        self.bounded = not variant.needs_levels
        self.crowded = not self.bounded  # registers are short

    @cute.jit
    def __call__(self, q, k, v, g, beta, a_log, dt_bias, final_state, out, cu_seqlens, workspace, q_token, q_head, k_token,
                 k_head, v_token, v_head, g_token, g_head, beta_token, beta_head, scale, gate_scale, seq_len, num_seqs,
                 qk_heads, heads, slot_begin, slot_end, stream):  # fmt: skip
        """Launch over slots [slot_begin, slot_end) and all heads; addresses and strides (in elements) are Int64, counts
        Int32. A stride of q, k, v or g, and their addresses, are multiples of 16 bytes."""
        tokens = seq_len
        if const_expr(self.cu_dtype is None):
            tokens = seq_len * num_seqs
        g_map, g_coordinates = self.tensor_map(G, g, g_token, g_head, tokens, heads)
        q_map, _ = self.tensor_map(Q, q, q_token, q_head, tokens, qk_heads)
        k_map, _ = self.tensor_map(K, k, k_token, k_head, tokens, qk_heads)
        v_map, v_coordinates = self.tensor_map(V, v, v_token, v_head, tokens, heads)
        pairs = (slot_end - slot_begin) * heads
        rounds, stay, grid, at_once = self.schedule(pairs, num_seqs, heads)
        self.kernel(
            g_map, q_map, k_map, v_map, g_coordinates, v_coordinates, beta, beta_token, beta_head, a_log, dt_bias, final_state,
            out, cu_seqlens, workspace, scale, gate_scale, seq_len, num_seqs, heads, heads // qk_heads, slot_begin,
            slot_end - slot_begin, rounds, stay, at_once,
        ).launch(
            grid=[grid, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[CTAS, 1, 1] if self.overlap else None,  # as the chain, see wy64.py
            stream=stream,
            min_blocks_per_mp=TEAMS // self.teams,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        g_map: cute.CopyAtom,  # of [tokens, H, 128], before the gate
        q_map: cute.CopyAtom,  # of [tokens, H / group, 128] bf16
        k_map: cute.CopyAtom,
        v_map: cute.CopyAtom,  # of [tokens, H, 128] bf16
        g_coordinates: cute.Tensor,
        v_coordinates: cute.Tensor,  # and of q and k
        beta: Int64,  # [tokens, H], before the sigmoid, with strides in elements
        beta_token: Int64,
        beta_head: Int64,
        a_log: Int64,  # [H]
        dt_bias: Int64,  # [H, 128], 16-byte aligned
        final_state: Int64,  # [num_seqs, H] states
        out: Int64,  # [tokens, H, 128] bf16; rows outside every packed sequence become 0
        cu_seqlens: Int64,  # [num_seqs + 1] int32 or int64
        workspace: Int64,  # [H, slots, RECORD_BYTES], then the records' flags
        scale: Float32,
        gate_scale: Float32,  # lower_bound * log2(e)
        seq_len: Int32,
        num_seqs: Int32,
        heads: Int32,
        group: Int32,
        slot_begin: Int32,
        slots: Int32,
        rounds: Int32,  # see PrepareTeams.schedule
        stay: Int32,
        at_once: Int32,
    ):
        if const_expr(not self.overlap):
            ptx.dependency_launch()
        allocator = SmemAllocator()
        full = allocator.allocate_array(Int64, self.teams * HEADER_BYTES // 8)
        tiles = allocator.allocate_array(BFloat16, self.teams * STRIDE // 2, byte_alignment=1024)
        team = self.team()
        if const_expr(self.teams > 1):
            full += team * (HEADER_BYTES // 8)
            tiles += cute.assume(team * (STRIDE // 2), divby=512)
        coordinates = (g_coordinates, v_coordinates, v_coordinates, v_coordinates)
        p = Problem(full, tiles, full.toint(), tiles.toint(), (g_map, q_map, k_map, v_map), coordinates, beta, beta_token,
                    beta_head, a_log, dt_bias, final_state, out, cu_seqlens, workspace, seq_len, num_seqs, heads, group,
                    slot_begin, slots, rounds, stay, at_once)  # fmt: skip
        warp = self.warp()
        if const_expr(self.cu_dtype is not None):
            self.clear_outside(p, out)
        if const_expr(self.overlap):
            self.clear_own_flags(p)
            cute.arch.sync_threads()
            self.let_chain_start(team)
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(4):
                    cute.arch.mbarrier_init(full + i, 1)
            cute.arch.mbarrier_init_fence()
            n = Int32(0)
            ptx.sts_v4_b32(p.header + NUMBER, [n] * 4)
            self.make_plan(p, n, self.task_of(p, n, team), p.num_seqs, n)
            for which in cutlass.range_constexpr(3):
                self.load(p, n, which)
            self.load_tables(p, n)
        self.sync()
        n = Int32(0)
        rows = ptx.lds_b32(p.plan(n) + ROWS)
        while rows > 0:
            self.chunk(p, n, rows, scale, gate_scale)
            n += 1
            rows = ptx.lds_b32(p.plan(n) + ROWS)
        if const_expr(self.overlap):
            if warp == 0:
                with cute.arch.elect_one():
                    self.release(p, n)
        else:
            ptx.bulk_wait_read()

    @cute.jit
    def clear_outside(self, p, out):
        """Zero this team's share of the output rows that no sequence covers."""
        first, end = sequences.span(p.num_seqs, p.cu_seqlens, self.cu_dtype)
        if first > 0 or end < p.seq_len:
            worker, workers = self.worker(self.team())
            thread = ptx.thread_index() & (TEAM - 1)
            for task in cutlass.range(worker, p.slots * p.heads, workers, unroll=1):
                slot = task // p.heads
                sequences.clear_rows(out, (p.slot_begin + slot) * CHUNK, CHUNK, first, end, p.seq_len, task - slot * p.heads,
                                     p.heads, thread, TEAM)  # fmt: skip

    # ---- one chunk -------------------------------------------------------------------------------------------------
    def anew(self, p, x):
        """x. Where registers are short, plus a 0 from shared memory: what is made of it, ptxas does not keep over the loop."""
        return x + ptx.lds_b32(p.header + NUMBER + 4) if self.crowded else x

    def place(self, p, n, begun=True):
        """n, warp, band, half and lane, made anew, so that what depends on them takes no registers over the loop."""
        if self.crowded and begun:
            n = ptx.lds_b32(p.header + NUMBER)
        thread = self.anew(p, self.thread())
        warp = cute.arch.make_warp_uniform(thread >> 5)
        return n, warp, warp & 3, warp >> 2, thread & 31

    def block_at(self, band, half, lane):
        """ldmatrix and stmatrix address, in a tile, of the first 16x16 block of the warp's rows and half. Those of the
        next three are the address with its bits 5 and 6 flipped as in 1 to 3: tiles are aligned to 128."""
        return half * (TILE_BYTES // 2) + (16 * band + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4)

    @cute.jit
    def chunk(self, p, n, rows, scale, gate_scale):
        parity = n & 1
        n, warp, band, half, lane = self.place(p, n, begun=False)
        at = self.block_at(band, half, lane)
        g_tile, q_tile, k_tile = self.tile(p, n, G), self.tile(p, n, Q), self.tile(p, n, K)
        rows_band = rows - 16 * band
        cute.arch.mbarrier_wait(p.full + G, parity)
        if const_expr(self.bounded):
            if const_expr(not self.wide_gate):
                self.zero_past_end(g_tile, rows_band, band, half)
            decays = self.decay_sums(p.smem, g_tile, *ptx.pin([gate_scale]), rows_band, band, half, lane)
            self.store_band_sum(p.smem, decays, band, half, lane)
        else:
            decays = self.log_decays(p.smem, g_tile, gate_scale, rows_band, band, half, lane)
            self.store_band_sum_of(p.smem, decays, band, half, lane)
        cute.arch.mbarrier_wait(p.full + Q, parity)
        cute.arch.mbarrier_wait(p.full + K, parity)
        self.zero_past_end(q_tile, rows_band, band, half)
        self.zero_past_end(k_tile, rows_band, band, half)
        if const_expr(not self.bounded):
            self.near_levels(p.smem, q_tile, k_tile, decays, band, half, lane)
        else:
            self.squares(p.smem, q_tile + at, band, half, lane, 0)
            self.squares(p.smem, k_tile + at, band, half, lane, 512)
        if const_expr(self.wide_gate):
            ptx.fence_proxy_async()  # the reads of g before V, which the copy engine brings into its second tile
        self.sync()
        if warp == 0:
            with cute.arch.elect_one():
                if const_expr(self.overlap):
                    self.release(p, n)
                else:
                    ptx.bulk_wait_read()  # of W, whose tile becomes that of v, and of A
            self.load(p, n, V)
        self.factors(p.smem, p.record(n), band, half, lane)
        cute.arch.sync_warp()
        n, warp, band, half, lane = self.place(p, n)
        at = self.block_at(band, half, lane)
        norms = None
        if const_expr(self.l2norm):
            norms = [[x * scale for x in self.norms(p.smem, band, lane >> 2, 0)], self.norms(p.smem, band, lane >> 2, 512)]
        image_at = [self.tile(p, n, which) + at for which in (G, Q, K)]
        if const_expr(self.bounded):
            q_band, k_band, a, m = self.images(p.smem, image_at, decays, norms, band, half, lane)
        else:
            q_band, k_band, a, m = self.level_images(p, n, image_at, decays, norms, scale, band, half, lane)
            n, warp, band, half, lane = self.place(p, n)
        self.share_diagonal(p.smem, a, m, band, half, lane)
        ptx.fence_proxy_async()
        self.sync()
        n, warp, band, half, lane = self.place(p, n)
        if warp == 0:
            with cute.arch.elect_one():
                self.store_unless_first(p, n, Q_AT, self.tile(p, n, Q))
                self.store_unless_whole(p, n, K_END_AT, self.tile(p, n, K), TILE_BYTES)
                ptx.bulk_commit()
            self.make_plan(p, n + 1, self.next_task(p, n), *ptx.lds_v2_b32(p.plan(n) + SEQUENCES))
            with cute.arch.elect_one():
                ptx.bulk_wait_read()
            self.load(p, n + 1, G)
            if const_expr(not self.wide_gate):
                if const_expr(self.direct):
                    if self.whole(p, n) == 0:  # whose K_end is still needed
                        self.load(p, n + 1, Q)
                else:
                    self.load(p, n + 1, Q)
            self.load_tables(p, n + 1)
        (n,) = ptx.pin([n])  # as above: tiles' addresses are made anew
        smem = self.anew(p, p.smem)
        if half == 1:
            self.diagonal_blocks(smem, a, m, p.beta_rows(n), band, lane)
        for b in cutlass.range_constexpr(1, BANDS):
            if band == b:
                self.blocks_below(smem, b, self.barrier(b), p.beta_rows(n), half, lane, q_band, k_band)
        cute.arch.mbarrier_wait(p.full + V, n & 1)
        self.zero_past_end(self.tile(p, n, V), ptx.lds_b32(p.plan(n) + ROWS) - 16 * band, band, half)
        ptx.fence_proxy_async()
        self.sync()
        if warp == 0:
            with cute.arch.elect_one():
                self.store_unless_whole(p, n, A_AT, p.smem + A_TILE, A_BYTES)
                ptx.bulk_commit()
        self.solve(p, n, warp, band, half, lane)

    @cute.jit
    def store_unless_first(self, p, n, at: cutlass.Constexpr, tile):
        """W or Q to the record, unless the state that it would meet is zero."""
        used = Int32(1)
        if const_expr(self.zero_start):
            used = ptx.lds_b32(p.plan(n) + INDEX)
        if used > 0:
            ptx.bulk_store(p.record(n) + at, tile, Int32(TILE_BYTES))

    @cute.jit
    def store_unless_whole(self, p, n, at: cutlass.Constexpr, source, size: cutlass.Constexpr):
        """K_end or A to the record, unless no chain will read it."""
        if const_expr(self.direct):
            if self.whole(p, n) == 0:
                ptx.bulk_store(p.record(n) + at, source, Int32(size))
        else:
            ptx.bulk_store(p.record(n) + at, source, Int32(size))

    @cute.jit
    def solve(self, p, n, warp, band, half, lane):
        """U and W of the chunk."""
        row8, upper = lane & 7, (lane >> 3) & 1
        channels = half * (TILE_BYTES // 2) + (row8 + 8 * (lane >> 4)) * 128 + (((2 * band + upper) ^ row8) << 4)
        v_at, w_at = self.tile(p, n, V) + channels, self.tile(p, n, G) + channels
        x = [[ptx.ldmatrix_x4_trans(tile + b * 2048) for tile in (v_at, w_at)] for b in range(BANDS)]
        ptx.fence_proxy_async()  # the reads of V before the next K, which the copy engine brings into its tile
        if warp == 0:
            cute.arch.barrier(barrier_id=self.barrier(V_TAKEN), number_of_threads=TEAM)
            self.load(p, n + 1, Q if self.wide_gate else K)
        else:
            cute.arch.barrier_arrive(barrier_id=self.barrier(V_TAKEN), number_of_threads=TEAM)
        u_at = p.record(n) + Int64(U_AT + half * U_BYTES + (band * 32 + lane) * 16)
        if const_expr(self.direct):
            if self.whole(p, n) > 0:
                self.results(p, n, [v[:1] for v in x], w_at, band, half, lane)
            else:
                self.eliminate(p.smem, x, u_at, w_at, lane)
        else:
            self.eliminate(p.smem, x, u_at, w_at, lane)
        ptx.fence_proxy_async()
        self.sync()
        if const_expr(self.direct):
            if self.whole(p, n) > 0:
                if warp == 0:
                    self.load(p, n + 1, Q)
                self.store_out(p, n)
        if warp == 0:
            with cute.arch.elect_one():
                self.store_unless_first(p, n, W_AT, self.tile(p, n, G))
                ptx.bulk_commit()
                if const_expr(self.crowded):
                    ptx.sts_b32(p.header + NUMBER, n + 1)
            if const_expr(self.wide_gate):
                with cute.arch.elect_one():
                    ptx.bulk_wait_read()
                self.load(p, n + 1, K)
