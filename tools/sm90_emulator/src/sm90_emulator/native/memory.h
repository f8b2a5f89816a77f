// Global memory is the host's memory, shared memory is a buffer per CTA. Every access is checked.
#pragma once
#include "machine.h"
#include "overlap.h"

static void *global_at(u64 address, u64 size) {
    if (address >= M->hot.begin && address + size <= M->hot.end) return (void *)address;
    const Launch *launch = M->launch;
    if (!launch->ranges_count) return (void *)address;
    u32 low = 0, high = launch->ranges_count;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (launch->ranges[middle].begin <= address) low = middle + 1;
        else high = middle;
    }
    if (low && address + size <= launch->ranges[low - 1].end) {
        M->hot = launch->ranges[low - 1];
        return (void *)address;
    }
    u64 parameters = (u64)launch->parameters;
    if (address >= parameters && address + size <= parameters + launch->parameter_bytes) return (void *)address;
    if (low) {
        Range near = launch->ranges[low - 1];
        fail("out-of-bounds: %llu bytes of global memory at %#llx; the nearest tensor below ends %lld bytes before",
             (unsigned long long)size, (unsigned long long)address, (long long)(address - near.end));
    }
    fail("out-of-bounds: %llu bytes of global memory at %#llx, below all tensors", (unsigned long long)size,
         (unsigned long long)address);
}

static void global_written(bool waited, u64 address, u64 size) {
    if (!M->launch->check_overlap) return;
    if (!waited) require_waited(address, size, "written");
    note_write(address, size);
}

static Cta *cta_of(Cta *cta, u32 address) {
    u32 rank = address >> RANK_SHIFT;
    if (rank >= cta->cluster->size)
        fail("out-of-bounds: shared address %#x is of CTA %u of a cluster of %u", address, rank, cta->cluster->size);
    Cta *peer = cta->cluster->ctas[rank];
    if (peer->done) fail("shared memory of CTA %u of the cluster is accessed after it ended", rank);
    return peer;
}

static u8 *shared_at(Cta *cta, u32 address, u32 size, Cta **owner) {
    Cta *peer = cta;
    if (address >> RANK_SHIFT != cta->rank) peer = cta_of(cta, address);
    u32 offset = (address & OFFSET_MASK) - SHARED_BASE;
    if (offset > M->launch->shared_bytes || offset + size > M->launch->shared_bytes)
        fail("out-of-bounds: %u bytes of shared memory at %#x; the CTA has %u bytes from %#x on", size, address,
             M->launch->shared_bytes, SHARED_BASE);
    *owner = peer;
    return peer->shared + offset;
}

static void require_written(Cta *owner, const u8 *at, u32 size, u32 address) {
    const u8 *written = owner->written + (at - owner->shared);
    for (u32 i = 0; i < size; i++)
        if (!written[i])
            fail("uninitialised: %u bytes of shared memory are read at %#x, and nobody has written byte %u of them", size, address, i);
}

static inline const u8 *shared_read(Cta *cta, u32 address, u32 size) {
    Cta *owner;
    u8 *at = shared_at(cta, address, size, &owner);
    if (M->launch->check_uninitialised) require_written(owner, at, size, address);
    return at;
}

static inline u8 *shared_write(Cta *cta, u32 address, u32 size) {
    Cta *owner;
    u8 *at = shared_at(cta, address, size, &owner);
    memset(owner->written + (at - owner->shared), 1, size);
    return at;
}

static inline bool is_shared(u64 generic) { return (generic & 0xFF00000000000000ull) == SHARED_WINDOW; }

enum { GENERIC, GLOBAL, SHARED, PARAMETER, LOCAL };

// Returns the host pointer for a lane's access to an address of a state space.
static inline void *access_at(Warp *warp, int space, u64 address, u32 size, bool writes, u32 lane) {
    if (address % size) fail("misaligned: %u bytes at %#llx", size, (unsigned long long)address);
    if (space == GENERIC) {
        if (is_shared(address)) space = SHARED;
        else if (address >> 56 == 0x7B) space = LOCAL;
        else space = GLOBAL;
    }
    if (space == SHARED) {
        if (writes) M->changes++;
        return writes ? shared_write(warp->cta, (u32)address, size) : (void *)shared_read(warp->cta, (u32)address, size);
    }
    if (space == LOCAL) {
        u64 offset = address & 0xFFFFFFFF;
        if (offset + size > M->launch->local_bytes) fail("out-of-bounds: %u bytes of local memory at %#llx", size, (unsigned long long)offset);
        return warp->local + (u64)lane * M->launch->local_bytes + offset;
    }
    if (writes) M->changes++;
    void *at = global_at(address, size);
    if (writes) global_written(warp->waited, address, size);
    return at;
}

// -- mbarriers ----------------------------------------------------------------------------------------------------------------------
// The 64 bits: expected arrivals (20), pending arrivals (20), bytes in flight (22, signed), the phase.

typedef struct {
    u32 expected, pending, phase;
    s32 bytes;
} Mbarrier;

static Mbarrier unpacked(u64 word) {
    Mbarrier barrier = {(u32)(word & 0xFFFFF), (u32)(word >> 20 & 0xFFFFF), (u32)(word >> 62 & 1), 0};
    barrier.bytes = (s32)((word >> 40 & 0x3FFFFF) << 10) >> 10;
    return barrier;
}

static u64 packed(Mbarrier b) {
    return (u64)b.expected | (u64)b.pending << 20 | ((u64)b.bytes & 0x3FFFFF) << 40 | (u64)b.phase << 62;
}

static u64 *mbarrier_at(Cta *cta, u32 address) {
    Cta *owner;
    if (address % 8) fail("misaligned: an mbarrier at %#x", address);
    u8 *at = shared_at(cta, address, 8, &owner);
    if (!owner->barrier_here[(at - owner->shared) / 8]) fail("there is no mbarrier at %#x: nobody initialised it", address);
    return (u64 *)at;
}

static bool mbarrier_waited(Cta *cta, u32 address) {
    Cta *owner;
    const u8 *at = shared_at(cta, address, 8, &owner);
    return owner->barrier_here[(at - owner->shared) / 8] & 2;
}

static void mbarrier_init(Cta *cta, u32 address, u32 count) {
    Cta *owner;
    if (address % 8) fail("misaligned: an mbarrier at %#x", address);
    if (count < 1 || count > 0xFFFFF) fail("an mbarrier of %u arrivals", count);
    u8 *at = shared_at(cta, address, 8, &owner);
    owner->barrier_here[(at - owner->shared) / 8] = 1;
    memset(owner->written + (at - owner->shared), 1, 8);
    *(u64 *)at = packed((Mbarrier){count, count, 0, 0});
    M->changes++;
}

// Returns the mbarrier's previous state.
static u64 mbarrier_arrive(Cta *cta, u32 address, u32 count, s64 expected, s64 delivered) {
    u64 *word = mbarrier_at(cta, address), before = *word;
    Mbarrier barrier = unpacked(before);
    if (count > barrier.pending)
        fail("the mbarrier at %#x has %u arrivals in its phase, and %u are left of them: one too many", address, barrier.expected,
             barrier.pending);
    s64 bytes = (s64)barrier.bytes + expected - delivered;
    if (bytes > 0xFFFFF * 1ll || bytes < -0xFFFFF * 1ll) fail("the mbarrier at %#x waits for %lld bytes", address, (long long)bytes);
    barrier.bytes = (s32)bytes;
    barrier.pending -= count;
    if (!barrier.pending && !barrier.bytes) {
        barrier.phase ^= 1;
        barrier.pending = barrier.expected;
    }
    *word = packed(barrier);
    if (M->now && M->now->waited) {
        Cta *owner;
        const u8 *at = shared_at(cta, address, 8, &owner);
        owner->barrier_here[(at - owner->shared) / 8] |= 2;
    }
    M->changes++;
    return before;
}
