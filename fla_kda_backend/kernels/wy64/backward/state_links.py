"""The chain warps of the chain of states: links without outputs, whose S and V' go to images; see states.py.

The order of statements in `link` is a schedule, as in chain/links.py: state arithmetic stands between groups of products,
accesses of shared memory between the products of a group. S and V' are stored while other products run than those that
take them from registers: S of a link during its update, V' during the second half of the next link's W S.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.ring import RingPosition
from fla_kda_backend.kernels.wy64 import states
from fla_kda_backend.kernels.wy64.chain.fragments import Fragments
from fla_kda_backend.kernels.wy64.chain.shared import QK_BYTES, QKA_BYTES
from fla_kda_backend.kernels.wy64.record import STATE_BYTES


class StateFragments(Fragments):
    """Fragments of which S and V' can be stored as swizzled images.

    Args:
        tid, warp: of the chain thread.
        shared: the CTA's StateShared.
    """

    def __init__(self, tid, warp, shared):
        super().__init__(tid, warp, shared, None)
        lane = tid % 32
        tile, row = lane // 8, lane % 8
        self.image_at = shared.qka.toint() + (8 * (tile // 2) + row) * 128 + (((2 * warp + tile % 2) ^ row) * 16)

    @cute.jit
    def store_s(self, stage, k: cutlass.Constexpr):
        """Keys 16*k to 16*k + 15 of the rounded S, [key][value], into a stage's image. No product may read them meanwhile."""
        ptx.stmatrix_x4_trans(self.image_at + stage * QKA_BYTES + k * 2048, [self.s_words[j, k] for j in range(4)])

    @cute.jit
    def store_v(self, stage, k: cutlass.Constexpr):
        """Tokens 16*k to 16*k + 15 of the rounded V', [token][value], likewise."""
        ptx.stmatrix_x4_trans(self.image_at + stage * QKA_BYTES + (QK_BYTES + k * 2048), [self.v_words[j, k] for j in range(4)])

    @cute.jit
    def keep_state(self):
        """Have S in its registers here; stores nothing, as image_at is never negative."""
        for k in cutlass.range_constexpr(8):
            s = self.flat_s[k // 4]
            for j in cutlass.range_constexpr(2):
                ptx.force_compute(self.image_at, [s[4 * j + e, k % 4] for e in range(4)])


class StateWarps:
    """One warpgroup, which works through the CTA's items.

    Args:
        cta: see chain/arguments.py; with StatesArguments and StateShared.
        tid, warp: of the thread, 0 to 127 and 0 to 3.
    """

    def __init__(self, cta, tid, warp):
        self.initial, self.v_first = cta.variant.initial_state, cta.variant.state_v_first
        self.segmented, self.keeps_images = cta.schedule.segmented, cta.schedule.stage == "all"
        self.args, self.shared, self.tasks, self.cluster = cta.args, cta.shared, cta.tasks, cta.cluster
        self.fragments = StateFragments(tid, warp, cta.shared)

    @cute.jit
    def run(self):
        """All items of the CTA, one after the other; positions in the rings go on from item to item."""
        chain = RingPosition.of_reader(self.shared.chain.stages)
        output = RingPosition.of_reader(self.shared.output.stages)
        entries = self.tasks.entries(self.tasks.task(Int32(0)))
        for turn in cutlass.range(self.tasks.rounds(), unroll=1):
            item = self.tasks.item(self.tasks.task(turn), entries)
            entries = self.tasks.entries(self.tasks.task(turn + 1))  # in flight during this task
            if item.output_links > 0:
                self.start(item)
                chain, output = self.links(item.output_links, chain, output)
                if const_expr(self.segmented):
                    if not item.ends and self.args.carry_out != 0:
                        states.store_carry(self.carry(self.args.carry_out, item), self.fragments.flat_s)

    def carry(self, address, item):
        """Address of an item's carried state."""
        return address + (Int64(item.head) * 2 + item.value_half) * STATE_BYTES

    @cute.jit
    def start(self, item):
        """The state before an item's first link, into acc_s."""
        if const_expr(self.segmented):
            if item.first > 0:
                ptx.dependency_wait()
                states.load_carry(self.carry(self.args.carry_in, item), self.fragments.flat_s)
            else:
                self.initial_state(item)
        else:
            self.initial_state(item)

    @cute.jit
    def initial_state(self, item):
        """The state before a sequence, into acc_s."""
        if const_expr(self.initial is None):
            for keys in self.fragments.flat_s:
                keys.fill(0.0)
        else:
            source = self.args.initial_state + states.state_offset(item.seq, item.head, self.args.heads, self.initial)
            states.read_state(source, item.value_half, self.initial, self.v_first, self.fragments.flat_s)

    @cute.jit
    def links(self, links, chain, output):
        """The links of an item; returns the positions of what comes next. At the end acc_s holds the state after it."""
        t, shared = self.fragments, self.shared
        following = chain.next()
        shared.chain.wait_full(chain)
        for k in cutlass.range_constexpr(4):
            t.load_u(chain.stage, k)
        for k in cutlass.range_constexpr(8):
            t.load_decay(chain.stage, k)
        t.start_v()
        t.round_state(0, 8)
        warpgroup.fence()
        t.minus_w_s(chain.stage, range(8))
        warpgroup.commit_group()
        t.decay_state()
        if links > 1:
            shared.chain.wait_full(following)
        for k in cutlass.range_constexpr(4):
            t.load_u(following.stage, k)  # whatever stands there, where no link follows
        shared.output.wait_full(output)
        warpgroup.wait_group(0)
        # Their stage is freed, and an arrival passes by loads.
        ptx.wait_for_loads(t.decay_at, [t.decay_words[0, k] for k in range(8)])
        with cute.arch.elect_one():
            self.cluster.free(shared.chain.empty + chain.stage)
        for c in cutlass.range(1, links, unroll=1):
            # acc_v: V' of link c - 1; S already decayed; u_words: U of link c, whose stage is `following`.
            following, output = self.link(c, links, following, output)
        self.update(output.stage, following.stage, 1, False)
        warpgroup.wait_group(0)
        self.store_v(output.stage, range(4))
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            if const_expr(self.keeps_images):
                cute.arch.mbarrier_arrive(shared.images.full + output.stage)
            self.cluster.free(shared.output.empty + output.stage)
        return following, output.next()

    @cute.jit
    def link(self, c, links, following, output):
        """From V' of link c - 1 to V' of link c."""
        t, shared = self.fragments, self.shared
        after, next_output = following.next(), output.next()
        ready = shared.chain.is_full(after)
        self.update(output.stage, following.stage, 2, True)
        t.start_v()
        if c + 1 < links:
            if not ready:
                shared.chain.wait_full(after)
        warpgroup.wait_group(1)  # S, keys 0 to 63
        t.round_state(0, 4)
        warpgroup.fence()
        for k in cutlass.range_constexpr(4):
            t.minus_w_s(following.stage, (k,))
            t.load_u(after.stage, k)  # whatever stands there, where no link follows
        warpgroup.commit_group()
        warpgroup.wait_group(1)  # S, keys 64 to 127
        t.round_state(4, 8)
        warpgroup.fence()
        for k in cutlass.range_constexpr(4):
            t.minus_w_s(following.stage, (4 + k,))
            self.store_v(output.stage, (k,))
            if const_expr(k == 1):
                with cute.arch.elect_one():
                    self.cluster.free(shared.output.empty + output.stage)
        warpgroup.commit_group()
        # This branch begins a basic block, and uses S unscaled: without it ptxas moves the scaling between the products.
        if c + 1 < links:
            if not ready:
                self.fragments.keep_state()
        t.decay_state()
        # The wait ends a basic block: without it ptxas moves the scaling behind the products.
        shared.output.wait_full(next_output)
        warpgroup.wait_group(0)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.cluster.free(shared.chain.empty + following.stage)
            if const_expr(self.keeps_images):
                cute.arch.mbarrier_arrive(shared.images.full + output.stage)
        return after, next_output

    @cute.jit
    def update(self, output_stage, following_stage, groups: cutlass.Constexpr, follows: cutlass.Constexpr):
        """S += K_end^T V', in one group or two. In between S is stored as it was, and the decay of the chunk in
        `following_stage` is loaded, if one follows."""
        t = self.fragments
        t.round_v()
        warpgroup.fence()
        for h in cutlass.range_constexpr(2):
            for k in cutlass.range_constexpr(4):
                t.k_end_v(h, output_stage, (k,))
                if const_expr(follows):
                    t.load_decay(following_stage, 4 * h + k)
                if const_expr(self.keeps_images):
                    t.store_s(output_stage, 4 * h + k)
            if const_expr(h == 1 or groups == 2):
                warpgroup.commit_group()

    @cute.jit
    def store_v(self, stage, ks: cutlass.Constexpr):
        """Blocks `ks` of 16 tokens of V' into a stage's image."""
        if const_expr(self.keeps_images):
            for k in cutlass.range_constexpr(len(ks)):
                self.fragments.store_v(stage, ks[k])
