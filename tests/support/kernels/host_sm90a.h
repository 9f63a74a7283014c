// What ptx_sm90a.cuh has on a GPU, for kernels that run on the CPU (see host_cuda.h): barriers in shared memory and products
// of a warpgroup. Registers are not counted, and fences between copies and products do nothing: one that is missing, and
// registers dealt wrongly, do not show.
#pragma once

#define PAGEKV_SWIZZLED_SHARED(name) unsigned char* const name = host_ptx::swizzled_shared()

namespace host_ptx {

inline unsigned char* swizzled_shared() {
    if (reinterpret_cast<uintptr_t>(host_run::shared) % 1024)
        PAGEKV_HOST_FAIL("swizzled shared memory must have a multiple of 1,024 bytes, to be aligned");
    return reinterpret_cast<unsigned char*>(host_run::shared);
}

// Of dynamic shared memory, which ends at the last address.
inline unsigned shared_address(const void* shared) {
    return static_cast<const char*>(shared) - (host_run::shared_end - host_run::kMaxShared);
}

template <int count> void fewer_registers() {}
template <int count> void more_registers() {}
inline void proxy_fence() {}

// --- barriers. The eight bytes: threads of a phase (20 bits), those that are missing (20), the phase's parity, a mark.

constexpr u_int64_t kBarrierMark = 0x2b5a5;

void check_barrier(const Site& site, const u_int64_t* barrier, bool initialised);
// Waits until the barrier's parity is another one.
void wait_for_phase(const Site& site, const u_int64_t* barrier, unsigned parity);

template <typename Barrier> void mbarrier_init(Barrier* barrier, unsigned count, PAGEKV_HERE) {
    u_int64_t* const at = reinterpret_cast<u_int64_t*>(barrier);
    check_barrier({"mbarrier.init", file, line}, at, false);
    *at = kBarrierMark << 41 | u_int64_t{count} << 20 | count;
}

inline void mbarrier_init_fence() {}

template <typename Barrier> void mbarrier_arrive(Barrier* barrier, PAGEKV_HERE) {
    u_int64_t* const at = reinterpret_cast<u_int64_t*>(barrier);
    check_barrier({"mbarrier.arrive", file, line}, at, true);
    *at -= 1 << 20;
    if ((*at >> 20 & 0xfffff) == 0) *at = (*at ^ u_int64_t{1} << 40) | (*at & 0xfffff) << 20;
}

template <typename Barrier> void mbarrier_wait(Barrier* barrier, unsigned parity, PAGEKV_HERE) {
    const Site site = {"mbarrier.try_wait", file, line};
    u_int64_t* const at = reinterpret_cast<u_int64_t*>(barrier);
    check_barrier(site, at, true);
    wait_for_phase(site, at, parity);
}

// --- products

// One lane's part.
struct WarpgroupProduct {
    float* d;
    unsigned columns;
    const unsigned* a_registers;  // null: a is in shared memory
    u_int64_t a, b;               // descriptors
    bool b_by_columns, add, is_bf16;
};
void start_product(const Site& site, const WarpgroupProduct& product);
void wait_for_products(const Site& site, int pending);
void wgmma_fence();
void wgmma_commit();

template <int pending> void wgmma_wait(PAGEKV_HERE) {
    wait_for_products({"wgmma.wait_group", file, line}, pending);
}

template <typename T> void wgmma_m64n128k16(float (&d)[16][4], u_int64_t a, u_int64_t b, bool add, PAGEKV_HERE) {
    start_product({"wgmma", file, line}, {d[0], 128, nullptr, a, b, false, add, kIsBf16<T>});
}

template <typename T, int N> void wgmma_m64k16(float (&d)[N][4], const unsigned (&a)[4], u_int64_t b, PAGEKV_HERE) {
    start_product({"wgmma", file, line}, {d[0], 8 * N, a, 0, b, true, true, kIsBf16<T>});
}

}  // namespace host_ptx
