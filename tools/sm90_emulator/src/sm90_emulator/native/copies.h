// Asynchronous operations: bulk copies, tensor copies, cp.async, st.async to another CTA. They are queued in a list and performed
// later: see Launch.lateness.
#pragma once
#include "memory.h"
#include "numbers.h"
#include "loads.h"

enum { BULK_LOAD, BULK_STORE, TENSOR_LOAD, TENSOR_STORE, SEND, BULK_PEER };
enum { NO_REDUCTION, ADD, MIN, MAX, INC, DEC, AND, OR, XOR };
enum { T_U8, T_U16, T_U32, T_S32, T_U64, T_S64, T_F16, T_F32, T_F64, T_F32_FTZ, T_BF16, T_TF32, T_TF32_FTZ };

static const u8 BYTES_OF_TYPE[16] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 4, 2, 4, 4};

typedef struct {
    u64 address, strides[5];
    u32 sizes[5], box[5], steps[5];
    u32 rank, type, swizzle, interleave, fill_nan;
} TensorMap;

// Decodes the 128-byte tensor map that the host encodes for sm_90. The layout is undocumented; this function follows CuteDSL's
// host code.
static TensorMap tensor_map(const u8 *bytes) {
    u64 w[16];
    u32 h[32];
    memcpy(w, bytes, 128);
    memcpy(h, bytes, 128);
    TensorMap map = {.address = w[0]};
    map.rank = (h[2] >> 4 & 7) + 1;
    map.type = h[2] >> 7 & 15;
    map.interleave = h[2] >> 11 & 3;
    map.swizzle = h[2] >> 13 & 3;
    map.fill_nan = h[2] >> 15 & 1;
    if ((h[2] & 15) != 2 || map.rank > 5 || map.type > T_TF32_FTZ) fail("no tensor map of tiles: its first words are %016llx %016llx",
        (unsigned long long)w[0], (unsigned long long)w[1]);
    if (map.interleave) fail("a tensor map that interleaves is not modelled");
    map.strides[0] = BYTES_OF_TYPE[map.type];
    for (u32 i = 1; i < map.rank; i++) map.strides[i] = ((u64)h[2 + i] | (u64)(h[7] >> 4 * (i - 1) & 15) << 32) << 4;
    for (u32 i = 0; i < map.rank; i++) {
        map.sizes[i] = h[8 + i] + 1;
        map.box[i] = bytes[55 + i] + 1u;
        map.steps[i] = (h[13] >> 3 * i & 7) + 1;
    }
    return map;
}

static inline u32 swizzled(u32 address, u32 mode) {  // mode: 0: no swizzle, 1: 32 bytes, 2: 64 bytes, 3: 128 bytes
    return address ^ ((address >> 7 & ((1u << mode) - 1)) << 4);
}

static void reduce(void *into, const void *from, u32 count, u32 type, u32 how);

// Performs a tensor copy between global memory and the shared memory of one CTA. Returns the tile's bytes in shared memory.
static u32 copy_tile(Cta *cta, const TensorMap *map, const s32 *at, u32 shared, bool loads, u32 reduction, bool waited) {
    u32 size = BYTES_OF_TYPE[map->type], row = map->box[0] * size;
    if (map->swizzle && row > 16u << map->swizzle) fail("a row of %u bytes in a tile that is swizzled by %u", row, 16u << map->swizzle);
    if (row % 16) fail("a row of %u bytes in a tile: no multiple of 16", row);
    if (shared % 128) fail("misaligned: a tile at shared address %#x, which must be a multiple of 128", shared);
    u32 rows = 1;
    for (u32 i = 1; i < map->rank; i++) rows *= (map->box[i] + map->steps[i] - 1) / map->steps[i];
    Cta *owner;
    u8 *base = shared_at(cta, shared, rows * row, &owner);
    u32 index[5] = {0};
    u8 line[256 * 8];
    for (u32 r = 0; r < rows; r++) {
        bool inside = true;
        u64 source = map->address;
        for (u32 i = 1; i < map->rank; i++) {
            s64 place = (s64)at[i] + index[i] * map->steps[i];
            inside = inside && place >= 0 && place < (s64)map->sizes[i];
            source += (u64)(place * (s64)map->strides[i]);
        }
        s64 first = at[0], begin = first < 0 ? -first : 0, end = (s64)map->sizes[0] - first;
        if (end > map->box[0]) end = map->box[0];
        if (!inside || end < begin) begin = end = 0;
        u32 offset = shared + r * row;
        if (loads) {
            for (u32 i = 0; i < row; i++) line[i] = 0;
            if (map->fill_nan)
                for (u32 i = 0; i < row; i++) line[i] = 0xFF;
            if (end > begin && !waited) require_waited(source + (u64)((first + begin) * size), (u64)(end - begin) * size, "loaded");
            if (end > begin) memcpy(line + begin * size, global_at(source + (u64)((first + begin) * size), (u64)(end - begin) * size), (size_t)(end - begin) * size);
            for (u32 i = 0; i < row; i += 16) {
                u32 place = swizzled(offset + i, map->swizzle) - shared;
                memcpy(base + place, line + i, 16);
                memset(owner->written + (base - owner->shared) + place, 1, 16);
            }
        } else if (end > begin) {
            for (u32 i = 0; i < row; i += 16) memcpy(line + i, base + (swizzled(offset + i, map->swizzle) - shared), 16);
            u8 *target = global_at(source + (u64)((first + begin) * size), (u64)(end - begin) * size);
            global_written(waited, source + (u64)((first + begin) * size), (u64)(end - begin) * size);
            if (reduction) reduce(target, line + begin * size, (u32)(end - begin), map->type, reduction);
            else memcpy(target, line + begin * size, (size_t)(end - begin) * size);
        }
        for (u32 i = 1; i < map->rank; i++) {
            if (++index[i] * map->steps[i] < map->box[i]) break;
            index[i] = 0;
        }
    }
    return rows * row;
}

static double number_at(const void *at, u32 type, u32 i) {
    switch (type) {
    case T_F16: return half_float(((const u16 *)at)[i]);
    case T_BF16: return bf16_float(((const u16 *)at)[i]);
    case T_F64: return ((const double *)at)[i];
    default: return ((const float *)at)[i];
    }
}

static void reduce(void *into, const void *from, u32 count, u32 type, u32 how) {
    for (u32 i = 0; i < count; i++) {
        if (type == T_F16 || type == T_BF16 || type == T_F32 || type == T_F64 || type == T_F32_FTZ) {
            double x = number_at(into, type, i), y = number_at(from, type, i);
            double z = how == ADD ? x + y : how == MIN ? fmin(x, y) : fmax(x, y);
            if (type == T_F16) ((u16 *)into)[i] = to_half(to_odd(z));
            else if (type == T_BF16) ((u16 *)into)[i] = to_bf16(to_odd(z));
            else if (type == T_F64) ((double *)into)[i] = z;
            else ((float *)into)[i] = (float)z;
            continue;
        }
        bool wide = type == T_U64 || type == T_S64;
        u64 x = wide ? ((u64 *)into)[i] : ((u32 *)into)[i], y = wide ? ((const u64 *)from)[i] : ((const u32 *)from)[i];
        s64 p = wide ? (s64)x : (s32)x, q = wide ? (s64)y : (s32)y;
        bool is_signed = type == T_S32 || type == T_S64;
        bool less = is_signed ? p < q : x < y;
        u64 z;
        switch (how) {
        case ADD: z = x + y; break;
        case MIN: z = less ? x : y; break;
        case MAX: z = less ? y : x; break;
        case INC: z = x >= y ? 0 : x + 1; break;
        case DEC: z = !x || x > y ? y : x - 1; break;
        case AND: z = x & y; break;
        case OR: z = x | y; break;
        default: z = x ^ y;
        }
        if (wide) ((u64 *)into)[i] = z;
        else ((u32 *)into)[i] = (u32)z;
    }
}

// Adds `by` to the pending copies of each CTA whose shared memory a copy reads or writes. A CTA must not end while it has any.
static void count_pending(const Copy *copy, s32 by) {
    Cluster *cluster = copy->cta->cluster;
    u32 mask = copy->kind == BULK_STORE || copy->kind == TENSOR_STORE ? 1u << copy->cta->rank
             : copy->kind == SEND || copy->kind == BULK_PEER           ? 1u << (copy->to >> RANK_SHIFT)
                                                                       : copy->mask;
    for (u32 rank = 0; rank < cluster->size; rank++)
        if (mask >> rank & 1) cluster->ctas[rank]->pending += (u32)by;
}

static void perform(Copy *copy) {
    Cta *cta = copy->cta;
    M->changes++;
    M->launch->copies++;
    count_pending(copy, -1);
    u32 size = (u32)copy->size;
    switch (copy->kind) {
    case BULK_LOAD: case TENSOR_LOAD:
        for (u32 rank = 0; rank < cta->cluster->size; rank++) {
            if (!(copy->mask >> rank & 1)) continue;
            Cta *peer = cta->cluster->ctas[rank];
            if (peer->done) fail("a copy arrives in a CTA that has ended");
            u32 here = copy->mask == 1u << rank ? copy->to : (copy->to & OFFSET_MASK) | rank << RANK_SHIFT;
            u32 barrier = copy->mask == 1u << rank ? copy->barrier : (copy->barrier & OFFSET_MASK) | rank << RANK_SHIFT;
            if (copy->kind == BULK_LOAD) {
                const void *from = global_at(copy->address, size);
                if (!copy->waited) require_waited(copy->address, size, "loaded");
                memcpy(shared_write(peer, here, size), from, size);
            } else {
                TensorMap map = tensor_map(copy->map);
                size = copy_tile(peer, &map, copy->coordinates, here, true, 0, copy->waited);
            }
            overwrite(cta, peer, here, size);
            mbarrier_arrive(peer, barrier, 0, 0, size);
            M->launch->copied_bytes += size;
        }
        break;
    case BULK_STORE: {
        Cta *owner;
        const u8 *from = shared_at(cta, copy->to, size, &owner);
        if (M->launch->check_uninitialised) require_written(owner, from, size, copy->to);
        void *target = global_at(copy->address, size);
        global_written(copy->waited, copy->address, size);
        if (copy->reduction) reduce(target, from, size / BYTES_OF_TYPE[copy->type], copy->type, copy->reduction);
        else memcpy(target, from, size);
        break;
    }
    case TENSOR_STORE: {
        TensorMap map = tensor_map(copy->map);
        copy_tile(cta, &map, copy->coordinates, copy->to, false, copy->reduction, copy->waited);
        break;
    }
    case BULK_PEER: {
        const u8 *from = shared_read(cta, (u32)copy->address, size);
        memcpy(shared_write(cta, copy->to, size), from, size);
        overwrite(cta, cta_of(cta, copy->to), copy->to, size);
        mbarrier_arrive(cta, copy->barrier, 0, 0, size);
        break;
    }
    case SEND:
        if (copy->to >> RANK_SHIFT != copy->barrier >> RANK_SHIFT) fail("st.async: the number and its mbarrier are in different CTAs");
        memcpy(shared_write(cta, copy->to, size), &copy->value, size);
        overwrite(cta, cta_of(cta, copy->to), copy->to, size);
        mbarrier_arrive(cta, copy->barrier, 0, 0, size);
    }
}

static void begin_copy(Copy copy) {
    count_pending(&copy, 1);
    M->changes++;
    if (M->launch->lateness == 0 || (M->launch->lateness == 1 && !below(4))) {
        perform(&copy);
        return;
    }
    if (M->copies_count == M->copies_room) {
        M->copies_room = M->copies_room ? 2 * M->copies_room : 256;
        M->copies = more_room(M->copies, M->copies_room * sizeof *M->copies);
    }
    M->copies[M->copies_count++] = copy;
}

static void perform_at(u32 index) {
    Copy copy = M->copies[index];
    M->copies[index] = M->copies[--M->copies_count];
    Warp *now = M->now;
    M->now = &copy.cta->warps[copy.warp];
    perform(&copy);
    M->now = now;
}

static void perform_one(void) { perform_at(below(M->copies_count)); }

// Performs the stores of a thread's first `groups` bulk groups. A wait on bulk groups waits for these stores.
static void perform_stores(Warp *warp, u32 lane, u32 groups) {
    for (u32 i = 0; i < M->copies_count;) {
        Copy *copy = &M->copies[i];
        bool stores = copy->kind == BULK_STORE || copy->kind == TENSOR_STORE;
        if (stores && copy->cta == warp->cta && copy->warp == warp->index && copy->lane == lane && copy->group < groups) perform_at(i);
        else i++;
    }
}

// -- copies of 4 to 16 bytes by each thread (cp.async) --------------------------------------------------------------------------------

static void perform_async(Warp *warp, const CopyAsync *copy) {
    M->changes++;
    if (copy->op == 1) {  // an arrival that waits for all copies before it
        mbarrier_arrive(warp->cta, copy->to, 1, 0, 0);
        return;
    }
    u32 room = (u32)(copy->bytes >> 16), given = copy->bytes & 0xFFFF;
    const void *from = given ? global_at(copy->from, given) : NULL;
    u8 *to = shared_write(warp->cta, copy->to, room);
    memset(to, 0, room);
    if (given) memcpy(to, from, given);
}

// Performs at most `most` cp.async copies, in order: those of the first `groups` commit groups of one lane, or of all lanes if
// `lane` is 32.
static void perform_asyncs(Warp *warp, u32 lane, u32 groups, u32 most) {
    u32 kept = 0, done = 0;
    CopyAsync *copies = warp->copies;
    for (u32 i = 0; i < warp->copies_count; i++) {
        if ((lane == LANES || copies[i].lane == lane) && copies[i].group < groups && done < most) {
            perform_async(warp, &copies[i]);
            done++;
        } else {
            copies[kept++] = copies[i];
        }
    }
    warp->copies_count = kept;
}

static void begin_async(Warp *warp, CopyAsync copy) {
    if (warp->copies_count == warp->copies_room) {
        warp->copies_room = warp->copies_room ? 2 * warp->copies_room : 64;
        warp->copies = more_room(warp->copies, warp->copies_room * sizeof *warp->copies);
    }
    warp->copies[warp->copies_count++] = copy;
    M->changes++;
    if (M->launch->lateness == 0) perform_asyncs(warp, LANES, ~0u, ~0u);
}
