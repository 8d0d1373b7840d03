"""Shared memory of a CTA of the reverse chain: two rings of operands, images of what goes out, and the mbarriers."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.backward.record import STATE_HALF_BYTES, V_HALF_BYTES
from fla_kda_backend.kernels.wy64.chain.shared import A_COLUMN, HEADER_BYTES, SMEM_LIMIT, Ring
from fla_kda_backend.kernels.wy64.record import A_BLOCK, BANDS, CHUNK, DECAY_BYTES, HALF, K_END_BYTES, Q_BYTES, W_BYTES
from fla_kda_backend.kernels.wy64.tasks import MAX_SORTED

A_IMAGE = BANDS * A_COLUMN  # all 16 blocks
D_OUT_BYTES = CHUNK * HALF * 2  # d_out of a chunk and value half
WQ_BYTES = W_BYTES + Q_BYTES  # a stage of the second ring
IMAGE_BYTES = V_HALF_BYTES  # of a dV', or of 64 keys of a dS
assert 2 * IMAGE_BYTES == STATE_HALF_BYTES
FIRST_STAGES, SECOND_STAGES, IMAGE_STAGES = 3, 3, 4
FIRST_BYTES = K_END_BYTES + A_IMAGE + D_OUT_BYTES + DECAY_BYTES
SMEM_BYTES = HEADER_BYTES + FIRST_STAGES * FIRST_BYTES + SECOND_STAGES * WQ_BYTES + IMAGE_STAGES * IMAGE_BYTES
assert FIRST_STAGES >= 3 and SECOND_STAGES >= 2  # a stage of the first ring is freed after the next one has arrived
assert SMEM_BYTES <= SMEM_LIMIT
assert 16 * (FIRST_STAGES + SECOND_STAGES + IMAGE_STAGES) + 4 * MAX_SORTED <= HEADER_BYTES


@dataclass(frozen=True)
class Shared:
    """Rings and pointers to their images; stage s of a ring has image s."""

    first: Ring  # K_end, A, d_out, decay: wanted from the chunk's A^T dO on, during the link before
    second: Ring  # W, Q
    image: Ring  # on their way out, in turn: dV' of the chunk before, if any, both halves of dS; at the item's end the last dV'
    k_end: Any
    a: Any
    d_out: Any  # [64 tokens][64 values], 16-byte piece p of row r at piece p ^ (r & 7)
    decay: Any
    wq: Any
    images: Any
    order: Any  # MAX_SORTED Int32, see tasks.py

    @classmethod
    def allocate(cls):
        smem = SmemAllocator()
        barriers = lambda n: smem.allocate_array(Int64, n, byte_alignment=8)  # noqa: E731
        ring = lambda n: Ring(barriers(n), barriers(n), n)  # noqa: E731
        first, second, images = ring(FIRST_STAGES), ring(SECOND_STAGES), ring(IMAGE_STAGES)
        order = smem.allocate_array(Int32, MAX_SORTED, byte_alignment=4)
        image = lambda size: smem.allocate_array(BFloat16, size // 2, byte_alignment=1024)  # noqa: E731
        wq, k_end = image(WQ_BYTES * SECOND_STAGES), image(K_END_BYTES * FIRST_STAGES)
        a, d_out = image(A_IMAGE * FIRST_STAGES), image(D_OUT_BYTES * FIRST_STAGES)
        out = image(IMAGE_BYTES * IMAGE_STAGES)
        decay = smem.allocate_array(Float32, DECAY_BYTES // 4 * FIRST_STAGES, byte_alignment=128)
        return cls(first, second, images, k_end, a, d_out, decay, wq, out, order)

    @cute.jit
    def init_barriers(self, tid, chain_warps: cutlass.Constexpr, arrivals_to_free: cutlass.Constexpr):
        """Arrivals of each barrier. A stage of the first ring is filled by its loader's one arrival and the bytes, and by one
        arrival of the warp that brings d_out; a stage of the second one by its loader's arrival and the bytes. Both are freed
        by `arrivals_to_free`. Images are filled by the chain warps and freed by the thread that stores them."""
        if tid == 0:
            for ring, fillers in ((self.first, 2), (self.second, 1)):
                for s in cutlass.range_constexpr(ring.stages):
                    cute.arch.mbarrier_init(ring.full + s, fillers)
                    cute.arch.mbarrier_init(ring.empty + s, arrivals_to_free)
            for s in cutlass.range_constexpr(self.image.stages):
                cute.arch.mbarrier_init(self.image.full + s, chain_warps)
                cute.arch.mbarrier_init(self.image.empty + s, 1)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def clear_above_diagonal(self, tid):
        """Zero the blocks of A that no copy touches."""
        for s in cutlass.range_constexpr(FIRST_STAGES):
            for j in cutlass.range_constexpr(1, BANDS):
                if tid < j * A_BLOCK // 16:
                    at = self.a.toint() + s * A_IMAGE + j * A_COLUMN + tid * 16
                    ptx.sts_v4_b32(at, [Int32(0)] * 4)
        ptx.fence_proxy_async()
