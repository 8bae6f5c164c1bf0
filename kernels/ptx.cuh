// The PTX of Hopper that these kernels use, one thin function an instruction. A header of our own rather than
// CUTLASS: the kernels need one shape of wgmma, tiled TMA, mbarriers and a few fences, which fit on these pages.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>

namespace mokfx {

struct alignas(64) TensorMap { uint8_t bytes[128]; };  // what cuTensorMapEncodeTiled writes

__device__ __forceinline__ uint32_t smem(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// threadIdx.x, read anew: what follows from it is not kept in registers from one tile to the next.
__device__ __forceinline__ int thread_index() {
    int t;
    asm volatile("mov.u32 %0, %tid.x;" : "=r"(t));
    return t;
}

__device__ __forceinline__ uint64_t now() {  // nanoseconds, the same clock on all multiprocessors
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

__device__ __forceinline__ uint32_t now_coarse() {  // the same in units of 2^32 ns, 4.3 s: one register, for deadlines
    uint32_t t;
    asm volatile("mov.u32 %0, %globaltimer_hi;" : "=r"(t));
    return t;
}

// ---- mbarriers in shared memory

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier, int count = 1) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(smem(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive_expect(uint64_t* barrier, int bytes) {  // one arrival, and bytes still to land
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ bool try_wait(uint64_t* barrier, int parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done) : "r"(smem(barrier)), "r"(parity) : "memory");
    return done;
}

__device__ __forceinline__ bool test_wait(uint64_t* barrier, int parity) {  // the same without staying
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done) : "r"(smem(barrier)), "r"(parity) : "memory");
    return done;
}

// ---- fences and barriers among threads

__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Orders ordinary accesses with those of the copy engine and the tensor cores, which reach memory by another way.
__device__ __forceinline__ void fence_proxy_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void fence_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int N> __device__ __forceinline__ void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ __forceinline__ void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

// ---- flags in global memory

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* address) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void raise(uint32_t* counter) {  // whoever sees it also sees what we had written or seen
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ uint32_t add_release(uint32_t* address, uint32_t value) {  // the old value
    uint32_t old;
    asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(value) : "memory");
    return old;
}

__device__ __forceinline__ uint32_t add_relaxed(uint32_t* address, uint32_t value) {
    uint32_t old;
    asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(value) : "memory");
    return old;
}

// ---- the copy engine (TMA), and 16-byte asynchronous copies for rows that lie anywhere

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load(const TensorMap* map, uint64_t* barrier, void* to, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(smem(to)), "l"(map), "r"(smem(barrier)), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void tma_load(const TensorMap* map, uint64_t* barrier, void* to, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
                 ::"r"(smem(to)), "l"(map), "r"(smem(barrier)), "r"(x), "r"(y), "r"(z) : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap* map, const void* from, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(map), "r"(smem(from)), "r"(x), "r"(y) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

template <int N> __device__ __forceinline__ void tma_store_wait_read() {  // all but N have left shared memory
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void tma_store_wait() {  // all are in global memory
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

__device__ __forceinline__ void copy_16(uint32_t to, const void* from, int bytes) {  // bytes 0: writes zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive_after_copies(uint64_t* barrier) {  // once all this thread's copies have landed
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem(barrier)) : "memory");
}

__device__ __forceinline__ void copy_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- tensor cores

// A matrix in shared memory in rows of 128 bytes, swizzled by 128 bytes, as TMA writes it. K-major: `stride` 1024 bytes
// from 8 rows to the next 8. Transposed (a row holds 64 columns of b, or 64 rows of a, of one k): `stride` 1024 bytes from
// 8 k to the next 8, `leading` bytes from 64 columns to the next 64.
__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t leading) {
    constexpr uint64_t stride = 1024, swizzle_128 = 1;
    return swizzle_128 << 62 | (stride >> 4) << 32 | uint64_t(leading >> 4) << 16 | (address & 0x3ffff) >> 4;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

#define MOKFX_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MOKFX_F16(i) MOKFX_F4(i), MOKFX_F4(i + 4), MOKFX_F4(i + 8), MOKFX_F4(i + 12)

// d[64 x N] += a[64 x 16] b[16 x N], bf16 with fp32 accumulators, N = 128 or 256. Thread t of the warpgroup holds, for
// each 8 columns j, d[4j], d[4j+1]: row 16 (t / 32) + t % 32 / 4, columns 8j + 2 (t % 4) and the next; d[4j+2], d[4j+3]:
// the same 8 rows on.
template <bool TRANSPOSED, bool A_TRANSPOSED = false>
__device__ __forceinline__ void wgmma(float (&d)[64], uint64_t a, uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, 1, 1, 1, %67, %66;"
        : MOKFX_F16(0), MOKFX_F16(16), MOKFX_F16(32), MOKFX_F16(48)
        : "l"(a), "l"(b), "n"(TRANSPOSED ? 1 : 0), "n"(A_TRANSPOSED ? 1 : 0));
}

template <bool TRANSPOSED, bool A_TRANSPOSED = false>
__device__ __forceinline__ void wgmma(float (&d)[128], uint64_t a, uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
        "%128, %129, 1, 1, 1, %131, %130;"
        : MOKFX_F16(0), MOKFX_F16(16), MOKFX_F16(32), MOKFX_F16(48), 
          MOKFX_F16(64), MOKFX_F16(80), MOKFX_F16(96), MOKFX_F16(112)
        : "l"(a), "l"(b), "n"(TRANSPOSED ? 1 : 0), "n"(A_TRANSPOSED ? 1 : 0));
}

#undef MOKFX_F4
#undef MOKFX_F16

// Four 8x8 matrices of 16-bit values to shared memory: lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// The same of the transposed matrices.
__device__ __forceinline__ void store_matrices_transposed(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void store_pair(uint32_t to, uint32_t low, uint32_t high) {  // 8 bytes to shared memory
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(low), "r"(high) : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t from) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
    return v;
}

// The inverse of store_matrices.
__device__ __forceinline__ void load_matrices(uint32_t from, uint32_t (&m)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(from) : "memory");
}

__device__ __forceinline__ uint32_t pack(float low, float high) {  // rounds to nearest even
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float unpack_low(uint32_t both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float unpack_high(uint32_t both) { return __uint_as_float(both & 0xffff0000u); }

}  // namespace mokfx
