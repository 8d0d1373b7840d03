"""The recurrence of the 64-token WY form on WGMMA, with the state in registers (SM90).

One task is (sequence, head, half of the value columns); a CTA works through its tasks one after the other. Per chunk
of 64 tokens, with the images that the prepare kernel left in the chunk's record (`S` [128 keys, 64 values] is kept as
S^T):

    V' = U - W S          tensor core: A = S^T in bf16, from registers; B = -W; accumulator `acc_v` starts at U
    O  = Q S              tensor core: the same A; B = Q; accumulator `acc_o`
    S  = diag(decay) S    CUDA cores: a column scale of the fp32 accumulators `acc_s`, while the products above run
    S += K_end^T V'       tensor core: A = V'^T in bf16, from registers; B = K_end; accumulators `acc_s`
    O += A V'             tensor core: the same A; B = A; written one chunk later, under the next products

Rounding: the products take bf16 operands and accumulate in fp32; S and V' are rounded to bf16 for use as operands, O
once on its way out; the state stays fp32 for the whole sequence.

Layout: one warpgroup holds the 64 value rows of S^T. An accumulator of a 64 x N product and the A operand of a
product over those N columns have the same order in registers (8 values per 16 columns), so operands are made by
rounding alone and no warp waits for another on the chain. B operands are the 128-byte swizzled images of the record,
brought in by one-dimensional bulk copies; U and the decay come in accumulator order.

Warps: 0-3 chain and outputs, 4 loads the ring {W, U, decay}, 7 the ring {Q, K_end, A}, 5 and 6 write O. The two rings
exist because W is needed half a chunk before K_end and freed as much earlier.

The order of statements in `link` is a schedule. ptxas serialises WGMMAs, silently, when accumulators in flight are
touched: state arithmetic stands between groups, never inside one; shared-memory accesses stand between the products
of a group because they would wait for everything queued before them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from .shared import ptx
from .shared.chain_fragments import K_MAJOR, MN_MAJOR, QKA_BYTES, ChainFragments, Ring, Shared
from .shared.states import CARRY_BYTES, load_carry, load_state, store_carry, store_state
from .shared.wy64 import (
    CHUNK,
    DECAY_AT,
    DECAY_BYTES,
    HALF,
    HEAD_DIM,
    MAX_SORTED,
    O_BYTES,
    Q_AT,
    RECORD_BYTES,
    U_AT,
    U_BYTES,
    W_AT,
    W_BYTES,
    Problem,
    TaskList,
)

SMEM_LIMIT = 232448


class ChainWY64(ChainFragments, TaskList):
    """State recurrence and outputs from the 64-token records; see the module's docstring.

    cu_dtype: None (batch of equal lengths), Int32 or Int64. initial, final: None, Float32 or BFloat16. state_v_first:
    states are [N, H, V, K], else [N, H, K, V]. max_ctas: CTAs to spread the tasks over (the number of SMs), or None for
    one task a CTA. unroll: links in the loop's body, 1 or 2.
    """

    CHAIN_WARPS = 4
    CHAIN_LOADER, OUTPUT_LOADER = 4, 7
    O_WRITERS = (5, 6)
    THREADS = 256  # 255 registers a thread; between 288 and 384 threads ptxas would cap them at 168
    HEADER_BYTES = 1024

    def __init__(
        self, *, cu_dtype=None, initial=None, final=Float32, state_v_first=True, stages=(4, 3), max_ctas=132, unroll=1
    ):
        self.cu_dtype, self.initial, self.final = cu_dtype, initial, final
        self.state_v_first = state_v_first
        self.chain_stages, self.output_stages = stages
        self.max_ctas, self.unroll = max_ctas, unroll
        if self.chain_stages < 3 or self.output_stages < 2:
            raise ValueError(
                f"needs at least 3 and 2 stages, got {stages}: a stage is freed after the next has arrived"
            )
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"stages {stages} need {self.smem_bytes} bytes of shared memory, limit {SMEM_LIMIT}")

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
        ).launch(
            grid=[ctas, 1, 1], block=[self.THREADS, 1, 1], stream=stream, min_blocks_per_mp=1, use_pdl=True
        )  # fmt: skip

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
        p = Problem(cu_seqlens, workspace, order, seq_len, num_seqs, heads, slot_begin, slot_end)
        self.init_barriers(tid, sm)
        self.sort(p, tid, cute.recast_ptr(sm.o, dtype=Int32))
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
        order = smem.allocate_array(Int32, MAX_SORTED, byte_alignment=4)
        tile = lambda size: smem.allocate_array(BFloat16, size // 2, byte_alignment=1024)  # noqa: E731
        w, qka = tile(W_BYTES * chain.stages), tile(QKA_BYTES * output.stages)
        u, o = tile(U_BYTES * chain.stages), tile(O_BYTES)
        decay = smem.allocate_array(Float32, DECAY_BYTES // 4 * chain.stages, byte_alignment=128)
        assert 16 * (chain.stages + output.stages + 1) + 4 * MAX_SORTED <= self.HEADER_BYTES
        return Shared(chain, output, store, w, u, decay, qka, o), order

    @cute.jit
    def init_barriers(self, tid, sm):
        """A loader's one arrival and its bytes fill a stage; one lane of each chain warp frees it. O: the reverse."""
        if tid == 0:
            for ring in (sm.chain, sm.output):
                for s in cutlass.range_constexpr(ring.stages):
                    cute.arch.mbarrier_init(ring.full + s, 1)
                    cute.arch.mbarrier_init(ring.empty + s, self.CHAIN_WARPS)
            cute.arch.mbarrier_init(sm.store.full, self.CHAIN_WARPS)
            cute.arch.mbarrier_init(sm.store.empty, len(self.O_WRITERS))
        cute.arch.mbarrier_init_fence()

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
            for _link in cutlass.range(links, unroll=1):
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
            source = self.record(p, head, slot + first) + Q_AT
            for _link in cutlass.range(links, unroll=1):
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
            for _link in cutlass.range(links, unroll=1):
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
        begin, end = self.bounds(p, self.task(p, Int32(0))[0])
        for turn in cutlass.range(self.rounds(p), unroll=1):
            seq, head, half = self.task(p, turn)
            if const_expr(self.cu_dtype is None):
                begin, end = self.bounds(p, seq)
            slot, first, links = self.span(p, seq, begin, end)
            empty = end == begin and seq >= 0 and slot >= p.slot_begin and slot < p.slot_end
            goes_on = (first + links) * CHUNK < end - begin
            carry = (Int64(head) * 2 + half) * CARRY_BYTES
            if const_expr(self.cu_dtype is not None):
                begin, end = self.bounds(p, self.task(p, turn + 1)[0])  # in flight during this task
            if links > 0:
                if first > 0:
                    ptx.dependency_wait()
                    load_carry(carry_in + carry, t.flat_s)
                else:
                    self.load_state(p, initial_state, seq, head, half, t)
                self.begin(t, sm, stage, phase)
                stage, phase, out_stage, out_phase, o_phase = self.links(
                    t, sm, links, stage, phase, out_stage, out_phase, o_phase
                )
                o_phase = self.finish(t, sm, out_stage, o_phase)
                if goes_on:
                    store_carry(carry_out + carry, t.flat_s)
                else:
                    self.store_state(p, final_state, seq, head, half, t)
            elif empty:
                self.load_state(p, initial_state, seq, head, half, t)
                self.store_state(p, final_state, seq, head, half, t)

    @cute.jit
    def load_state(self, p, states, seq, head, half, t):
        size = const_expr(0 if self.initial is None else self.initial.width // 8 * HEAD_DIM * HEAD_DIM)
        address = states + (Int64(seq) * p.heads + head) * size
        load_state(address, half, self.initial, self.state_v_first, t.flat_s)

    @cute.jit
    def store_state(self, p, states, seq, head, half, t):
        size = const_expr(0 if self.final is None else self.final.width // 8 * HEAD_DIM * HEAD_DIM)
        address = states + (Int64(seq) * p.heads + head) * size
        store_state(address, half, self.final, self.state_v_first, t.flat_s)

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
