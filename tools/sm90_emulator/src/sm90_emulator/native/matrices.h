// Tensor cores: wgmma, mma, and the loads and stores of fragments.
#pragma once
#include "copies.h"

enum { K_F16, K_BF16, K_TF32, K_E4M3, K_E5M2, K_S8, K_U8 };
enum { D_F32, D_F16, D_S32 };

static const u8 KIND_BYTES[] = {2, 2, 4, 1, 1, 1, 1};

// The fields that Instruction.more holds for a matrix instruction.
typedef struct {
    u32 n, a_kind, b_kind, d_kind;
    bool a_in_registers, a_across, b_across, a_negative, b_negative;
} Shape;

static Shape shape_of(s64 more) {
    return (Shape){more & 0x1FF, more >> 9 & 15, more >> 13 & 15, more >> 17 & 7, more >> 20 & 1,
                   more >> 21 & 1, more >> 22 & 1, more >> 23 & 1, more >> 24 & 1};
}

static inline char *at_offset(Warp *warp, s32 offset) {
    return offset >= 0 ? warp->regs + offset : (char *)M->program->constants - offset - 4;
}

static inline double element(const u8 *bytes, u32 i, u32 kind) {
    u16 half;
    u32 word;
    switch (kind) {
    case K_F16: memcpy(&half, bytes + 2 * i, 2); return half_float(half);
    case K_BF16: memcpy(&half, bytes + 2 * i, 2); return bf16_float(half);
    case K_TF32: memcpy(&word, bytes + 4 * i, 4); return float_of(word & ~0x1FFFu);
    case K_E4M3: return E4M3[bytes[i]];
    case K_E5M2: return E5M2[bytes[i]];
    case K_S8: return (s8)bytes[i];
    default: return bytes[i];
    }
}

// Loads elements of an operand from shared memory: `count` rows (A) or columns (B) from `first` on, over all of k.
static void load_operand(Cta *cta, u64 descriptor, u32 kind, bool across, u32 first, u32 count, double *out, u32 by_row, u32 by_k) {
    u32 start = (u32)(descriptor & 0x3FFF) << 4, leading = (u32)(descriptor >> 16 & 0x3FFF) << 4;
    u32 stride = (u32)(descriptor >> 32 & 0x3FFF) << 4, mode = (u32)(descriptor >> 62);
    if (descriptor >> 49 & 7) fail("wgmma: a descriptor with a base offset is not modelled: %#llx", (unsigned long long)descriptor);
    u32 bits = mode ? 4 - mode : 0;  // number of address bits that the swizzle changes
    u32 size = KIND_BYTES[kind], chunk = 16 / size;
    u32 rank = cta->rank << RANK_SHIFT;
    if (across && size != 2) fail("wgmma: only elements of 16 bits may lie across k");
    for (u32 row = across ? first - first % chunk : first; row < first + count; row += across ? chunk : 1) {
        u32 ks = across ? 16 : 2;
        for (u32 k = 0; k < ks; k++) {
            u32 linear;
            if (across) {
                u32 width = mode ? 8u << bits : 8;
                linear = mode ? start + row / width * leading + k / 8 * stride + k % 8 * (2 * width) + row % width * 2
                              : start + row / 8 * stride + k / 8 * leading + k % 8 * 16;
            } else {
                linear = mode ? start + row / 8 * stride + row % 8 * (16u << bits) + 16 * k
                              : start + row / 8 * stride + row % 8 * 16 + k * leading;
            }
            Cta *owner;
            const u8 *bytes = shared_at(cta, (swizzled(linear, bits) & 0x3FFFF) | rank, 16, &owner);
            for (u32 i = 0; i < chunk; i++) {
                double x = element(bytes, i, kind);
                if (across) {
                    if (row + i >= first && row + i < first + count) out[(row + i - first) * by_row + k * by_k] = x;
                } else {
                    out[(row - first) * by_row + (k * chunk + i) * by_k] = x;
                }
            }
        }
    }
}

static void fragment(Warp *warp, const s32 *list, u32 registers, u32 kind, double a[16][32]) {
    u32 size = KIND_BYTES[kind], each = 4 / size;
    for (u32 r = 0; r < registers; r++) {
        const u8 *bytes = (const u8 *)at_offset(warp, list[r]);
        for (u32 lane = 0; lane < LANES; lane++)
            for (u32 e = 0; e < each; e++)
                a[lane / 4 + 8 * (r % 2)][each * (lane % 4) + e + 4 * each * (r / 2)] = element(bytes + 4 * lane, e, kind);
    }
}

static int exponent_of(double x) {
    int exponent;
    frexp(x, &exponent);
    return exponent - 1;
}

// Hopper's tensor cores align FP8 products to the largest exponent among them, and keep 13 fraction bits.
static float limited_sum(const double *a, const double *b, u32 step, u32 ks, float before) {
    double products[33];
    int most = -10000;
    bool finite = isfinite(before);
    for (u32 k = 0; k < ks; k++) {
        products[k] = a[k] * b[k * step];
        finite = finite && isfinite(products[k]);
        if (products[k] != 0) {
            int e = exponent_of(a[k]) + exponent_of(b[k * step]);
            if (e > most) most = e;
        }
    }
    products[ks] = before;
    if (!finite) {
        double sum = before;
        for (u32 k = 0; k < ks; k++) sum += products[k];
        return (float)sum;
    }
    if (before != 0 && exponent_of(before) > most) most = exponent_of(before);
    double sum = 0;
    for (u32 k = 0; k <= ks; k++) sum += trunc(ldexp(products[k], 13 - most));
    return (float)ldexp(sum, most - 13);
}

static void multiply(Warp *warp, const Product *product) {
    const Instruction *ins = product->ins;
    Shape shape = shape_of(ins->more);
    static double a[16][32], b[32][256];
    u32 n = shape.n, ks = 32 / KIND_BYTES[shape.a_kind];
    const s32 *list = M->program->pool + ins->list;
    u32 sums = (shape.d_kind == D_F16 ? 2 : 4) * n / 8;
    if (shape.a_in_registers) fragment(warp, list + sums, 4, shape.a_kind, a);
    else load_operand(warp->cta, product->a_descriptor, shape.a_kind, shape.a_across, warp->index % 4 * 16, 16, a[0], 32, 1);
    load_operand(warp->cta, product->b_descriptor, shape.b_kind, shape.b_across, 0, n, b[0], 1, 256);
    M->launch->wgmmas++;
    double sign = shape.a_negative != shape.b_negative ? -1 : 1;
    bool limited = M->launch->limited_fp8 && (shape.a_kind == K_E4M3 || shape.a_kind == K_E5M2);
    for (u32 row = 0; row < 16; row++) {
        double total[256];
        if (!limited) {
            memset(total, 0, n * sizeof *total);
            for (u32 k = 0; k < ks; k++) {
                double x = sign * a[row][k];
                for (u32 column = 0; column < n; column++) total[column] += x * b[k][column];
            }
        }
        for (u32 column = 0; column < n; column++) {
            u32 lane = row % 8 * 4 + column % 8 / 2;
            u32 i = column / 8 * 4 + row / 8 * 2 + column % 2;
            if (shape.d_kind == D_F32) {
                float *sum = (float *)at_offset(warp, list[i]) + lane;
                float before = product->adds ? *sum : 0;
                *sum = limited ? limited_sum(a[row], &b[0][column], 256, ks, before) : (float)(before + total[column]);
            } else if (shape.d_kind == D_F16) {
                u16 *sum = (u16 *)((u32 *)at_offset(warp, list[i / 2]) + lane) + i % 2;
                *sum = to_half(to_odd((product->adds ? half_float(*sum) : 0) + total[column]));
            } else {
                s32 *sum = (s32 *)at_offset(warp, list[i]) + lane;
                *sum = (s32)((product->adds ? (u32)*sum : 0) + (u32)(s64)total[column]);
            }
        }
    }
}

static void perform_products(Warp *warp, u32 until) {
    while (warp->performed < until) multiply(warp, &warp->products[warp->performed++]);
    if (warp->performed == warp->issued && warp->groups_done == warp->groups) return;
}

static void begin_product(Warp *warp, Product product) {
    if (warp->issued == warp->products_room) {
        warp->products_room = warp->products_room ? 2 * warp->products_room : 64;
        warp->products = more_room(warp->products, warp->products_room * sizeof *warp->products);
    }
    warp->products[warp->issued++] = product;
    if (M->launch->lateness == 0 || (M->launch->lateness == 1 && !below(4))) perform_products(warp, warp->issued);
}

static void commit_products(Warp *warp) {
    if (warp->groups == warp->groups_room) {
        warp->groups_room = warp->groups_room ? 2 * warp->groups_room : 64;
        warp->group_ends = more_room(warp->group_ends, warp->groups_room * sizeof *warp->group_ends);
    }
    warp->group_ends[warp->groups++] = warp->issued;
    M->changes++;
}

// Returns whether all four warps of the warpgroup have arrived; if so, performs the wgmma groups to wait for.
static bool wait_products(Warp *warp, u32 left) {
    if (warp->groups <= left) return true;
    u32 until = warp->groups - left, first = warp->index / 4 * 4;
    if (first + 4 > warp->cta->warps_count) fail("wgmma: warp %u is in no group of four", warp->index);
    for (u32 w = first; w < first + 4; w++)
        if (warp->cta->warps[w].groups < until && warp->cta->warps[w].live) return false;
    for (u32 w = first; w < first + 4; w++) {
        Warp *other = &warp->cta->warps[w];
        if (other->groups >= until) perform_products(other, other->group_ends[until - 1]);
    }
    return true;
}

static void multiply_in_warp(Warp *warp, const Instruction *ins) {
    Shape shape = shape_of(ins->more);
    static double a[16][32];
    double b[32][8], sums[16][8];
    u32 size = KIND_BYTES[shape.a_kind], each = 4 / size;
    u32 a_count = ins->count & 0xFF, b_count = ins->count >> 8 & 0xFF, d_count = ins->count >> 16 & 0xFF;
    const s32 *list = M->program->pool + ins->list;
    u32 ks = b_count * 4 * each;
    fragment(warp, list + d_count, a_count, shape.a_kind, a);
    for (u32 r = 0; r < b_count; r++) {
        const u8 *bytes = (const u8 *)at_offset(warp, list[d_count + a_count + r]);
        for (u32 lane = 0; lane < LANES; lane++)
            for (u32 e = 0; e < each; e++) b[each * (lane % 4) + e + 4 * each * r][lane / 4] = element(bytes + 4 * lane, e, shape.b_kind);
    }
    const s32 *before = list + d_count + a_count + b_count;
    memset(sums, 0, sizeof sums);
    for (u32 row = 0; row < 16; row++)
        for (u32 k = 0; k < ks; k++)
            for (u32 column = 0; column < 8; column++) sums[row][column] += a[row][k] * b[k][column];
    for (u32 row = 0; row < 16; row++)
        for (u32 column = 0; column < 8; column++) {
            u32 lane = row % 8 * 4 + column / 2, i = row / 8 * 2 + column % 2;
            if (shape.d_kind == D_F32) {
                float c = ((float *)at_offset(warp, before[i]))[lane];
                ((float *)at_offset(warp, list[i]))[lane] = (float)(c + sums[row][column]);
            } else if (shape.d_kind == D_S32) {
                u32 c = ((u32 *)at_offset(warp, before[i]))[lane];
                ((u32 *)at_offset(warp, list[i]))[lane] = c + (u32)(s64)sums[row][column];
            } else {
                u16 c = ((u16 *)((u32 *)at_offset(warp, before[i / 2]) + lane))[i % 2];
                ((u16 *)((u32 *)at_offset(warp, list[i / 2]) + lane))[i % 2] = to_half(to_odd(half_float(c) + sums[row][column]));
            }
        }
}

static void load_matrices(Warp *warp, const Instruction *ins, const u32 *addresses) {
    const s32 *list = M->program->pool + ins->list;
    for (s32 i = 0; i < ins->count; i++) {
        u16 matrix[8][8];
        for (u32 row = 0; row < 8; row++) {
            u32 address = addresses[8 * (u32)i + row];
            if (address % 16) fail("misaligned: a row of a matrix at %#x", address);
            // Fragments are operands of tensor cores: memory that was never written is NaN, which shows in the result if it is used.
            Cta *owner;
            memcpy(matrix[row], shared_at(warp->cta, address, 16, &owner), 16);
        }
        u32 *to = (u32 *)at_offset(warp, list[i]);
        for (u32 lane = 0; lane < LANES; lane++) {
            u32 x = lane / 4, y = lane % 4 * 2;
            to[lane] = ins->kind ? matrix[y][x] | (u32)matrix[y + 1][x] << 16 : matrix[x][y] | (u32)matrix[x][y + 1] << 16;
        }
    }
}

static void store_matrices(Warp *warp, const Instruction *ins, const u32 *addresses) {
    const s32 *list = M->program->pool + ins->list;
    M->changes++;
    for (s32 i = 0; i < ins->count; i++) {
        u16 matrix[8][8];
        const u32 *from = (const u32 *)at_offset(warp, list[i]);
        for (u32 lane = 0; lane < LANES; lane++) {
            u32 x = lane / 4, y = lane % 4 * 2;
            u16 low = (u16)from[lane], high = (u16)(from[lane] >> 16);
            if (ins->kind) matrix[y][x] = low, matrix[y + 1][x] = high;
            else matrix[x][y] = low, matrix[x][y + 1] = high;
        }
        for (u32 row = 0; row < 8; row++) {
            u32 address = addresses[8 * (u32)i + row];
            if (address % 16) fail("misaligned: a row of a matrix at %#x", address);
            memcpy(shared_write(warp->cta, address, 16), matrix[row], 16);
        }
    }
}
