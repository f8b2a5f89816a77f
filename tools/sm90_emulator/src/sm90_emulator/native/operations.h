// Operation codes, and access to registers.
#pragma once
#include "machine.h"

enum {
#define UNARY(NAME, ...) OP_##NAME,
#define BINARY(NAME, ...) OP_##NAME,
#define TERNARY(NAME, ...) OP_##NAME,
#define COMPARE(NAME, ...) OP_##NAME,
#define OTHER(NAME) OP_##NAME,
#include "elementwise.h"
    ELEMENTWISE_COUNT,
    BEFORE_CONTROL = ELEMENTWISE_COUNT - 1,
#include "control.h"
#undef UNARY
#undef BINARY
#undef TERNARY
#undef COMPARE
#undef OTHER
    OPERATIONS
};

typedef void (*Elementwise)(char *regs, const char *constants, const Instruction *ins, u32 active);
extern const Elementwise ELEMENTWISE[];

#define REG(TYPE, OFFSET) ((TYPE *)((OFFSET) >= 0 ? regs + (OFFSET) : constants - (OFFSET)-4))
#define PRED(OFFSET) (*REG(u32, OFFSET))

static inline void merge_pred(u32 *into, u32 held, u32 lanes) { *into = (*into & ~lanes) | (held & lanes); }

// Writes the result of a comparison, combined with a predicate (`kind`: 1 and, 2 or, 3 xor), and its negation to a second predicate.
static inline void compared(char *regs, const char *constants, const Instruction *ins, u32 held, u32 active) {
    u32 other = 0, opposite = ~held;
    if (ins->kind) {
        other = PRED(ins->c) ^ (ins->more & 1 ? FULL : 0);
        held = ins->kind == 1 ? held & other : ins->kind == 2 ? held | other : held ^ other;
        opposite = ins->kind == 1 ? opposite & other : ins->kind == 2 ? opposite | other : opposite ^ other;
    }
    if (ins->d >= 0) merge_pred((u32 *)(regs + ins->d), held, active);
    if (ins->target >= 0) merge_pred((u32 *)(regs + ins->target), opposite, active);
}
