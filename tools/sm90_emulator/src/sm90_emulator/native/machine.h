// The state of a launch: instructions, warps, CTAs, clusters, memory, and error handling.
#pragma once
#define _GNU_SOURCE
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;

#define LANES 32
#define FULL 0xFFFFFFFFu
// The first shared address of a kernel. As on hardware, the first KiB is reserved, so no valid shared address is 0.
#define SHARED_BASE 1024u
// A shared address consists of the CTA's rank in its cluster and an offset.
#define RANK_SHIFT 24
#define OFFSET_MASK 0xFFFFFFu
// Generic addresses of shared memory begin here, where no host has memory.
#define SHARED_WINDOW 0x7A00000000000000ull
#define BARRIERS 16
#define CLUSTER_MOST 16

// An operand is a byte offset into a warp's registers, or, if negative, into the constants. For all lanes together, a 32-bit
// register takes 128 bytes, a 64-bit register 256, and a predicate 4 (one bit per lane).
typedef struct {
    u16 op;
    u8 negated;  // whether the guard is negated
    u8 kind;
    s32 guard;  // the guard predicate; -1 for none
    s32 wide;  // the address in `a` has 64 bits
    s32 target;
    s32 d, a, b, c, e;
    s32 list, count;  // operands in braces: index of the first in the pool, and their number
    s64 imm;  // added to the address in `a`
    s64 more;
    s64 imm_other;  // added to the address in `b`
} Instruction;

#define NONE INT32_MIN  // a missing operand

typedef struct {
    const Instruction *code;
    const s32 *pool;
    const char *constants;
    s32 count, register_bytes;
    // Offsets of the special registers; -1 if the kernel does not read the register.
    s32 special[40];
} Program;

enum {
    TID_X, TID_Y, TID_Z, NTID_X, NTID_Y, NTID_Z, CTAID_X, CTAID_Y, CTAID_Z, NCTAID_X, NCTAID_Y, NCTAID_Z, LANEID, WARPID, NWARPID,
    SMID, NSMID, CLUSTERID_X, CLUSTERID_Y, CLUSTERID_Z, NCLUSTERID_X, NCLUSTERID_Y, NCLUSTERID_Z, CLUSTER_CTAID_X, CLUSTER_CTAID_Y,
    CLUSTER_CTAID_Z, CLUSTER_CTARANK, CLUSTER_NCTARANK, SHARED_SYMBOL, PARAMETERS, SHARED_SIZE, LOCAL_SYMBOL,
    CLUSTER_NCTAID_X, CLUSTER_NCTAID_Y, CLUSTER_NCTAID_Z
};

typedef struct {
    u64 begin, end;
} Range;

typedef struct {
    u32 grid[3], block[3], cluster[3];
    u32 shared_bytes;
    u32 local_bytes;  // local memory per thread
    u32 registers;  // initial registers per thread; 0 if unknown
    u32 resident;  // the largest number of resident CTAs
    u32 together;  // number of CTAs that start together, even if none waits for another
    u64 seed;  // of random choices; 0: no random order
    u32 check_uninitialised;
    u32 limited_fp8;
    u32 lateness;  // when copies and wgmma are performed: 0 at once, 1 at random times, 2 as late as permitted
    u32 ranges_count;
    u32 multiprocessors;
    u32 check_overlap;
    u32 shared_byte;  // initial value of every byte of shared memory
    u32 early;  // PDL launch: may start while the preceding kernel still runs
    u64 patience;  // instructions without a visible change after which the launch is a deadlock
    const Range *ranges;
    const u8 *parameters;
    u64 parameter_bytes;
    // Results.
    u64 instructions, thread_instructions, wgmmas, copies, copied_bytes, rounds;
    s32 error_at;
    u32 error_warp, error_lane, error_cta[3];
    u64 (*counts)[2];  // for each instruction, the warps and the threads that executed it; NULL: not counted
    char error[4096];
} Launch;

struct Cta;
struct Machine;

typedef struct {
    const Instruction *ins;
    u32 rank_in_group;
    bool adds;
    u64 a_descriptor, b_descriptor;
} Product;

typedef struct {
    s32 op;
    u64 from;
    u32 to, bytes, group;
    u32 lane;
} CopyAsync;

// A load from shared memory whose result has not been used yet: the first registers that it writes, and each lane's address.
typedef struct {
    s32 registers[4];
    u32 count, at, lanes, bytes;
    u32 addresses[LANES];
} Load;

typedef struct {
    u32 load, warp;  // the load instruction's index plus 1; 0 for none
} GivenBack;

typedef struct Warp {
    char *regs;
    u32 pc[LANES];
    u32 live, stuck;
    u32 at;  // the warp's last instruction, for reports
    u64 apart;  // instructions since the warp's lanes were last converged
    u32 index;
    struct Cta *cta;
    u32 registers;  // registers of each lane
    bool waits, cluster_arrived;
    bool waited;  // whether the warp has waited for the preceding kernel (griddepcontrol.wait)
    u32 wait_barrier, wait_generation, cluster_generation;
    // wgmma: how many were issued, how many of these committed, how many performed.
    Product *products;
    u32 products_room, issued, committed_products, performed;
    u32 *group_ends;
    u32 groups_room, groups, groups_done;
    CopyAsync *copies;
    u32 copies_room, copies_first, copies_count;
    u32 copy_groups[LANES], bulk_groups[LANES];
    Load *loads;
    u32 loads_room, loads_count;
    char *local;
} Warp;

typedef struct {
    u32 arrived, expected, generation;
    // Whether a warp that waited for the preceding kernel has arrived in this generation (gathers) and in the last one (waited).
    bool gathers, waited;
} Barrier;

typedef struct Cluster {
    struct Cta *ctas[CLUSTER_MOST];
    u32 size, arrived, generation, running;
    bool gathers, waited;
    u32 at[3];
} Cluster;

typedef struct Cta {
    Cluster *cluster;
    u32 rank, at[3], linear;
    u8 *shared, *written;
    u8 *barrier_here;  // per 8 bytes: 1: an mbarrier is here; 2: a warp that waited for the preceding kernel has arrived
    Warp *warps;
    u32 warps_count, running;
    Barrier barriers[BARRIERS];
    u32 pending;  // unfinished copies that read or write this CTA's shared memory
    GivenBack *given_back;  // per 16 bytes of shared memory, for CTAs of clusters: see loads.h
    u32 registers_left;  // registers per lane that warps released and others may acquire
    bool done;
} Cta;

typedef struct {
    int kind;
    Cta *cta;  // the issuing CTA
    u32 warp, lane, group;
    u64 address, size;
    u32 to, barrier, mask, reduction;
    const u8 *map;
    bool waited;
    s32 coordinates[5];
    u64 value;
    u8 type;
} Copy;

typedef struct Machine {
    const Program *program;
    Launch *launch;
    Cta **resident;
    u32 resident_count;
    u64 next_cluster, clusters;
    Copy *copies;
    u32 copies_count, copies_room;
    u64 changes;  // number of changes visible to other warps
    u64 clock;
    u64 random;
    jmp_buf escape;
    Warp *now;
    Range hot;
    bool early;  // the preceding kernel's writes are hidden
    bool triggered, triggered_early;  // the next kernel may start; it may start even before this one has waited
} Machine;

static Machine *M;  // the running machine; each compilation unit has its own

static void fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

static void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(M->launch->error, sizeof M->launch->error, format, arguments);
    va_end(arguments);
    if (M->now) {
        M->launch->error_at = (s32)M->now->at;
        M->launch->error_warp = M->now->index;
        memcpy(M->launch->error_cta, M->now->cta->at, sizeof M->now->cta->at);
    } else {
        M->launch->error_at = -1;
    }
    longjmp(M->escape, 1);
}

static u64 chance(void) {  // xorshift64*
    u64 x = M->random;
    x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
    M->random = x;
    return x * 0x2545F4914F6CDD1Dull;
}

static u32 below(u32 bound) { return (u32)((chance() >> 33) % bound); }

static void *more_room(void *old, size_t size) {
    void *room = realloc(old, size);
    if (!room) fail("out of host memory: %zu bytes", size);
    return room;
}
