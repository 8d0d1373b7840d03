"""The chain warps: the links of a work item with their outputs. kernel.py says what a link computes.

The order of statements in `link` is a schedule. ptxas serialises WGMMAs, silently, when accumulators in flight are
touched: state arithmetic stands between groups, never inside one. Shared-memory accesses stand between the products of a
group, because elsewhere they would wait for everything queued before them.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.ring import RingPosition
from fla_kda_backend.kernels.wy64 import states
from fla_kda_backend.kernels.wy64.chain.fragments import Fragments
from fla_kda_backend.kernels.wy64.chain.shared import QKA_BYTES
from fla_kda_backend.kernels.wy64.chain.states import IntermediateStates
from fla_kda_backend.kernels.wy64.record import STATE_BYTES


class Positions(NamedTuple):
    """Where the chain warps stand in each ring: the stages that they take next."""

    chain: RingPosition
    output: RingPosition
    o: RingPosition


class Ready(NamedTuple):
    """Whether the waits of the coming link would pass at once, tested while products run."""

    chain: cutlass.Boolean  # the next link's W, U and decay are there
    output: cutlass.Boolean  # the link's Q, K_end and A are there
    o: cutlass.Boolean  # the writers have taken the O before the last


class ChainWarps:
    """One warpgroup, which works through the CTA's items.

    Args:
        cta: see arguments.py.
        tid, warp: of the thread, 0 to 127 and 0 to 3.
    """

    def __init__(self, cta, tid, warp):
        variant, schedule = cta.variant, cta.schedule
        self.initial, self.final, self.v_first = variant.initial_state, variant.final_state, variant.state_v_first
        self.segmented = schedule.segmented
        self.zero_start = schedule.starts_from_zero(variant)  # every item begins with the state zero of a sequence
        self.resumes = schedule.segmented or schedule.replay  # an item may begin inside a sequence
        self.args, self.shared, self.tasks, self.cluster = cta.args, cta.shared, cta.tasks, cta.cluster
        self.fragments = Fragments(tid, warp, cta.shared, None if variant.l2norm else cta.args.scale)
        self.states = IntermediateStates(variant, cta.args, self.fragments)

    @cute.jit
    def run(self):
        """All items of the CTA, one after the other; positions in the rings go on from item to item."""
        counted = (Int32(0), Int32(0))
        self.fragments.acc_o.fill(0.0)
        at = Positions(
            chain=RingPosition.of_reader(self.shared.chain.stages),
            output=RingPosition.of_reader(self.shared.output.stages),
            o=RingPosition.of_writer(self.shared.o.stages),
        )
        entries = self.tasks.entries(self.tasks.task(Int32(0)))
        for turn in cutlass.range(self.tasks.rounds(), unroll=1):
            item = self.tasks.item(self.tasks.task(turn), entries)
            entries = self.tasks.entries(self.tasks.task(turn + 1))  # in flight during this task
            if item.output_links > 0:
                counted = self.states.count(item, counted)
                row, step = self.states.address(item, counted), self.states.step()
                if const_expr(self.zero_start):
                    self.states.store_zeros(row)
                    at = self.first_link(at)
                    if item.output_links > 1:
                        row += step
                        self.begin(at.chain, row)
                    at = self.links(Int32(1), item.output_links, at, row, step)
                else:
                    at = self.start(item, at)
                    self.begin(at.chain, row)
                    at = self.spine(item, at)
                    at = self.links(Int32(0), item.output_links, at, row, step)
                at = self.finish(at)
                if item.ends:
                    self.store_final_state(item)
                elif const_expr(self.segmented):
                    carry = self.args.carry_out + (Int64(item.head) * 2 + item.value_half) * STATE_BYTES
                    states.store_carry(carry, self.fragments.flat_s)
            elif item.empty:
                at = self.initial_state(at)
                self.store_final_state(item)

    # ---- states at the ends of an item

    @cute.jit
    def start(self, item, at):
        """The state before an item's first link, into acc_s."""
        if const_expr(self.resumes):
            if item.first > 0:
                self.resume(item)
            else:
                at = self.initial_state(at)
        else:
            at = self.initial_state(at)
        return at

    @cute.jit
    def resume(self, item):
        """The state where an item begins inside its sequence, into acc_s."""
        ptx.dependency_wait()
        carry = self.args.carry_in + (Int64(item.head) * 2 + item.value_half) * STATE_BYTES
        states.load_carry(carry, self.fragments.flat_s)

    @cute.jit
    def initial_state(self, at):
        """The state before a sequence, zero or from a stage of the output ring, into acc_s."""
        output = at.output
        if const_expr(self.initial is None):
            for keys in self.fragments.flat_s:
                keys.fill(0.0)
        else:
            self.shared.output.wait_full(output)
            image = self.shared.qka.toint() + output.stage * QKA_BYTES
            states.load_state(image, self.initial, self.v_first, self.fragments.flat_s)
            ptx.fence_proxy_async()  # these reads before the copy that the stage takes next
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                self.cluster.free(self.shared.output.empty + output.stage)
            output = output.next()
        return at._replace(output=output)

    @cute.jit
    def store_final_state(self, item):
        if const_expr(self.final is not None):
            offset = states.state_offset(item.seq, item.head, self.args.heads, self.final)
            states.store_state(self.args.final_state + offset, item.value_half, self.final, self.v_first, self.fragments.flat_s)

    # ---- links

    @cute.jit
    def first_link(self, at):
        """From state zero: V' = U, S = K_end^T V', O = A V'. At the end acc_o holds O, as after `links`."""
        t, shared = self.fragments, self.shared
        shared.chain.wait_full(at.chain)
        for k in cutlass.range_constexpr(4):
            t.load_u(at.chain.stage, k)
        t.v_from_u()
        shared.output.wait_full(at.output)
        warpgroup.fence()
        for h in cutlass.range_constexpr(2):
            t.k_end_v(h, at.output.stage, range(4), zero=True)
        t.a_v(at.output.stage, range(4), zero=True)
        warpgroup.commit_group()
        with cute.arch.elect_one():
            self.cluster.free(shared.chain.empty + at.chain.stage)
        warpgroup.wait_group(0)
        return Positions(at.chain.next(), at.output.next(), at.o)

    @cute.jit
    def begin(self, chain, row):
        """What `links` expects of the first chunk, in the stage at `chain`, and of the state, which goes to `row`."""
        t = self.fragments
        self.shared.chain.wait_full(chain)
        for k in cutlass.range_constexpr(4):
            t.load_u(chain.stage, k)
        for k in cutlass.range_constexpr(8):
            t.load_decay(chain.stage, k)
        t.start_v()
        t.round_state(0, 8)
        self.states.store(row, 0, 8)

    @cute.jit
    def spine(self, item, at):
        """The links without outputs; only the replay has any."""
        return at

    @cute.jit
    def links(self, first, links, at, row, step):
        """The links with outputs of an item, from number `first` on.

        On entry S is rounded, acc_v holds U, `decay` is the first chunk's and, unless first = 0, acc_o holds the O of the
        link before. At the end acc_o holds the last O, and the last output stage is still to be freed. row, step: address
        of the intermediate state before the first chunk, and bytes to the next one.
        """
        shared = self.shared
        ready = Ready(
            chain=shared.chain.is_full(at.chain.next()),
            output=shared.output.is_full(at.output),
            o=shared.o.is_empty(at.o),
        )
        previous_out = at.output.stage_before()
        for c in cutlass.range(first, links, unroll=1):
            row += step
            at, previous_out, ready = self.link(c, links, at, previous_out, ready, row)
        return at

    @cute.jit
    def link(self, c, links, at, previous_out, ready, row):
        """Link `c`. `previous_out`: the output stage of the link before, whose O is still being computed.

        The body ends by waiting for its products: ptxas tracks no accumulator in flight across the loop's edge and would
        serialise every product.
        """
        t, shared = self.fragments, self.shared
        chain, output, o = at
        following = chain.next()
        warpgroup.fence()
        t.minus_w_s(chain.stage, range(8))
        warpgroup.commit_group()
        warpgroup.wait_group(1)  # O of the previous chunk
        if c + 1 < links:
            if not ready.chain:
                shared.chain.wait_full(following)
        t.decay_state()
        if not ready.output:
            shared.output.wait_full(output)
        if not ready.o:
            shared.o.wait_empty(o)
        t.round_output()
        warpgroup.fence()
        for k in cutlass.range_constexpr(8):
            t.q_s(output.stage, k)
            if const_expr(k % 2 == 0):
                t.store_o(k // 2)
            else:
                t.load_u(following.stage, k // 2)
        warpgroup.commit_group()
        cute.arch.sync_warp()
        if c > 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(shared.o.full)
                self.cluster.free(shared.output.empty + previous_out)
            o = o.next()
        warpgroup.wait_group(1)  # V'
        t.round_v()
        with cute.arch.elect_one():
            self.cluster.free(shared.chain.empty + chain.stage)
        warpgroup.fence()
        for h in cutlass.range_constexpr(2):
            t.k_end_v(h, output.stage, range(4))
            warpgroup.commit_group()
        for k in cutlass.range_constexpr(4):
            t.a_v(output.stage, (k,))
            for j in cutlass.range_constexpr(2):
                t.load_decay(following.stage, 2 * k + j)
        warpgroup.commit_group()
        if c + 1 < links:
            self.fragments.start_v()  # not by `t`: the DSL would carry a local variable through the branch
        at = Positions(following, output.next(), o)
        after = following.next()
        warpgroup.wait_group(2)  # S, keys 0 to 63
        t.round_state(0, 4)
        self.states.store_between(c, links, row, 0, 4)
        ready = Ready(chain=shared.chain.is_full(after), output=shared.output.is_full(at.output), o=shared.o.is_empty(at.o))
        warpgroup.wait_group(0)  # S, keys 64 to 127
        t.round_state(4, 8)
        self.states.store_between(c, links, row, 4, 8)
        return at, output.stage, ready

    @cute.jit
    def finish(self, at):
        """Hand over the last O of an item and free its output stage."""
        t, shared = self.fragments, self.shared
        t.round_output()
        shared.o.wait_empty(at.o)
        for k in cutlass.range_constexpr(4):
            t.store_o(k)
        cute.arch.sync_warp()
        last = at.output.stage_before()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.o.full)
            self.cluster.free(shared.output.empty + last)
        return at._replace(o=at.o.next())
