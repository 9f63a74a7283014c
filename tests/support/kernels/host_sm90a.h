// What ptx_sm90a.cuh has on a GPU, for kernels that run on the CPU (see host_cuda.h): barriers in shared memory and products
// of a warpgroup. Registers are not counted, and fences between copies and products do nothing: one that is missing, and
// registers dealt wrongly, do not show.
#pragma once

#define PAGEKV_SWIZZLED_SHARED(name) unsigned char* const name = host_ptx::swizzled_shared()

namespace host_ptx {

using host_run::Product;
using host_run::Thread;

inline unsigned char* swizzled_shared() {
    if (reinterpret_cast<uintptr_t>(host_run::run.shared) % 1024)
        PAGEKV_HOST_FAIL("swizzled shared memory must have a multiple of 1,024 bytes, to be aligned");
    return reinterpret_cast<unsigned char*>(host_run::run.shared);
}

// Of dynamic shared memory, which ends at the last address.
inline unsigned shared_address(const void* shared) {
    return static_cast<const char*>(shared) - (host_run::run.shared_end - host_run::kMaxShared);
}

template <int count> void fewer_registers() {}
template <int count> void more_registers() {}
inline void proxy_fence() {}

// --- barriers. The eight bytes: threads of a phase (20 bits), those that are missing (20), the phase's parity, a mark.

constexpr u_int64_t kBarrierMark = 0x2b5a5;

inline void check_barrier(const Site& site, const u_int64_t* barrier, bool initialised) {
    const char* byte = reinterpret_cast<const char*>(barrier);
    if (byte < host_run::run.shared || byte + 8 > host_run::run.shared_end || reinterpret_cast<uintptr_t>(byte) % 8)
        PAGEKV_HOST_FAIL("%s:%d: %s: not eight aligned bytes of shared memory: %p", site.file, site.line, site.what, byte);
    if (initialised && *barrier >> 41 != kBarrierMark)
        PAGEKV_HOST_FAIL("%s:%d: %s: the barrier was not initialised", site.file, site.line, site.what);
}

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
    Thread& self = *host_run::run.current;
    self.barrier = reinterpret_cast<u_int64_t*>(barrier);
    self.parity = parity;
    self.until = [](const Thread& thread) { return (*thread.barrier >> 40 & 1) != thread.parity; };
    check_barrier(site, self.barrier, true);
    host_run::wait(Thread::kUntil, site);  // ended or not: lanes of a warp go on together
}

// --- products

// A 16-bit element of an operand with the swizzle of 128 bytes, by the canonical layouts in 16-byte units of the PTX manual.
// `outer`: row of a, column of b; `k`: 0 to 15.
inline float operand(const Product& product, u_int64_t descriptor, bool by_columns, unsigned outer, unsigned k) {
    const unsigned start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
    const unsigned stride = (descriptor >> 32 & 0x3fff) << 4;
    // By rows (K-major): eight rows of 128 bytes, and eight more after `stride`. By columns: 64 elements of a row, and 64
    // more after `leading`; eight rows of 128 bytes, and eight more after `stride`.
    unsigned at = by_columns ? start + outer % 64 * 2 + outer / 64 * leading + k % 8 * 128 + k / 8 * stride
                             : start + outer % 8 * 128 + outer / 8 * stride + k * 2;
    at ^= (at >> 7 & 7) << 4;
    const char* const byte = host_run::run.shared_end - host_run::kMaxShared + at;
    if (byte < host_run::run.shared || byte + 2 > host_run::run.shared_end) {
        host_run::note("%s:%d: %s: an operand is not in shared memory", product.site.file, product.site.line, product.site.what);
        return 0.0f;
    }
    unsigned short bits;
    memcpy(&bits, byte, 2);
    return product.is_bf16 ? bf16_to_float(bits) : f16_to_float(bits);
}

// What one warp has of a product: 16 rows. `own`: of each lane.
inline void multiply(Product* (&own)[32], unsigned warp) {
    const Product& product = *own[0];
    const unsigned vectors = product.columns / 8;
    float a[16][16];
    static Row8 b[16][16], d[16][16];  // by k or row, and eight columns
    for (unsigned lane = 0; lane < 32; ++lane) {
        const unsigned g = lane / 4, t = 2 * (lane % 4);
        for (unsigned i = 0; i < 8 && product.a_registers != nullptr; ++i) {
            const unsigned short bits = own[lane]->a_registers[i / 2] >> 16 * (i % 2);
            a[g + 8 * (i / 2 % 2)][t + i % 2 + 8 * (i / 4)] = product.is_bf16 ? bf16_to_float(bits) : f16_to_float(bits);
        }
        for (unsigned n = 0; n < vectors; ++n)
            for (unsigned i = 0; i < 4; ++i)
                d[g + 8 * (i / 2)][n][t + i % 2] = product.add ? own[lane]->d[4 * n + i] : 0.0f;
    }
    for (unsigned k = 0; k < 16; ++k) {
        for (unsigned row = 0; row < 16 && product.a_registers == nullptr; ++row)
            a[row][k] = operand(product, product.a, false, warp % 4 * 16 + row, k);
        for (unsigned column = 0; column < product.columns; ++column)
            b[k][column / 8][column % 8] = operand(product, product.b, product.b_by_columns, column, k);
    }
    for (unsigned row = 0; row < 16; ++row)
        for (unsigned k = 0; k < 16; ++k)
            for (unsigned n = 0; n < vectors; ++n) d[row][n] += a[row][k] * b[k][n];
    for (unsigned lane = 0; lane < 32; ++lane)
        for (unsigned n = 0; n < vectors; ++n)
            for (unsigned i = 0; i < 4; ++i) own[lane]->d[4 * n + i] = d[lane / 4 + 8 * (i / 2)][n][2 * (lane % 4) + i % 2];
}

struct ProductWait { Thread* thread; int pending; };

inline void resolve_products(void** operands, unsigned) {
    Thread* threads[32];
    for (unsigned lane = 0; lane < 32; ++lane) threads[lane] = static_cast<ProductWait*>(operands[lane])->thread;
    const unsigned pending = static_cast<ProductWait*>(operands[0])->pending, open = threads[0]->product_group;
    size_t done = 0;
    for (; done < threads[0]->products.size() && threads[0]->products[done].group + pending < open; ++done) {
        Product* own[32];
        for (unsigned lane = 0; lane < 32; ++lane) {
            Product& product = *(own[lane] = &threads[lane]->products[done]);
            if (product.a != own[0]->a || product.b != own[0]->b || product.add != own[0]->add)
                return host_run::note("%s:%d: %s: all lanes must name the same operands", product.site.file, product.site.line,
                                      product.site.what);
            if (product.before.empty()) continue;
            for (unsigned i = 0; i < product.before.size(); ++i)
                if (host_bits<unsigned>(product.d[i]) != 0xffffffffu)
                    return host_run::note("%s:%d: %s: its result was written before the wait", product.site.file,
                                          product.site.line, product.site.what);
            memcpy(product.d, product.before.data(), product.before.size() * sizeof(float));
        }
        multiply(own, host_run::index_of(*threads[0]) / 32);
    }
    for (Thread* thread : threads) thread->products.erase(thread->products.begin(), thread->products.begin() + done);
}

inline void start_product(Product product) {
    Thread& self = *host_run::run.current;
    for (const u_int64_t descriptor : {product.a, product.b})
        if (descriptor != 0 && ((descriptor & 0x3fffc000c000c000) != 0 || descriptor >> 62 != 1))
            PAGEKV_HOST_FAIL("%s:%d: %s: a descriptor 0x%016lx that is not emulated", product.site.file, product.site.line,
                             product.site.what, static_cast<unsigned long>(descriptor));
    if (!self.fenced)
        PAGEKV_HOST_FAIL("%s:%d: %s: no wgmma.fence before", product.site.file, product.site.line, product.site.what);
    host_run::warp_operation(product.site, 0xffffffffu, nullptr, nullptr);
    bool first = true;
    for (const Product& other : self.products) first = first && other.d != product.d;
    if (first) {
        product.before.assign(product.d, product.d + product.columns / 2);
        memset(product.d, 0xff, product.columns / 2 * sizeof(float));
    }
    product.group = self.product_group;
    self.products.push_back(product);
    ++self.num_products;
}

inline void wgmma_fence() { host_run::run.current->fenced = true; }
inline void wgmma_commit() { ++host_run::run.current->product_group; }

template <int pending> void wgmma_wait(PAGEKV_HERE) {
    const Site site = {"wgmma.wait_group", file, line};
    host_run::wait(Thread::kLate, site);
    ProductWait operand = {host_run::run.current, pending};
    host_run::warp_operation(site, 0xffffffffu, &operand, resolve_products);
    host_run::run.current->fenced = false;
}

template <typename T> void wgmma_m64n128k16(float (&d)[16][4], u_int64_t a, u_int64_t b, bool add, PAGEKV_HERE) {
    start_product({{"wgmma", file, line}, d[0], 128, nullptr, a, b, false, add, kIsBf16<T>, 0, {}});
}

template <typename T, int N> void wgmma_m64k16(float (&d)[N][4], const unsigned (&a)[4], u_int64_t b, PAGEKV_HERE) {
    start_product({{"wgmma", file, line}, d[0], 8 * N, a, 0, b, true, true, kIsBf16<T>, 0, {}});
}

}  // namespace host_ptx
