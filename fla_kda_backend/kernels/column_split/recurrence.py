"""Recurrence over chunks of 16 tokens with the value columns split over CTAs.

A CTA carries BV value columns of one head of one sequence through all its chunks. Value columns are independent, so CTAs
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

Warp roles: `compute_warps` warps compute, one more, the loader, loads.

    loader    per chunk: waits for the stage's `empty`; the record with one bulk copy and the 16 rows of v with cp.async (rows
              past the end become 0), both completing on the stage's `full`
    compute   per chunk: waits for `full`, computes P and O, arrives on `empty` of the chunk before, computes the rest, stores
              out; each warp owns BV / compute_warps columns outright: its part of S stays in registers for the whole sequence
              (state.py), and through movmatrix as bf16 in the layout of the B operand
"""

from typing import NamedTuple

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
from fla_kda_backend.kernels.column_split.state import DIM, STATE_BYTES, State
from fla_kda_backend.kernels.ring import RingPosition
from fla_kda_backend.kernels.variant import DTYPE_BYTES


class RecurrenceArguments(NamedTuple):
    v: Int64  # [tokens, heads, 128] bf16
    initial_state: Int64  # [num_seqs, heads] states
    final_state: Int64  # [num_seqs, heads] states
    out: Int64  # [tokens, heads, 128] bf16
    cu_seqlens: Int64  # [num_seqs + 1] int32 or int64
    workspace: Int64  # [heads, slot_end - slot_begin, RECORD_BYTES]
    carry_in: Int64  # [heads, V, K] fp32
    carry_out: Int64  # [heads, V, K] fp32
    seq_len: Int32
    heads: Int32
    slot_begin: Int32
    slot_end: Int32
    intermediate_states: Int64  # [rows, heads] bf16 states
    num_seqs: Int32


class Ring(NamedTuple):
    """The stages in shared memory: at each a record, then 16 rows of v."""

    full: cute.Pointer  # [stages] mbarriers
    empty: cute.Pointer  # [stages] mbarriers
    base: Int32  # address of the first stage


class WorkItem(NamedTuple):
    """What a CTA works through: value columns of a sequence's head over the chunks of the launch."""

    sequence: Int32
    head: Int32
    column: Int32  # the first of BV
    length: Int32  # tokens of the sequence
    base: Int32  # the sequence's slots are [base, last)
    last: Int32
    low: Int32  # those of the launch are [low, high)
    high: Int32


class RecurrenceSplit:
    """Compile-time facts: the arithmetic, columns per CTA, compute warps, stages, dtypes of states and cu_seqlens.

    segmented: the launch covers only some slots. Sequences that reach over its ends take their state from carry_in and leave
    it in carry_out, [heads, V, K] fp32 (exact in either setting). Intermediate states and states [K, V] need "robust".
    """

    ctas_per_sm = 1

    def __init__(self, variant, schedule):
        self.robust, self.cu_dtype = schedule.arithmetic == "robust", variant.cu_seqlens
        self.bv, self.stages, self.segmented = schedule.bv, schedule.stages, schedule.segmented
        self.initial, self.final, self.v_first = variant.initial_state, variant.final_state, variant.state_v_first
        self.compute_warps = self.loader_warp = schedule.warps  # warps 0 to loader_warp - 1 compute
        self.threads = 32 * (self.compute_warps + 1)
        self.tiles = self.bv // (8 * self.compute_warps)  # of 8 columns, per warp
        self.writes_states = variant.intermediate_states is not None
        self.log2_tokens = (variant.intermediate_states or 64).bit_length() - 1  # from one intermediate state to the next
        self.state = State(self.robust, self.tiles, self.v_first, self.log2_tokens)
        self.v_row = 2 * self.bv + 16  # bytes; padded: the rows that a warp reads together fall into different banks
        self.v_rows = RECORD_BYTES  # byte offset in a stage
        stage = RECORD_BYTES + CHUNK * self.v_row
        self.stage_bytes = stage + (-stage) % 128
        self.smem_bytes = self.stages * self.stage_bytes + 16 * self.stages + 128

    @cute.jit
    def __call__(self, a, stream):
        """Launch all sequences and heads; a: the contract's Arguments."""
        arguments = RecurrenceArguments(
            v=a.v,
            initial_state=a.initial_state,
            final_state=a.final_state,
            out=a.out,
            cu_seqlens=a.cu_seqlens,
            workspace=a.workspace,
            carry_in=a.carry_in,
            carry_out=a.carry_out,
            seq_len=a.seq_len,
            heads=a.heads,
            slot_begin=a.slot_begin,
            slot_end=a.slot_end,
            intermediate_states=a.intermediate_states,
            num_seqs=a.num_seqs,
        )
        self.kernel(arguments).launch(
            grid=[a.num_seqs * a.heads * (DIM // self.bv), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, args: RecurrenceArguments):
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        item, begin = self.work_item(args, block)
        ring = self.ring(warp)

        # address of the item's first token and first column in out and, with the same layout, in v
        token = Int64(begin) + Int64(item.low - item.base) * CHUNK
        row_stride = Int64(args.heads) * ROW_BYTES
        first = token * row_stride + Int64(item.head) * ROW_BYTES + Int64(item.column) * 2
        rows = item.length - (item.low - item.base) * CHUNK
        if warp == self.loader_warp:
            self.load(args, item, ring, args.v + first, row_stride, rows)
        else:
            self.compute(args, item, ring, args.out + first, row_stride, rows, warp)

    @cute.jit
    def work_item(self, args, block):
        """The CTA's WorkItem, and the first token of its sequence."""
        slices = const_expr(DIM // self.bv)
        task = block // slices
        column = (block - task * slices) * self.bv
        s = task // args.heads
        head = task - s * args.heads
        begin, length, base = sequences.sequence(s, args.cu_seqlens, args.seq_len, LOG2_CHUNK, self.cu_dtype)
        last = base + ((length + (CHUNK - 1)) >> LOG2_CHUNK)
        low = base if base > args.slot_begin else args.slot_begin
        high = last if last < args.slot_end else args.slot_end
        return WorkItem(s, head, column, length, base, last, low, high), begin

    @cute.jit
    def ring(self, warp):
        """Allocate the ring and initialise its barriers; to be called by the whole CTA."""
        allocator = SmemAllocator()
        full = allocator.allocate_array(Int64, self.stages, byte_alignment=8)
        empty = allocator.allocate_array(Int64, self.stages, byte_alignment=8)
        base = allocator.allocate_array(BFloat16, self.stages * self.stage_bytes // 2, byte_alignment=128).toint()
        if warp == self.loader_warp:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.stages):
                    # the expected bytes of the bulk copy, and one cp.async arrival per lane of the loader
                    cute.arch.mbarrier_init(full + stage, 1 + 32)
                    cute.arch.mbarrier_init(empty + stage, 32 * self.compute_warps)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        return Ring(full, empty, base)

    # ---- the loader warp ------------------------------------------------------------------------------------------
    @cute.jit
    def load(self, args, item, ring, v, row_stride, rows):
        """v: address of the first row; rows: tokens from there to the end of the sequence."""
        slots = Int64(args.slot_end - args.slot_begin)
        record = args.workspace + (Int64(item.head) * slots + Int64(item.low - args.slot_begin)) * RECORD_BYTES
        chunks = item.high - item.low
        lane = cute.arch.lane_idx()
        pieces = const_expr(self.bv // 8)  # of 16 bytes in a row of v
        position = RingPosition.of_writer(self.stages)
        ptx.dependency_wait()  # in every CTA, before the first read of what prepare writes: see launch.py
        for _ in cutlass.range(chunks, unroll=1):
            full = ring.full + position.stage
            cute.arch.mbarrier_wait(ring.empty + position.stage, position.phase)
            at = ring.base + position.stage * self.stage_bytes
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, RECORD_BYTES)
                ptx.bulk_load(at, record, Int32(RECORD_BYTES), full.toint())
            for i in cutlass.range_constexpr(CHUNK * pieces // 32):
                row = (i * 32 + lane) // pieces
                piece = (i * 32 + lane) % pieces
                inside = row < rows
                source = v + Int64(row if inside else Int32(0)) * row_stride + Int64(piece * 16)
                target = at + self.v_rows + row * self.v_row + piece * 16
                ptx.cp_async_16_or_zero(target, source, Int32(16) if inside else Int32(0))
            ptx.cp_async_mbarrier_arrive(full.toint())
            record += RECORD_BYTES
            v += row_stride * CHUNK
            rows -= CHUNK
            position.advance()
        ptx.cp_async_wait_all()  # no lane leaves with copies of its own in flight

    # ---- the compute warps ----------------------------------------------------------------------------------------
    @cute.jit
    def compute(self, args, item, ring, out, row_stride, rows, warp):
        """Load the warp's state, walk the chunks, store the state. out: address of the CTA's first row and column; rows: as
        for `load`."""
        own = item.column + warp * (8 * self.tiles) + (cute.arch.lane_idx() % 4) * (2 * self.tiles)  # a lane's first column
        own_step = const_expr(DIM if self.v_first else 1)
        element = (Int64(item.sequence) * Int64(args.heads) + Int64(item.head)) * (DIM * DIM) + Int64(own) * own_step
        carry = Int64(item.head) * (DIM * DIM) + Int64(own) * DIM
        state = self.state.zeros()
        carried_in, carried_out = item.base < args.slot_begin, item.last > args.slot_end
        begins_here, begun = item.base >= args.slot_begin, item.base < args.slot_end
        if const_expr(self.segmented):
            if carried_in and item.last > args.slot_begin:
                self.state.load(state, args.carry_in + carry * 4, "fp32", True)
        if const_expr(self.initial is not None):
            if begins_here and begun:
                address = args.initial_state + element * DTYPE_BYTES[self.initial]
                self.state.load(state, address, self.initial, self.v_first)
        self.walk(args, item, ring, state, out + Int64((own - item.column) * 2), row_stride, rows, warp)
        if const_expr(self.segmented):
            if carried_out and begun:
                self.state.store(state, args.carry_out + carry * 4, "fp32", True)
        if const_expr(self.final is not None):
            if (not carried_out) and begun and (begins_here or item.last > args.slot_begin):
                address = args.final_state + element * DTYPE_BYTES[self.final]
                self.state.store(state, address, self.final, self.v_first)

    @cute.jit
    def first_intermediate_state(self, args, item):
        """Address of the state before the sequence's first chunk."""
        chunks = sequences.chunks_before(
            item.sequence, item.length, args.num_seqs, args.cu_seqlens, args.seq_len, self.log2_tokens, self.cu_dtype
        )
        return args.intermediate_states + (Int64(chunks) * Int64(args.heads) + Int64(item.head)) * STATE_BYTES

    @cute.jit
    def walk(self, args, item, ring, state, out, row_stride, rows, warp):
        """The recurrence. out: address of the first row and the lane's first column."""
        first_state, chunk = Int64(0), Int32(0)
        if const_expr(self.writes_states):
            first_state, chunk = self.first_intermediate_state(args, item), item.low - item.base
        chunks = item.high - item.low
        lane = cute.arch.lane_idx()
        g, t = lane // 4, lane % 4
        operand = cute.make_rmem_tensor((self.tiles, 8, 2), Int32)
        for j in cutlass.range_constexpr(self.tiles):
            for block in cutlass.range_constexpr(8):
                for r in cutlass.range_constexpr(2):
                    operand[j, block, r] = self.state.operand_word(state, j, block, r)
        # rows of k_start, q_start as A fragments; rows of k_end transposed: tile m of A is (keys 8*(m%2).., tokens 8*(m//2)..)
        row_a, row_e = lane % 16, lane % 8 + 8 * (lane // 16)
        address_a = ring.base + row_a * ROW_BYTES
        address_e = ring.base + K_END + row_e * ROW_BYTES
        v_words = ring.base + self.v_rows + g * self.v_row + warp * (16 * self.tiles) + t * (4 * self.tiles)
        below = ptx.less_b32(2 * t, g, 0xFFFF, 0) | ptx.less_b32(2 * t + 1, g, -0x10000, 0)
        position = RingPosition.of_reader(self.stages)
        zero = Float32(0.0)
        for n in cutlass.range(chunks, unroll=1):
            if const_expr(self.writes_states):
                column = item.column + warp * (8 * self.tiles)
                self.state.store_intermediate(state, operand, first_state, chunk, column, args.heads)
                chunk += 1
            cute.arch.mbarrier_wait(ring.full + position.stage, position.phase)
            at = position.stage * self.stage_bytes
            p = [[zero] * 4 for _ in range(self.tiles)]
            o = [[zero] * 4 for _ in range(self.tiles)]
            for block in cutlass.range_constexpr(8):
                piece = ((2 * block + lane // 16) ^ (row_a % 8)) * 16
                k_start = ptx.ldmatrix_x4(address_a + at + K_START + piece)
                q_start = ptx.ldmatrix_x4(address_a + at + Q_START + piece)
                for j in cutlass.range_constexpr(self.tiles):
                    s = (operand[j, block, 0], operand[j, block, 1])
                    p[j] = ptx.mma_bf16(k_start, s, p[j])
                    o[j] = ptx.mma_bf16(q_start, s, o[j])
            # The stage of the chunk before, by every lane: no lane's reads hang on another's arrival. Only here: an arrival
            # passes by loads that still wait for the memory pipe, behind stores of states for long, but not by what used their
            # results.
            if n > 0:
                cute.arch.mbarrier_arrive(ring.empty + position.stage_before())
            v = [ptx.lds_words(v_words + at + 8 * r * self.v_row, self.tiles) for r in range(2)]
            lds_beta = const_expr(ptx.lds_f32 if self.robust else ptx.lds_b32)
            beta = [lds_beta(ring.base + at + BETA + (g + 8 * r) * 4) for r in range(2)]
            inverse = self.terms_of(ptx.lds_v4_b32(ring.base + at + INVERSE + lane * 16), below)
            scores = ptx.lds_v4_b32(ring.base + at + SCORES + lane * 16)
            decay = [ptx.lds_v4_f32(ring.base + at + DECAY + g * 64 + 16 * i) for i in range(4)]
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
                k_end = ptx.ldmatrix_x4_trans(address_e + at + ((2 * block + (lane // 8) % 2) ^ (row_e % 8)) * 16)
                factors = [decay[block // 2][2 * (block % 2) + r] for r in range(2)]
                for j in cutlass.range_constexpr(self.tiles):
                    self.state.update(state, j, block, factors, k_end, update[j])
                    for r in cutlass.range_constexpr(2):
                        operand[j, block, r] = self.state.operand_word(state, j, block, r)
            for j in cutlass.range_constexpr(self.tiles):
                c = ptx.mma_bf16(scores, update[j], o[j] if self.robust else [zero] * 4)
                for r in cutlass.range_constexpr(2):
                    word = ptx.pack_bf16x2(c[2 * r], c[2 * r + 1])
                    if const_expr(not self.robust):
                        word = ptx.add_bf16x2_ftz(ptx.pack_bf16x2(o[j][2 * r], o[j][2 * r + 1]), word)
                    result[r][j] = word
            for r in cutlass.range_constexpr(2):
                if g + 8 * r < rows:
                    ptx.stg_words(out + Int64(g + 8 * r) * row_stride, result[r])
            out += row_stride * CHUNK
            rows -= CHUNK
            position.advance()

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
