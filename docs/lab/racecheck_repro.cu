// Shared-memory patterns of the kernels, each alone, to be run under compute-sanitizer's racecheck on an SM90 GPU.
//
//     nvcc -std=c++17 -gencode=arch=compute_90a,code=sm_90a -o racecheck_repro racecheck_repro.cu
//     compute-sanitizer --tool racecheck ./racecheck_repro MODE
//
// Ring modes: warp 4 fills a ring of two stages of 1,024 bytes by bulk copies that complete on the stage's mbarrier `full`.
// Warps 0 to 3 wait for it, read of the stage 512 bytes, each lane its own 4, and then 64 bytes that every lane reads, and free
// the stage by arriving on its mbarrier `empty`. Producer and consumers run in loops whose length is known at run time only.
//
//     elected       one elected lane per warp arrives, after __syncwarp, which orders the other lanes' reads before it
//     lanes         all 32 lanes of each warp arrive
//     barrier       as elected, and a named barrier of all five warps per stage
//     early         as lanes, but before the reads: a real race, the positive control
//     tensor        as elected, the copies by a tensor map (cp.async.bulk.tensor)
//     tensor-early  as early, the copies by a tensor map
//
// Tile modes: a bulk copy brings 64 rows of 128 bytes; all warps wait for it; each warp stores zeros to those of its own 8
// rows that are past the end; fence.proxy.async; then each warp reads, by ldmatrix.trans, 8 columns (of 2 bytes) of all rows.
//
//     zeros         __syncthreads between the stores and ldmatrix
//     zeros-early   no barrier there: a real race, the positive control
//
// Exit status: 0 where the values are right (the positive controls may give wrong ones), 1 where not, 2 where it did not run.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include <cuda.h>
#include <cuda_runtime.h>

constexpr int STAGES = 2, READERS = 4, RING_THREADS = 32 * (READERS + 1);
constexpr int STAGE_BYTES = 1024, STAGE_WORDS = STAGE_BYTES / 4, OWN_WORDS = 32 * READERS, COMMON_WORDS = 16;
constexpr int ROWS = 64, ROW_BYTES = 128, TILE_BYTES = ROWS * ROW_BYTES, TILE_WARPS = 8, TILE_THREADS = 32 * TILE_WARPS;
constexpr int BLOCKS = 8, CHUNKS = 16;

enum class Free { ELECTED, LANES, BARRIER, EARLY };

__device__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ void arrive_expecting(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ void wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

__device__ bool elected() {
    uint32_t is;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(is)::"memory");
    return is;
}

__device__ void copy(uint32_t target, const void* source, int bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
        "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier)
        : "memory");
}

__device__ void copy_by_map(uint32_t target, const CUtensorMap* map, int first, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2}], [%3];"
                 :
                 : "r"(target), "l"(map), "r"(first), "r"(barrier)
                 : "memory");
}

__device__ void named_barrier() { asm volatile("bar.sync 1, %0;" ::"n"(RING_THREADS) : "memory"); }

// source: [BLOCKS][chunks][STAGE_WORDS]; out: [BLOCKS][OWN_WORDS], the sum of all words that a thread has read
template <Free FREE, bool BY_MAP>
__global__ void __launch_bounds__(RING_THREADS)
    ring(const uint32_t* source, const __grid_constant__ CUtensorMap map, uint32_t* out, int chunks) {
    __shared__ alignas(128) uint32_t stages[STAGES][STAGE_WORDS];
    __shared__ alignas(8) uint64_t barriers[2 * STAGES];
    const int warp = threadIdx.x / 32;
    const uint32_t full = shared_address(barriers), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, FREE == Free::LANES || FREE == Free::EARLY ? 32 * READERS : READERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp == READERS) {
        int stage = 0;
        uint32_t phase = 1;
#pragma unroll 1
        for (int c = 0; c < chunks; ++c) {
            wait(empty + 8 * stage, phase);
            if (elected()) {
                arrive_expecting(full + 8 * stage, STAGE_BYTES);
                const int chunk = blockIdx.x * chunks + c;
                const uint32_t target = shared_address(stages[stage]);
                if constexpr (BY_MAP) {
                    copy_by_map(target, &map, chunk * STAGE_WORDS, full + 8 * stage);
                } else {
                    copy(target, source + static_cast<size_t>(chunk) * STAGE_WORDS, STAGE_BYTES, full + 8 * stage);
                }
            }
            __syncwarp();
            if (FREE == Free::BARRIER) named_barrier();
            if (++stage == STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
    } else {
        int stage = 0;
        uint32_t phase = 0, sum = 0;
#pragma unroll 1
        for (int c = 0; c < chunks; ++c) {
            wait(full + 8 * stage, phase);
            if (FREE == Free::EARLY) arrive(empty + 8 * stage);
            sum += stages[stage][threadIdx.x];
            const uint4* common = reinterpret_cast<const uint4*>(&stages[stage][OWN_WORDS]);
            for (int i = 0; i < COMMON_WORDS / 4; ++i) {
                const uint4 x = common[i];
                sum += x.x + x.y + x.z + x.w;
            }
            if (FREE == Free::LANES) {
                arrive(empty + 8 * stage);
            } else if (FREE != Free::EARLY) {
                __syncwarp();
                if (FREE == Free::BARRIER) named_barrier();
                if (elected()) arrive(empty + 8 * stage);
            }
            if (++stage == STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
        out[blockIdx.x * OWN_WORDS + threadIdx.x] = sum;
    }
}

__device__ uint4 ldmatrix_transposed(uint32_t address) {
    uint4 x;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}

// source: [BLOCKS][chunks][ROWS][ROW_BYTES / 4]; rows: of a chunk that are not past the end; out: [BLOCKS][TILE_WARPS], the
// sum of the 16-bit halves of all words that a warp has read
template <bool SYNC>
__global__ void __launch_bounds__(TILE_THREADS) tile(const uint32_t* source, uint32_t* out, int chunks, int rows) {
    __shared__ alignas(128) uint32_t words[TILE_BYTES / 4];
    __shared__ alignas(8) uint64_t barrier;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t full = shared_address(&barrier), at = shared_address(words);
    if (threadIdx.x == 0) {
        barrier_init(full, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    uint32_t sum = 0;
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
        if (threadIdx.x == 0) {
            arrive_expecting(full, TILE_BYTES);
            copy(at, source + (static_cast<size_t>(blockIdx.x) * chunks + c) * (TILE_BYTES / 4), TILE_BYTES, full);
        }
        __syncwarp();
        wait(full, c & 1);
        for (int i = 0; i < ROWS / TILE_WARPS; ++i) {
            const int row = warp * (ROWS / TILE_WARPS) + i;
            if (row >= rows) words[row * (ROW_BYTES / 4) + lane] = 0;
        }
        asm volatile("fence.proxy.async;" ::: "memory");
        if (SYNC) __syncthreads();
        // four 8 x 8 matrices: rows 32 * r to 32 * r + 31, columns 8 * warp to 8 * warp + 7
        for (int r = 0; r < ROWS / 32; ++r) {
            const uint4 x = ldmatrix_transposed(at + (32 * r + lane) * ROW_BYTES + warp * 16);
            for (uint32_t word : {x.x, x.y, x.z, x.w}) sum += (word & 0xffff) + (word >> 16);
        }
        asm volatile("fence.proxy.async;" ::: "memory");  // the reads before the copy that the tile takes next
        __syncthreads();
    }
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
    if (lane == 0) out[blockIdx.x * TILE_WARPS + warp] = sum;
}

#define CHECK(call)                                                                            \
    do {                                                                                       \
        const cudaError_t error = (call);                                                      \
        if (error != cudaSuccess) {                                                            \
            std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error));                \
            return 2;                                                                          \
        }                                                                                      \
    } while (0)

static std::vector<uint32_t> numbers(size_t count) {
    std::vector<uint32_t> x(count);
    uint32_t state = 1;
    for (uint32_t& value : x) value = (state = state * 1664525u + 1013904223u);
    return x;
}

static int compare(const std::vector<uint32_t>& found, const std::vector<uint32_t>& right, const char* mode) {
    size_t wrong = 0;
    for (size_t i = 0; i < right.size(); ++i) wrong += found[i] != right[i];
    std::printf("%s: %zu of %zu sums are wrong\n", mode, wrong, right.size());
    return wrong ? 1 : 0;
}

static int run_ring(const char* mode, Free free, bool by_map, int chunks) {
    const auto source = numbers(static_cast<size_t>(BLOCKS) * chunks * STAGE_WORDS);
    std::vector<uint32_t> right(BLOCKS * OWN_WORDS), found(right.size());
    for (int b = 0; b < BLOCKS; ++b) {
        for (int c = 0; c < chunks; ++c) {
            const uint32_t* stage = &source[(static_cast<size_t>(b) * chunks + c) * STAGE_WORDS];
            uint32_t common = 0;
            for (int i = 0; i < COMMON_WORDS; ++i) common += stage[OWN_WORDS + i];
            for (int t = 0; t < OWN_WORDS; ++t) right[b * OWN_WORDS + t] += common + stage[t];
        }
    }
    uint32_t *input, *out;
    CHECK(cudaMalloc(&input, source.size() * 4));
    CHECK(cudaMalloc(&out, found.size() * 4));
    CHECK(cudaMemcpy(input, source.data(), source.size() * 4, cudaMemcpyHostToDevice));
    CUtensorMap map{};
    if (by_map) {
        void* symbol = nullptr;
        cudaDriverEntryPointQueryResult status;
        CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &status));
        if (status != cudaDriverEntryPointSuccess) return 2;
        const cuuint64_t size = source.size(), stride = 0;  // one dimension has no stride
        const cuuint32_t box = STAGE_WORDS, step = 1;
        const CUresult made = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(symbol)(
            &map, CU_TENSOR_MAP_DATA_TYPE_UINT32, 1, input, &size, &stride, &box, &step, CU_TENSOR_MAP_INTERLEAVE_NONE,
            CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        if (made != CUDA_SUCCESS) {
            std::fprintf(stderr, "cuTensorMapEncodeTiled: %d\n", static_cast<int>(made));
            return 2;
        }
    }
    if (by_map && free == Free::EARLY) ring<Free::EARLY, true><<<BLOCKS, RING_THREADS>>>(input, map, out, chunks);
    else if (by_map) ring<Free::ELECTED, true><<<BLOCKS, RING_THREADS>>>(input, map, out, chunks);
    else if (free == Free::ELECTED) ring<Free::ELECTED, false><<<BLOCKS, RING_THREADS>>>(input, map, out, chunks);
    else if (free == Free::LANES) ring<Free::LANES, false><<<BLOCKS, RING_THREADS>>>(input, map, out, chunks);
    else if (free == Free::BARRIER) ring<Free::BARRIER, false><<<BLOCKS, RING_THREADS>>>(input, map, out, chunks);
    else ring<Free::EARLY, false><<<BLOCKS, RING_THREADS>>>(input, map, out, chunks);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(found.data(), out, found.size() * 4, cudaMemcpyDeviceToHost));
    return compare(found, right, mode);
}

static int run_tile(const char* mode, bool sync, int chunks) {
    const int rows = 43;  // of 64: the last band is all zeros, one has both
    const auto source = numbers(static_cast<size_t>(BLOCKS) * chunks * TILE_BYTES / 4);
    std::vector<uint32_t> right(BLOCKS * TILE_WARPS), found(right.size());
    for (int b = 0; b < BLOCKS; ++b) {
        for (int c = 0; c < chunks; ++c) {
            for (int row = 0; row < rows; ++row) {
                for (int i = 0; i < ROW_BYTES / 4; ++i) {
                    const size_t index = ((static_cast<size_t>(b) * chunks + c) * ROWS + row) * (ROW_BYTES / 4) + i;
                    right[b * TILE_WARPS + i / 4] += (source[index] & 0xffff) + (source[index] >> 16);
                }
            }
        }
    }
    uint32_t *input, *out;
    CHECK(cudaMalloc(&input, source.size() * 4));
    CHECK(cudaMalloc(&out, found.size() * 4));
    CHECK(cudaMemcpy(input, source.data(), source.size() * 4, cudaMemcpyHostToDevice));
    if (sync) tile<true><<<BLOCKS, TILE_THREADS>>>(input, out, chunks, rows);
    else tile<false><<<BLOCKS, TILE_THREADS>>>(input, out, chunks, rows);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(found.data(), out, found.size() * 4, cudaMemcpyDeviceToHost));
    return compare(found, right, mode);
}

int main(int argc, char** argv) {
    const char* mode = argc > 1 ? argv[1] : "";
    const auto is = [mode](const char* name) { return std::strcmp(mode, name) == 0; };
    if (is("elected")) return run_ring(mode, Free::ELECTED, false, CHUNKS);
    if (is("lanes")) return run_ring(mode, Free::LANES, false, CHUNKS);
    if (is("barrier")) return run_ring(mode, Free::BARRIER, false, CHUNKS);
    if (is("early")) return run_ring(mode, Free::EARLY, false, CHUNKS);
    if (is("tensor")) return run_ring(mode, Free::ELECTED, true, CHUNKS);
    if (is("tensor-early")) return run_ring(mode, Free::EARLY, true, CHUNKS);
    if (is("zeros")) return run_tile(mode, true, CHUNKS);
    if (is("zeros-early")) return run_tile(mode, false, CHUNKS);
    std::fprintf(stderr, "usage: %s elected|lanes|barrier|early|tensor|tensor-early|zeros|zeros-early\n", argv[0]);
    return 2;
}
