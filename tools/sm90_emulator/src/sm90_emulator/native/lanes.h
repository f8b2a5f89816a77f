// Building blocks of the elementwise instructions.
#pragma once
#include "numbers.h"

typedef u16 (*Half)(u16, u16);

static inline u32 pairs(u32 x, u32 y, Half f) { return f((u16)x, (u16)y) | (u32)f((u16)(x >> 16), (u16)(y >> 16)) << 16; }
static inline u16 lesser_u16(u16 x, u16 y) { return x < y ? x : y; }
static inline u16 greater_u16(u16 x, u16 y) { return x > y ? x : y; }
static inline u16 lesser_s16(u16 x, u16 y) { return (s16)x < (s16)y ? x : y; }
static inline u16 greater_s16(u16 x, u16 y) { return (s16)x > (s16)y ? x : y; }
static inline u16 sum_u16(u16 x, u16 y) { return (u16)(x + y); }

static inline bool is_nan16(u16 x, u16 infinity) { return (x & 0x7FFF) > infinity; }
// An integer key that orders the finite values of both 16-bit formats: their bits in sign-magnitude order.
static inline s32 order16(u16 x) { return x & 0x8000 ? -(s32)(x & 0x7FFF) - 1 : x; }

#define SMALL(FORMAT, INFINITY_)                                                                                                 \
    static inline u16 lesser_##FORMAT(u16 x, u16 y) {                                                                            \
        if (is_nan16(x, INFINITY_)) return is_nan16(y, INFINITY_) ? 0x7FFF : y;                                                  \
        return is_nan16(y, INFINITY_) ? x : order16(x) < order16(y) ? x : y;                                                     \
    }                                                                                                                            \
    static inline u16 greater_##FORMAT(u16 x, u16 y) {                                                                           \
        if (is_nan16(x, INFINITY_)) return is_nan16(y, INFINITY_) ? 0x7FFF : y;                                                  \
        return is_nan16(y, INFINITY_) ? x : order16(x) > order16(y) ? x : y;                                                     \
    }                                                                                                                            \
    static inline u16 lesser_nan_##FORMAT(u16 x, u16 y) {                                                                        \
        return is_nan16(x, INFINITY_) || is_nan16(y, INFINITY_) ? 0x7FFF : lesser_##FORMAT(x, y);                                \
    }                                                                                                                            \
    static inline u16 greater_nan_##FORMAT(u16 x, u16 y) {                                                                       \
        return is_nan16(x, INFINITY_) || is_nan16(y, INFINITY_) ? 0x7FFF : greater_##FORMAT(x, y);                               \
    }
SMALL(f16, 0x7C00)
SMALL(bf16, 0x7F80)
#undef SMALL

static inline u16 relu(u16 x) { return x & 0x8000 ? 0 : x; }
static inline u16 sum_f16(u16 x, u16 y) { return to_half(half_float(x) + half_float(y)); }
static inline u16 difference_f16(u16 x, u16 y) { return to_half(half_float(x) - half_float(y)); }
static inline u16 product_f16(u16 x, u16 y) { return to_half(half_float(x) * half_float(y)); }
static inline u16 fused_f16(u16 x, u16 y, u16 z) {
    return to_half(to_odd((double)half_float(x) * half_float(y) + half_float(z)));
}
static inline u16 sum_bf16(u16 x, u16 y) { return to_bf16(to_odd((double)bf16_float(x) + bf16_float(y))); }
static inline u16 difference_bf16(u16 x, u16 y) { return to_bf16(to_odd((double)bf16_float(x) - bf16_float(y))); }
static inline u16 product_bf16(u16 x, u16 y) { return to_bf16(bf16_float(x) * bf16_float(y)); }
static inline u16 fused_bf16(u16 x, u16 y, u16 z) {
    return to_bf16(to_odd((double)bf16_float(x) * bf16_float(y) + bf16_float(z)));
}

// `count` bits of the lowest `width` bits of x, from bit `at` on; bits beyond `width` are the sign or 0.
static inline u64 field_of(u64 x, u32 at, u32 count, u32 width, bool is_signed) {
    if (!count || (at >= width && !is_signed)) return 0;
    if (at >= width) at = width - 1;
    if (count > width - at) count = width - at;
    x <<= 64 - at - count;
    return is_signed ? (u64)((s64)x >> (64 - count)) : x >> (64 - count);
}

// y with `count` bits of x inserted at bit `at`.
static inline u64 with_field(u64 x, u64 y, u32 at, u32 count, u32 width) {
    if (!count || at >= width) return y;
    if (count > width - at) count = width - at;
    u64 mask = ~0ull >> (64 - count) << at;
    return (y & ~mask) | (x << at & mask);
}

static inline u64 reversed(u64 x) {
    u64 y = 0;
    for (int i = 0; i < 64; i++) y |= (x >> i & 1) << (63 - i);
    return y;
}

static inline u32 highest(u64 x) { return x ? 63 - (u32)__builtin_clzll(x) : FULL; }

static inline u32 permuted(u32 x, u32 y, u32 choice) {
    u64 bytes = (u64)y << 32 | x;
    u32 out = 0;
    for (int i = 0; i < 4; i++) {
        u32 one = choice >> 4 * i & 15;
        u32 byte = (u32)(bytes >> 8 * (one & 7)) & 0xFF;
        if (one & 8) byte = byte & 0x80 ? 0xFF : 0;
        out |= byte << 8 * i;
    }
    return out;
}

static inline u32 dot(u32 x, u32 y, u32 z, bool signed_x, bool signed_y) {
    for (int i = 0; i < 32; i += 8) z += (u32)((signed_x ? (s8)(x >> i) : (u8)(x >> i)) * (signed_y ? (s8)(y >> i) : (u8)(y >> i)));
    return z;
}

static inline u64 clamped(__int128 x, s64 more) {
    int bits = (int)(more & 255);
    __int128 least = more >> 8 ? -((__int128)1 << (bits - 1)) : 0, most = least + ((__int128)1 << bits) - 1;
    return (u64)(x < least ? least : x > most ? most : x);
}
