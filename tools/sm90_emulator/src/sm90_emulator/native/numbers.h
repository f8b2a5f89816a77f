// Formats of numbers narrower than float32.
#pragma once
#include "machine.h"

static inline float float_of(u32 bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline u32 bits_of(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float half_float(u16 bits) {
    _Float16 x;
    memcpy(&x, &bits, 2);
    return (float)x;
}

static inline u16 to_half(float x) {
    _Float16 narrow = (_Float16)x;
    u16 bits;
    memcpy(&bits, &narrow, 2);
    return x != x ? 0x7FFF : bits;
}

static inline float bf16_float(u16 bits) { return float_of((u32)bits << 16); }

static inline u16 to_bf16(float x) {
    u32 bits = bits_of(x);
    return x != x ? 0x7FFF : (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static inline u16 to_bf16_towards_zero(float x) { return x != x ? 0x7FFF : (u16)(bits_of(x) >> 16); }

static inline u16 to_half_towards_zero(float x) {
    u16 bits = to_half(x);
    float back = half_float(bits);
    return x == x && fabsf(back) > fabsf(x) ? (u16)(bits - 1) : bits;
}

// A float32 that rounds to any narrower format as the double does: the last bit is set where the conversion is inexact.
static inline float to_odd(double x) {
    float near = (float)x;
    if ((double)near == x || x != x || isinf(near)) return near;
    u32 bits = bits_of(near);
    if (fabs((double)near) > fabs(x)) bits--;
    return float_of(bits | 1);
}

extern float E4M3[256], E5M2[256];

static inline void fill_tables(void) {
    for (int code = 0; code < 256; code++) {
        int sign = code >> 7, field = code >> 3 & 15, rest = code & 7;
        float x = ldexpf((float)(field ? 8 + rest : rest), (field ? field : 1) - 10);
        E4M3[code] = (code & 0x7F) == 0x7F ? NAN : sign ? -x : x;
        E5M2[code] = half_float((u16)(code << 8));
    }
}

// Rounds to nearest even, saturating at the largest finite number; infinity saturates too, NaN stays.
static inline u8 to_small_float(float x, int mantissa, int bias, float most, u8 most_code, u8 nan) {
    if (x != x) return nan;
    u8 sign = (u8)(bits_of(x) >> 31 << 7);
    float size = fabsf(x);
    if (size >= most) return sign | most_code;
    int exponent;
    frexpf(size, &exponent);  // size = f * 2^exponent, 0.5 <= f < 1
    int unit = (exponent - 1 < 1 - bias ? 1 - bias : exponent - 1) - mantissa;
    int steps = (int)rintf(ldexpf(size, -unit));
    if (size == 0) steps = 0;
    int field = unit + mantissa + bias;
    if (steps < 1 << mantissa) return sign | (u8)steps;  // subnormal, where the field is 0
    if (steps == 2 << mantissa) field++, steps >>= 1;
    u32 code = (u32)(field << mantissa | (steps & ((1 << mantissa) - 1)));
    return sign | (code > most_code ? most_code : (u8)code);
}

static inline u8 to_e4m3(float x) { return to_small_float(x, 3, 7, 448.0f, 0x7E, 0x7F); }
static inline u8 to_e5m2(float x) { return to_small_float(x, 2, 15, 57344.0f, 0x7B, 0x7F); }

static inline float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }

static inline u32 to_tf32(float x) {  // ties away from zero
    u32 bits = bits_of(x);
    return (bits & 0x7F800000) == 0x7F800000 ? bits : (bits + 0x1000) & ~0x1FFFu;
}
