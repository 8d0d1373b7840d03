"""Shared memory of a chain CTA: two rings of record images, O, and the mbarriers."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.record import (
    A_BLOCK,
    A_BYTES,
    BANDS,
    CHUNK,
    DECAY_BYTES,
    HALF,
    K_END_BYTES,
    Q_BYTES,
    U_BYTES,
    W_BYTES,
    a_block,
)
from fla_kda_backend.kernels.wy64.tasks import MAX_SORTED

SMEM_LIMIT = 232448  # bytes a CTA may use
A_COLUMN = BANDS * A_BLOCK  # in shared memory a column of blocks is complete, with zeros above the diagonal
A_PIECES = [  # of each column: offset in the record's A, offset in shared memory, size, in bytes
    (a_block(j, j), j * (A_COLUMN + A_BLOCK), A_COLUMN - j * A_BLOCK) for j in range(BANDS)
]
assert sum(size for _, _, size in A_PIECES) == A_BYTES
QK_BYTES = Q_BYTES + K_END_BYTES
QKA_BYTES = QK_BYTES + BANDS * A_COLUMN  # a stage of the output ring
O_BYTES = CHUNK * HALF * 2  # O of a chunk and value half
HEADER_BYTES = 1024  # mbarriers and the order of the sequences
CHAIN_STAGES, OUTPUT_STAGES = 4, 3
SMEM_BYTES = HEADER_BYTES + CHAIN_STAGES * (W_BYTES + U_BYTES + DECAY_BYTES) + OUTPUT_STAGES * QKA_BYTES + O_BYTES
assert CHAIN_STAGES >= 3 and OUTPUT_STAGES >= 2  # a stage is freed after the next one has arrived, see cluster.py
assert SMEM_BYTES <= SMEM_LIMIT
assert 16 * (CHAIN_STAGES + OUTPUT_STAGES + 2) + 4 * MAX_SORTED <= HEADER_BYTES


@dataclass(frozen=True)
class Ring:
    """The mbarriers `full` and `empty` of a ring of stages. `at`: a RingPosition."""

    full: Any
    empty: Any
    stages: int

    def wait_full(self, at):
        cute.arch.mbarrier_wait(self.full + at.stage, at.phase)

    def wait_empty(self, at):
        cute.arch.mbarrier_wait(self.empty + at.stage, at.phase)

    def is_full(self, at):
        """Whether a wait would not block."""
        return cute.arch.mbarrier_test_wait(self.full + at.stage, at.phase)

    def is_empty(self, at):
        return cute.arch.mbarrier_test_wait(self.empty + at.stage, at.phase)


@dataclass(frozen=True)
class Shared:
    """Rings and pointers to their images; stage s of a ring has image s."""

    chain: Ring  # W, U, decay: freed when V' of a link is there
    output: Ring  # Q, K_end, A, or an initial state: freed one link later
    o: Ring  # O, one stage
    checkpoint: Ring  # states in global memory whose flags are still to be set, one stage
    w: Any
    u: Any
    decay: Any
    qka: Any
    o_image: Any
    order: Any  # MAX_SORTED Int32, see tasks.py

    @classmethod
    def allocate(cls):
        smem = SmemAllocator()
        barriers = lambda n: smem.allocate_array(Int64, n, byte_alignment=8)  # noqa: E731
        ring = lambda n: Ring(barriers(n), barriers(n), n)  # noqa: E731
        chain, output, o, checkpoint = ring(CHAIN_STAGES), ring(OUTPUT_STAGES), ring(1), ring(1)
        order = smem.allocate_array(Int32, MAX_SORTED, byte_alignment=4)
        image = lambda size: smem.allocate_array(BFloat16, size // 2, byte_alignment=1024)  # noqa: E731
        w, qka = image(W_BYTES * CHAIN_STAGES), image(QKA_BYTES * OUTPUT_STAGES)
        u, o_image = image(U_BYTES * CHAIN_STAGES), image(O_BYTES)
        decay = smem.allocate_array(Float32, DECAY_BYTES // 4 * CHAIN_STAGES, byte_alignment=128)
        return cls(chain, output, o, checkpoint, w, u, decay, qka, o_image, order)

    @cute.jit
    def init_barriers(self, tid, chain_warps: cutlass.Constexpr, o_writers: cutlass.Constexpr,
                      arrivals_to_free: cutlass.Constexpr):  # fmt: skip
        """Arrivals of each barrier. A stage of a record ring is filled by its loader's one arrival and the bytes, and freed by
        `arrivals_to_free`. O and checkpoints are filled by the chain warps and freed by the warps or the thread that take
        them."""
        if tid == 0:
            for ring in (self.chain, self.output):
                for s in cutlass.range_constexpr(ring.stages):
                    cute.arch.mbarrier_init(ring.full + s, 1)
                    cute.arch.mbarrier_init(ring.empty + s, arrivals_to_free)
            for ring, takers in ((self.o, o_writers), (self.checkpoint, 1)):
                cute.arch.mbarrier_init(ring.full, chain_warps)
                cute.arch.mbarrier_init(ring.empty, takers)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def clear_above_diagonal(self, tid):
        """Zero the blocks of A that no copy touches."""
        for s in cutlass.range_constexpr(OUTPUT_STAGES):
            for j in cutlass.range_constexpr(1, BANDS):
                if tid < j * A_BLOCK // 16:
                    at = self.qka.toint() + s * QKA_BYTES + QK_BYTES + j * A_COLUMN + tid * 16
                    ptx.sts_v4_b32(at, [Int32(0)] * 4)
        ptx.fence_proxy_async()
