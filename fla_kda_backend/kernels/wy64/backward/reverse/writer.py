"""The writer of the reverse chain: images of dS and dV' from shared memory into the local records."""

import cutlass
import cutlass.cute as cute

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.ring import RingPosition
from fla_kda_backend.kernels.wy64.backward.record import DS_AT, DV_AT, LOCAL_BYTES, STATE_HALF_BYTES, V_HALF_BYTES
from fla_kda_backend.kernels.wy64.backward.workspace import local_record


class Writer:
    """One warp, of which one thread works; cta: see arguments.py."""

    def __init__(self, cta):
        self.args, self.shared, self.tasks = cta.args, cta.shared, cta.tasks

    @cute.jit
    def run(self):
        if cute.arch.lane_idx() == 0:
            self.write()
        cute.arch.sync_warp()
        ptx.dependency_wait()  # in every CTA, also where it has no chunk: see kernel.py

    @cute.jit
    def write(self):
        """A link's dS comes together with the dV' of the link before; the last dV' of an item comes by itself.

        The proxy fence is this thread's, behind the barrier: the chain warps would wait for their stores with one.
        """
        args, shared = self.args, self.shared
        ds, dv = RingPosition.of_reader(shared.ds.stages), RingPosition.of_reader(shared.dv.stages)
        for turn in cutlass.range(self.tasks.rounds(), unroll=1):
            item = self.tasks.item_now(turn)
            if item.output_links > 0:
                slot = item.slot + item.first + item.output_links - 1 - args.slot_begin
                local = local_record(args.workspace, args.heads, args.slot_end - args.slot_begin, item.head, slot)
                local_ds = local + DS_AT + item.value_half * STATE_HALF_BYTES
                local_dv = local + DV_AT + item.value_half * V_HALF_BYTES
                for link in cutlass.range(item.output_links, unroll=1):
                    shared.ds.wait_full(ds)
                    ptx.fence_proxy_async()
                    ptx.bulk_store(local_ds, shared.ds_image.toint(), STATE_HALF_BYTES)
                    ptx.bulk_commit()
                    local_ds -= LOCAL_BYTES
                    if link > 0:
                        self.store_dv(local_dv, dv)
                        ptx.bulk_wait_read_but_one()
                        cute.arch.mbarrier_arrive(shared.ds.empty)
                        ptx.bulk_wait_read()
                        cute.arch.mbarrier_arrive(shared.dv.empty + dv.stage)
                        local_dv -= LOCAL_BYTES
                        dv.advance()
                    else:
                        ptx.bulk_wait_read()
                        cute.arch.mbarrier_arrive(shared.ds.empty)
                    ds.advance()
                self.store_dv(local_dv, dv)
                ptx.bulk_wait_read()
                cute.arch.mbarrier_arrive(shared.dv.empty + dv.stage)
                dv.advance()
        ptx.bulk_wait()

    def store_dv(self, target, dv):
        """One dV', once it is there, as a group of its own."""
        self.shared.dv.wait_full(dv)
        ptx.fence_proxy_async()
        ptx.bulk_store(target, self.shared.dv_image.toint() + dv.stage * V_HALF_BYTES, V_HALF_BYTES)
        ptx.bulk_commit()
