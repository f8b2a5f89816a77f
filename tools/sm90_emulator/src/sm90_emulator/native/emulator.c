// An emulator of sm_90: runs the kernels of decoded PTX. See the README.
#include "interpret.h"

float E4M3[256], E5M2[256];

static void set_special(Warp *warp, int which, u32 value) {
    s32 offset = M->program->special[which];
    if (offset < 0) return;
    for (u32 lane = 0; lane < LANES; lane++) ((u32 *)(warp->regs + offset))[lane] = value;
}

static void begin_warp(Cta *cta, u32 index) {
    Warp *warp = &cta->warps[index];
    const Launch *launch = M->launch;
    const Program *program = M->program;
    Cluster *cluster = cta->cluster;
    warp->cta = cta, warp->index = index, warp->waited = !M->early, warp->registers = launch->registers;
    warp->regs = aligned_alloc(64, ((size_t)program->register_bytes + 127) / 64 * 64);
    if (!warp->regs) fail("out of host memory: %d bytes of registers", program->register_bytes);
    memset(warp->regs, 0, (size_t)program->register_bytes);
    if (launch->local_bytes) warp->local = calloc(LANES, launch->local_bytes);
    u32 threads = launch->block[0] * launch->block[1] * launch->block[2];
    for (u32 lane = 0; lane < LANES; lane++) {
        u32 thread = index * LANES + lane;
        if (thread >= threads) continue;
        warp->live |= 1u << lane;
        u32 places[3] = {thread % launch->block[0], thread / launch->block[0] % launch->block[1], thread / launch->block[0] / launch->block[1]};
        for (int axis = 0; axis < 3; axis++)
            if (program->special[TID_X + axis] >= 0) ((u32 *)(warp->regs + program->special[TID_X + axis]))[lane] = places[axis];
        if (program->special[LANEID] >= 0) ((u32 *)(warp->regs + program->special[LANEID]))[lane] = lane;
        if (program->special[PARAMETERS] >= 0) ((u64 *)(warp->regs + program->special[PARAMETERS]))[lane] = (u64)launch->parameters;
    }
    for (int axis = 0; axis < 3; axis++) {
        set_special(warp, NTID_X + axis, launch->block[axis]);
        set_special(warp, CTAID_X + axis, cta->at[axis]);
        set_special(warp, NCTAID_X + axis, launch->grid[axis]);
        set_special(warp, CLUSTERID_X + axis, cta->at[axis] / launch->cluster[axis]);
        set_special(warp, NCLUSTERID_X + axis, launch->grid[axis] / launch->cluster[axis]);
        set_special(warp, CLUSTER_CTAID_X + axis, cta->at[axis] % launch->cluster[axis]);
        set_special(warp, CLUSTER_NCTAID_X + axis, launch->cluster[axis]);
    }
    set_special(warp, WARPID, index);
    set_special(warp, NWARPID, cta->warps_count);
    set_special(warp, SMID, cta->linear % launch->multiprocessors);
    set_special(warp, NSMID, launch->multiprocessors);
    set_special(warp, CLUSTER_CTARANK, cta->rank);
    set_special(warp, CLUSTER_NCTARANK, cluster->size);
    set_special(warp, SHARED_SYMBOL, SHARED_BASE | cta->rank << RANK_SHIFT);
    set_special(warp, SHARED_SIZE, launch->shared_bytes);
    set_special(warp, LOCAL_SYMBOL, 0);
}

static void begin_cluster(u64 number) {
    const Launch *launch = M->launch;
    Cluster *cluster = calloc(1, sizeof *cluster);
    cluster->size = launch->cluster[0] * launch->cluster[1] * launch->cluster[2];
    u32 clusters[3];
    for (int axis = 0; axis < 3; axis++) clusters[axis] = launch->grid[axis] / launch->cluster[axis];
    u32 at[3] = {(u32)(number % clusters[0]), (u32)(number / clusters[0] % clusters[1]), (u32)(number / clusters[0] / clusters[1])};
    u32 threads = launch->block[0] * launch->block[1] * launch->block[2];
    M->resident = more_room(M->resident, (M->resident_count + cluster->size) * sizeof *M->resident);
    for (u32 rank = 0; rank < cluster->size; rank++) {
        Cta *cta = calloc(1, sizeof *cta);
        u32 inside[3] = {rank % launch->cluster[0], rank / launch->cluster[0] % launch->cluster[1], rank / launch->cluster[0] / launch->cluster[1]};
        for (int axis = 0; axis < 3; axis++) cta->at[axis] = at[axis] * launch->cluster[axis] + inside[axis];
        cta->linear = cta->at[0] + launch->grid[0] * (cta->at[1] + launch->grid[1] * cta->at[2]);
        cta->cluster = cluster, cta->rank = rank;
        size_t size = (launch->shared_bytes + 1023) / 1024 * 1024 + 1024;
        cta->shared = aligned_alloc(1024, size);
        memset(cta->shared, (int)launch->shared_byte, size);
        cta->written = calloc(1, size), cta->barrier_here = calloc(1, size / 8);
        cta->given_back = cluster->size > 1 ? calloc(size / 16, sizeof *cta->given_back) : NULL;
        cta->warps_count = cta->running = (threads + LANES - 1) / LANES;
        cta->warps = calloc(cta->warps_count, sizeof *cta->warps);
        cluster->ctas[rank] = cta;
        cluster->running++;
        for (u32 w = 0; w < cta->warps_count; w++) begin_warp(cta, w);
        M->resident[M->resident_count++] = cta;
    }
}

static void forget(Cta *cta) {
    for (u32 w = 0; w < cta->warps_count; w++) {
        Warp *warp = &cta->warps[w];
        free(warp->regs), free(warp->products), free(warp->group_ends), free(warp->copies), free(warp->loads), free(warp->local);
    }
    free(cta->warps), free(cta->shared), free(cta->written), free(cta->barrier_here), free(cta->given_back), free(cta);
}

// Removes CTAs that have ended; their memory stays until their cluster has ended.
static void end_ctas(void) {
    u32 kept = 0;
    for (u32 i = 0; i < M->resident_count; i++) {
        Cta *cta = M->resident[i];
        if (cta->running) {
            M->resident[kept++] = cta;
            continue;
        }
        if (cta->pending) {
            M->now = &cta->warps[0];
            fail("the CTA ended while %u of its copies were on their way", cta->pending);
        }
        cta->done = true;
        Cluster *cluster = cta->cluster;
        cluster_passes(cluster);
        if (--cluster->running) continue;
        for (u32 rank = 0; rank < cluster->size; rank++) forget(cluster->ctas[rank]);
        free(cluster);
    }
    M->resident_count = kept;
}

// Describes the waiting warps, for the report of a deadlock.
static void describe_waiting(const char *what) {
    char *text = M->launch->error;
    size_t room = sizeof M->launch->error;
    int used = snprintf(text, room, "%s: ", what);
    u32 lines = 0;
    for (u32 i = 0; i < M->resident_count; i++)
        for (u32 w = 0; w < M->resident[i]->warps_count; w++) {
            Warp *warp = &M->resident[i]->warps[w];
            if (!warp->live) continue;
            u32 seen = 0;
            for (u32 lane = 0; lane < LANES; lane++) {
                if (!(warp->live & ~seen & 1u << lane)) continue;
                u32 lanes = 0;
                for (u32 other = lane; other < LANES; other++)
                    if (warp->live >> other & 1 && warp->pc[other] == warp->pc[lane]) lanes |= 1u << other;
                seen |= lanes;
                if (lines++ > 40 || (size_t)used > room - 200) continue;
                used += snprintf(text + used, room - (size_t)used, "\n  CTA (%u, %u, %u) warp %u lanes %08x at @%u", warp->cta->at[0], warp->cta->at[1],
                                 warp->cta->at[2], w, lanes, warp->pc[lane]);
                const Instruction *ins = &M->program->code[warp->pc[lane]];
                if (ins->op == OP_mbarrier_wait) {
                    u32 address = (u32)address_of(warp->regs, M->program->constants, ins, lane);
                    Mbarrier barrier = unpacked(*mbarrier_at(warp->cta, address));
                    used += snprintf(text + used, room - (size_t)used, " mbarrier %#x phase %u, %u of %u arrivals and %d bytes are missing", address,
                                     barrier.phase, barrier.pending, barrier.expected, barrier.bytes);
                }
                if (ins->op == OP_setmaxnreg)
                    used += snprintf(text + used, room - (size_t)used, " for %lld registers: it has %u, and others have left %u", (long long)ins->imm,
                                     warp->registers, warp->cta->registers_left);
                if (warp->waits) {
                    Barrier *barrier = &warp->cta->barriers[warp->wait_barrier];
                    used += snprintf(text + used, room - (size_t)used, " barrier %u, %u of %u threads have arrived", warp->wait_barrier, barrier->arrived,
                                     barrier->expected);
                }
            }
        }
    if (lines > 41) snprintf(text + used, room - (size_t)used, "\n  and %u more", lines - 41);
    M->launch->error_at = -1;
    longjmp(M->escape, 1);
}

static void run_all(void) {
    Launch *launch = M->launch;
    u32 per_cluster = launch->cluster[0] * launch->cluster[1] * launch->cluster[2], quiet = 0;
    u64 spent = 0;  // instructions executed since the last visible change
    static const u64 slices[] = {4, 32, 256, 4096};
    while (M->resident_count || M->next_cluster < M->clusters) {
        while (M->next_cluster < M->clusters && (M->resident_count == 0 || M->resident_count + per_cluster <= launch->together)) begin_cluster(M->next_cluster++);
        u64 changes = M->changes, done = 0;
        u64 slice = launch->seed ? slices[below(4)] : 20000;
        u32 first = launch->seed ? below(M->resident_count) : 0;
        launch->rounds++;
        for (u32 i = 0; i < M->resident_count; i++) {
            Cta *cta = M->resident[(i + first) % M->resident_count];
            u32 offset = launch->seed ? below(cta->warps_count) : 0;
            for (u32 w = 0; w < cta->warps_count; w++) {
                Warp *warp = &cta->warps[(w + offset) % cta->warps_count];
                if (!warp->live) continue;
                if (launch->seed && quiet < 16 && !below(4)) {
                    done++;
                    continue;
                }
                done += run_warp(warp, launch->seed ? 1 + below((u32)slice) : slice);
                if (launch->lateness == 1) {
                    while (M->copies_count && below(2)) perform_one();
                    if (warp->copies_count && below(2)) { M->now = warp; perform_asyncs(warp, LANES, ~0u, 1 + below(8)); M->now = NULL; }
                    if (warp->performed < warp->issued && !below(3)) { M->now = warp; perform_products(warp, warp->performed + 1 + below(warp->issued - warp->performed)); M->now = NULL; }
                }
            }
        }
        end_ctas();
        quiet = changes == M->changes ? quiet + 1 : 0;
        spent = quiet ? spent + done : 0;
        if (!quiet || (done && quiet < 16)) continue;
        if (M->copies_count) {
            perform_one();
            continue;
        }
        bool moved = false;
        for (u32 i = 0; i < M->resident_count && !moved; i++)
            for (u32 w = 0; w < M->resident[i]->warps_count && !moved; w++) {
                Warp *warp = &M->resident[i]->warps[w];
                if (warp->copies_count) M->now = warp, perform_asyncs(warp, LANES, ~0u, 1), M->now = NULL, moved = true;
            }
        if (moved) continue;
        if (M->next_cluster < M->clusters && M->resident_count + per_cluster <= launch->resident) {
            begin_cluster(M->next_cluster++);
            quiet = 0, spent = 0;
            continue;
        }
        if (!done) describe_waiting("deadlock");
        if (spent > launch->patience) describe_waiting("no progress");
    }
    if (M->copies_count) fail("%u copies were on their way when the kernel ended", M->copies_count);
}

__attribute__((visibility("default"))) const char *operation_name(u32 index) { return index < OPERATIONS ? NAMES[index] : NULL; }

__attribute__((visibility("default"))) u32 size_of(u32 what) {
    return (u32)(what == 0 ? sizeof(Instruction) : what == 1 ? sizeof(Program) : sizeof(Launch));
}

// Returns 0, or 1 with Launch.error filled in.
__attribute__((visibility("default"))) int run_launch(const Program *program, Launch *launch) {
    static bool filled;
    if (!filled) fill_tables(), filled = true;
    Machine machine = {.program = program, .launch = launch};
    machine.random = launch->seed * 0x9E3779B97F4A7C15ull + 0x1234567ull;
    machine.clusters = (u64)launch->grid[0] * launch->grid[1] * launch->grid[2] / ((u64)launch->cluster[0] * launch->cluster[1] * launch->cluster[2]);
    Machine *outer = M;
    M = &machine;
    begin_overlap();
    int failed = setjmp(machine.escape);
    if (!failed) run_all();
    end_overlap(failed);
    M = outer;
    free(machine.copies), free(machine.resident);
    return failed;
}
