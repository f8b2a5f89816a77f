// Overlapping launches (PDL, programmatic dependent launch). A kernel may start while the preceding kernel still runs; the
// preceding kernel's writes are visible when griddepcontrol.wait returns. Here launches run one after another, so a kernel's writes
// are recorded. An access by the next kernel to recorded bytes is an error, unless the warp has waited, or has passed a barrier
// with a warp of its CTA that has waited.
#pragma once
#include "machine.h"

// A set of memory bytes in blocks of 16: a hash table of block numbers, 0 for an empty slot, with a byte mask each.
typedef struct {
    u64 *blocks;
    u16 *masks;
    u8 (*content)[16];  // the blocks' contents when the kernel ended
    u64 room, count;
} Bytes;

static Bytes written;  // memory that the running kernel has written
static Bytes hidden;  // memory that earlier kernels have written, if these kernels may still run

static void forget_bytes(Bytes *bytes) {
    free(bytes->blocks), free(bytes->masks), free(bytes->content);
    *bytes = (Bytes){0};
}

static u64 slot_of(const Bytes *bytes, u64 block) {
    u64 slot = (block * 0x9E3779B97F4A7C15ull) >> 20 & (bytes->room - 1);
    while (bytes->blocks[slot] && bytes->blocks[slot] != block) slot = (slot + 1) & (bytes->room - 1);
    return slot;
}

static void add_bytes(Bytes *bytes, u64 block, u16 mask) {
    if (2 * bytes->count >= bytes->room) {
        Bytes old = *bytes;
        bytes->room = old.room ? 2 * old.room : 1024;
        bytes->blocks = calloc(bytes->room, sizeof *bytes->blocks), bytes->masks = calloc(bytes->room, sizeof *bytes->masks);
        if (!bytes->blocks || !bytes->masks) fail("out of host memory: %llu blocks that are written", (unsigned long long)bytes->room);
        for (u64 i = 0; i < old.room; i++)
            if (old.blocks[i]) {
                u64 slot = slot_of(bytes, old.blocks[i]);
                bytes->blocks[slot] = old.blocks[i], bytes->masks[slot] = old.masks[i];
            }
        free(old.blocks), free(old.masks);
    }
    u64 slot = slot_of(bytes, block);
    bytes->count += !bytes->blocks[slot];
    bytes->blocks[slot] = block;
    bytes->masks[slot] |= mask;
}

static u16 mask_of(u64 block, u64 address, u64 size) {
    u64 first = address > 16 * block ? address - 16 * block : 0, end = address + size - 16 * block;
    return (u16)((end >= 16 ? 0xFFFFu : (1u << end) - 1) & ~((1u << first) - 1));
}

static void require_waited(u64 address, u64 size, const char *what) {
    if (!hidden.count) return;
    for (u64 block = address / 16; block <= (address + size - 1) / 16; block++) {
        u64 slot = slot_of(&hidden, block);
        if (hidden.blocks[slot] && hidden.masks[slot] & mask_of(block, address, size))
            fail("overlap: %llu bytes of global memory at %#llx are %s, and nobody has waited for the kernel before, which writes them",
                 (unsigned long long)size, (unsigned long long)address, what);
    }
}

static void note_write(u64 address, u64 size) {
    for (u64 block = address / 16; block <= (address + size - 1) / 16; block++) add_bytes(&written, block, mask_of(block, address, size));
}

static bool in_tensor(u64 address, u64 size) {
    const Launch *launch = M->launch;
    u32 low = 0, high = launch->ranges_count;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (launch->ranges[middle].begin <= address) low = middle + 1;
        else high = middle;
    }
    return low && address + size <= launch->ranges[low - 1].end;
}

// Returns a mask of the bytes of a slot that are still in a tensor; other bytes may no longer be mapped.
static u16 readable_of(const Bytes *bytes, u64 slot) {
    u64 address = 16 * bytes->blocks[slot];
    if (!address || in_tensor(address, 16)) return address ? bytes->masks[slot] : 0;
    u16 readable = 0;
    for (u32 byte = 0; byte < 16; byte++) readable |= (u16)((bytes->masks[slot] >> byte & 1 && in_tensor(address + byte, 1)) << byte);
    return readable;
}

// Whether the memory is unchanged since the last kernel. If not, something else ran in between, and must have waited for that
// kernel.
static bool is_unchanged(const Bytes *bytes) {
    for (u64 i = 0; i < bytes->room; i++) {
        u16 readable = readable_of(bytes, i);
        for (u32 byte = 0; readable >> byte; byte++)
            if (readable >> byte & 1 && ((const u8 *)(16 * bytes->blocks[i]))[byte] != bytes->content[i][byte]) return false;
    }
    return true;
}

static void begin_overlap(void) {
    M->early = M->launch->check_overlap && M->launch->early && hidden.count && is_unchanged(&hidden);
    if (!M->early) forget_bytes(&hidden);
}

// Determines the writes that the next kernel must wait for: those of this kernel, if the next kernel may start before this
// kernel's end; and those hidden from this kernel, if the next kernel may also start before this kernel has waited.
static void end_overlap(bool failed) {
    bool opens = !failed && M->launch->check_overlap && M->triggered;
    if (opens && M->triggered_early)
        for (u64 i = 0; i < hidden.room; i++)
            if (hidden.blocks[i]) add_bytes(&written, hidden.blocks[i], hidden.masks[i]);
    forget_bytes(&hidden);
    if (opens && written.count) {
        hidden = written;
        written = (Bytes){0};
        hidden.content = calloc(hidden.room, 16);
        for (u64 i = 0; hidden.content && i < hidden.room; i++) {
            u16 readable = readable_of(&hidden, i);
            for (u32 byte = 0; readable >> byte; byte++)
                if (readable >> byte & 1) hidden.content[i][byte] = ((const u8 *)(16 * hidden.blocks[i]))[byte];
        }
        if (!hidden.content) forget_bytes(&hidden);
    }
    forget_bytes(&written);
}
