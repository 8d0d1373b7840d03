"""Shared memory of a CTA of the chain of states: the rings of the forward chain, and mbarriers of its own."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from fla_kda_backend.kernels.wy64.chain.shared import CHAIN_STAGES, HEADER_BYTES, OUTPUT_STAGES, QKA_BYTES, SMEM_LIMIT, Ring
from fla_kda_backend.kernels.wy64.record import DECAY_BYTES, U_BYTES, W_BYTES
from fla_kda_backend.kernels.wy64.tasks import MAX_SORTED

CHAIN_STAGE_BYTES = W_BYTES + U_BYTES + DECAY_BYTES
SMEM_BYTES = HEADER_BYTES + CHAIN_STAGES * CHAIN_STAGE_BYTES + OUTPUT_STAGES * QKA_BYTES
assert SMEM_BYTES <= SMEM_LIMIT and OUTPUT_STAGES >= 2
assert 16 * (CHAIN_STAGES + OUTPUT_STAGES) + 8 * OUTPUT_STAGES + 4 * MAX_SORTED <= HEADER_BYTES


@dataclass(frozen=True)
class StateShared:
    """Rings and pointers to their images; stage s of a ring has image s. See states.py."""

    chain: Ring  # W, U, decay: freed when V' of a link is there
    output: Ring  # K_end, and room for S and V': freed one link later
    images: Ring  # S and V' of a link, in its output stage; `full` only
    w: Any
    u: Any
    decay: Any
    qka: Any  # per output stage: S, K_end, V'
    o_image: Any  # there is no O; Fragments asks for its place
    order: Any  # MAX_SORTED Int32, see tasks.py

    w_bytes, chain_bytes = W_BYTES, CHAIN_STAGE_BYTES

    @classmethod
    def allocate(cls):
        smem = SmemAllocator()
        barriers = lambda n: smem.allocate_array(Int64, n, byte_alignment=8)  # noqa: E731
        chain, output = (Ring(barriers(n), barriers(n), n) for n in (CHAIN_STAGES, OUTPUT_STAGES))
        images = Ring(barriers(OUTPUT_STAGES), None, OUTPUT_STAGES)
        order = smem.allocate_array(Int32, MAX_SORTED, byte_alignment=4)
        image = lambda size: smem.allocate_array(BFloat16, size // 2, byte_alignment=1024)  # noqa: E731
        w, qka, u = image(W_BYTES * CHAIN_STAGES), image(QKA_BYTES * OUTPUT_STAGES), image(U_BYTES * CHAIN_STAGES)
        decay = smem.allocate_array(Float32, DECAY_BYTES // 4 * CHAIN_STAGES, byte_alignment=128)
        return cls(chain, output, images, w, u, decay, qka, qka, order)

    @cute.jit
    def init_barriers(self, tid, chain_warps: cutlass.Constexpr, keeps_images: cutlass.Constexpr,
                      arrivals_to_free: cutlass.Constexpr):  # fmt: skip
        """Arrivals of each barrier: of its loader and, where images are kept, for the output ring of their writer, too."""
        if tid == 0:
            for ring, fillers in ((self.chain, 1), (self.output, 2 if keeps_images else 1)):
                for s in cutlass.range_constexpr(ring.stages):
                    cute.arch.mbarrier_init(ring.full + s, fillers)
                    cute.arch.mbarrier_init(ring.empty + s, arrivals_to_free)
            for s in cutlass.range_constexpr(self.images.stages):
                cute.arch.mbarrier_init(self.images.full + s, chain_warps)
        cute.arch.mbarrier_init_fence()
