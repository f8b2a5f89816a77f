// One function per elementwise instruction.
#include "operations.h"
#include "lanes.h"

#define U8 u32, u8
#define S8 u32, s8
#define U16 u32, u16
#define S16 u32, s16
#define U32 u32, u32
#define S32 u32, s32
#define U64 u64, u64
#define S64 u64, s64
#define F32 float, float
#define F64 double, double

// Only full warps use vector instructions; with inactive lanes, a scalar loop suffices.
#define LOOP(...)                                                                          \
    if (active == FULL) {                                                                  \
        _Pragma("GCC ivdep") for (u32 lane = 0; lane < LANES; lane++) { __VA_ARGS__; }     \
    } else {                                                                               \
        for (u32 left = active; left; left &= left - 1) {                                  \
            u32 lane = (u32)__builtin_ctz(left);                                           \
            __VA_ARGS__;                                                                   \
        }                                                                                  \
    }

#define ARGUMENTS char *regs, const char *constants, const Instruction *ins, u32 active

#define UNARY(...) UNARY_(__VA_ARGS__)
#define UNARY_(NAME, D, TD, A, TA, VALUE)                                  \
    static void do_##NAME(ARGUMENTS) {                                     \
        D *d = REG(D, ins->d);                                             \
        const A *a = REG(A, ins->a);                                       \
        LOOP(TA x = (TA)a[lane]; d[lane] = (D)(TD)(VALUE))                 \
    }
#define BINARY(...) BINARY_(__VA_ARGS__)
#define BINARY_(NAME, D, TD, A, TA, B, TB, VALUE)                                          \
    static void do_##NAME(ARGUMENTS) {                                                     \
        D *d = REG(D, ins->d);                                                             \
        const A *a = REG(A, ins->a);                                                       \
        const B *b = REG(B, ins->b);                                                       \
        LOOP(TA x = (TA)a[lane]; TB y = (TB)b[lane]; d[lane] = (D)(TD)(VALUE))             \
    }
#define TERNARY(...) TERNARY_(__VA_ARGS__)
#define TERNARY_(NAME, D, TD, A, TA, B, TB, C, TC, VALUE)                                                   \
    static void do_##NAME(ARGUMENTS) {                                                                      \
        D *d = REG(D, ins->d);                                                                              \
        const A *a = REG(A, ins->a);                                                                        \
        const B *b = REG(B, ins->b);                                                                        \
        const C *c = REG(C, ins->c);                                                                        \
        LOOP(TA x = (TA)a[lane]; TB y = (TB)b[lane]; TC z = (TC)c[lane]; d[lane] = (D)(TD)(VALUE))          \
    }
#define COMPARE(...) COMPARE_(__VA_ARGS__)
#define COMPARE_(NAME, A, TA, VALUE)                                                     \
    static void do_##NAME(ARGUMENTS) {                                                   \
        const A *a = REG(A, ins->a), *b = REG(A, ins->b);                                \
        u32 held = 0;                                                                    \
        for (u32 lane = 0; lane < LANES; lane++) {                                       \
            TA x = (TA)a[lane], y = (TA)b[lane];                                         \
            held |= (u32)(VALUE) << lane;                                                \
        }                                                                                \
        compared(regs, constants, ins, held, active);                                    \
    }
#include "elementwise.h"
#undef UNARY
#undef BINARY
#undef TERNARY
#undef COMPARE

const Elementwise ELEMENTWISE[] = {
#define UNARY(NAME, ...) do_##NAME,
#define BINARY(NAME, ...) do_##NAME,
#define TERNARY(NAME, ...) do_##NAME,
#define COMPARE(NAME, ...) do_##NAME,
#include "elementwise.h"
};
