"""Prepare kernel for chunks of 64 tokens in WY form: everything of KDA that does not depend on the state.

Teams of 256 threads, two on an SM; each works through the (chunk, head) pairs team, team + teams, ... A team is a CTA, and
the last chunks go first: the chain begins with the first ones and finds them in the L2. Overlapped, both teams of an SM
are one CTA, chunks go in order of time, a flag says of each record that it is written, and after some rounds some CTAs
end, so that the chain runs on their SMs while the others go on. A chunk's tokens are four bands of 16. With i, j
tokens, b, c bands, G the sum of log2 decays from the chunk's start, l the same from the start of the token's own band
and t[b] the sum over band b:

    y        = gate_scale * sigmoid(exp(A_log) * (g + dt_bias))      special-function unit; 0 past the end; fp16, scaled
    l        = running sum of y in a band                            tensor cores: a triangle of ones; fp32
    q^, k^   = x * rsqrt(sum x^2 + 1e-6)                             sum: diagonal of x x^T on the tensor cores; fp32
    q_band   = bf16(scale * q^ * 2^l)  k_band = bf16(k^ * 2^l)       CUDA cores; operands of A and M
    k_inv    = bf16(k^ * 2^-l)       k_next = bf16(k^ * 2^(t[b]-l))  the same
    Q        = bf16(scale * q^ * 2^G)                                image in place of q
    K_end    = bf16(k^ * 2^(G_63 - G))                               image in place of k
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
errors of the chain come out smaller than with U and W each rounded from a product with (I + M)^-1.

Every factor that joins two bands is at most 1 whatever the gate: the diagonal blocks use 2^l and 2^-l (16 tokens: at
most 2^115.4 with lower_bound >= -5), blocks of neighbouring bands k_next, blocks further apart k_next times the decay
of the bands between. So nothing overflows, an underflow is a true one, and no later token reaches an earlier output.
Rows past the sequence's end are zeros with y = beta = 0: they vanish from every product and d is the decay of the
real rows.

Warps: band w = warp % 4, channel half h = warp // 4. A warp holds its 16 rows x 64 channels in m16n8k16 A-fragment
order from the tiles to the products. A and M are sums over both halves, which the two warps of a band swap. For U and
W a warp computes 16 channels of each.

Four tiles of 16 KB hold g, q, k and v of a chunk, and the next chunk's rows move in as soon as one is free: chunk n has
its g in tile n % 4, q, k, v in those after it. Warp 0 loads g and q of chunk n + 1 into the tiles of q and k once the
images there are stored, k into that of v once v is in registers, v into that of g once W is stored. It does so while
it has no blocks to compute, and plans chunk n + 1 then. Loads are tensor copies: rows past the end of the tensor
arrive as zeros, rows of the next sequence are zeroed after they arrive.

The workspace holds one record of RECORD_BYTES per (head, slot):

    -W, Q, K_end   64 rows of 128 channels, as two tiles [64 rows][64 channels] with 128-byte swizzle: 16-byte piece p
                   of row r lies at piece p ^ (r & 7)
    A              per 16 columns j the rows i from the diagonal block down, 32 bytes each with 32-byte swizzle: piece p
                   of row i lies at piece p ^ (i >> 2 & 1)
    U              per value half: accumulators of U^T [64 channels x 64 tokens], [16-token block][128 threads][8 bf16]
    d              fp32, channel 16a + 8b + 2c + e at 16a + 4c + 2b + e
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind, make_smem_layout_atom
from cutlass.memory import SmemAllocator

from fla_kda_backend.kernels.shared import ptx, sequences
from fla_kda_backend.kernels.shared.prepare_steps import (
    A_TILE,
    BIAS,
    LOG2E,
    RATE,
    TILE_BYTES,
    TILES_BYTES,
    PrepareSteps,
)
from fla_kda_backend.kernels.shared.record64 import (
    A_AT,
    A_BYTES,
    BANDS,
    CHUNK,
    HALF,
    K_END_AT,
    LOG2_CHUNK,
    Q_AT,
    READY_AT,
    RECORD_BYTES,
    U_AT,
    U_BYTES,
    W_AT,
)
from fla_kda_backend.kernels.shared.wy64 import clear_flags, flag_address

# shared memory of a team before its tiles: mbarriers of g, q, k, v; of two chunks in turn the plan and sigmoid(beta)
PLAN, BETA, HEADER_BYTES = 64, 128, 1024
# of a plan: rows from the chunk's first to the sequence's end (0: no chunk), the number of the (chunk, head) pair, first
# token, chunk of the sequence; for the next plan: sequences up to this one, chunks behind it
ROWS, TASK, HEAD, SLOT, TOKEN, INDEX, SEQUENCES, BEHIND = range(0, 32, 4)
G, Q, K, V = range(4)
TEAM = 256  # threads
TEAMS = 2  # on an SM
STAGGER = 3000  # ns; the first records are there the sooner, and the teams of an SM come to differ in what they need of it
STRIDE = -(-TILES_BYTES // 1024) * 1024  # from team to team, of tiles
# named barriers of a team, of 8: all its threads; 1 to 3, the two warps of a band; all but warp 0 only arrive
ALL, V_TAKEN = 0, 4


@dataclass(frozen=True)
class Problem:
    """Run-time facts of a launch; see the kernel's parameters."""

    full: Any  # mbarriers of g, q, k, v
    tiles: Any  # shared memory, aligned to 1024
    header: Int32  # its address, and that of the tiles
    smem: Int32
    maps: Any  # tensor maps of g, q, k, v
    coordinates: Any
    beta: Int64
    a_log: Int64
    dt_bias: Int64
    cu_seqlens: Int64
    workspace: Int64
    seq_len: Int32
    num_seqs: Int32
    heads: Int32
    slot_begin: Int32
    slots: Int32
    rounds: Int32
    stay: Int32

    def plan(self, n):
        """Address of the plan of the CTA's chunk number n."""
        return self.header + PLAN + (n & 1) * 32

    def beta_rows(self, n):
        """Address of sigmoid(beta) of its 64 rows, fp32."""
        return self.header + BETA + (n & 1) * 256

    def record(self, n):
        """Address of its record."""
        head, slot = ptx.lds_v2_b32(self.plan(n) + HEAD)
        return self.workspace + (Int64(head) * Int64(self.slots) + Int64(slot)) * RECORD_BYTES

    def tile(self, n, which):
        return self.smem + ((n + which) & 3) * TILE_BYTES


class PrepareWY64(PrepareSteps):
    """Compile-time facts: the dtype of cu_seqlens (None: equal lengths); max_ctas: the number of SMs; zero_start: the chain
    needs neither W nor Q of a sequence's first chunk, which are then not written; link_time, for the overlapped kernel: what
    a link of the chain takes, in thousandths of what a chunk takes a team. Overlapped, cu_seqlens holds one sequence, and
    the launch covers all slots."""

    def __init__(self, cu_dtype=None, max_ctas=132, zero_start=False, link_time=None):
        if cu_dtype not in sequences.CU_DTYPES:
            raise ValueError(f"unsupported: cu_dtype={cu_dtype!r}")
        self.cu_dtype, self.max_ctas, self.zero_start = cu_dtype, max_ctas, zero_start
        self.overlap, self.link_time = link_time is not None, link_time
        # Only a CTA of both teams leaves an SM as a whole.
        self.teams = TEAMS if self.overlap else 1
        self.threads = self.teams * TEAM
        self.smem_bytes = self.teams * (HEADER_BYTES + STRIDE)

    @cute.jit
    def __call__(self, q, k, v, g, beta, a_log, dt_bias, out, cu_seqlens, workspace, scale, gate_scale, seq_len, num_seqs,
                 heads, slot_begin, slot_end, stream):  # fmt: skip
        """Launch over slots [slot_begin, slot_end) and all heads; addresses are Int64, counts Int32."""
        tokens = seq_len
        if const_expr(self.cu_dtype is None):
            tokens = seq_len * num_seqs
        g_map, q_map, k_map, v_map = (self.tensor_map(x, tokens, heads) for x in (g, q, k, v))
        pairs = (slot_end - slot_begin) * heads
        rounds, stay, grid = self.schedule(pairs, num_seqs, heads)
        self.kernel(
            g_map[0], q_map[0], k_map[0], v_map[0], g_map[1], beta, a_log, dt_bias, out, cu_seqlens, workspace, scale,
            gate_scale, seq_len, num_seqs, heads, slot_begin, slot_end - slot_begin, rounds, stay,
        ).launch(
            grid=[grid, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=TEAMS // self.teams,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.jit
    def schedule(self, pairs, num_seqs, heads):
        """(rounds, stay, grid). Of the overlapped kernel: after `rounds` chunks all CTAs but the first `stay` end and leave
        their SMs to the chain, which then ends soon after the last chunk is prepared."""
        rounds = stay = Int32(0)
        ctas = const_expr(self.max_ctas * TEAMS // self.teams)
        grid = cutlass.min((pairs + (self.teams - 1)) // self.teams, ctas)
        if const_expr(self.overlap):
            stay = cutlass.max(cutlass.min(self.max_ctas - 2 * num_seqs * heads, grid), Int32(1))
            meanwhile = pairs // (num_seqs * heads) * self.link_time * TEAMS * stay // 1000
            rounds = cutlass.max(pairs - meanwhile, Int32(0)) // (TEAMS * self.max_ctas)
            if rounds == 0:
                grid = stay
        return rounds, stay, grid

    def tile_layout(self):
        """64 rows x 64 channels with 128-byte swizzle, twice."""
        atom = make_smem_layout_atom(SmemLayoutAtomKind.K_SW128, BFloat16)
        return cute.tile_to_shape(atom, (CHUNK, HALF, 2), order=(0, 1, 2))

    def tensor_map(self, address, tokens, heads):
        """Of [tokens, heads, 128] as (token, channel of a half, half of a head); boxes are tiles."""
        pointer = cute.make_ptr(BFloat16, address, cute.AddressSpace.gmem, assumed_align=16)
        row = cute.assume(Int64(heads) * (2 * HALF), divby=2 * HALF)
        rows = cute.make_tensor(pointer, cute.make_layout((tokens, HALF, 2 * heads), stride=(row, 1, HALF)))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), rows, self.tile_layout(), (CHUNK, HALF, 2))

    @cute.kernel
    def kernel(
        self,
        g_map: cute.CopyAtom,  # of [tokens, H, 128] bf16, before the gate
        q_map: cute.CopyAtom,  # of [tokens, H, 128] bf16
        k_map: cute.CopyAtom,
        v_map: cute.CopyAtom,
        coordinates: cute.Tensor,  # of all four
        beta: Int64,  # [tokens, H] bf16, before the sigmoid
        a_log: Int64,  # [H] fp32
        dt_bias: Int64,  # [H, 128] fp32
        out: Int64,  # [tokens, H, 128] bf16; rows outside every packed sequence become 0
        cu_seqlens: Int64,  # [num_seqs + 1] int32 or int64
        workspace: Int64,  # [H, slots, RECORD_BYTES], then the records' flags
        scale: Float32,
        gate_scale: Float32,  # lower_bound * log2(e)
        seq_len: Int32,
        num_seqs: Int32,
        heads: Int32,
        slot_begin: Int32,
        slots: Int32,
        rounds: Int32,  # see schedule
        stay: Int32,
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
        p = Problem(full, tiles, full.toint(), tiles.toint(), (g_map, q_map, k_map, v_map), coordinates, beta, a_log, dt_bias,
                    cu_seqlens, workspace, seq_len, num_seqs, heads, slot_begin, slots, rounds, stay)  # fmt: skip
        warp, _, _, _ = self.warp_lane()
        if const_expr(self.cu_dtype is not None):
            self.clear_outside(p, out)
        if const_expr(self.overlap):
            self.clear_own_flags(p)
            cute.arch.sync_threads()
            ptx.dependency_launch()
            if team == 1:
                ptx.nanosleep(Int32(STAGGER))
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(4):
                    cute.arch.mbarrier_init(full + i, 1)
            cute.arch.mbarrier_init_fence()
            n = Int32(0)
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

    # ---- the overlapped kernel: who prepares what, and the flags of what is prepared ---------------------------------
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

    def slot_of(self, p, number):
        """(sequence, chunk, slot) of chunk `number` of every head, in order of time over all sequences."""
        seq_chunks = p.slots // p.num_seqs
        chunk = number // p.num_seqs
        seq = number - chunk * p.num_seqs
        if const_expr(self.cu_dtype is not None):  # one sequence
            _, _, base = sequences.sequence(Int32(0), p.cu_seqlens, p.seq_len, LOG2_CHUNK, self.cu_dtype)
            return Int32(0), number, base + number
        return seq, chunk, seq * seq_chunks + chunk

    @cute.jit
    def clear_own_flags(self, p):
        """Clear the flags of the records that this team will write. All do so before the chain may start."""
        thread = ptx.thread_index()
        n, team = thread & (TEAM - 1), thread // TEAM  # not by self.team(): lanes leave the loop one by one
        task = self.task_of(p, n, team)
        while task < p.slots * p.heads:
            number = task // p.heads
            _, _, slot = self.slot_of(p, number)
            if slot < p.slots:
                clear_flags(p.workspace, p.heads, p.slots, task - number * p.heads, slot)
            n += TEAM
            task = self.task_of(p, n, team)
        ptx.fence_gpu()

    @cute.jit
    def release(self, p, n):
        """By the thread that stores: the record of the CTA's chunk before number n is written."""
        ptx.bulk_wait()
        if n > 0:
            head, slot = ptx.lds_v2_b32(p.plan(n - 1) + HEAD)
            ptx.fence_proxy_async_global()
            ptx.stg_release_b32(flag_address(p.workspace, p.heads, p.slots, head, slot) + READY_AT, Int32(1))

    # ---- plans and loads: warp 0 -----------------------------------------------------------------------------------
    @cute.jit
    def make_plan(self, p, n, task, sequences_left, behind):
        """Plan the CTA's chunk number n: pair `task` of the launch, in one of the first `sequences_left` sequences."""
        # pinned here: nothing made of it is kept in a register over the loop
        (seq_len,) = ptx.pin([p.seq_len])
        number = task // p.heads
        slot, s = p.slots - 1 - number, Int32(-1)
        if const_expr(self.overlap):
            if number < p.slots:
                s, _, slot = self.slot_of(p, number)
        elif const_expr(self.cu_dtype is None):
            if slot >= 0:
                s = sequences.sequence_of_slot(p.slot_begin + slot, p.num_seqs, p.cu_seqlens, seq_len, LOG2_CHUNK, None)
        else:
            s, behind = sequences.sequence_from_end(
                number, behind, sequences_left, p.slot_begin, p.slot_begin + p.slots, p.cu_seqlens, seq_len, LOG2_CHUNK,
                self.cu_dtype,
            )  # fmt: skip
        rows, token, index = Int32(0), Int32(0), Int32(0)
        if s >= 0:
            begin, length, base = sequences.sequence(s, p.cu_seqlens, seq_len, LOG2_CHUNK, self.cu_dtype)
            base -= p.slot_begin
            if const_expr(self.cu_dtype is not None and not self.overlap):
                end = cutlass.min(base + ((length + (CHUNK - 1)) >> LOG2_CHUNK), p.slots)
                slot = end - 1 - (number - behind)
            index = slot - base
            rows, token = length - index * CHUNK, begin + index * CHUNK
        ptx.sts_v4_b32(p.plan(n), [rows, task, task - number * p.heads, slot])
        ptx.sts_v4_b32(p.plan(n) + TOKEN, [token, index, s + 1, behind])
        cute.arch.sync_warp()

    @cute.jit
    def load(self, p, n, which: cutlass.Constexpr):
        """Bring rows of the planned chunk number n into their tile."""
        head, token = ptx.lds_b32(p.plan(n) + HEAD), ptx.lds_b32(p.plan(n) + TOKEN)
        full = p.full + which
        if ptx.lds_b32(p.plan(n) + ROWS) > 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, TILE_BYTES)
            layout = self.tile_layout()
            ring = cute.append(layout.outer, cute.make_layout(4, stride=TILE_BYTES // 2))
            tiles = cute.make_tensor(cute.recast_ptr(p.tiles, layout.inner, BFloat16), ring)
            rows = cute.local_tile(cute.domain_offset((token, 0, 0), p.coordinates), (CHUNK, HALF, 2), (0, 0, None))
            target, source = cpasync.tma_partition(
                p.maps[which], 0, cute.make_layout(1), cute.group_modes(tiles, 0, 3), cute.group_modes(rows, 0, 3)
            )
            cute.copy(p.maps[which], source[None, head], target[None, (n + which) & 3], tma_bar_ptr=full)

    @cute.jit
    def load_tables(self, p, n):
        """sigmoid(beta), the gate's bias and rate for the planned chunk number n; clear the flags of its record."""
        lane = ptx.thread_index() & 31
        rows, head = ptx.lds_b32(p.plan(n) + ROWS), ptx.lds_b32(p.plan(n) + HEAD)
        if rows > 0:
            token = ptx.lds_b32(p.plan(n) + TOKEN)
            x = []
            for i in cutlass.range_constexpr(2):
                row = token + ptx.less_b32(2 * lane + i, rows, 2 * lane + i, 0)
                x.append(ptx.ldg_nc_bf16(p.beta + (Int64(row) * Int64(p.heads) + Int64(head)) * 2))
            rate = ptx.ldg_nc_f32(p.a_log + Int64(head) * 4)
            bias = ptx.ldg_v4_f32(p.dt_bias + Int64(head) * 512 + Int64(lane * 16))
            if const_expr(not self.overlap):
                with cute.arch.elect_one():
                    clear_flags(p.workspace, p.heads, p.slots, head, ptx.lds_b32(p.plan(n) + SLOT))
            y = [ptx.rcp(Float32(1.0) + ptx.ex2(b * Float32(-LOG2E))) for b in x]
            y = [ptx.less_f32(2 * lane + i, rows, y[i], 0.0) for i in range(2)]
            ptx.sts_v2_f32(p.beta_rows(n) + lane * 8, *y)
            rate = ptx.ex2(rate * Float32(LOG2E)) * Float32(-LOG2E)
            ptx.sts_v4_f32(p.smem + BIAS + lane * 16, [b * rate for b in bias])
            ptx.sts_f32(p.smem + RATE, rate)

    @cute.jit
    def zero_past_end(self, tile, rows_band, band, half):
        """Rows of the warp's block that belong to the next sequence, or to none."""
        if rows_band < 16:
            lane = ptx.lane_index()
            for i in cutlass.range_constexpr(4):
                row = (lane >> 3) + 4 * i
                if row >= rows_band:
                    at = half * (TILE_BYTES // 2) + (16 * band + row) * 128 + (lane & 7) * 16
                    ptx.sts_v4_b32(tile + at, [Int32(0)] * 4)
            cute.arch.sync_warp()

    # ---- one chunk -------------------------------------------------------------------------------------------------
    def team(self):
        if const_expr(self.teams == 1):
            return 0
        return cute.arch.make_warp_uniform(ptx.thread_index() // TEAM)

    def worker(self, team):
        """Number of the team in the launch, and of teams."""
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        return team * grid + block, self.teams * grid

    def sync(self):
        """Barrier of the team."""
        cute.arch.barrier(barrier_id=8 * self.team() + ALL, number_of_threads=TEAM)

    def warp_lane(self):
        """Band, half and lane, read anew, so that what depends on them takes no registers over the loop."""
        thread = ptx.thread_index()
        if const_expr(self.teams > 1):
            thread = thread & (TEAM - 1)
        warp = cute.arch.make_warp_uniform(thread >> 5)
        return warp, warp & 3, warp >> 2, thread & 31

    def block_at(self, band, half, lane):
        """ldmatrix and stmatrix address, in a tile, of the first 16x16 block of the warp's rows and half. Those of the
        next three are the address with its bits 5 and 6 flipped as in 1 to 3: tiles are aligned to 128."""
        return half * (TILE_BYTES // 2) + (16 * band + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4)

    @cute.jit
    def chunk(self, p, n, rows, scale, gate_scale):
        parity = n & 1
        warp, band, half, lane = self.warp_lane()
        at = self.block_at(band, half, lane)
        g_tile, q_tile, k_tile = p.tile(n, G), p.tile(n, Q), p.tile(n, K)
        rows_band = rows - 16 * band
        cute.arch.mbarrier_wait(p.full + G, parity)
        self.zero_past_end(g_tile, rows_band, band, half)
        sums = self.decay_sums(p.smem, g_tile + at, *ptx.pin([gate_scale]), rows_band, half, lane)
        self.store_band_sum(p.smem, sums, band, half, lane)
        cute.arch.mbarrier_wait(p.full + Q, parity)
        cute.arch.mbarrier_wait(p.full + K, parity)
        self.zero_past_end(q_tile, rows_band, band, half)
        self.zero_past_end(k_tile, rows_band, band, half)
        self.squares(p.smem, q_tile + at, band, half, lane, 0)
        self.squares(p.smem, k_tile + at, band, half, lane, 512)
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
        warp, band, half, lane = self.warp_lane()
        at = self.block_at(band, half, lane)
        norms = [[x * scale for x in self.norms(p.smem, band, lane >> 2, 0)], self.norms(p.smem, band, lane >> 2, 512)]
        q_band, k_band, a, m = self.images(p.smem, (g_tile + at, q_tile + at, k_tile + at), sums, norms, band, half, lane)
        self.share_diagonal(p.smem, a, m, band, half, lane)
        ptx.fence_proxy_async()
        self.sync()
        warp, band, half, lane = self.warp_lane()
        if warp == 0:
            with cute.arch.elect_one():
                self.store_unless_first(p, n, Q_AT, q_tile)
                ptx.bulk_store(p.record(n) + K_END_AT, k_tile, Int32(TILE_BYTES))
                ptx.bulk_commit()
            self.make_plan(p, n + 1, self.task_of(p, n + 1, self.team()), *ptx.lds_v2_b32(p.plan(n) + SEQUENCES))
            with cute.arch.elect_one():
                ptx.bulk_wait_read()
            self.load(p, n + 1, G)
            self.load(p, n + 1, Q)
            self.load_tables(p, n + 1)
        (n,) = ptx.pin([n])  # as above: tiles' addresses are made anew
        if half == 1:
            self.diagonal_blocks(p.smem, a, m, p.beta_rows(n), band, lane)
        for b in cutlass.range_constexpr(1, BANDS):
            if band == b:
                self.blocks_below(p.smem, b, 8 * self.team() + b, p.beta_rows(n), half, lane, q_band, k_band)
        cute.arch.mbarrier_wait(p.full + V, parity)
        self.zero_past_end(p.tile(n, V), ptx.lds_b32(p.plan(n) + ROWS) - 16 * band, band, half)
        ptx.fence_proxy_async()
        self.sync()
        if warp == 0:
            with cute.arch.elect_one():
                ptx.bulk_store(p.record(n) + A_AT, p.smem + A_TILE, Int32(A_BYTES))
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
    def solve(self, p, n, warp, band, half, lane):
        """U and W of the chunk."""
        row8, upper = lane & 7, (lane >> 3) & 1
        channels = half * (TILE_BYTES // 2) + (row8 + 8 * (lane >> 4)) * 128 + (((2 * band + upper) ^ row8) << 4)
        v_at, w_at = p.tile(n, V) + channels, p.tile(n, G) + channels
        x = [[ptx.ldmatrix_x4_trans(tile + b * 2048) for tile in (v_at, w_at)] for b in range(BANDS)]
        ptx.fence_proxy_async()  # the reads of V before the next K, which the copy engine brings into its tile
        if warp == 0:
            cute.arch.barrier(barrier_id=8 * self.team() + V_TAKEN, number_of_threads=TEAM)
            self.load(p, n + 1, K)
        else:
            cute.arch.barrier_arrive(barrier_id=8 * self.team() + V_TAKEN, number_of_threads=TEAM)
        u_at = p.record(n) + Int64(U_AT + half * U_BYTES + (band * 32 + lane) * 16)
        self.eliminate(p.smem, x, u_at, w_at, lane)
        ptx.fence_proxy_async()
        self.sync()
        if warp == 0:
            with cute.arch.elect_one():
                self.store_unless_first(p, n, W_AT, p.tile(n, G))
                ptx.bulk_commit()
