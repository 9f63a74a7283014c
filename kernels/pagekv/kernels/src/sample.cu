// Sampling: the next token of each row of logits, by top-k, top-p, min-p and the key of a draw.
//
// A thread block has one row. The key of a token is the distance of its logit to the largest one, in log2 of weights, in
// fixed point; its weight is an integer that follows from the key (sampling_weight.cuh). Sums of integers do not depend on
// their order, so a row's token depends neither on the batch nor on the GPU. The rank of a token is its key, then its id:
// smaller ranks come first, so equally likely tokens are in the order of ids.
//
// Top-k and top-p each search for the last rank that is kept, one digit of 12 bits after the other. A pass over the tokens
// whose ranks begin with the digits found so far adds up, for each value of the next digit, how many tokens have it (top-k)
// or the sum of their weights (top-p).
//
// Filters mostly keep some hundred tokens. So one pass lists the likeliest tokens, about a thousand, in shared memory: all
// that reach a bar, which follows from the largest logit of each thread. If the list has all tokens that decide, the rest of
// the work uses the list alone: all of top-k, all of top-p but the sum of all weights, and the draw. Otherwise further
// passes read the row. Both ways give the same token.
#include "sampling_weight.cuh"

constexpr i32 kThreads = 512;
constexpr i32 kWarps = kThreads / 32;
constexpr i32 kEach = 8;                  // tokens that a thread reads at a time
constexpr i32 kGroup = 256;               // neighbouring ids that are drawn from together
constexpr u64 kFirstGroup = 1ull << 32;   // the number of group 0 in a draw; that of a token is its id
constexpr i32 kIdBits = 20;
constexpr i32 kRankBits = 48;             // of key and id together
constexpr i32 kDigitBits = 12;
constexpr i32 kKeyShift = kRankBits - kIdBits - kDigitBits;  // from a key to the first digit of its rank
constexpr i32 kDigits = 1 << kDigitBits;  // at least as many as there are groups
constexpr i32 kListed = 1536;
// So many lanes of every warp, or more, have a token that reaches the bar. The list has at least 384 tokens then, and about
// 1,100 if the likely ones are spread evenly over the threads.
constexpr i32 kAboveBar = 24;
constexpr u64 kNone = ~0ull;
constexpr u64 kLastPlace = (1ull << kIdBits) - 1;

struct Shared {
    u32 low[kDigits];   // sums by digit, the lower halves
    u32 high[kDigits];  // the upper halves
    u64 list[kListed];
    u64 of_warps[kWarps];
    u64 rest;
    i32 found;
    i32 num_listed;
    i32 num_below;     // listed tokens with a key below listed_below
    u32 listed_below;  // a key: all tokens with a smaller key that the filters keep so far are listed
};

template <typename T> struct Row {
    const T* logits;
    i32 size;
    float best;
    float scale;
    float scale_low;

    __device__ __forceinline__ u32 key(float logit) const { return key_of(logit, best, scale, scale_low); }
};

__device__ __forceinline__ u64 rank_of(u32 key, i32 id) { return static_cast<u64>(key) << kIdBits | static_cast<u32>(id); }

// The last rank that is kept, as key and id: the key alone decides for nearly all tokens.
struct Bound {
    u32 key;
    u32 id;

    __device__ __forceinline__ bool keeps(u32 other, i32 other_id) const {
        return other < key || (other == key && static_cast<u32>(other_id) <= id);
    }
};

__device__ __forceinline__ Bound bound_of(u64 rank) {
    return Bound{static_cast<u32>(rank >> kIdBits), static_cast<u32>(rank) % (1u << kIdBits)};
}

// --- sums by digit

__device__ __forceinline__ void clear(Shared& shared) {
    for (i32 i = threadIdx.x; i < kDigits; i += kThreads) shared.low[i] = shared.high[i] = 0u;
    __syncthreads();
}

__device__ __forceinline__ void add(Shared& shared, u32 digit, u64 mass) {
    // At low temperatures most tokens may have no weight. All of them have one digit, and a warp's additions to one address
    // are expected to take one after the other.
    if (mass == 0ull) return;
    const u32 low = static_cast<u32>(mass);
    const u32 sum = atomicAdd(&shared.low[digit], low) + low;
    const u32 high = static_cast<u32>(mass >> 32) + (sum < low ? 1u : 0u);
    if (high != 0u) atomicAdd(&shared.high[digit], high);
}

// Adds up the sums in the order of digits and returns the first digit at which the total exceeds `target`; there must be one.
// If `share` is not 0, `target` is first set to share / 2^64 of all sums. The sums of smaller digits are subtracted from
// `target`.
__device__ __forceinline__ u32 crossing(Shared& shared, u64& target, u64 share) {
    constexpr i32 kOwn = kDigits / kThreads;
    const i32 lane = threadIdx.x % 32, first = threadIdx.x * kOwn;
    __syncthreads();  // all sums are there
    u64 own = 0ull;
    for (i32 i = first; i < first + kOwn; ++i) own += static_cast<u64>(shared.high[i]) << 32 | shared.low[i];
    u64 sum = own;
    for (i32 distance = 1; distance < 32; distance *= 2) {
        const u64 below = __shfl_up_sync(kFullWarp, sum, distance);
        if (lane >= distance) sum += below;
    }
    if (lane == 31) shared.of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    u64 all = 0ull;
    for (i32 warp = 0; warp < kWarps; ++warp) {
        if (warp == static_cast<i32>(threadIdx.x) / 32) sum += all;
        all += shared.of_warps[warp];
    }
    if (share != 0ull) target = __umul64hi(all, share);
    u64 before = sum - own;
    if (before <= target && target < sum) {
        i32 digit = first;
        while (true) {
            const u64 mass = static_cast<u64>(shared.high[digit]) << 32 | shared.low[digit];
            if (target < before + mass) break;
            before += mass;
            ++digit;
        }
        shared.found = digit;
        shared.rest = target - before;
    }
    __syncthreads();
    target = shared.rest;
    return static_cast<u32>(shared.found);
}

// --- tokens

// Calls `visit` with logit and id of every token.
template <typename T, typename Visit> __device__ __forceinline__ void each_token(const T* logits, i32 size, Visit visit) {
    i32 first = threadIdx.x;
    for (; first + (kEach - 1) * kThreads < size; first += kEach * kThreads) {
        T loaded[kEach];
#pragma unroll
        for (i32 i = 0; i < kEach; ++i) loaded[i] = logits[first + i * kThreads];
#pragma unroll
        for (i32 i = 0; i < kEach; ++i) visit(loaded[i], first + i * kThreads);
    }
#pragma unroll 1
    for (; first < size; first += kThreads) visit(logits[first], first);
}

// Lists a token with `what`, its key or any other 32 bits. Tokens for which there is no room are only counted.
__device__ __forceinline__ void put(Shared& shared, u32 what, i32 id) {
    const i32 at = atomicAdd(&shared.found, 1);
    if (at < kListed) shared.list[at] = rank_of(what, id);
}

// Called after all `put`. The list has every token with a key below `end` that the filters keep so far; if these were too
// many, it counts as empty.
__device__ __forceinline__ void end_list(Shared& shared, u32 end) {
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.num_listed = shared.found <= kListed ? shared.found : 0;
        shared.listed_below = shared.found <= kListed ? end : 0u;
        shared.num_below = 0;
    }
    __syncthreads();
}

// Lists the likeliest tokens; `most` is the largest logit of the thread's tokens.
template <typename T> __device__ __forceinline__ void list_best(const Row<T>& row, Shared& shared, float most) {
    const i32 lane = threadIdx.x % 32;
    i32 before = 0;
    for (i32 other = 0; other < 32; ++other) {
        const float theirs = __shfl_sync(kFullWarp, most, other);
        before += theirs > most || (theirs == most && other < lane) ? 1 : 0;
    }
    if (before == kAboveBar - 1) shared.of_warps[threadIdx.x / 32] = __float_as_uint(most);
    if (threadIdx.x == 0) shared.found = 0;
    __syncthreads();
    float bar = infinity();
    for (i32 warp = 0; warp < kWarps; ++warp) bar = fminf(bar, __uint_as_float(static_cast<u32>(shared.of_warps[warp])));
    // In most rounds no lane of a warp has such a token, and the warp goes on at once.
    each_token(row.logits, row.size, [&](T logit, i32 id) {
        if (to_float(logit) >= bar) put(shared, __float_as_uint(to_float(logit)), id);
    });
    // A token below the bar has a key no smaller than the bar's, except for one unit of rounding.
    const u32 end = max(row.key(bar), 1u) - 1u;
    end_list(shared, end);
    for (i32 i = threadIdx.x; i < shared.num_listed; i += kThreads) {
        const Bound token = bound_of(shared.list[i]);
        const u32 key = row.key(__uint_as_float(token.key));
        shared.list[i] = rank_of(key, static_cast<i32>(token.id));
        if (key < end) atomicAdd(&shared.num_below, 1);
    }
    __syncthreads();
}

// Lists the tokens that `bound` keeps and whose first digit is at most `digit`.
template <typename T> __device__ __forceinline__ void list(const Row<T>& row, Shared& shared, Bound bound, u32 digit) {
    __syncthreads();  // all threads have read what was found
    if (threadIdx.x == 0) shared.found = 0;
    __syncthreads();
    each_token(row.logits, row.size, [&](T logit, i32 id) {
        const u32 key = row.key(to_float(logit));
        if (key >> kKeyShift <= digit && bound.keeps(key, id) && shared.found <= kListed) put(shared, key, id);
    });
    end_list(shared, (digit + 1u) << kKeyShift);
}

// The bound of one more filter over the tokens that `bound` keeps. Their masses are added up in the order of ranks: 1 each if
// `counts`, else their weights. The new bound is the first rank at which the sum exceeds `target`, or share / 2^64 of all
// masses if `share` is not 0.
template <bool counts, typename T>
__device__ __forceinline__ Bound last_kept(const Row<T>& row, Shared& shared, Bound bound, u64 target, u64 share) {
    u64 prefix = 0ull;
    i32 done = 0;  // digits
    // Whether the list has all tokens that decide: all that `bound` keeps, or the first target + 1 of a count.
    bool listed = bound.key < shared.listed_below || (counts && target < static_cast<u64>(shared.num_below));
    if (!listed) {
        clear(shared);
        each_token(row.logits, row.size, [&](T logit, i32 id) {
            const u32 key = row.key(to_float(logit));
            if (!bound.keeps(key, id)) return;
            if (counts)
                atomicAdd(&shared.low[key >> kKeyShift], 1u);
            else
                add(shared, key >> kKeyShift, weight(key));
        });
        prefix = crossing(shared, target, share);
        share = 0ull;
        done = 1;
        const u32 digit = static_cast<u32>(prefix), end = (digit + 1u) << kKeyShift;
        if (shared.listed_below < end) list(row, shared, bound, digit);
        listed = shared.listed_below >= end;
    }
#pragma unroll 1
    for (i32 shift = kRankBits - (done + 1) * kDigitBits; shift >= 0; shift -= kDigitBits) {
        clear(shared);
        auto visit = [&](u32 key, i32 id) {
            const u64 rank = rank_of(key, id);
            if (rank >> (shift + kDigitBits) == prefix && bound.keeps(key, id))
                add(shared, static_cast<u32>(rank >> shift) % kDigits, counts ? 1ull : weight(key));
        };
        if (listed) {
            for (i32 i = threadIdx.x; i < shared.num_listed; i += kThreads) {
                const Bound token = bound_of(shared.list[i]);
                visit(token.key, static_cast<i32>(token.id));
            }
        } else {
            each_token(row.logits, row.size, [&](T logit, i32 id) { visit(row.key(to_float(logit)), id); });
        }
        prefix = prefix << kDigitBits | crossing(shared, target, share);
        share = 0ull;
    }
    return bound_of(prefix);
}

// The largest value of all threads.
__device__ __forceinline__ u64 largest(Shared& shared, u64 value) {
    for (i32 distance = 16; distance > 0; distance /= 2)
        value = max(value, __shfl_xor_sync(kFullWarp, value, distance));
    if (threadIdx.x % 32 == 0) shared.of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    for (i32 warp = 0; warp < kWarps; ++warp) value = max(value, shared.of_warps[warp]);
    __syncthreads();
    return value;
}

// The likeliest token, of equals the first; -1 if a logit is NaN. `best` becomes its logit, `most` the largest logit of this
// thread's tokens.
template <typename T>
__device__ __forceinline__ i32 likeliest(const T* logits, i32 size, Shared& shared, float& best, float& most) {
    most = -infinity();
    i32 id = threadIdx.x;
    bool broken = false;
    each_token(logits, size, [&](T loaded, i32 at) {
        const float logit = to_float(loaded);
        if (logit <= most) return;
        broken = broken || logit != logit;
        most = logit;
        id = at;
    });
    // An integer that orders logits as floats do, with -0 as 0, and is larger for the smaller id of two equals.
    const u32 bits = __float_as_uint(most + 0.0f);
    const u32 order = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    u64 found = broken ? kNone : static_cast<u64>(order) << 32 | (0xffffffffu - static_cast<u32>(id));
    found = largest(shared, found);
    if (found == kNone) return -1;
    const u32 value = static_cast<u32>(found >> 32);
    best = __uint_as_float(value & 0x80000000u ? value & 0x7fffffffu : ~value);
    return static_cast<i32>(0xffffffffu - static_cast<u32>(found));
}

// --- the draw: two exponential races, one between groups of 256 neighbouring ids, one between the tokens of the winner

// A random number of the exponential distribution with mean 1, from the bits of SplitMix64 (Steele, Lea and Flood, 2014).
__device__ __forceinline__ double exponential(u64 draw_key, u64 number) {
    u64 bits = draw_key + number * 0x9e3779b97f4a7c15ull;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9ull;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111ebull;
    bits ^= bits >> 31;
    return -log(static_cast<double>(bits >> 12 << 1 | 1ull) * 0x1p-53);
}

// An entry of the race: the score, weight / random number, with the place in the last bits, the smaller place being larger.
// Doubles above 0 are ordered as their bits are; 2^-32 of a score is lost. 0 without weight.
__device__ __forceinline__ u64 entry(u64 held, u64 draw_key, u64 number, i32 place) {
    if (held == 0ull) return 0ull;
    const double score = static_cast<double>(held) / exponential(draw_key, number);
    return (static_cast<u64>(__double_as_longlong(score)) | kLastPlace) - static_cast<u32>(place);
}

__device__ __forceinline__ i32 place_of(u64 winner) { return static_cast<i32>(kLastPlace - (winner & kLastPlace)); }

// Draws a group by the weights of all groups, which stand in the sums by digit.
__device__ __forceinline__ i32 draw_group(Shared& shared, u64 draw_key) {
    __syncthreads();  // all sums are there
    u64 best = 0ull;
    for (i32 group = threadIdx.x; group < kDigits; group += kThreads) {
        const u64 held = static_cast<u64>(shared.high[group]) << 32 | shared.low[group];
        best = max(best, entry(held, draw_key, kFirstGroup + static_cast<u32>(group), group));
    }
    return place_of(largest(shared, best));
}

// Calls `visit` with id and weight of every listed token that is kept.
template <typename Visit>
__device__ __forceinline__ void each_kept(const Shared& shared, Bound bound, u64 min_weight, Visit visit) {
    for (i32 i = threadIdx.x; i < shared.num_listed; i += kThreads) {
        const Bound token = bound_of(shared.list[i]);
        const u64 held = weight(token.key);
        if (bound.keeps(token.key, static_cast<i32>(token.id)) && held >= min_weight) visit(token.id, held);
    }
}

// Draws one of the tokens that are kept, all of which are listed.
__device__ __forceinline__ i32 draw_listed(Shared& shared, Bound bound, u64 min_weight, u64 draw_key) {
    clear(shared);
    each_kept(shared, bound, min_weight, [&](u32 id, u64 held) { add(shared, id / kGroup, held); });
    const u32 group = static_cast<u32>(draw_group(shared, draw_key));
    u64 best = 0ull;
    each_kept(shared, bound, min_weight, [&](u32 id, u64 held) {
        if (id / kGroup == group) best = max(best, entry(held, draw_key, id, static_cast<i32>(id)));
    });
    return place_of(largest(shared, best));
}

// Draws as `draw_listed` does, where the list lacks tokens that are kept: reads the row.
template <typename T>
__device__ __forceinline__ i32 draw(const Row<T>& row, Shared& shared, Bound bound, u64 min_weight, u64 draw_key) {
    const i32 lane = threadIdx.x % 32;
    auto mass = [&](i32 id) {
        if (id >= row.size) return 0ull;
        const u32 key = row.key(to_float(row.logits[id]));
        if (!bound.keeps(key, id)) return 0ull;
        const u64 held = weight(key);
        return held >= min_weight ? held : 0ull;
    };
    clear(shared);
    for (i32 group = threadIdx.x / 32; group * kGroup < row.size; group += kWarps) {
        u64 sum = 0ull;
#pragma unroll
        for (i32 i = 0; i < kGroup / 32; ++i) sum += mass(group * kGroup + i * 32 + lane);
        for (i32 distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(kFullWarp, sum, distance);
        if (lane == 0) {
            shared.low[group] = static_cast<u32>(sum);
            shared.high[group] = static_cast<u32>(sum >> 32);
        }
    }
    const i32 first = draw_group(shared, draw_key) * kGroup, id = first + static_cast<i32>(threadIdx.x);
    const u64 own = threadIdx.x < kGroup ? entry(mass(id), draw_key, static_cast<u32>(id), id) : 0ull;
    return place_of(largest(shared, own));
}

template <typename T> __device__ __forceinline__ i32 choose(const T* logits, i32 size, const Choice& choice, Shared& shared) {
    Row<T> row = {logits, size, 0.0f, choice.scale, choice.scale_low};
    float most;
    const i32 likely = likeliest(logits, size, shared, row.best, most);
    if (likely < 0 || choice.scale == 0.0f) return likely;
    Bound bound = {kLastKey, ~0u};
    if (choice.top_k > 0 || choice.top_p != kNone) list_best(row, shared, most);
    if (choice.top_k > 0) bound = last_kept<true>(row, shared, bound, static_cast<u64>(choice.top_k) - 1, 0ull);
    if (choice.top_p != kNone) bound = last_kept<false>(row, shared, bound, 0ull, choice.top_p);
    if (bound.key < shared.listed_below) return draw_listed(shared, bound, choice.min_weight, choice.draw_key);
    return draw(row, shared, bound, choice.min_weight, choice.draw_key);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) pagekv_sample(const SampleParams p) {
    __shared__ Shared shared;
    const Choice choice = p.choices[blockIdx.x];
    if (threadIdx.x == 0) {
        shared.num_listed = 0;
        shared.listed_below = 0u;
    }
    __syncthreads();
    const i64 row = blockIdx.x;
    const i32 token =
        choice.adjusted >= 0
            ? choose(p.adjusted + static_cast<i64>(choice.adjusted) * p.vocab_size, p.vocab_size, choice, shared)
            : choose(static_cast<const Element*>(p.logits) + row * p.logit_stride, p.vocab_size, choice, shared);
    if (threadIdx.x != 0) return;
    p.tokens[row] = token;
    p.last_tokens[choice.last_token] = max(token, 0);
    if (choice.penalty_row < 0 || token < 0) return;
    const i64 place = static_cast<i64>(choice.penalty_row) * p.vocab_size + token;
    p.counts[place] += 1;
    p.seen[place] = 1;
}
