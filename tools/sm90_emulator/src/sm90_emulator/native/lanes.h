// What elementwise instructions are made of.
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
// An order of the finite numbers that both formats share: that of their bits, with the sign turned.
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

static inline u32 field_of(u32 x, u32 at, u32 count, bool is_signed) {
    if (!count) return 0;
    u64 wide = is_signed ? (u64)(s64)(s32)x : x;
    if (at > 31) return is_signed && x >> 31 ? FULL : 0;
    u64 field = wide >> at;
    if (count > 31) return (u32)field;
    u32 cut = (u32)field & ((1u << count) - 1);
    u32 last = at + count - 1 > 31 ? 31 : at + count - 1;
    return is_signed && x >> last & 1 ? cut | ~((1u << count) - 1) : cut;
}

static inline u32 reversed(u32 x) {
    u32 y = 0;
    for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
    return y;
}

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

static inline u32 dot_u8(u32 x, u32 y, u32 z) {
    for (int i = 0; i < 32; i += 8) z += (x >> i & 255) * (y >> i & 255);
    return z;
}

static inline u32 dot_s8(u32 x, u32 y, u32 z) {
    for (int i = 0; i < 32; i += 8) z += (u32)((s32)(s8)(x >> i) * (s8)(y >> i));
    return z;
}

static inline u32 to_s32(double x) {
    return x != x ? 0 : x <= -2147483648.0 ? 0x80000000u : x >= 2147483647.0 ? 0x7FFFFFFFu : (u32)(s32)x;
}
static inline u32 to_u32(double x) { return !(x > 0) ? 0 : x >= 4294967295.0 ? FULL : (u32)x; }
static inline u64 to_s64(double x) {
    return x != x ? 0x8000000000000000ull : x <= -9223372036854775808.0 ? 1ull << 63 : x >= 9223372036854775808.0 ? ~0ull >> 1 : (u64)(s64)x;
}
static inline u64 to_u64(double x) { return !(x > 0) ? 0 : x >= 18446744073709551616.0 ? ~0ull : (u64)x; }
