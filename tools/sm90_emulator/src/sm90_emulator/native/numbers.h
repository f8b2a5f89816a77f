// Number formats narrower than float32.
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

// Converts a double to a float32 that rounds to any narrower format as the double does: the last bit is set if the conversion is
// inexact.
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

// Rounding modes of conversions. SPECIAL is added if a conversion to a float saturates at the largest finite number, or if a
// conversion to an integer turns NaN into the integer with only the sign bit set, rather than into 0.
enum { NEAREST, TOWARDS_ZERO, DOWN, UP, AWAY_FROM_ZERO, TO_ODD, SPECIAL = 8 };

static inline double whole(double x, s64 rounding) {
    switch (rounding & 7) {
    case NEAREST: return rint(x);
    case TOWARDS_ZERO: return trunc(x);
    case DOWN: return floor(x);
    case UP: return ceil(x);
    default: return round(x);  // ties away from zero
    }
}

// Returns the bits of x as a float with the given numbers of fraction and exponent bits.
static inline u32 narrowed(double x, int fraction, int exponent, s64 rounding) {
    u32 infinity = ((1u << exponent) - 1) << fraction, sign = (u32)(signbit(x) != 0) << (fraction + exponent);
    if (x != x) return infinity | ((1u << fraction) - 1);
    u32 code = infinity;
    if (!isinf(x)) {
        int bias = (1 << (exponent - 1)) - 1, above;
        frexp(x, &above);  // |x| < 2^above
        int field = x != 0 && above - 1 > 1 - bias ? above - 1 + bias : 1;
        double steps = fabs(whole(ldexp(x, fraction + bias - field), rounding));
        code = field - 1 >= 1 << exponent ? infinity : ((u32)(field - 1) << fraction) + (u32)steps;
        bool back = (rounding & 7) == TOWARDS_ZERO || (rounding & 7) == (sign ? UP : DOWN);
        if (code >= infinity) code = infinity - back;
    }
    return sign | (code == infinity && rounding & SPECIAL ? infinity - 1 : code);
}

static inline double of_integer(__int128 x, s64 rounding) {
    double near = (double)x;
    __int128 over = (__int128)near - x;
    if (!over || rounding == NEAREST) return near;
    if (rounding == UP) return over < 0 ? nextafter(near, INFINITY) : near;
    if (rounding == DOWN) return over > 0 ? nextafter(near, -INFINITY) : near;
    if ((over > 0) == (x > 0)) near = nextafter(near, 0);
    if (rounding != TO_ODD) return near;
    u64 bits;
    memcpy(&bits, &near, 8);
    bits |= 1;
    memcpy(&near, &bits, 8);
    return near;
}

static inline s64 to_signed(double x, int bits, s64 rounding) {
    s64 most = (s64)(~0ull >> (65 - bits));
    if (x != x) return rounding & SPECIAL ? -most - 1 : 0;
    x = whole(x, rounding);
    return x >= ldexp(1, bits - 1) ? most : x <= -ldexp(1, bits - 1) ? -most - 1 : (s64)x;
}

static inline u64 to_unsigned(double x, int bits, s64 rounding) {
    if (x != x) return rounding & SPECIAL ? 1ull << (bits - 1) : 0;
    x = whole(x, rounding);
    return x <= 0 ? 0 : x >= ldexp(1, bits) ? ~0ull >> (64 - bits) : (u64)x;
}
