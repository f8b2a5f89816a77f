        case OP_nop: case OP_fence: case OP_wgmma_fence: break;
        case OP_bra: {
            if (active == group) {
                pc = (u32)ins->target;
                if (group == warp->live) continue;
                for (u32 lane = 0; lane < LANES; lane++)
                    if (group >> lane & 1) warp->pc[lane] = pc;
                if (done >= budget) {
                    warp->stuck = group;
                    goto leave;
                }
                goto select;
            }
            for (u32 lane = 0; lane < LANES; lane++)
                if (group >> lane & 1) warp->pc[lane] = active >> lane & 1 ? (u32)ins->target : pc + 1;
            goto select;
        }
        case OP_exit:
            for (u32 lane = 0; lane < LANES; lane++)
                if (group >> lane & 1) warp->pc[lane] = pc + 1;
            finish_lanes(warp, active);
            if (!warp->live) goto leave;
            goto select;
        case OP_trap: fail("the kernel trapped");
        case OP_yield: done = budget; break;

        case OP_mov_pred: merge_pred(&PRED(ins->d), PRED(ins->a) ^ (ins->more & 1 ? FULL : 0), active); break;
        case OP_not_pred: merge_pred(&PRED(ins->d), ~PRED(ins->a), active); break;
        case OP_and_pred: case OP_or_pred: case OP_xor_pred: {
            u32 x = PRED(ins->a) ^ (ins->more & 1 ? FULL : 0), y = PRED(ins->b) ^ (ins->more & 2 ? FULL : 0);
            merge_pred(&PRED(ins->d), ins->op == OP_and_pred ? x & y : ins->op == OP_or_pred ? x | y : x ^ y, active);
            break;
        }
        case OP_selp_16: case OP_selp_32: {
            u32 *d = REG(u32, ins->d), held = PRED(ins->c) ^ (ins->more & 4 ? FULL : 0);
            const u32 *a = REG(u32, ins->a), *b = REG(u32, ins->b);
            LOOP(d[lane] = held >> lane & 1 ? a[lane] : b[lane])
            break;
        }
        case OP_selp_64: {
            u64 *d = REG(u64, ins->d);
            u32 held = PRED(ins->c) ^ (ins->more & 4 ? FULL : 0);
            const u64 *a = REG(u64, ins->a), *b = REG(u64, ins->b);
            LOOP(d[lane] = held >> lane & 1 ? a[lane] : b[lane])
            break;
        }
        case OP_selp_pred: {
            u32 held = PRED(ins->c), x = PRED(ins->a), y = PRED(ins->b);
            merge_pred(&PRED(ins->d), (held & x) | (~held & y), active);
            break;
        }
        case OP_lop3: {
            u32 *d = REG(u32, ins->d);
            const u32 *a = REG(u32, ins->a), *b = REG(u32, ins->b), *c = REG(u32, ins->c);
            u32 table = (u32)ins->imm;
            LOOP(u32 x = a[lane], y = b[lane], z = c[lane], r = 0;
                 if (table & 1) r |= ~x & ~y & ~z;
                 if (table & 2) r |= ~x & ~y & z;
                 if (table & 4) r |= ~x & y & ~z;
                 if (table & 8) r |= ~x & y & z;
                 if (table & 16) r |= x & ~y & ~z;
                 if (table & 32) r |= x & ~y & z;
                 if (table & 64) r |= x & y & ~z;
                 if (table & 128) r |= x & y & z;
                 d[lane] = r)
            break;
        }
        case OP_bfi_32: case OP_bfi_64: {
            const u32 *c = REG(u32, ins->c), *e = REG(u32, ins->e);
            EACH {
                if (ins->op == OP_bfi_64)
                    REG(u64, ins->d)[lane] = with_field(REG(u64, ins->a)[lane], REG(u64, ins->b)[lane], c[lane] & 255, e[lane] & 255, 64);
                else
                    REG(u32, ins->d)[lane] = (u32)with_field(REG(u32, ins->a)[lane], REG(u32, ins->b)[lane], c[lane] & 255, e[lane] & 255, 32);
            }
            break;
        }
        case OP_rounded_f32: {
            float *d = REG(float, ins->d);
            const float *a = REG(float, ins->a), *b = REG(float, ins->b), *c = REG(float, ins->c);
            EACH d[lane] = rounded((s32)ins->more, ins->kind, a[lane], b[lane], c[lane]);
            break;
        }
        case OP_clock:
            M->clock += 16;
            if (ins->more == 8) { u64 *d = REG(u64, ins->d); EACH d[lane] = M->clock; }
            else { u32 *d = REG(u32, ins->d); EACH d[lane] = (u32)M->clock; }
            break;

        case OP_ldparam: {
            // `more`: bytes of an element, whether it is signed (<< 8), bytes of a register (<< 16)
            u32 size = ins->more & 255;
            for (s32 i = 0; i < ins->count; i++) {
                u64 value = 0;
                if ((u64)ins->imm + size * (u32)(i + 1) > M->launch->parameter_bytes) fail("out-of-bounds: a parameter at %lld", (long long)ins->imm);
                memcpy(&value, M->launch->parameters + ins->imm + size * (u32)i, size);
                put(regs, pool[ins->list + i], ins->more, value, active);
            }
            break;
        }
        case OP_ld: {
            u32 size = ins->more & 255, shared[LANES], of_shared = 0;
            EACH {
                u64 address = address_of(regs, constants, ins, lane);
                shared[lane] = (u32)address;
                of_shared |= (u32)(ins->kind == SHARED || (ins->kind == GENERIC && is_shared(address))) << lane;
                const u8 *at = access_at(warp, ins->kind, address, size * (u32)ins->count, false, lane);
                // The ordering modifier marks reads of memory that others may write concurrently, such as flags.
                if (!warp->waited && !ins->imm_other) require_waited((u64)at, size * (u32)ins->count, "loaded");
                for (s32 i = 0; i < ins->count; i++) {
                    u64 value = 0;
                    memcpy(&value, at + size * (u32)i, size);
                    put(regs, pool[ins->list + i], ins->more, value, 1u << lane);
                }
            }
            if (of_shared) begin_load(warp, ins, pool, shared, of_shared, size * (u32)ins->count);
            break;
        }
        case OP_st: {
            u32 size = ins->more & 255;
            EACH {
                u64 address = address_of(regs, constants, ins, lane);
                u8 *at = access_at(warp, ins->kind, address, size * (u32)ins->count, true, lane);
                for (s32 i = 0; i < ins->count; i++) {
                    s32 offset = pool[ins->list + i];
                    if (size == 8) memcpy(at + 8 * i, REG(u64, offset) + lane, 8);
                    else memcpy(at + size * (u32)i, REG(u32, offset) + lane, size);
                }
            }
            break;
        }
        case OP_atom: {
            u32 size = ins->more >> 16 & 1 ? 4 : BYTES_OF_TYPE[ins->more & 255];
            EACH {
                u64 operand = size == 8 ? REG(u64, ins->b)[lane] : REG(u32, ins->b)[lane];
                u64 before = atomic(warp, ins, address_of(regs, constants, ins, lane), operand, lane);
                if (ins->d < 0) continue;
                if (size == 8) REG(u64, ins->d)[lane] = before;
                else REG(u32, ins->d)[lane] = (u32)before;
            }
            break;
        }
        case OP_cas: {
            u32 size = (u32)ins->more;
            EACH {
                u64 changes = M->changes, before = 0;
                void *at = access_at(warp, ins->kind, address_of(regs, constants, ins, lane), size, true, lane);
                u64 expected = size == 8 ? REG(u64, ins->b)[lane] : REG(u32, ins->b)[lane];
                u64 wanted = size == 8 ? REG(u64, ins->c)[lane] : REG(u32, ins->c)[lane];
                memcpy(&before, at, size);
                M->changes = changes;
                if (before == expected) {
                    memcpy(at, &wanted, size);
                    M->changes = changes + (before != wanted);
                }
                if (ins->d < 0) continue;
                if (size == 8) REG(u64, ins->d)[lane] = before;
                else REG(u32, ins->d)[lane] = (u32)before;
            }
            break;
        }
        case OP_generic_of_shared: case OP_generic_of_local: {
            u64 *d = REG(u64, ins->d), base = ins->op == OP_generic_of_local ? 0x7Bull << 56 : SHARED_WINDOW;
            if (ins->more == 8) { const u64 *a = REG(u64, ins->a); EACH d[lane] = (u32)a[lane] | base; }
            else { const u32 *a = REG(u32, ins->a); EACH d[lane] = a[lane] | base; }
            break;
        }
        case OP_shared_of_generic: {
            const u64 *a = REG(u64, ins->a);
            if (ins->more == 8) { u64 *d = REG(u64, ins->d); EACH d[lane] = (u32)a[lane]; }
            else { u32 *d = REG(u32, ins->d); EACH d[lane] = (u32)a[lane]; }
            break;
        }
        case OP_mapa: {
            // `kind`: whether the address has 64 bits; `more`: whether it is a generic address
            const u32 *rank = REG(u32, ins->b);
            EACH {
                if (rank[lane] >= cta->cluster->size) fail("mapa: CTA %u of a cluster of %u", rank[lane], cta->cluster->size);
                u64 x = ins->kind ? REG(u64, ins->a)[lane] : REG(u32, ins->a)[lane];
                x = (x & ~0xFF000000ull) | (u64)rank[lane] << RANK_SHIFT;
                if (ins->kind) REG(u64, ins->d)[lane] = x;
                else REG(u32, ins->d)[lane] = (u32)x;
            }
            break;
        }
        case OP_rank_of: {
            u32 *d = REG(u32, ins->d);
            EACH d[lane] = (u32)((ins->kind ? REG(u64, ins->a)[lane] : REG(u32, ins->a)[lane]) >> RANK_SHIFT & 0xFF);
            break;
        }
        case OP_is_space: {
            const u64 *a = REG(u64, ins->a);
            u32 held = 0;
            EACH held |= (u32)(ins->kind == SHARED ? is_shared(a[lane]) : !is_shared(a[lane])) << lane;
            merge_pred(&PRED(ins->d), held, active);
            break;
        }

        // -- between the lanes of a warp ------------------------------------------------------------------------------------------
#define MEET(MASK)                                        \
    {                                                     \
        u32 needed = (MASK) & warp->live;                 \
        if ((group & needed) != needed) goto block;       \
    }
        case OP_bar_warp: MEET(REG(u32, ins->a)[__builtin_ctz(active)]) break;
        case OP_shfl: {
            // `kind`: idx, up, down, bfly
            u32 first = (u32)__builtin_ctz(active), out[LANES], held = 0;
            MEET(REG(u32, ins->e)[first])
            u32 *d = REG(u32, ins->d);
            const u32 *a = REG(u32, ins->a), *b = REG(u32, ins->b), *c = REG(u32, ins->c);
            EACH {
                s32 by = (s32)(b[lane] & 31), most = (s32)(c[lane] & 31), segments = (s32)(c[lane] >> 8 & 31), own = (s32)lane;
                s32 upper = (own & segments) | (most & ~segments), lower = own & segments, from;
                bool held_here;
                switch (ins->kind) {
                case 0: from = lower | (by & ~segments); held_here = from <= upper; break;
                case 1: from = own - by; held_here = from >= upper; break;
                case 2: from = own + by; held_here = from <= upper; break;
                default: from = own ^ by; held_here = from <= upper;
                }
                if (!held_here) from = own;
                out[lane] = a[from & 31];
                held |= (u32)held_here << lane;
            }
            EACH d[lane] = out[lane];
            if (ins->target >= 0) merge_pred((u32 *)(regs + ins->target), held, active);
            break;
        }
        case OP_ballot: case OP_vote_any: case OP_vote_all: case OP_vote_uni: {
            u32 mask = REG(u32, ins->b)[__builtin_ctz(active)];
            MEET(mask)
            mask &= active;
            u32 held = (PRED(ins->a) ^ (ins->more & 1 ? FULL : 0)) & mask;
            if (ins->op == OP_ballot) { u32 *d = REG(u32, ins->d); EACH d[lane] = held; }
            else {
                bool yes = ins->op == OP_vote_any ? held != 0 : ins->op == OP_vote_all ? held == mask : held == mask || !held;
                merge_pred(&PRED(ins->d), yes ? FULL : 0, active);
            }
            break;
        }
        case OP_match_any: case OP_match_any_64: case OP_match_all: {
            u32 mask = REG(u32, ins->b)[__builtin_ctz(active)], out[LANES];
            MEET(mask)
            EACH {
                out[lane] = 0;
                for (u32 other = 0; other < LANES; other++)
                    if (mask & active & 1u << other) {
                        bool same = ins->op == OP_match_any_64 ? REG(u64, ins->a)[lane] == REG(u64, ins->a)[other]
                                                               : REG(u32, ins->a)[lane] == REG(u32, ins->a)[other];
                        out[lane] |= (u32)same << other;
                    }
            }
            u32 *d = REG(u32, ins->d), held = 0;
            EACH {
                bool all = out[lane] == (mask & active);
                held |= (u32)all << lane;
                d[lane] = ins->op == OP_match_all && !all ? 0 : out[lane];
            }
            if (ins->op == OP_match_all && ins->target >= 0) merge_pred((u32 *)(regs + ins->target), held, active);
            break;
        }
        case OP_redux: {
            u32 mask = REG(u32, ins->b)[__builtin_ctz(active)];
            MEET(mask)
            const u32 *a = REG(u32, ins->a);
            u32 *d = REG(u32, ins->d), result = a[__builtin_ctz(active & mask)], first = (u32)__builtin_ctz(active & mask);
            for (u32 lane = first + 1; lane < LANES; lane++) {
                if (!(active & mask & 1u << lane)) continue;
                u32 x = a[lane];
                switch (ins->kind) {
                case ADD: result += x; break;
                case MIN: result = ins->more ? (u32)((s32)x < (s32)result ? (s32)x : (s32)result) : x < result ? x : result; break;
                case MAX: result = ins->more ? (u32)((s32)x > (s32)result ? (s32)x : (s32)result) : x > result ? x : result; break;
                case AND: result &= x; break;
                case OR: result |= x; break;
                default: result ^= x;
                }
            }
            EACH d[lane] = result;
            break;
        }
        case OP_elect: {
            u32 mask = REG(u32, ins->a)[__builtin_ctz(active)];
            MEET(mask)
            u32 leader = (u32)__builtin_ctz(mask & active);
            merge_pred((u32 *)(regs + ins->target), 1u << leader, active);
            if (ins->d >= 0) { u32 *d = REG(u32, ins->d); EACH d[lane] = leader; }
            break;
        }
        case OP_activemask: { u32 *d = REG(u32, ins->d); EACH d[lane] = active; break; }

        // -- between warps --------------------------------------------------------------------------------------------------------
        case OP_setmaxnreg: {
            MEET(FULL)
            if (!M->launch->registers) break;
            u32 wanted = (u32)ins->imm, more = wanted - warp->registers;
            if (ins->kind ? wanted < warp->registers : wanted > warp->registers)
                fail("setmaxnreg: a thread that has %u registers asks to %s to %u", warp->registers, ins->kind ? "rise" : "fall", wanted);
            if (ins->kind && more > cta->registers_left) goto block;
            cta->registers_left -= more;  // `more` is negative if the warp releases registers
            warp->registers = wanted;
            M->changes++;
            break;
        }
        case OP_bar_sync: case OP_bar_arrive: case OP_bar_red: {
            MEET(FULL)
            u32 first = (u32)__builtin_ctz(active), index = REG(u32, ins->a)[first];
            if (index >= BARRIERS) fail("barrier %u", index);
            Barrier *barrier = &cta->barriers[index];
            u32 threads_expected = ins->b != NONE ? REG(u32, ins->b)[first] : cta->warps_count * LANES;
            if (threads_expected % LANES || !threads_expected) fail("a barrier of %u threads", threads_expected);
            if (warp->waits) {
                if (barrier->generation == warp->wait_generation) goto block;
                warp->waits = false;
                warp->waited |= barrier->waited;
                break;
            }
            if (barrier->arrived && barrier->expected != threads_expected)
                fail("barrier %u: this warp expects %u threads, another one %u", index, threads_expected, barrier->expected);
            barrier->expected = threads_expected;
            barrier->arrived += LANES;
            barrier->gathers |= warp->waited;
            if (barrier->arrived > threads_expected) fail("barrier %u: more than %u threads arrive", index, threads_expected);
            M->changes++;
            if (barrier->arrived == threads_expected) {
                barrier->generation++;
                barrier->arrived = 0;
                barrier->waited = barrier->gathers, barrier->gathers = false;
                if (ins->op != OP_bar_arrive) warp->waited |= barrier->waited;
            } else if (ins->op == OP_bar_sync) {
                warp->waits = true;
                warp->wait_barrier = index;
                warp->wait_generation = barrier->generation;
                goto block;
            }
            break;
        }
        case OP_grid_wait: warp->waited = true; break;
        case OP_grid_trigger:
            M->triggered = true;
            if (!warp->waited) M->triggered_early = true;
            break;
        case OP_cluster_arrive: {
            MEET(FULL)
            Cluster *cluster = cta->cluster;
            if (warp->cluster_arrived) fail("barrier.cluster: a second arrival without a wait");
            warp->cluster_arrived = true;
            warp->cluster_generation = cluster->generation;
            cluster->arrived++;
            cluster->gathers |= warp->waited;
            M->changes++;
            cluster_passes(cluster);
            break;
        }
        case OP_cluster_wait: {
            MEET(FULL)
            if (!warp->cluster_arrived) fail("barrier.cluster: a wait without an arrival");
            cluster_passes(cta->cluster);
            if (cta->cluster->generation == warp->cluster_generation) goto block;
            warp->cluster_arrived = false;
            warp->waited |= cta->cluster->waited;
            break;
        }

        // -- mbarriers ------------------------------------------------------------------------------------------------------------
        case OP_mbarrier_init: EACH mbarrier_init(cta, (u32)address_of(regs, constants, ins, lane), REG(u32, ins->b)[lane]); break;
        case OP_mbarrier_inval: {
            EACH {
                Cta *owner;
                u8 *at = shared_at(cta, (u32)address_of(regs, constants, ins, lane), 8, &owner);
                owner->barrier_here[(at - owner->shared) / 8] = 0;
            }
            break;
        }
        case OP_mbarrier_arrive: case OP_mbarrier_expect_tx: {
            // `b`: an arrival count, or with `kind` expected bytes; `kind` 2: completed bytes
            EACH {
                u32 count = ins->b != NONE ? REG(u32, ins->b)[lane] : 1;
                u32 address = (u32)address_of(regs, constants, ins, lane);
                if (warp->loads_count && address >> RANK_SHIFT != cta->rank) give_back(warp);
                u64 state = ins->op == OP_mbarrier_expect_tx ? mbarrier_arrive(cta, address, 0, ins->kind == 2 ? 0 : count, ins->kind == 2 ? count : 0)
                          : ins->kind ? mbarrier_arrive(cta, address, 1, count, 0)
                                      : mbarrier_arrive(cta, address, count, 0, 0);
                if (ins->d >= 0) REG(u64, ins->d)[lane] = state;
            }
            break;
        }
        case OP_mbarrier_wait: {
            // `kind` & 1: by parity, otherwise by state; & 2: waits
            u32 ready = 0;
            EACH {
                Mbarrier barrier = unpacked(*mbarrier_at(cta, (u32)address_of(regs, constants, ins, lane)));
                u32 phase = ins->kind & 1 ? REG(u32, ins->b)[lane] & 1 : unpacked(REG(u64, ins->b)[lane]).phase;
                ready |= (u32)(barrier.phase != phase) << lane;
                if (ready >> lane & 1) warp->waited |= mbarrier_waited(cta, (u32)address_of(regs, constants, ins, lane));
            }
            if (!ready && ins->kind & 2) goto block;
            merge_pred(&PRED(ins->d), ready, active);
            if (ready != active && budget > done + 16) budget = done + 16;
            break;
        }

        // -- copies ---------------------------------------------------------------------------------------------------------------
        case OP_cp_async: {
            // `more`: bytes to write; `b`: the source; `c`: bytes to read, the rest is zero-filled
            EACH {
                u32 to = (u32)address_of(regs, constants, ins, lane), size = (u32)ins->more;
                u64 from = REG(u64, ins->b)[lane] + (u64)(s64)ins->target;
                u32 given = ins->c != NONE ? REG(u32, ins->c)[lane] : size;
                if (ins->e != NONE && PRED(ins->e) >> lane & 1) given = 0;
                if (given > size) given = size;
                if (to % size || (given && from % size)) fail("misaligned: cp.async of %u bytes from %#llx to %#x", size, (unsigned long long)from, to);
                if (given && !warp->waited) require_waited(from, given, "loaded");
                begin_async(warp, (CopyAsync){0, from, to, size << 16 | given, warp->copy_groups[lane], lane});
            }
            break;
        }
        case OP_cp_async_commit: EACH warp->copy_groups[lane]++; break;
        case OP_cp_async_wait: {
            u32 left = (u32)ins->imm;
            EACH if (warp->copy_groups[lane] > left || ins->kind) perform_asyncs(warp, lane, ins->kind ? ~0u : warp->copy_groups[lane] - left, ~0u);
            break;
        }
        case OP_cp_async_arrive: {
            EACH {
                u32 address = (u32)address_of(regs, constants, ins, lane);
                if (!ins->kind) {  // counts as one additional arrival
                    Mbarrier barrier = unpacked(*mbarrier_at(cta, address));
                    barrier.pending++;
                    *mbarrier_at(cta, address) = packed(barrier);
                }
                begin_async(warp, (CopyAsync){1, 0, address, 0, warp->copy_groups[lane], lane});
            }
            break;
        }
        case OP_bulk_load: case OP_bulk_store: case OP_bulk_peer: case OP_tensor_load: case OP_tensor_store: {
            // a: the address in shared memory; b: the address in global memory, or the tensor map; c: bytes; e: mbarrier; list: coordinates;
            // target: mask
            EACH {
                Copy copy = {0};
                copy.kind = ins->op == OP_bulk_load ? BULK_LOAD : ins->op == OP_bulk_store ? BULK_STORE : ins->op == OP_bulk_peer ? BULK_PEER
                          : ins->op == OP_tensor_load ? TENSOR_LOAD : TENSOR_STORE;
                copy.waited = warp->waited;
                copy.cta = cta, copy.warp = warp->index, copy.lane = lane, copy.group = warp->bulk_groups[lane];
                copy.to = (u32)address_of(regs, constants, ins, lane);
                copy.mask = 1u << (copy.to >> RANK_SHIFT);
                copy.reduction = ins->kind;
                copy.type = (u8)(ins->more >> 8);
                u64 other = ins->op == OP_bulk_peer ? REG(u32, ins->b)[lane] : REG(u64, ins->b)[lane];
                other += (u64)ins->imm_other;
                if (ins->e != NONE) copy.barrier = REG(u32, ins->e)[lane] + (u32)(ins->more >> 32);
                if (ins->op == OP_bulk_load || ins->op == OP_tensor_load) {
                    if (ins->target >= 0 || ins->target < -1) copy.mask = REG(u32, ins->target)[lane] & 0xFFFF;
                    if (copy.mask >> cta->cluster->size) fail("multicast to CTAs %#x of a cluster of %u", copy.mask, cta->cluster->size);
                }
                if (ins->op == OP_tensor_load || ins->op == OP_tensor_store) {
                    copy.map = other >= (u64)M->launch->parameters && other + 128 <= (u64)M->launch->parameters + M->launch->parameter_bytes
                             ? (const u8 *)other : global_at(other, 128);
                    if (other % 64) fail("misaligned: a tensor map at %#llx", (unsigned long long)other);
                    TensorMap map = tensor_map(copy.map);
                    if ((s32)map.rank != ins->count) fail("a tensor map of rank %u, and %d coordinates", map.rank, ins->count);
                    for (s32 i = 0; i < ins->count; i++) copy.coordinates[i] = (s32)REG(u32, pool[ins->list + i])[lane];
                } else {
                    copy.address = other, copy.size = REG(u32, ins->c)[lane];
                    if (!copy.size || copy.size % 16 || other % 16 || copy.to % 16)
                        fail("misaligned: a bulk copy of %llu bytes, shared %#x, other %#llx: all must be multiples of 16", (unsigned long long)copy.size,
                             copy.to, (unsigned long long)other);
                }
                begin_copy(copy);
            }
            break;
        }
        case OP_bulk_commit: EACH warp->bulk_groups[lane]++; break;
        case OP_bulk_wait: EACH if (warp->bulk_groups[lane] > (u32)ins->imm) perform_stores(warp, lane, warp->bulk_groups[lane] - (u32)ins->imm); break;
        case OP_st_async: {
            u32 size = (u32)(ins->more & 255);
            EACH {
                for (s32 i = 0; i < ins->count; i++) {
                    Copy copy = {0};
                    s32 source = pool[ins->list + i];
                    copy.kind = SEND, copy.cta = cta, copy.warp = warp->index, copy.lane = lane, copy.size = size;
                    copy.to = (u32)address_of(regs, constants, ins, lane) + size * (u32)i;
                    copy.barrier = REG(u32, ins->e)[lane] + (u32)(ins->more >> 32);
                    copy.value = size == 8 ? REG(u64, source)[lane] : REG(u32, source)[lane];
                    begin_copy(copy);
                }
            }
            break;
        }

        // -- matrices -------------------------------------------------------------------------------------------------------------
        case OP_wgmma: {
            MEET(FULL)
            Product product = {ins, warp->index % 4, true, 0, 0};
            u32 lane = (u32)__builtin_ctz(active);
            if (ins->c != NONE) {
                u32 held = PRED(ins->c);
                product.adds = held & 1;
                if (held != 0 && held != FULL) fail("wgmma: lanes do not agree on whether it adds");
            }
            if (ins->a != NONE) product.a_descriptor = REG(u64, ins->a)[lane];
            product.b_descriptor = REG(u64, ins->b)[lane];
            begin_product(warp, product);
            break;
        }
        case OP_wgmma_commit: MEET(FULL) commit_products(warp); break;
        case OP_wgmma_wait:
            MEET(FULL)
            if (!wait_products(warp, (u32)ins->imm)) goto block;
            break;
        case OP_mma: MEET(FULL) multiply_in_warp(warp, ins); break;
        case OP_ldmatrix: case OP_stmatrix: {
            MEET(FULL)
            u32 addresses[LANES];
            for (u32 lane = 0; lane < LANES; lane++) addresses[lane] = (u32)address_of(regs, constants, ins, lane);
            if (ins->op == OP_ldmatrix) {
                load_matrices(warp, ins, addresses);
                begin_load(warp, ins, pool, addresses, ins->count == 4 ? FULL : (1u << 8 * ins->count) - 1, 16);
            }
            else store_matrices(warp, ins, addresses);
            break;
        }
