"""The writer warps of the 64-token chain: O from shared memory to its rows in global memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.ring import RingPosition
from fla_kda_backend.kernels.wy64.record import CHUNK, HALF, HEAD_DIM


class Writers:
    """Two warps, 64 threads.

    Args:
        cta: see arguments.py.
        thread: 0 to 63.
    """

    def __init__(self, cta, thread):
        self.args, self.shared, self.tasks, self.thread = cta.args, cta.shared, cta.tasks, thread

    def run(self):
        self.publish_checkpoints()
        self.write_output()

    def publish_checkpoints(self):
        """Nothing, except in the replay."""

    @cute.jit
    def write_output(self):
        """Rows of 128 bytes: 8 threads per row, 8 rows at a time; rows past the end of the sequence are not written."""
        args, ring = self.args, self.shared.o
        row, piece = self.thread // 8, self.thread % 8
        source = self.shared.o_image.toint() + row * 128 + (piece ^ row) * 16
        at = RingPosition.of_reader(ring.stages)
        step = Int64(args.heads) * (HEAD_DIM * 2 * 8)
        for turn in cutlass.range(self.tasks.rounds(), unroll=1):
            item = self.tasks.item_now(turn)
            token = (item.first + item.spine_links) * CHUNK + row
            line = (Int64(item.begin) + token) * args.heads + item.head
            target = args.out + line * (HEAD_DIM * 2) + item.value_half * (HALF * 2) + piece * 16
            left = item.length - token
            for _link in cutlass.range(item.output_links, unroll=1):
                ring.wait_full(at)
                rows = [ptx.lds_v4_b32(source + 1024 * k) for k in range(8)]
                # An arrival passes by loads that still wait for the memory pipe, behind the last link's stores, but not by what
                # used their results. Rows past the end of the sequence have no other use.
                ptx.wait_for_loads(source, [row[0] for row in rows])
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(ring.empty)
                for k in cutlass.range_constexpr(8):
                    if left > 8 * k:
                        ptx.stg_once_words(target + step * k, rows[k])
                target += step * 8
                left -= CHUNK
                at.advance()
