// Loads in flight when their memory is released. A thread continues after a load from shared memory until it uses the result. An
// arrival at an mbarrier of its own CTA is ordered after the load; an arrival at another CTA's mbarrier is not, and that CTA's
// copies may overwrite memory that has not been read yet. Here memory is read at once, so each load is recorded until a result is
// used, or the warp passes a fence or a barrier. If an arrival at another CTA's mbarrier releases the memory before that, no other
// CTA's copy may overwrite the memory.
#pragma once
#include "machine.h"

static void forget_loads(Warp *warp, u32 count) {  // the oldest ones: results arrive in the order of the loads
    warp->loads_count -= count;
    memmove(warp->loads, warp->loads + count, warp->loads_count * sizeof *warp->loads);
}

static void use_register(Warp *warp, s32 offset) {
    if (offset < 0) return;
    for (u32 i = warp->loads_count; i--;)
        for (u32 r = 0; r < warp->loads[i].count; r++)
            if (warp->loads[i].registers[r] == offset) {
                forget_loads(warp, i + 1);
                return;
            }
}

// Forgets the loads that an instruction waits for: loads whose results it uses, and all older loads. MMAs, barriers and fences wait
// for all loads.
static void use_results(Warp *warp, const Instruction *ins, const s32 *pool) {
    switch (ins->op) {
    case OP_mma: case OP_wgmma: case OP_bar_sync: case OP_bar_red: case OP_cluster_arrive: case OP_fence:
        warp->loads_count = 0;
        return;
    }
    use_register(warp, ins->a), use_register(warp, ins->b), use_register(warp, ins->c), use_register(warp, ins->e);
    // A load's list holds its destinations; a register with a load in flight is not written before that load completes.
    if (ins->op >= ELEMENTWISE_COUNT)
        for (s32 i = 0; i < ins->count; i++) use_register(warp, pool[ins->list + i]);
}

static void begin_load(Warp *warp, const Instruction *ins, const s32 *pool, const u32 *addresses, u32 lanes, u32 bytes) {
    if (warp->cta->cluster->size == 1) return;
    if (warp->loads_count == warp->loads_room) {
        warp->loads_room = warp->loads_room ? 2 * warp->loads_room : 32;
        warp->loads = more_room(warp->loads, warp->loads_room * sizeof *warp->loads);
    }
    Load *load = &warp->loads[warp->loads_count++];
    *load = (Load){.at = warp->at, .lanes = lanes, .bytes = bytes};
    for (s32 i = 0; i < ins->count && load->count < 4; i++)
        if (pool[ins->list + i] >= 0) load->registers[load->count++] = pool[ins->list + i];
    memcpy(load->addresses, addresses, sizeof load->addresses);
}

// Handles an arrival at another CTA's mbarrier, which releases the memory of loads in flight.
static void give_back(Warp *warp) {
    Cta *cta = warp->cta;
    for (u32 i = 0; i < warp->loads_count; i++) {
        const Load *load = &warp->loads[i];
        for (u32 lane = 0; lane < LANES; lane++) {
            if (!(load->lanes >> lane & 1) || load->addresses[lane] >> RANK_SHIFT != cta->rank) continue;
            u32 first = (load->addresses[lane] & OFFSET_MASK) - SHARED_BASE;
            for (u32 block = first / 16; block <= (first + load->bytes - 1) / 16; block++)
                cta->given_back[block] = (GivenBack){load->at + 1, warp->index};
        }
    }
}

// Checks a copy, issued by a CTA of the cluster, that writes to a CTA's shared memory.
static void overwrite(Cta *by, Cta *owner, u32 address, u32 size) {
    if (owner->cluster->size == 1) return;
    u32 first = (address & OFFSET_MASK) - SHARED_BASE;
    for (u32 block = first / 16; block <= (first + size - 1) / 16; block++) {
        GivenBack *given = &owner->given_back[block];
        if (given->load && by != owner) {
            M->now = &owner->warps[given->warp];
            M->now->at = given->load - 1;
            fail("overwritten: a copy of CTA %u of the cluster writes to shared memory at %#x, which this warp loads and gives back by an "
                 "arrival at another CTA's mbarrier, without waiting for the load: it needs a fence between the two",
                 by->rank, SHARED_BASE + 16 * block);
        }
        given->load = 0;
    }
}
