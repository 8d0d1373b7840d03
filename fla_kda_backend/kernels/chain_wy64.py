"""The recurrence of the 64-token WY form on WGMMA, with the state in registers (SM90).

One task is (sequence, head, half of the value columns); a CTA works through its tasks one after the other. Per chunk of
64 tokens, with the images that the prepare kernel left in the chunk's record (`S` [128 keys, 64 values] is kept as S^T):

    V' = U - W S          tensor core: A = S^T in bf16, from registers; B = -W; accumulator `acc_v` starts at U
    O  = Q S              tensor core: the same A; B = Q; accumulator `acc_o`
    S  = diag(decay) S    CUDA cores: a column scale of the fp32 accumulators `acc_s`, while the products above run
    S += K_end^T V'       tensor core: A = V'^T in bf16, from registers; B = K_end; accumulators `acc_s`
    O += A V'             tensor core: the same A; B = A; written one chunk later, under the next products

Rounding: the products take bf16 operands and accumulate in fp32; S and V' are rounded to bf16 for use as operands, O once
on its way out; the state stays fp32 for the whole sequence.

Layout: one warpgroup holds the 64 value rows of S^T. An accumulator of a 64 x N product and the A operand of a product
over those N columns have the same order in registers (8 values per 16 columns), so operands are made by rounding alone and
no warp waits for another on the chain. B operands are the 128-byte swizzled images of the record, brought in by
one-dimensional bulk copies; U and the decay come in accumulator order.

Warps: 0-3 chain and outputs, 4 loads the ring {W, U, decay}, 7 the ring {Q, K_end, A}, 5 and 6 write O. The two rings
exist because W is needed half a chunk before K_end and freed as much earlier.

The order of statements in `links` is a schedule. ptxas serialises WGMMAs, silently, when accumulators in flight are
touched: state arithmetic stands between groups, never inside one; shared-memory accesses stand between the products of a
group because they would wait for everything queued before them.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field, SmemLayoutAtomKind, make_smem_layout_atom
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.memory import SmemAllocator

from .shared import ptx

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
CHUNK = 64
HEAD_DIM = 128
HALF = HEAD_DIM // 2

# One record of the workspace, per (head, slot): byte offsets of its images.
W_AT = 0
QKA_AT = 16384  # Q, K_end and A stand together: one copy brings all three
U_AT = 57344  # two halves of 8192
DECAY_AT = 73728
RECORD_BYTES = 74240

W_BYTES, U_BYTES, DECAY_BYTES = 16384, 8192, 512
Q_BYTES, K_END_BYTES, A_BYTES = 16384, 16384, 8192
QKA_BYTES = Q_BYTES + K_END_BYTES + A_BYTES
O_BYTES = CHUNK * HALF * 2
CARRY_BYTES = HEAD_DIM * HALF * 4  # one (head, half), fp32, in accumulator order

SORTED_SEQUENCES = 128  # up to here the longest sequence goes first; more sequences keep their order


@dsl_user_op
def pin(values, *, loc=None, ip=None):
    """Return register `values` (all Float32 or all Int32) unchanged, through an empty instruction that is not moved: what
    computes them stays before it."""
    kind, letter = (T.f32(), "f") if isinstance(values[0], Float32) else (T.i32(), "r")
    dsl_type, n = type(values[0]), len(values)
    raw = llvm.inline_asm(
        llvm.StructType.get_literal([kind] * n),
        [v.ir_value(loc=loc, ip=ip) for v in values],
        "// pin",
        ",".join([f"={letter}"] * n + [str(i) for i in range(n)]),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return tuple(dsl_type(llvm.extractvalue(kind, raw, [i], loc=loc, ip=ip)) for i in range(n))


@dataclass(frozen=True)
class Ring:
    """A ring of shared-memory stages: `full` and `empty` mbarriers and the number of stages."""

    full: Any
    empty: Any
    stages: int


@dataclass(frozen=True)
class Problem:
    """Run-time facts, the same for the whole grid."""

    cu_seqlens: Int64
    seq_len: Int32
    num_seqs: Int32
    heads: Int32
    slot_begin: Int32
    slot_end: Int32
    workspace: Int64
    order: Any  # shared memory: sequences by falling length


@dataclass(frozen=True)
class Shared:
    """Shared-memory pointers."""

    chain: Ring  # W, U, decay
    output: Ring  # Q, K_end, A
    store: Ring  # O
    w: Any
    u: Any
    decay: Any
    qka: Any
    o: Any


class ChainWY64:
    """State recurrence and outputs from the 64-token records; see the module's docstring.

    cu_dtype: None (batch of equal lengths), Int32 or Int64. initial, final: None, Float32 or BFloat16. state_v_first: states
    are [N, H, V, K], else [N, H, K, V]. max_ctas: CTAs to spread the tasks over (the number of SMs), or None for one
    task a CTA.
    """

    CHAIN_WARPS = 4
    CHAIN_LOADER, OUTPUT_LOADER = 4, 7
    O_WRITERS = (5, 6)
    THREADS = 256  # 255 registers a thread; between 288 and 384 threads ptxas would cap them at 168
    HEADER_BYTES = 1024

    def __init__(self, *, cu_dtype=None, initial=None, final=Float32, state_v_first=True, stages=(4, 3), max_ctas=132, unroll=1):
        self.cu_dtype, self.initial, self.final = cu_dtype, initial, final
        self.state_v_first = state_v_first
        self.chain_stages, self.output_stages = stages
        self.max_ctas, self.unroll = max_ctas, unroll
        if self.chain_stages < 3 or self.output_stages < 2:
            raise ValueError(f"needs at least 3 and 2 stages, got {stages}: a stage is freed after the next has arrived")
        if self.smem_bytes > 232448:
            raise ValueError(f"stages {stages} need {self.smem_bytes} bytes of shared memory, limit 232448")

    @property
    def smem_bytes(self):
        chain = self.chain_stages * (W_BYTES + U_BYTES + DECAY_BYTES)
        return self.HEADER_BYTES + chain + self.output_stages * QKA_BYTES + O_BYTES

    @cute.jit
    def __call__(
        self,
        initial_state: Int64,
        final_state: Int64,
        out: Int64,  # [tokens, heads, 128] bf16
        cu_seqlens: Int64,  # [num_seqs + 1], or 0
        workspace: Int64,  # [heads, slot_end - slot_begin] records
        carry_in: Int64,  # [heads, 2] states of the sequence that began before slot_begin
        carry_out: Int64,  # the same, of the one that goes on past slot_end; not the same memory as carry_in
        seq_len: Int32,
        num_seqs: Int32,
        heads: Int32,
        slot_begin: Int32,
        slot_end: Int32,
        stream,
    ):
        ctas = num_seqs * heads * 2
        if const_expr(self.max_ctas is not None):
            ctas = cutlass.min(ctas, Int32(self.max_ctas))
        self.kernel(
            initial_state, final_state, out, cu_seqlens, workspace, carry_in, carry_out,
            seq_len, num_seqs, heads, slot_begin, slot_end,
        ).launch(grid=[ctas, 1, 1], block=[self.THREADS, 1, 1], stream=stream, min_blocks_per_mp=1, use_pdl=True)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        initial_state: Int64,
        final_state: Int64,
        out: Int64,
        cu_seqlens: Int64,
        workspace: Int64,
        carry_in: Int64,
        carry_out: Int64,
        seq_len: Int32,
        num_seqs: Int32,
        heads: Int32,
        slot_begin: Int32,
        slot_end: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        sm, order = self.allocate()
        p = Problem(cu_seqlens, seq_len, num_seqs, heads, slot_begin, slot_end, workspace, order)
        self.init_barriers(tid, sm)
        self.sort_sequences(tid, p, sm)
        cute.arch.sync_threads()
        if warp == self.CHAIN_LOADER:
            self.load_chain(p, sm)
        elif warp == self.OUTPUT_LOADER:
            self.load_output(p, sm)
        elif warp == self.O_WRITERS[0] or warp == self.O_WRITERS[1]:
            self.write_o(tid - 32 * self.O_WRITERS[0], p, sm, out)
        elif warp < self.CHAIN_WARPS:
            self.chain(tid, warp, p, sm, initial_state, final_state, carry_in, carry_out)

    # ---- set-up

    def allocate(self):
        smem = SmemAllocator()
        barriers = lambda n: smem.allocate_array(Int64, n, byte_alignment=8)  # noqa: E731
        ring = lambda n: Ring(barriers(n), barriers(n), n)  # noqa: E731
        chain, output, store = ring(self.chain_stages), ring(self.output_stages), ring(1)
        order = smem.allocate_array(Int32, SORTED_SEQUENCES, byte_alignment=4)
        tile = lambda size: smem.allocate_array(BFloat16, size // 2, byte_alignment=1024)  # noqa: E731
        w, qka = tile(W_BYTES * chain.stages), tile(QKA_BYTES * output.stages)
        u, o = tile(U_BYTES * chain.stages), tile(O_BYTES)
        decay = smem.allocate_array(Float32, DECAY_BYTES // 4 * chain.stages, byte_alignment=128)
        assert 16 * (chain.stages + output.stages + 1) + 4 * SORTED_SEQUENCES <= self.HEADER_BYTES
        return Shared(chain, output, store, w, u, decay, qka, o), order

    @cute.jit
    def init_barriers(self, tid, sm):
        """A loader's one arrival and its bytes fill a stage; one lane of each chain warp frees it. O the other way round."""
        if tid == 0:
            for ring in (sm.chain, sm.output):
                for s in cutlass.range_constexpr(ring.stages):
                    cute.arch.mbarrier_init(ring.full + s, 1)
                    cute.arch.mbarrier_init(ring.empty + s, self.CHAIN_WARPS)
            cute.arch.mbarrier_init(sm.store.full, self.CHAIN_WARPS)
            cute.arch.mbarrier_init(sm.store.empty, len(self.O_WRITERS))
        cute.arch.mbarrier_init_fence()

    # ---- tasks

    @cute.jit
    def sort_sequences(self, tid, p, sm):
        """order[rank] = sequence, longest first, by counting (the O buffer holds the lengths meanwhile)."""
        if const_expr(self.cu_dtype is not None):
            if p.num_seqs <= SORTED_SEQUENCES:
                lengths = cute.make_tensor(cute.recast_ptr(sm.o, dtype=Int32), cute.make_layout(SORTED_SEQUENCES))
                mine = Int32(0)
                if tid < p.num_seqs:
                    mine = self.bounds(p, tid)[1] - self.bounds(p, tid)[0]
                    lengths[tid] = mine
                cute.arch.sync_threads()
                if tid < p.num_seqs:
                    rank = Int32(0)
                    for other in cutlass.range(p.num_seqs, unroll=4):
                        theirs = lengths[other]
                        if theirs > mine or (theirs == mine and other < tid):
                            rank += 1
                    cute.make_tensor(p.order, cute.make_layout(SORTED_SEQUENCES))[rank] = tid

    @cute.jit
    def rounds(self, p):
        """How many tasks a CTA has at most."""
        grid, _, _ = cute.arch.grid_dim()
        return (p.num_seqs * p.heads * 2 + grid - 1) // grid

    @cute.jit
    def task(self, p, turn):
        """(sequence, head, half) of this CTA's task number `turn`; sequence -1: none.

        Tasks are dealt out forwards and backwards in turn, so that with falling lengths the sums come out even; the two
        halves of a head fall to neighbouring CTAs and share its record in the L2.
        """
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        index = turn * grid + bid
        if turn % 2 == 1:
            index = turn * grid + grid - 1 - bid
        pair = index // 2
        rank = pair // p.heads
        seq = rank
        if rank >= p.num_seqs:
            seq = Int32(-1)
        elif const_expr(self.cu_dtype is not None):
            if p.num_seqs <= SORTED_SEQUENCES:
                seq = cute.make_tensor(p.order, cute.make_layout(SORTED_SEQUENCES))[rank]
        return seq, pair % p.heads, index % 2

    @cute.jit
    def bounds(self, p, seq):
        """First token of the sequence and of the next one; 0, 0 for sequence -1. Below 2^31 tokens in all."""
        begin, end = Int32(0), Int32(0)
        if seq >= 0:
            if const_expr(self.cu_dtype is None):
                begin = seq * p.seq_len
                end = begin + p.seq_len
            else:
                size = const_expr(self.cu_dtype.width // 8)
                begin = ptx.ldg_nc_b32(p.cu_seqlens + Int64(seq) * size)  # the low word, for Int64
                end = ptx.ldg_nc_b32(p.cu_seqlens + Int64(seq + 1) * size)
        return begin, end

    @cute.jit
    def span(self, p, seq, begin, end):
        """(slot of chunk 0, first chunk and number of chunks in this launch)."""
        chunks = (end - begin + CHUNK - 1) // CHUNK
        slot = begin // CHUNK + seq
        if const_expr(self.cu_dtype is None):
            slot = seq * chunks
        first = cutlass.max(p.slot_begin - slot, Int32(0))
        links = cutlass.max(cutlass.min(p.slot_end - slot, chunks) - first, Int32(0))
        return slot, first, links

    @cute.jit
    def record(self, p, head, slot):
        """Address of the record of (head, slot)."""
        return p.workspace + (Int64(head) * (p.slot_end - p.slot_begin) + (slot - p.slot_begin)) * RECORD_BYTES

    @cute.jit
    def advance(self, stage, phase, stages: cutlass.Constexpr):
        stage += 1
        if stage == stages:
            stage = Int32(0)
            phase = phase ^ 1
        return stage, phase

    # ---- loader warps

    @cute.jit
    def load_chain(self, p, sm):
        ptx.dependency_wait()
        stage, phase = Int32(0), Int32(1)
        for turn in cutlass.range(self.rounds(p), unroll=1):
            seq, head, half = self.task(p, turn)
            begin, end = self.bounds(p, seq)
            slot, first, links = self.span(p, seq, begin, end)
            source = self.record(p, head, slot + first)
            for link in cutlass.range(links, unroll=1):
                cute.arch.mbarrier_wait(sm.chain.empty + stage, phase)
                with cute.arch.elect_one():
                    full = sm.chain.full + stage
                    cute.arch.mbarrier_arrive_and_expect_tx(full, W_BYTES + U_BYTES + DECAY_BYTES)
                    full = full.toint()
                    ptx.bulk_load(sm.w.toint() + stage * W_BYTES, source + W_AT, W_BYTES, full)
                    ptx.bulk_load(sm.u.toint() + stage * U_BYTES, source + U_AT + half * U_BYTES, U_BYTES, full)
                    ptx.bulk_load(sm.decay.toint() + stage * DECAY_BYTES, source + DECAY_AT, DECAY_BYTES, full)
                source += RECORD_BYTES
                stage, phase = self.advance(stage, phase, self.chain_stages)

    @cute.jit
    def load_output(self, p, sm):
        ptx.dependency_wait()
        stage, phase = Int32(0), Int32(1)
        for turn in cutlass.range(self.rounds(p), unroll=1):
            seq, head, _ = self.task(p, turn)
            begin, end = self.bounds(p, seq)
            slot, first, links = self.span(p, seq, begin, end)
            source = self.record(p, head, slot + first) + QKA_AT
            for link in cutlass.range(links, unroll=1):
                cute.arch.mbarrier_wait(sm.output.empty + stage, phase)
                with cute.arch.elect_one():
                    full = sm.output.full + stage
                    cute.arch.mbarrier_arrive_and_expect_tx(full, QKA_BYTES)
                    ptx.bulk_load(sm.qka.toint() + stage * QKA_BYTES, source, QKA_BYTES, full.toint())
                source += RECORD_BYTES
                stage, phase = self.advance(stage, phase, self.output_stages)

    # ---- writer warps

    @cute.jit
    def write_o(self, thread, p, sm, out):
        """Rows of 128 bytes: 8 threads a row, 8 rows at a time; rows past the end of the sequence are not written."""
        row, piece = thread // 8, thread % 8
        source = sm.o.toint() + row * 128 + (piece ^ row) * 16
        phase = Int32(0)
        for turn in cutlass.range(self.rounds(p), unroll=1):
            seq, head, half = self.task(p, turn)
            begin, end = self.bounds(p, seq)
            _, first, links = self.span(p, seq, begin, end)
            token = begin + first * CHUNK + row
            if const_expr(self.cu_dtype is None):
                token = first * CHUNK + row
            line = Int64(token)
            if const_expr(self.cu_dtype is None):
                line += Int64(seq) * p.seq_len
            target = out + (line * p.heads + head) * (HEAD_DIM * 2) + half * (HALF * 2) + piece * 16
            left = end - begin - first * CHUNK - row
            step = Int64(p.heads) * (HEAD_DIM * 2 * 8)
            for link in cutlass.range(links, unroll=1):
                cute.arch.mbarrier_wait(sm.store.full, phase)
                rows = [ptx.lds_v4_b32(source + 1024 * k) for k in range(8)]
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(sm.store.empty)
                for k in cutlass.range_constexpr(8):
                    if left > 8 * k:
                        ptx.stg_words(target + step * k, rows[k])
                target += step * 8
                left -= CHUNK
                phase = phase ^ 1

    # ---- chain warps

    @cute.jit
    def chain(self, tid, warp, p, sm, initial_state, final_state, carry_in, carry_out):
        t = self.operands(tid, warp, sm)
        t.acc_o.fill(0.0)
        stage, phase, out_stage, out_phase, o_phase = Int32(0), Int32(0), Int32(0), Int32(0), Int32(1)
        seq, head, half = self.task(p, Int32(0))
        begin, end = self.bounds(p, seq)
        for turn in cutlass.range(self.rounds(p), unroll=1):
            slot, first, links = self.span(p, seq, begin, end)
            chunks = (end - begin + CHUNK - 1) // CHUNK
            state = (Int64(seq) * p.heads + head) * (HEAD_DIM * HEAD_DIM)
            fragment = (Int64(head) * 2 + half) * CARRY_BYTES + tid * 16
            # The next task's bounds are on their way during this one.
            next_seq, next_head, next_half = self.task(p, turn + 1)
            next_begin, next_end = self.bounds(p, next_seq)
            if links > 0:
                if first > 0:
                    ptx.dependency_wait()
                    self.load_carry(carry_in + fragment, t)
                else:
                    self.load_state(initial_state, state, tid, half, t)
                self.begin(t, sm, stage, phase)
                stage, phase, out_stage, out_phase, o_phase = self.links(
                    t, sm, links, stage, phase, out_stage, out_phase, o_phase
                )
                o_phase = self.finish(t, sm, out_stage, o_phase)
                if first + links < chunks:
                    self.store_carry(carry_out + fragment, t)
                else:
                    self.store_state(final_state, state, tid, half, t)
            elif chunks == 0 and seq >= 0 and slot >= p.slot_begin and slot < p.slot_end:
                self.load_state(initial_state, state, tid, half, t)
                self.store_state(final_state, state, tid, half, t)
            seq, head, half, begin, end = next_seq, next_head, next_half, next_begin, next_end

    def mma(self, b_major):
        """64 x 64 x 16, A from registers."""
        op = warpgroup.MmaF16BF16Op(
            BFloat16, Float32, (64, 64, 16), warpgroup.OperandSource.RMEM, K_MAJOR, b_major
        )
        return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))

    def operands(self, tid, warp, sm):
        """Register tensors and shared-memory descriptors of one chain thread."""

        def b_operand(tiled, pointer, kind, shape, order, stages, stride):
            image = cute.tile_to_shape(make_smem_layout_atom(kind, BFloat16), shape, order=order)
            ring = cute.append(image.outer, cute.make_layout(stages, stride=stride // 2))
            tensor = cute.make_tensor(cute.recast_ptr(pointer, image.inner, BFloat16), ring)
            return tiled.make_fragment_B(tiled.get_slice(tid).partition_B(tensor))

        t = Operands()
        k_major, mn_major = self.mma(K_MAJOR), self.mma(MN_MAJOR)
        KSW, MNSW = SmemLayoutAtomKind.K_SW128, SmemLayoutAtomKind.MN_SW128
        t.w = b_operand(k_major, sm.w, KSW, (64, 128), (0, 1), sm.chain.stages, W_BYTES)
        qka = lambda at: sm.qka + at // 2  # noqa: E731
        stages = sm.output.stages
        t.q = b_operand(k_major, qka(0), KSW, (64, 128), (0, 1), stages, QKA_BYTES)
        t.k_end = b_operand(mn_major, qka(Q_BYTES), MNSW, (128, 64), (1, 0), stages, QKA_BYTES)
        t.a = b_operand(k_major, qka(Q_BYTES + K_END_BYTES), KSW, (64, 64), (0, 1), stages, QKA_BYTES)

        accumulator = lambda: cute.make_rmem_tensor(k_major.get_slice(tid).partition_shape_C((64, 64)), Float32)  # noqa: E731
        flat = lambda x: cute.make_tensor(x.iterator, cute.make_layout((8, 4)))  # noqa: E731
        t.acc_v, t.acc_o, t.acc_s = accumulator(), accumulator(), [accumulator(), accumulator()]
        t.flat_v, t.flat_o, t.flat_s = flat(t.acc_v), flat(t.acc_o), [flat(x) for x in t.acc_s]
        t.bits_v = cute.make_tensor(cute.recast_ptr(t.acc_v.iterator, dtype=Int32), cute.make_layout((8, 4)))
        a_layout = lambda k: cute.make_layout(((2, 2, 2), 1, k), stride=((1, 2, 4), 0, 8))  # noqa: E731
        t.s_bf16, t.v_bf16 = cute.make_rmem_tensor(a_layout(8), BFloat16), cute.make_rmem_tensor(a_layout(4), BFloat16)
        t.flat_s_bf16 = cute.make_tensor(t.s_bf16.iterator, cute.make_layout((8, 8)))
        t.s_words = cute.recast_tensor(t.flat_s_bf16, Int32)
        t.flat_v_bf16 = cute.make_tensor(t.v_bf16.iterator, cute.make_layout((8, 4)))
        t.o_bf16 = cute.make_rmem_tensor((8, 4), BFloat16)
        t.o_words = cute.recast_tensor(t.o_bf16, Int32)
        t.decay = cute.make_rmem_tensor((4, 8), Float32)
        t.decay_words = cute.recast_tensor(t.decay, Int32)
        t.u_words = cute.make_rmem_tensor((4, 4), Int32)

        lane = tid % 32
        tile, row = lane // 8, lane % 8
        t.u_at = sm.u.toint() + tid * 16
        t.decay_at = sm.decay.toint() + (tid % 4) * 16
        t.o_at = sm.o.toint() + (8 * (tile // 2) + row) * 128 + (((2 * warp + tile % 2) ^ row) * 16)
        return t

    @cute.jit
    def begin(self, t, sm, stage, phase):
        """What `links` expects of the first chunk and the state."""
        cute.arch.mbarrier_wait(sm.chain.full + stage, phase)
        for k in cutlass.range_constexpr(4):
            self.load_u(t, stage, k)
        for k in cutlass.range_constexpr(8):
            self.load_decay(t, stage, k)
        self.start_v(t)
        self.round_state(t, 0, 8)

    @cute.jit
    def links(self, t, sm, links, stage, phase, out_stage, out_phase, o_phase):
        """All links of a task. On entry S is rounded, acc_v holds U and `decay` the first chunk's; at the end acc_o
        holds the last O. Returns the rings' positions; the last output stage is still to be freed."""
        following, following_phase = self.advance(stage, phase, self.chain_stages)
        ready = (
            cute.arch.mbarrier_test_wait(sm.chain.full + following, following_phase),
            cute.arch.mbarrier_test_wait(sm.output.full + out_stage, out_phase),
            cute.arch.mbarrier_test_wait(sm.store.empty, o_phase),
        )
        at = (stage, phase, out_stage, out_phase, o_phase, Int32(0))
        if const_expr(self.unroll == 1):
            for c in cutlass.range(links, unroll=1):
                at, ready = self.link(t, sm, c, links, at, ready, True)
        else:
            for pair in cutlass.range(links // 2, unroll=1):
                at, ready = self.link(t, sm, 2 * pair, links, at, ready, False)
                at, ready = self.link(t, sm, 2 * pair + 1, links, at, ready, True)
            if links % 2 == 1:
                at, ready = self.link(t, sm, links - 1, links, at, ready, True)
        return at[:5]

    @cute.jit
    def link(self, t, sm, c, links, at, ready, last: cutlass.Constexpr):
        """Link `c`; `last`: of the loop's body. ptxas tracks no accumulator in flight across the loop's edge (it would
        serialise every product), so that the body's last link waits for its O."""
        stage, phase, out_stage, out_phase, o_phase, previous_out = at
        chain_ready, output_ready, o_ready = ready
        following, following_phase = self.advance(stage, phase, self.chain_stages)
        warpgroup.fence()
        self.product(K_MAJOR, t.acc_v, t.s_bf16, t.w[None, 0, None, stage], range(8))
        warpgroup.commit_group()
        warpgroup.wait_group(1)  # O of the previous chunk
        if c + 1 < links:
            if not chain_ready:
                cute.arch.mbarrier_wait(sm.chain.full + following, following_phase)
        self.decay_state(t)
        if not output_ready:
            cute.arch.mbarrier_wait(sm.output.full + out_stage, out_phase)
        if not o_ready:
            cute.arch.mbarrier_wait(sm.store.empty, o_phase)
        self.round(t.o_bf16, t.flat_o, range(4))
        warpgroup.fence()
        for k in cutlass.range_constexpr(8):
            self.product(K_MAJOR, t.acc_o, t.s_bf16, t.q[None, 0, None, out_stage], (k,), zero=(k == 0))
            if const_expr(k % 2 == 0):
                self.store_o(t, k // 2)
            else:
                self.load_u(t, following, k // 2)
        warpgroup.commit_group()
        cute.arch.sync_warp()
        if c > 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(sm.store.full)
                cute.arch.mbarrier_arrive(sm.output.empty + previous_out)
            o_phase = o_phase ^ 1
        warpgroup.wait_group(1)  # V'
        self.round(t.flat_v_bf16, t.flat_v, range(4))
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(sm.chain.empty + stage)
        warpgroup.fence()
        for h in cutlass.range_constexpr(2):
            self.product(MN_MAJOR, t.acc_s[h], t.v_bf16, t.k_end[None, h, None, out_stage], range(4))
            warpgroup.commit_group()
        for k in cutlass.range_constexpr(4):
            self.product(K_MAJOR, t.acc_o, t.v_bf16, t.a[None, 0, None, out_stage], (k,))
            for j in cutlass.range_constexpr(2):
                self.load_decay(t, following, 2 * k + j)
        warpgroup.commit_group()
        if c + 1 < links:
            self.start_v(t)
        previous_out = out_stage
        out_stage, out_phase = self.advance(out_stage, out_phase, self.output_stages)
        stage, phase = following, following_phase
        after, after_phase = self.advance(stage, phase, self.chain_stages)
        warpgroup.wait_group(2)  # S, keys 0 to 63
        self.round_state(t, 0, 4)
        chain_ready = cute.arch.mbarrier_test_wait(sm.chain.full + after, after_phase)
        output_ready = cute.arch.mbarrier_test_wait(sm.output.full + out_stage, out_phase)
        o_ready = cute.arch.mbarrier_test_wait(sm.store.empty, o_phase)
        warpgroup.wait_group(0 if last else 1)  # S, keys 64 to 127
        self.round_state(t, 4, 8)
        return (stage, phase, out_stage, out_phase, o_phase, previous_out), (chain_ready, output_ready, o_ready)

    @cute.jit
    def finish(self, t, sm, out_stage, o_phase):
        """Hand over the last O of a task and free its output stage."""
        self.round(t.o_bf16, t.flat_o, range(4))
        cute.arch.mbarrier_wait(sm.store.empty, o_phase)
        for k in cutlass.range_constexpr(4):
            self.store_o(t, k)
        cute.arch.sync_warp()
        last = out_stage - 1
        if out_stage == 0:
            last = Int32(self.output_stages - 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(sm.store.full)
            cute.arch.mbarrier_arrive(sm.output.empty + last)
        return o_phase ^ 1

    # ---- pieces of a link

    @cute.jit
    def product(self, b_major: cutlass.Constexpr, acc, a, b, ks: cutlass.Constexpr, zero: cutlass.Constexpr = False):
        """acc (+)= a[k-block] b[k-block] for the k-blocks `ks`; b: (MMA, k-blocks) of one stage."""
        mma = self.mma(b_major)
        for k in cutlass.range_constexpr(len(ks)):
            mma.set(Field.ACCUMULATE, not (zero and k == 0))
            block = b[None, ks[k]]
            block = cute.make_tensor(block.iterator, cute.append(block.layout, cute.make_layout(1)))
            cute.gemm(mma, acc, a[None, None, ks[k]], block, acc)

    @cute.jit
    def round(self, target, source, ks: cutlass.Constexpr):
        for k in cutlass.range_constexpr(len(ks)):
            target[None, ks[k]].store(source[None, ks[k]].load().to(BFloat16))

    @cute.jit
    def round_state(self, t, begin: cutlass.Constexpr, end: cutlass.Constexpr):
        """S to bf16, blocks of 16 keys `begin` to `end`."""
        for k in cutlass.range_constexpr(begin, end):
            t.flat_s_bf16[None, k].store(t.flat_s[k // 4][None, k % 4].load().to(BFloat16))
            words = pin(tuple(t.s_words[j, k] for j in range(4)))
            for j in cutlass.range_constexpr(4):
                t.s_words[j, k] = words[j]

    @cute.jit
    def decay_state(self, t):
        """S *= decay, column by column. Pinned: the scaled state must be complete before the next group is issued."""
        for k in cutlass.range_constexpr(8):
            s = t.flat_s[k // 4]
            for e in cutlass.range_constexpr(8):
                s[e, k % 4] = s[e, k % 4] * t.decay[(e & 1) + 2 * (e >> 2), k]
        for k in cutlass.range_constexpr(8):
            s = t.flat_s[k // 4]
            pinned = pin(tuple(s[e, k % 4] for e in range(8)))
            for e in cutlass.range_constexpr(8):
                s[e, k % 4] = pinned[e]

    @cute.jit
    def load_u(self, t, stage, k: cutlass.Constexpr):
        words = ptx.lds_volatile_v4_b32(t.u_at + stage * U_BYTES + k * 2048)
        for j in cutlass.range_constexpr(4):
            t.u_words[j, k] = words[j]

    @cute.jit
    def load_decay(self, t, stage, k: cutlass.Constexpr):
        words = ptx.lds_volatile_v4_b32(t.decay_at + stage * DECAY_BYTES + k * 64)
        for j in cutlass.range_constexpr(4):
            t.decay_words[j, k] = words[j]

    @cute.jit
    def start_v(self, t):
        """acc_v = U, widened by integer operations: one each, where a conversion takes two for the high half."""
        for k in cutlass.range_constexpr(4):
            for j in cutlass.range_constexpr(4):
                word = t.u_words[j, k]
                t.bits_v[2 * j, k] = word << 16
                t.bits_v[2 * j + 1, k] = word & Int32(-65536)

    @cute.jit
    def store_o(self, t, k: cutlass.Constexpr):
        """16 tokens of O^T, transposed on the way: token-major rows of 128 bytes, piece index XOR row % 8."""
        ptx.stmatrix_x4_trans(t.o_at + k * 2048, [t.o_words[j, k] for j in range(4)])

    # ---- states

    @cute.jit
    def load_carry(self, address, t):
        for j in cutlass.range_constexpr(16):
            for e, x in enumerate(ptx.ldg_v4_f32(address + j * 2048)):
                t.flat_s[j // 8][4 * (j % 2) + e, j % 8 // 2] = x

    @cute.jit
    def store_carry(self, address, t):
        for j in cutlass.range_constexpr(16):
            ptx.stg_v4_f32(address + j * 2048, *[t.flat_s[j // 8][4 * (j % 2) + e, j % 8 // 2] for e in range(4)])

    def state_pairs(self, dtype, base, offset, tid, half):
        """For each pair of registers: (state half, index, index) and the addresses of its one or two elements."""
        size = dtype.width // 8
        value = half * HALF + 16 * (tid // 32) + tid % 32 // 4
        key = 2 * (tid % 4)
        key_step, value_step = (1, HEAD_DIM) if self.state_v_first else (HEAD_DIM, 1)
        start = base + (offset + value * value_step + key * key_step) * size
        for j in range(16):
            for r in range(2):
                first = start + (8 * j * key_step + 8 * r * value_step) * size
                yield (j // 8, 4 * (j % 2) + 2 * r, j % 8 // 2), first, first + key_step * size

    @cute.jit
    def load_state(self, initial_state, offset, tid, half, t):
        if const_expr(self.initial is None):
            for h in cutlass.range_constexpr(2):
                t.acc_s[h].fill(0.0)
        else:
            for (h, e, k), first, second in self.state_pairs(self.initial, initial_state, offset, tid, half):
                if const_expr(self.state_v_first and self.initial is Float32):
                    pair = ptx.ldg_v2_f32(first)
                elif const_expr(self.state_v_first):
                    pair = ptx.unpack_bf16x2(ptx.ldg_b32(first))
                else:
                    load = const_expr(ptx.ldg_f32 if self.initial is Float32 else ptx.ldg_bf16)
                    pair = (load(first), load(second))
                t.flat_s[h][e, k], t.flat_s[h][e + 1, k] = pair

    @cute.jit
    def store_state(self, final_state, offset, tid, half, t):
        if const_expr(self.final is not None):
            for (h, e, k), first, second in self.state_pairs(self.final, final_state, offset, tid, half):
                low, high = t.flat_s[h][e, k], t.flat_s[h][e + 1, k]
                if const_expr(self.state_v_first and self.final is Float32):
                    ptx.stg_v2_f32(first, low, high)
                elif const_expr(self.state_v_first):
                    ptx.stg_b32(first, ptx.pack_bf16x2(low, high))
                elif const_expr(self.final is Float32):
                    ptx.stg_f32(first, low)
                    ptx.stg_f32(second, high)
                else:
                    words = ptx.pack_bf16x2(low, high)
                    ptx.stg_b16(first, words)
                    ptx.stg_b16(second, words >> 16)


class Operands:
    """Register tensors, descriptors and addresses of a chain thread; filled by ChainWY64.operands."""
