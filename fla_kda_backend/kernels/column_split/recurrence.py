"""Recurrence over chunks of 16 tokens with the value columns split over CTAs.

A CTA carries BV value columns of one head of one sequence through all its chunks; value columns are independent, so CTAs
never speak to one another. With S [128 keys, BV] the state at the chunk's start, and k_start, q_start, k_end, decay,
inverse, scores, beta from the prepare kernel's record, per chunk:

    P  = bf16(k_start S)    O = bf16(q_start S)      tensor cores, fp32 from 0, eight ascending k16 blocks
    u  = bf16(bf16(v - P) * beta)                    CUDA cores, packed bf16
    U  = bf16(inverse u)                             tensor cores, one k16 step
    out = bf16(O + bf16(scores U))                   tensor cores, packed bf16 add; registers to global memory
    dS = k_end^T U                                   tensor cores, one k16 step
    S  = bf16(fma(decay, S, dS))                     CUDA cores

This is the "exact" setting, FlashKDA's to the bit. "robust" carries S in fp32, S = decay * S + k_end^T U with the tensor
core adding onto the scaled accumulator, and rounds it to bf16 only as an operand: a slow decay is not rounded away. P,
O and u = (v - P) * beta stay in fp32; U = bf16(u + (inverse - I) bf16(u)), out = bf16(O + scores U). inverse - I comes in
two terms, bf16 and what that leaves: with one key repeated, slow decay and beta near 2, errors of the inverse add up.

On request it writes the rounded S before each 64 or 32 tokens, for chunk c of a sequence at row (chunks of all sequences
before it) + c.

Every warp owns BV / warps columns outright: its part of S stays in registers for the whole sequence, in the accumulator's
layout (bf16 pairs or fp32) and, through movmatrix, as bf16 in the layout of the B operand. A warp's
`tiles` m16n8k16 column tiles interleave: MMA column n of tile j is column (n // 2) * 2 * tiles + 2 * j + n % 2, so that
the columns of a thread lie side by side in memory.

One more warp loads: the record with one bulk copy, the 16 rows of v with cp.async (rows past the end become 0), both
completing on the stage's `full` barrier; a compute warp frees a stage by arriving on its `empty` barrier.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from fla_kda_backend.kernels import ptx, sequences
from fla_kda_backend.kernels.column_split.record import (
    BETA,
    CHUNK,
    DECAY,
    INVERSE,
    K_END,
    K_START,
    LOG2_CHUNK,
    Q_START,
    RECORD_BYTES,
    ROW_BYTES,
    SCORES,
)

DIM = 128
STATE_BYTES = DIM * DIM * 2  # of a bf16 state


class RecurrenceSplit:
    """Compile-time facts: the arithmetic, columns a CTA, compute warps, input stages, dtypes of states and cu_seqlens.

    segmented: the launch covers only some slots; sequences that reach over its ends take their state from carry_in and
    leave it in carry_out, [H, V, K] fp32 (exact in either setting). state_v_first: the call's states are [.., V, K], else
    [.., K, V]; states: write those before each state_chunk tokens; the last two need "robust".
    """

    ctas_per_sm = 1

    def __init__(self, variant, schedule):
        self.states = variant.intermediate_states is not None
        self.log2_state_chunk = (variant.intermediate_states or 64).bit_length() - 1
        self.bv, self.warps, self.stages, self.segmented = schedule.bv, schedule.warps, schedule.stages, schedule.segmented
        self.initial, self.final, self.cu_dtype = variant.initial_state, variant.final_state, variant.cu_seqlens
        self.state_v_first, self.robust = variant.state_v_first, schedule.arithmetic == "robust"
        bv, warps, stages = self.bv, self.warps, self.stages
        self.tiles = bv // (8 * warps)
        self.threads = 32 * (warps + 1)
        self.v_row = 2 * bv + 16  # padded: the rows that a warp reads together fall into different banks
        self.v_rows = RECORD_BYTES  # byte offset in a stage
        stage = RECORD_BYTES + CHUNK * self.v_row
        self.stage_bytes = stage + (-stage) % 128
        self.smem_bytes = stages * self.stage_bytes + 16 * stages + 128

    @cute.jit
    def __call__(self, v, initial_state, final_state, out, cu_seqlens, workspace, carry_in, carry_out, states, seq_len,
                 num_seqs, heads, slot_begin, slot_end, stream):  # fmt: skip
        """Launch all sequences and heads; addresses are Int64, counts Int32."""
        self.kernel(
            v, initial_state, final_state, out, cu_seqlens, workspace, carry_in, carry_out, seq_len, heads, slot_begin,
            slot_end, states, num_seqs,
        ).launch(
            grid=[num_seqs * heads * (DIM // self.bv), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,
            use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        v: Int64,  # [tokens, H, 128] bf16
        initial_state: Int64,  # [N, H] states
        final_state: Int64,  # [N, H] states
        out: Int64,  # [tokens, H, 128] bf16
        cu_seqlens: Int64,  # [N + 1]
        workspace: Int64,  # [H, slot_end - slot_begin, RECORD_BYTES]
        carry_in: Int64,  # [H, V, K] fp32
        carry_out: Int64,  # [H, V, K] fp32
        seq_len: Int32,
        heads: Int32,
        slot_begin: Int32,
        slot_end: Int32,
        states: Int64,  # [rows, H] bf16 states
        num_seqs: Int32,
    ):
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        slices = const_expr(DIM // self.bv)
        task = block // slices
        column = (block - task * slices) * self.bv
        s = task // heads
        head = task - s * heads
        begin, length, base = sequences.sequence(s, cu_seqlens, seq_len, LOG2_CHUNK, self.cu_dtype)
        last = base + ((length + (CHUNK - 1)) >> LOG2_CHUNK)
        low = base if base > slot_begin else slot_begin
        high = last if last < slot_end else slot_end

        allocator = SmemAllocator()
        full = allocator.allocate_array(Int64, self.stages, byte_alignment=8)
        empty = allocator.allocate_array(Int64, self.stages, byte_alignment=8)
        ring = allocator.allocate_array(BFloat16, self.stages * self.stage_bytes // 2, byte_alignment=128).toint()
        if warp == self.warps:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.stages):
                    # the bulk copy's announcement and one cp.async arrival for each lane of the loader warp
                    cute.arch.mbarrier_init(full + stage, 1 + 32)
                    cute.arch.mbarrier_init(empty + stage, 32 * self.warps)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        # position of the first chunk's first token, and of this CTA's columns in it
        token = Int64(begin) + Int64(low - base) * CHUNK
        row_stride = Int64(heads) * ROW_BYTES
        first = token * row_stride + Int64(head) * ROW_BYTES + Int64(column) * 2
        rows = length - (low - base) * CHUNK
        if warp == self.warps:
            record = workspace + (Int64(head) * Int64(slot_end - slot_begin) + Int64(low - slot_begin)) * RECORD_BYTES
            self.load(full, empty, ring, record, v + first, row_stride, rows, high - low)
        else:
            own = column + warp * (8 * self.tiles) + (cute.arch.lane_idx() % 4) * (2 * self.tiles)
            own_step = const_expr(DIM if self.state_v_first else 1)
            element = (Int64(s) * Int64(heads) + Int64(head)) * (DIM * DIM) + Int64(own) * own_step
            carry = Int64(head) * (DIM * DIM) + Int64(own) * DIM
            if const_expr(self.robust):
                state = cute.make_rmem_tensor((self.tiles, 8, 4), Float32)
                state.fill(0.0)
            else:
                state = cute.make_rmem_tensor((self.tiles, 8, 2), Int32)
                state.fill(0)
            carried_in, carried_out = base < slot_begin, last > slot_end
            begins_here, begun = base >= slot_begin, base < slot_end
            if const_expr(self.segmented):
                if carried_in and last > slot_begin:
                    self.load_state(state, carry_in + carry * 4, "fp32", True)
            if const_expr(self.initial is not None):
                if begins_here and begun:
                    self.load_state(state, initial_state + element * self.bytes(self.initial), self.initial, self.state_v_first)
            out_columns = out + first + Int64((own - column) * 2)
            row, first_chunk = Int64(0), Int32(0)
            if const_expr(self.states):
                chunks = sequences.chunks_before(s, length, num_seqs, cu_seqlens, seq_len, self.log2_state_chunk, self.cu_dtype)
                first_chunk = low - base
                row = states + (Int64(chunks) * Int64(heads) + Int64(head)) * STATE_BYTES
            self.recur(full, empty, ring, state, out_columns, row_stride, rows, high - low, warp, row, first_chunk, column,
                       heads)  # fmt: skip
            if const_expr(self.segmented):
                if carried_out and begun:
                    self.store_state(state, carry_out + carry * 4, "fp32", True)
            if const_expr(self.final is not None):
                if (not carried_out) and begun and (begins_here or last > slot_begin):
                    self.store_state(state, final_state + element * self.bytes(self.final), self.final, self.state_v_first)

    # ---- the loader warp ------------------------------------------------------------------------------------------
    @cute.jit
    def load(self, full, empty, ring, record, v, row_stride, rows, chunks):
        lane = cute.arch.lane_idx()
        pieces = const_expr(self.bv // 8)  # of 16 bytes in a row of v
        stage, phase = Int32(0), Int32(1)
        ptx.dependency_wait()  # in every CTA, before the first read of what prepare writes: see column_split.py
        for _ in cutlass.range(chunks, unroll=1):
            cute.arch.mbarrier_wait(empty + stage, phase)
            at = ring + stage * self.stage_bytes
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, RECORD_BYTES)
                ptx.bulk_load(at, record, Int32(RECORD_BYTES), (full + stage).toint())
            for i in cutlass.range_constexpr(CHUNK * pieces // 32):
                row = (i * 32 + lane) // pieces
                piece = (i * 32 + lane) % pieces
                inside = row < rows
                source = v + Int64(row if inside else Int32(0)) * row_stride + Int64(piece * 16)
                target = at + self.v_rows + row * self.v_row + piece * 16
                ptx.cp_async_16_or_zero(target, source, Int32(16) if inside else Int32(0))
            ptx.cp_async_mbarrier_arrive((full + stage).toint())
            record += RECORD_BYTES
            v += row_stride * CHUNK
            rows -= CHUNK
            stage += 1
            if stage == self.stages:
                stage = Int32(0)
                phase = phase ^ 1
        ptx.cp_async_wait_all()  # no lane leaves with copies of its own in flight

    # ---- the compute warps ----------------------------------------------------------------------------------------
    @cute.jit
    def recur(self, full, empty, ring, state, out, row_stride, rows, chunks, warp, states, chunk, column, heads):
        lane = cute.arch.lane_idx()
        g, t = lane // 4, lane % 4
        operand = cute.make_rmem_tensor((self.tiles, 8, 2), Int32)
        for j in cutlass.range_constexpr(self.tiles):
            for block in cutlass.range_constexpr(8):
                for r in cutlass.range_constexpr(2):
                    operand[j, block, r] = ptx.movmatrix(self.state_word(state, j, block, r))
        # rows of k_start, q_start as A fragments; rows of k_end transposed: tile m of A is (keys 8*(m%2).., tokens 8*(m//2)..)
        row_a, row_e = lane % 16, lane % 8 + 8 * (lane // 16)
        address_a = ring + row_a * ROW_BYTES
        address_e = ring + K_END + row_e * ROW_BYTES
        v_words = ring + self.v_rows + g * self.v_row + warp * (16 * self.tiles) + t * (4 * self.tiles)
        below = ptx.less_b32(2 * t, g, 0xFFFF, 0) | ptx.less_b32(2 * t + 1, g, -0x10000, 0)
        stage, phase = Int32(0), Int32(0)
        zero = Float32(0.0)
        for _ in cutlass.range(chunks, unroll=1):
            if const_expr(self.states):
                self.store_between(state, operand, states, chunk, column + warp * (8 * self.tiles), heads)
                chunk += 1
            cute.arch.mbarrier_wait(full + stage, phase)
            at = stage * self.stage_bytes
            p = [[zero] * 4 for _ in range(self.tiles)]
            o = [[zero] * 4 for _ in range(self.tiles)]
            for block in cutlass.range_constexpr(8):
                piece = ((2 * block + lane // 16) ^ (row_a % 8)) * 16
                a = ptx.ldmatrix_x4(address_a + at + K_START + piece)
                b = ptx.ldmatrix_x4(address_a + at + Q_START + piece)
                for j in cutlass.range_constexpr(self.tiles):
                    s = (operand[j, block, 0], operand[j, block, 1])
                    p[j] = ptx.mma_bf16(a, s, p[j])
                    o[j] = ptx.mma_bf16(b, s, o[j])
            v = [ptx.lds_words(v_words + at + 8 * r * self.v_row, self.tiles) for r in range(2)]
            lds_beta = const_expr(ptx.lds_f32 if self.robust else ptx.lds_b32)
            beta = [lds_beta(ring + at + BETA + (g + 8 * r) * 4) for r in range(2)]
            inverse = self.terms_of(ptx.lds_v4_b32(ring + at + INVERSE + lane * 16), below)
            scores = ptx.lds_v4_b32(ring + at + SCORES + lane * 16)
            decay = [ptx.lds_v4_f32(ring + at + DECAY + g * 64 + 16 * i) for i in range(4)]
            update = []
            result = [[None] * self.tiles, [None] * self.tiles]
            for j in cutlass.range_constexpr(self.tiles):
                u, words = [], []
                for r in cutlass.range_constexpr(2):
                    pair = self.write(v[r][j], p[j][2 * r : 2 * r + 2], beta[r])
                    u += pair if self.robust else [zero] * 2
                    words.append(ptx.movmatrix(ptx.pack_bf16x2(*pair) if self.robust else pair))
                c = u
                for term in inverse:
                    c = ptx.mma_bf16(term, words, c)
                update.append([ptx.movmatrix(ptx.pack_bf16x2(c[2 * r], c[2 * r + 1])) for r in range(2)])
            for block in cutlass.range_constexpr(8):
                a = ptx.ldmatrix_x4_trans(address_e + at + ((2 * block + (lane // 8) % 2) ^ (row_e % 8)) * 16)
                factors = [decay[block // 2][2 * (block % 2) + r] for r in range(2)]
                for j in cutlass.range_constexpr(self.tiles):
                    self.update_state(state, j, block, factors, a, update[j])
                    for r in cutlass.range_constexpr(2):
                        operand[j, block, r] = ptx.movmatrix(self.state_word(state, j, block, r))
            for j in cutlass.range_constexpr(self.tiles):
                c = ptx.mma_bf16(scores, update[j], o[j] if self.robust else [zero] * 4)
                for r in cutlass.range_constexpr(2):
                    word = ptx.pack_bf16x2(c[2 * r], c[2 * r + 1])
                    if const_expr(not self.robust):
                        word = ptx.add_bf16x2_ftz(ptx.pack_bf16x2(o[j][2 * r], o[j][2 * r + 1]), word)
                    result[r][j] = word
            cute.arch.mbarrier_arrive(empty + stage)  # by every lane: no lane's reads hang on another's arrival
            for r in cutlass.range_constexpr(2):
                if g + 8 * r < rows:
                    ptx.stg_words(out + Int64(g + 8 * r) * row_stride, result[r])
            out += row_stride * CHUNK
            rows -= CHUNK
            stage += 1
            if stage == self.stages:
                stage = Int32(0)
                phase = phase ^ 1

    def terms_of(self, inverse, below):
        """The fragments that add up to the inverse, or robust: to inverse - I. below: mask of a word's elements there."""
        if not self.robust:
            return [inverse]
        top, left, right, bottom = inverse
        lead = (top & below, left, Int32(0), bottom & below)
        rest = (ptx.movmatrix(top) & below, ptx.movmatrix(right), Int32(0), ptx.movmatrix(bottom) & below)
        return [rest, lead]

    def write(self, v, p, beta):
        """u of two columns: fp32, or exact: a bf16 pair. FlashKDA's bf16 sums and products flush denormals in fp32."""
        if self.robust:
            return [ptx.mul(ptx.sub(a, b), beta) for a, b in zip(ptx.unpack_bf16x2(v), p)]
        return ptx.mul_bf16x2_ftz(ptx.sub_bf16x2_ftz(v, ptx.pack_bf16x2(*p)), beta)

    # ---- the state: element e of (tile, block) is key 16*block + g + 8*(e // 2), MMA column 2*t + e % 2 -----------
    def state_word(self, state, j, block, r):
        """Elements 2r and 2r + 1 as a bf16 pair."""
        if self.robust:
            return ptx.pack_bf16x2(state[j, block, 2 * r], state[j, block, 2 * r + 1])
        return state[j, block, r]

    @cute.jit
    def update_state(self, state, j, block, factors, k_end, u):
        if const_expr(self.robust):
            c = ptx.mma_bf16(k_end, u, [state[j, block, e] * factors[e // 2] for e in range(4)])
            for e in cutlass.range_constexpr(4):
                state[j, block, e] = c[e]
        else:
            c = ptx.mma_bf16(k_end, u, [Float32(0.0)] * 4)
            for r in cutlass.range_constexpr(2):
                low, high = ptx.unpack_bf16x2(state[j, block, r])
                state[j, block, r] = ptx.pack_bf16x2(
                    ptx.fma(factors[r], low, c[2 * r]), ptx.fma(factors[r], high, c[2 * r + 1])
                )

    # ---- the state in memory --------------------------------------------------------------------------------------
    def bytes(self, kind):
        return 4 if kind == "fp32" else 2

    def steps(self, kind, v_first):
        """Bytes from a key to the next, and from a column to the next."""
        size = self.bytes(kind)
        return (size, DIM * size) if v_first else (DIM * size, size)

    @cute.jit
    def load_state(self, state, address, kind: cutlass.Constexpr, v_first: cutlass.Constexpr):
        """`address` is that of key 0 of the thread's first column."""
        key_step, column_step = const_expr(self.steps(kind, v_first))
        read = ptx.ldg_f32 if kind == "fp32" else ptx.ldg_bf16
        key = address + Int64(cute.arch.lane_idx() // 4) * key_step
        for j in cutlass.range_constexpr(self.tiles):
            for block in cutlass.range_constexpr(8):
                for r in cutlass.range_constexpr(2):
                    at = key + Int64(2 * j * column_step + (16 * block + 8 * r) * key_step)
                    pair = (read(at), read(at + Int64(column_step)))
                    if const_expr(self.robust):
                        state[j, block, 2 * r], state[j, block, 2 * r + 1] = pair
                    else:
                        state[j, block, r] = ptx.pack_bf16x2(pair[0], pair[1])

    @cute.jit
    def store_state(self, state, address, kind: cutlass.Constexpr, v_first: cutlass.Constexpr):
        """An fp32 state of the exact setting is the widened bf16 one."""
        key_step, column_step = const_expr(self.steps(kind, v_first))
        key = address + Int64(cute.arch.lane_idx() // 4) * key_step
        for j in cutlass.range_constexpr(self.tiles):
            for block in cutlass.range_constexpr(8):
                for r in cutlass.range_constexpr(2):
                    at = key + Int64(2 * j * column_step + (16 * block + 8 * r) * key_step)
                    if const_expr(kind == "fp32" and self.robust):
                        ptx.stg_f32(at, state[j, block, 2 * r])
                        ptx.stg_f32(at + Int64(column_step), state[j, block, 2 * r + 1])
                    elif const_expr(kind == "fp32"):
                        low, high = ptx.unpack_bf16x2(state[j, block, r])
                        ptx.stg_f32(at, low)
                        ptx.stg_f32(at + Int64(column_step), high)
                    else:
                        word = self.state_word(state, j, block, r)
                        ptx.stg_b16(at, word)
                        ptx.stg_b16(at + Int64(column_step), word >> 16)

    @cute.jit
    def store_between(self, state, operand, first, chunk, column, heads):
        """The rounded state before 16-token chunk `chunk` of the sequence, if one of the longer chunks begins there.

        first: address of the state before the sequence's first chunk; column: the warp's first. In [V, K] a word of the
        operand holds two neighbouring keys of a column, in [K, V] a word of the state two neighbouring columns of a key.
        """
        log2 = const_expr(self.log2_state_chunk - LOG2_CHUNK)
        if chunk & ((1 << log2) - 1) == 0:
            g, t = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
            address = first + Int64(chunk >> log2) * Int64(heads) * STATE_BYTES
            if const_expr(self.state_v_first):
                address += Int64((column + g // 2 * (2 * self.tiles) + g % 2) * (2 * DIM) + 4 * t)
            else:
                address += Int64(g * (2 * DIM) + (column + t * (2 * self.tiles)) * 2)
            for j in cutlass.range_constexpr(self.tiles):
                for block in cutlass.range_constexpr(8):
                    for r in cutlass.range_constexpr(2):
                        key = const_expr(16 * block + 8 * r)
                        if const_expr(self.state_v_first):
                            ptx.stg_b32(address + Int64(2 * j * (2 * DIM) + 2 * key), operand[j, block, r])
                        else:
                            ptx.stg_b32(address + Int64(key * (2 * DIM) + 4 * j), self.state_word(state, j, block, r))
