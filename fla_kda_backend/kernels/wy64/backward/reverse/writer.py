"""The writer of the reverse chain: images of dS and dV' from shared memory into the local records."""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.ring import RingPosition
from fla_kda_backend.kernels.wy64.backward.record import DS_AT, DV_AT, LOCAL_BYTES, STATE_HALF_BYTES, V_HALF_BYTES
from fla_kda_backend.kernels.wy64.backward.reverse.shared import IMAGE_BYTES
from fla_kda_backend.kernels.wy64.backward.workspace import local_record, publish_at, publish_rest, ready_address
from fla_kda_backend.kernels.wy64.record import FLAG_BYTES


class Writer:
    """One warp, of which one thread works; cta: see arguments.py."""

    def __init__(self, cta):
        self.args, self.shared, self.tasks, self.beside = cta.args, cta.shared, cta.tasks, cta.schedule.beside

    @cute.jit
    def run(self):
        if cute.arch.lane_idx() == 0:
            self.write()
        cute.arch.sync_warp()
        ptx.dependency_wait()  # in every CTA, also where it has no chunk: see kernel.py

    @cute.jit
    def write(self):
        """The images in the order in which they come. One is freed when the next one's copy has begun: two at a time.

        Beside the local gradients, a chunk is counted once its last image, dV', is written. That is asked for five images or
        more later, which is time enough for the copies, so that this thread does not wait."""
        args = self.args
        image = RingPosition.of_reader(self.shared.image.stages)
        for turn in cutlass.range(self.tasks.rounds(), unroll=1):
            item = self.tasks.item_now(turn)
            if item.output_links > 0:
                slot = item.slot + item.first + item.output_links - 1 - args.slot_begin
                local = local_record(args.workspace, args.heads, args.slot_end - args.slot_begin, item.head, slot)
                ds = local + DS_AT + item.value_half * STATE_HALF_BYTES
                dv = local + DV_AT + item.value_half * V_HALF_BYTES
                ready = ready_address(args.workspace, args.heads, args.slot_end - args.slot_begin, item.head, slot)
                for link in cutlass.range(item.output_links, unroll=1):
                    if link > 0:  # dV' of the link before
                        self.store(dv, image)
                        self.free_before(image)
                        image.advance()
                        dv -= LOCAL_BYTES
                    self.store(ds, image)
                    if link > 0:
                        self.free_before(image)
                    image.advance()
                    self.store(ds + IMAGE_BYTES, image)
                    self.free_before(image)
                    image.advance()
                    ds -= LOCAL_BYTES
                    if const_expr(self.beside):
                        # Five images since the last dV' but one: dS in halves and dV' of the link before, this one's dS.
                        publish_at(link, ready, -FLAG_BYTES, ptx.bulk_wait_but_five)
                self.store(dv, image)
                self.free_before(image)
                ptx.bulk_wait_read()
                cute.arch.mbarrier_arrive(self.shared.image.empty + image.stage)
                image.advance()
                if const_expr(self.beside):
                    publish_rest(item.output_links, ready, -FLAG_BYTES)
        ptx.bulk_wait()

    def store(self, target, image):
        """One image, once it is there, as a group of its own. The proxy fence is this thread's, behind the barrier: the chain
        warps would wait for their stores with one."""
        self.shared.image.wait_full(image)
        ptx.fence_proxy_async()
        ptx.bulk_store(target, self.shared.images.toint() + image.stage * IMAGE_BYTES, IMAGE_BYTES)
        ptx.bulk_commit()

    def free_before(self, image):
        """Free the image before this one, once it is read."""
        ptx.bulk_wait_read_but_one()
        cute.arch.mbarrier_arrive(self.shared.image.empty + image.stage_before())
