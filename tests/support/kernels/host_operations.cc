// The work of the built-in functions and PTX wrappers of host_builtins.h and host_sm90a.h, once all their lanes are there.
#include "host_fibers.h"

namespace host_run {

void resolve_shuffle(void** operands, unsigned mask) {
    for (unsigned i = 0; i < 32; ++i) {
        if (!(mask >> i & 1)) continue;
        Shuffle* own = static_cast<Shuffle*>(operands[i]);
        if (!(mask >> own->source & 1)) return note("shuffle: lane %u reads lane %u, outside mask 0x%08x", i, own->source, mask);
        own->result = static_cast<Shuffle*>(operands[own->source])->value;
    }
}

void resolve_vote(void** operands, unsigned mask) {
    unsigned ballot = 0;
    for (unsigned i = 0; i < 32; ++i)
        if ((mask >> i & 1) && static_cast<Vote*>(operands[i])->predicate) ballot |= 1u << i;
    for (unsigned i = 0; i < 32; ++i)
        if (mask >> i & 1) static_cast<Vote*>(operands[i])->ballot = ballot;
}

}  // namespace host_run

namespace host_ptx {

using host_run::Product;
using host_run::Thread;
typedef float Row8 __attribute__((vector_size(32)));

// --- shared memory

void check_shared(const Site& site, const void* address) {
    const char* byte = static_cast<const char*>(address);
    const bool dynamic = byte >= host_run::shared && byte + 16 <= host_run::shared_end;
    const bool fixed = __start_pagekv_shared != nullptr && byte >= __start_pagekv_shared && byte + 16 <= __stop_pagekv_shared;
    if (!dynamic && !fixed) PAGEKV_HOST_FAIL("%s:%d: %s: not in shared memory: %p", site.file, site.line, site.what, address);
    if (reinterpret_cast<uintptr_t>(address) % 16)
        PAGEKV_HOST_FAIL("%s:%d: %s: not aligned to 16 bytes: %p", site.file, site.line, site.what, address);
}

void start_copy(void* shared, const char (&bytes)[16]) {
    host_run::AsyncCopy copy = {static_cast<char*>(shared), {}};
    memcpy(copy.bytes, bytes, 16);
    host_run::run.current->groups.back().push_back(copy);
}

void cp_async_commit() { host_run::run.current->groups.emplace_back(); }

void wait_for_copies(int pending) {
    auto& groups = host_run::run.current->groups;
    while (static_cast<int>(groups.size()) - 1 > pending) {  // the last one is open: no wait is for it
        for (const host_run::AsyncCopy& copy : groups.front()) memcpy(copy.to, copy.bytes, 16);
        groups.erase(groups.begin());
    }
}

// --- tensor cores

void resolve_ldmatrix(void** operands, unsigned) {
    for (unsigned lane = 0; lane < 32; ++lane) {
        const LoadMatrix& own = *static_cast<LoadMatrix*>(operands[lane]);
        for (unsigned matrix = 0; matrix < 4; ++matrix) {
            unsigned short half[2];
            for (unsigned i = 0; i < 2; ++i) {
                const unsigned pair = 2 * (lane % 4) + i, other = lane / 4;
                const unsigned row = own.transposed ? pair : other, column = own.transposed ? other : pair;
                const LoadMatrix& source = *static_cast<LoadMatrix*>(operands[8 * matrix + row]);
                half[i] = static_cast<const unsigned short*>(source.row)[column];
            }
            (*own.registers)[matrix] = half[0] | static_cast<unsigned>(half[1]) << 16;
        }
    }
}


void resolve_mma(void** operands, unsigned) {
    float a[16][16];
    Row8 b[16], d[16];
    auto element = [](bool is_bf16, unsigned bits) { return is_bf16 ? bf16_to_float(bits) : f16_to_float(bits); };
    for (unsigned lane = 0; lane < 32; ++lane) {
        const Mma& own = *static_cast<Mma*>(operands[lane]);
        const unsigned g = lane / 4, t = 2 * (lane % 4);
        for (unsigned i = 0; i < 8; ++i)
            a[g + 8 * (i / 2 % 2)][t + i % 2 + 8 * (i / 4)] = element(own.is_bf16, own.a[i / 2] >> 16 * (i % 2));
        for (unsigned i = 0; i < 4; ++i) b[t + i % 2 + 8 * (i / 2)][g] = element(own.is_bf16, own.b[i / 2] >> 16 * (i % 2));
        for (unsigned i = 0; i < 4; ++i) d[g + 8 * (i / 2)][t + i % 2] = own.d[i];
    }
    for (unsigned row = 0; row < 16; ++row)
        for (unsigned k = 0; k < 16; ++k) d[row] += a[row][k] * b[k];
    for (unsigned lane = 0; lane < 32; ++lane)
        for (unsigned i = 0; i < 4; ++i)
            static_cast<Mma*>(operands[lane])->d[i] = d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
}

// --- barriers of compute capability 9.0

void check_barrier(const Site& site, const u_int64_t* barrier, bool initialised) {
    const char* byte = reinterpret_cast<const char*>(barrier);
    if (byte < host_run::shared || byte + 8 > host_run::shared_end || reinterpret_cast<uintptr_t>(byte) % 8)
        PAGEKV_HOST_FAIL("%s:%d: %s: not eight aligned bytes of shared memory: %p", site.file, site.line, site.what, byte);
    if (initialised && *barrier >> 41 != kBarrierMark)
        PAGEKV_HOST_FAIL("%s:%d: %s: the barrier was not initialised", site.file, site.line, site.what);
}

void wait_for_phase(const Site& site, const u_int64_t* barrier, unsigned parity) {
    Thread& self = *host_run::run.current;
    self.barrier = barrier;
    self.parity = parity;
    self.until = [](const Thread& thread) { return (*thread.barrier >> 40 & 1) != thread.parity; };
    host_run::wait(Thread::kUntil, site);  // ended or not: lanes of a warp go on together
}

// --- products of a warpgroup

// A 16-bit element of an operand with the swizzle of 128 bytes, by the canonical layouts in 16-byte units of the PTX manual.
// `outer`: row of a, column of b; `k`: 0 to 15.
float operand(const Product& product, u_int64_t descriptor, bool by_columns, unsigned outer, unsigned k) {
    const unsigned start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
    const unsigned stride = (descriptor >> 32 & 0x3fff) << 4;
    // By rows (K-major): eight rows of 128 bytes, and eight more after `stride`. By columns: 64 elements of a row, and 64
    // more after `leading`; eight rows of 128 bytes, and eight more after `stride`.
    unsigned at = by_columns ? start + outer % 64 * 2 + outer / 64 * leading + k % 8 * 128 + k / 8 * stride
                             : start + outer % 8 * 128 + outer / 8 * stride + k * 2;
    at ^= (at >> 7 & 7) << 4;
    const char* const byte = host_run::shared_end - host_run::kMaxShared + at;
    if (byte < host_run::shared || byte + 2 > host_run::shared_end) {
        host_run::note("%s:%d: %s: an operand is not in shared memory", product.site.file, product.site.line, product.site.what);
        return 0.0f;
    }
    unsigned short bits;
    memcpy(&bits, byte, 2);
    return product.is_bf16 ? bf16_to_float(bits) : f16_to_float(bits);
}

// What one warp has of a product: 16 rows. `own`: of each lane.
void multiply(Product* (&own)[32], unsigned warp) {
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

void resolve_products(void** operands, unsigned) {
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

void start_product(const Site& site, const WarpgroupProduct& given) {
    Product product = {given, site, host_run::run.current->product_group, {}};
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
    self.products.push_back(product);
    ++self.num_products;
}

void wgmma_fence() { host_run::run.current->fenced = true; }
void wgmma_commit() { ++host_run::run.current->product_group; }

void wait_for_products(const Site& site, int pending) {
    host_run::wait(Thread::kLate, site);
    ProductWait operand = {host_run::run.current, pending};
    host_run::warp_operation(site, 0xffffffffu, &operand, resolve_products);
    host_run::run.current->fenced = false;
}

}  // namespace host_ptx
