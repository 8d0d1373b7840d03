"""The chain warps of the reverse chain: the links of a work item, last chunk first. kernel.py says what a link computes.

As in ../../chain/links.py the order of statements in `link` is a schedule: arithmetic on the state stands between groups of
WGMMAs, shared-memory accesses between the products of a group. An operand in registers is touched while no product that reads
it is in flight: dS is stored during the products with W, dV' one link later, during those with Q; dO is loaded after those.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from fla_kda_backend.kernels.ring import RingPosition
from fla_kda_backend.kernels.wy64 import states
from fla_kda_backend.kernels.wy64.backward.reverse.fragments import ReverseFragments
from fla_kda_backend.kernels.wy64.record import STATE_BYTES

KIND = "fp32"  # of gradients of states in memory


class Positions(NamedTuple):
    """Where the chain warps stand in each ring: the stages that they take next."""

    first: RingPosition
    second: RingPosition
    image: RingPosition


class Ready(NamedTuple):
    """Whether the waits of the coming link would pass at once, tested while products run."""

    first: cutlass.Boolean  # the next link's K_end, A, d_out and decay are there
    second: cutlass.Boolean  # the link's W and Q are there
    image: cutlass.Boolean  # there is room for the last dV'


class ChainWarps:
    """One warpgroup, which works through the CTA's items.

    Args:
        cta: see arguments.py.
        tid, warp: of the thread, 0 to 127 and 0 to 3.
    """

    def __init__(self, cta, tid, warp):
        self.v_first, self.scaled = cta.variant.state_v_first, not cta.variant.l2norm
        self.segmented = cta.schedule.segmented
        self.has_final, self.wants_initial = cta.schedule.d_final_state, cta.schedule.d_initial_state
        self.args, self.shared, self.tasks, self.cluster = cta.args, cta.shared, cta.tasks, cta.cluster
        self.fragments = ReverseFragments(tid, warp, cta.shared)

    @cute.jit
    def run(self):
        """All items of the CTA, one after the other; positions in the rings go on from item to item."""
        at = Positions(
            first=RingPosition.of_reader(self.shared.first.stages),
            second=RingPosition.of_reader(self.shared.second.stages),
            image=RingPosition.of_writer(self.shared.image.stages),
        )
        entries = self.tasks.entries(self.tasks.task(Int32(0)))
        for turn in cutlass.range(self.tasks.rounds(), unroll=1):
            item = self.tasks.item(self.tasks.task(turn), entries)
            entries = self.tasks.entries(self.tasks.task(turn + 1))  # in flight during this task
            if item.output_links > 0:
                self.start(item)
                self.begin(at.first)
                at = self.links(item.output_links, at)
                at = self.finish(at)
                self.end(item)
            elif item.empty:
                self.copy_state(item)

    # ---- gradients of states at the ends of an item

    def factors(self):
        """The gradients in the chain are those in memory times the first; those in memory are the chain's times the second."""
        return (1 / self.args.scale, self.args.scale) if self.scaled else (None, None)

    @cute.jit
    def start(self, item):
        """The gradient of the state after the item's last chunk, into acc_s."""
        if const_expr(self.segmented):
            if item.ends:
                self.load_final(item, self.factors()[0])
            else:
                carry = self.args.d_carry_in + (Int64(item.head) * 2 + item.value_half) * STATE_BYTES
                states.load_carry(carry, self.fragments.flat_s)
        else:
            self.load_final(item, self.factors()[0])

    @cute.jit
    def load_final(self, item, factor):
        """The gradient of the sequence's final state, times `factor` unless None, into acc_s."""
        if const_expr(self.has_final):
            offset = states.state_offset(item.seq, item.head, self.args.heads, KIND)
            address = self.args.d_final_state + offset
            states.load_global_state(address, item.value_half, self.v_first, self.fragments.flat_s)
            self.multiply(factor)
        else:
            for keys in self.fragments.flat_s:
                keys.fill(0.0)

    @cute.jit
    def end(self, item):
        """acc_s, the gradient of the state before the item's first chunk, to where it is wanted."""
        if const_expr(self.segmented):
            if item.first == 0:
                self.store_initial(item, self.factors()[1])
            else:
                carry = self.args.d_carry_out + (Int64(item.head) * 2 + item.value_half) * STATE_BYTES
                states.store_carry(carry, self.fragments.flat_s)
        else:
            self.store_initial(item, self.factors()[1])

    @cute.jit
    def store_initial(self, item, factor):
        """acc_s, times `factor` unless None, to the gradient of the sequence's initial state, where that is wanted."""
        if const_expr(self.wants_initial):
            if self.args.d_initial_state != 0:
                self.multiply(factor)
                offset = states.state_offset(item.seq, item.head, self.args.heads, KIND)
                address = self.args.d_initial_state + offset
                states.store_state(address, item.value_half, KIND, self.v_first, self.fragments.flat_s)

    @cute.jit
    def copy_state(self, item):
        """A sequence without tokens: its states' gradients are equal."""
        if const_expr(self.wants_initial):
            self.load_final(item, None)
            self.store_initial(item, None)

    @cute.jit
    def multiply(self, factor):
        if const_expr(factor is not None):
            for state in self.fragments.flat_s:
                for k in cutlass.range_constexpr(4):
                    state[None, k].store(state[None, k].load() * factor)

    # ---- links

    @cute.jit
    def begin(self, first):
        """What `links` expects of the item's last chunk, in the stage at `first`: see `link`."""
        t = self.fragments
        t.round_state(0, 8)
        self.shared.first.wait_full(first)
        for k in cutlass.range_constexpr(4):
            t.load_d_out(first.stage, k)
        warpgroup.fence()
        t.a_d_out(first.stage, range(4), True)
        t.k_end_ds(first.stage, range(4))
        warpgroup.commit_group()
        for k in cutlass.range_constexpr(8):
            t.load_decay(first.stage, k)
        warpgroup.wait_group(0)

    @cute.jit
    def links(self, links, at):
        """All links of an item. At the end acc_s holds dS before its first chunk, and the last dV' is still to be stored."""
        ready = self.test(at)
        for c in cutlass.range(links, unroll=1):
            at, ready = self.link(c, links, at, ready)
        return at

    def test(self, at):
        shared = self.shared
        return Ready(
            first=shared.first.is_full(at.first.next()), second=shared.second.is_full(at.second),
            image=shared.image.is_empty(at.image),
        )  # fmt: skip

    @cute.jit
    def link(self, c, links, at, ready):
        """Link `c`, counted from the item's last chunk. On entry dS is rounded, `decay` is the chunk's and acc_v holds its
        A^T dO + K_end dS over keys 0 to 63. `at.image` is for the dV' of the link before; a first link puts half of its dS
        there, over what is no dV'.

        After the last link acc_v and the decay are made of whatever the next stage holds, and not used.
        """
        t, shared = self.fragments, self.shared
        first, second, image = at
        lower = image  # for dS, keys 0 to 63
        if c > 0:
            lower = image.next()
        upper = lower.next()
        following = first.next()
        warpgroup.fence()
        t.k_end_ds(first.stage, range(4, 8))
        warpgroup.commit_group()
        if self.args.heads < 0:
            # Never. But ptxas does not move the scaling of the state over a use of the unscaled one; it would move it between
            # the first two products.
            states.store_carry(self.args.workspace, self.fragments.flat_s)
        if c + 1 < links:
            if not ready.first:
                shared.first.wait_full(following)
        t.decay_state()
        if not ready.second:
            shared.second.wait_full(second)
        if not ready.image:
            shared.image.wait_empty(image)
        lower_ready = shared.image.is_empty(lower)
        warpgroup.fence()
        for k in cutlass.range_constexpr(4):
            for h in cutlass.range_constexpr(2):
                t.q_d_out(h, second.stage, (k,))
            t.store_dv(image.stage, k)
        warpgroup.commit_group()
        warpgroup.wait_group(1)  # dV'
        t.round_v()
        if not lower_ready:
            shared.image.wait_empty(lower)
        upper_ready = shared.image.is_empty(upper)
        warpgroup.fence()
        for k in cutlass.range_constexpr(4):
            t.minus_w_dv(0, second.stage, (k,))
            t.store_ds(lower.stage, k)
        warpgroup.commit_group()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.image.full + lower.stage)
            if c > 0:
                cute.arch.mbarrier_arrive(shared.image.full + image.stage)
        if not upper_ready:
            shared.image.wait_empty(upper)
        warpgroup.fence()
        for k in cutlass.range_constexpr(4):
            t.minus_w_dv(1, second.stage, (k,))
            t.store_ds(upper.stage, 4 + k)
        warpgroup.commit_group()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.image.full + upper.stage)
        warpgroup.wait_group(2)  # the products with dO
        for k in cutlass.range_constexpr(4):
            t.load_d_out(following.stage, k)
        warpgroup.wait_group(1)  # dS, keys 0 to 63
        t.round_state(0, 4)
        warpgroup.fence()
        for k in cutlass.range_constexpr(4):
            t.a_d_out(following.stage, (k,), k == 0)
            for j in cutlass.range_constexpr(2):
                t.load_decay(following.stage, 2 * k + j)
        t.k_end_ds(following.stage, range(4))
        warpgroup.commit_group()
        at = Positions(following, second.next(), upper.next())
        ready = self.test(at)
        warpgroup.wait_group(1)  # dS, keys 64 to 127
        t.round_state(4, 8)
        with cute.arch.elect_one():
            self.cluster.free(shared.first.empty + first.stage)
            self.cluster.free(shared.second.empty + second.stage)
        warpgroup.wait_group(0)
        return at, ready

    @cute.jit
    def finish(self, at):
        """Hand over the last dV' of an item."""
        t, shared = self.fragments, self.shared
        shared.image.wait_empty(at.image)
        for k in cutlass.range_constexpr(4):
            t.store_dv(at.image.stage, k)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.image.full + at.image.stage)
        return at._replace(image=at.image.next())
