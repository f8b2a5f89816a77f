// Runs a warp. Lanes at the same instruction run together; the lanes that are furthest behind run first.
#pragma once
#include "operations.h"
#include "lanes.h"
#include "matrices.h"
#include <fenv.h>

static const char *const NAMES[] = {
#define UNARY(NAME, ...) #NAME,
#define BINARY(NAME, ...) #NAME,
#define TERNARY(NAME, ...) #NAME,
#define COMPARE(NAME, ...) #NAME,
#define OTHER(NAME) #NAME,
#include "elementwise.h"
#include "control.h"
#undef UNARY
#undef BINARY
#undef TERNARY
#undef COMPARE
#undef OTHER
};

#define EACH for (u32 lane = 0; lane < LANES; lane++) if (active >> lane & 1)
#define LOOP(...)                                             \
    if (active == FULL) {                                      \
        _Pragma("GCC ivdep") for (u32 lane = 0; lane < LANES; lane++) { __VA_ARGS__; } \
    } else {                                                   \
        EACH { __VA_ARGS__; }                                         \
    }

static inline u64 address_of(const char *regs, const char *constants, const Instruction *ins, u32 lane) {
    u64 base = ins->wide ? REG(u64, ins->a)[lane] : REG(u32, ins->a)[lane];
    return base + (u64)ins->imm;
}

// Writes loaded data to registers. `more`: bytes, whether signed (<< 8), bytes of the register (<< 16).
static inline void put(char *regs, s32 offset, s64 more, u64 value, u32 lanes) {
    if (offset < 0) return;
    u32 size = more & 255, room = more >> 16 & 255;
    if (more >> 8 & 1) value = (u64)((s64)(value << (64 - 8 * size)) >> (64 - 8 * size));
    for (; lanes; lanes &= lanes - 1) {
        u32 lane = (u32)__builtin_ctz(lanes);
        if (room == 8) ((u64 *)(regs + offset))[lane] = value;
        else ((u32 *)(regs + offset))[lane] = room == 2 ? (u16)value : (u32)value;
    }
}

// The cluster barrier completes when all warps of the cluster that have not exited have arrived.
static void cluster_passes(Cluster *cluster) {
    for (u32 rank = 0; rank < cluster->size; rank++) {
        Cta *cta = cluster->ctas[rank];
        for (u32 w = 0; w < cta->warps_count; w++) {
            Warp *warp = &cta->warps[w];
            if (warp->live && !(warp->cluster_arrived && warp->cluster_generation == cluster->generation)) return;
        }
    }
    cluster->generation++;
    cluster->waited = cluster->gathers, cluster->gathers = false;
    M->changes++;
}

static __attribute__((noinline)) float rounded(s32 mode, s32 what, volatile float x, volatile float y, volatile float z) {
    fesetround(mode == 1 ? FE_TOWARDZERO : mode == 2 ? FE_DOWNWARD : FE_UPWARD);
    volatile float result = what == 0 ? x + y : what == 1 ? x - y : what == 2 ? x * y : what == 3 ? fmaf(x, y, z) : what == 4 ? x / y : sqrtf(x);
    fesetround(FE_TONEAREST);
    return result;
}

static void finish_lanes(Warp *warp, u32 lanes) {
    warp->live &= ~lanes;
    M->changes++;
    if (warp->live) return;
    if (warp->copies_count) perform_asyncs(warp, LANES, ~0u, ~0u);
    for (u32 lane = 0; lane < LANES; lane++) perform_stores(warp, lane, ~0u);
    warp->cta->running--;
}

// Stores a value, if memory still holds the value before. Another process may emulate another GPU that accesses this memory.
static bool replaced(void *at, u32 size, u64 before, u64 after) {
    u32 before4 = (u32)before;
    if (size == 4) return __atomic_compare_exchange_n((u32 *)at, &before4, (u32)after, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    if (size == 8) return __atomic_compare_exchange_n((u64 *)at, &before, after, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    memcpy(at, &after, size);
    return true;
}

static u64 atomic(Warp *warp, const Instruction *ins, u64 address, u64 operand, u32 lane) {
    u32 type = (u32)(ins->more & 255), how = (u32)(ins->more >> 8 & 255);
    u32 size = ins->more >> 16 & 1 ? 4 : BYTES_OF_TYPE[type];
    u64 changes = M->changes;
    void *at = access_at(warp, ins->kind, address, size, true, lane);
    u64 before, after;
    do {
        before = after = 0;
        memcpy(&before, at, size);
        if (how == 255) memcpy(&after, &operand, size);  // exch
        else {
            after = before;
            reduce(&after, &operand, ins->more >> 16 & 1 ? 2 : 1, type, how);  // 2: two 16-bit values
        }
    } while (!replaced(at, size, before, after));
    M->changes = changes + (after != before);
    return before;
}

#define APART_MOST 100000

// Runs up to `budget` instructions. Returns the number of executed instructions: 0 if no lane can proceed.
static u64 run_warp(Warp *warp, u64 budget) {
    const Program *program = M->program;
    const Instruction *code = program->code;
    const s32 *pool = program->pool;
    char *regs = warp->regs;
    const char *constants = program->constants;
    Cta *cta = warp->cta;
    u64 done = 0, threads = 0;
    M->now = warp;
    u32 group, pc, meet;
    // Lanes that are behind run first, as on hardware, unless they seem to wait for lanes that are ahead.
    u32 start = warp->apart > APART_MOST && warp->stuck != warp->live && chance() & 1 ? warp->stuck : 0;
    warp->stuck = start;

select:
    pc = FULL;
    for (u32 lane = 0; lane < LANES; lane++)
        if ((warp->live & ~warp->stuck) >> lane & 1 && warp->pc[lane] < pc) pc = warp->pc[lane];
    if (pc == FULL) {
        if (start) {  // lanes that exhausted an earlier budget
            warp->stuck &= ~start;
            start = 0;
            goto select;
        }
        goto leave;
    }
    group = 0, meet = FULL;
    for (u32 lane = 0; lane < LANES; lane++) {
        if (!(warp->live >> lane & 1)) continue;
        if (warp->pc[lane] == pc) group |= 1u << lane;
        else if (warp->pc[lane] > pc && warp->pc[lane] < meet) meet = warp->pc[lane];
    }
    warp->stuck &= ~group;
    if (group == warp->live) warp->apart = 0;

    for (;;) {
        if (pc == meet || done >= budget) {
            for (u32 lane = 0; lane < LANES; lane++)
                if (group >> lane & 1) warp->pc[lane] = pc;
            if (done >= budget) {
                warp->stuck = group == warp->live ? 0 : group;
                goto leave;
            }
            goto select;
        }
        const Instruction *ins = &code[pc];
        warp->at = pc;
        u32 active = group;
        if (ins->guard >= 0) {
            u32 held = *(u32 *)(regs + ins->guard);
            active &= ins->negated ? ~held : held;
        }
        done++;
        if (!active) {
            pc++;
            continue;
        }
        threads += (u64)__builtin_popcount(active);
        if (M->launch->counts) M->launch->counts[pc][0]++, M->launch->counts[pc][1] += (u64)__builtin_popcount(active);
        if (warp->loads_count) use_results(warp, ins, pool);
        if (ins->op < ELEMENTWISE_COUNT) {
            ELEMENTWISE[ins->op](regs, constants, ins, active);
            pc++;
            continue;
        }
        switch (ins->op) {
#include "execute.h"
        default: fail("operation %u is unknown", ins->op);
        }
        pc++;
        continue;

    block:
        for (u32 lane = 0; lane < LANES; lane++)
            if (group >> lane & 1) warp->pc[lane] = pc;
        warp->stuck |= group;
        done--, threads -= (u64)__builtin_popcount(active);
        if (M->launch->counts) M->launch->counts[pc][0]--, M->launch->counts[pc][1] -= (u64)__builtin_popcount(active);
        goto select;
    }

leave:
    warp->apart += done;
    M->launch->instructions += done;
    M->launch->thread_instructions += threads;
    M->now = NULL;
    return done;
}
