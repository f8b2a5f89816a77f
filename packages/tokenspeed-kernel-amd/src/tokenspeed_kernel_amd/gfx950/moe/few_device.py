# mypy: ignore-errors
"""Device code of `few`: both GEMMs. Each workgroup encodes (quantises) its own activations.

A *strip* is 32 rows of weights, a *quad* 512 elements of k. An *exact pass* adds to the accumulators the dot products of the
residuals that the encoding leaves, see ``exact_device``.

Both GEMMs are memory-bound. A wave loads the weights of its own strip, or half strip, from global memory to registers, two quads
(*even* and *odd*) in flight. Only the encoded activations are in LDS. The MMAs are 16 x 16 x 128, with weights as the left operand
and activations as the right one. Fewer than 16 rows of activations are replicated across the 16 columns; the surplus columns are
not stored.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950 import instructions_device as isa
from tokenspeed_kernel_amd.gfx950.moe.encode_device import (
    ENOUGH,
    activation_layout,
    encode_by_block,
    encode_e4m3,
    held_at_least,
    load_activations,
    magnitudes,
    token_step,
)
from tokenspeed_kernel_amd.gfx950.moe.exact_device import Source, add_exactly, passes_of, source_layout
from tokenspeed_kernel_amd.gfx950.moe.tile_device import (
    accumulator_layout,
    activated,
    add_mfmas,
    halves_at,
    load_biases,
    load_half_quad,
    load_quad,
    strips_at,
)
from tokenspeed_kernel_amd.gluon.choose_device import choose, store_choice
from tokenspeed_kernel_amd.gluon.layouts_device import axis_layout, plain

# Columns of an MMA. A tile has fewer rows of activations, so its rows are replicated across the columns.
_COLUMNS = gl.constexpr(16)


@gluon.constexpr_function
def repeated_codes_layout(rows, warps):
    """Returns the register layout of the MMAs' right operand, uint8 [1, 16 / rows, chunks, rows, 16]. A chunk is 16 bytes of a row.
    Rows are replicated across the 16 columns, and all warps hold the same encoded values."""
    return gl.BlockedLayout([1, 1, 1, 1, 16], [1, 16 // rows, 4, rows, 1], [warps, 1, 1, 1, 1], [4, 3, 1, 2, 0])


@gluon.constexpr_function
def repeated_scale_layout(rows, warps):
    """Returns the register layout of the right operand's block scales, uint8 [1, 16 / rows, rows, g, step]. ``g``: the lane group
    along k."""
    return gl.BlockedLayout([1, 1, 1, 1, 4], [1, 16 // rows, rows, 4, 1], [warps, 1, 1, 1, 1], [4, 2, 1, 3, 0])


@gluon.aggregate
class Encoded:
    """A workgroup's encoded rows in LDS. The planes are called first, second and third; planes that the encoding lacks repeat the
    first.

    Each plane has encoded values, uint8 [quads, 1, 1, chunks, rows, 16], and block scales, uint8 [quads, 1, 1, rows, g, step]. The
    16 bytes of neighbouring rows are adjacent, so that the lanes of a wave read contiguous memory.
    """

    first: gl.shared_memory_descriptor
    second: gl.shared_memory_descriptor
    third: gl.shared_memory_descriptor
    first_scale: gl.shared_memory_descriptor
    second_scale: gl.shared_memory_descriptor
    third_scale: gl.shared_memory_descriptor


@gluon.jit
def room_for_codes(ROWS: gl.constexpr, BLOCK: gl.constexpr, encoding: gl.constexpr):
    """Allocates LDS for the encoded values of one plane, see `Encoded`. ``BLOCK``: elements of k of a row."""
    pieces: gl.constexpr = 16 if encoding.format == "e2m1" else 32
    return gl.allocate_shared_memory(gl.uint8, [BLOCK // 512, 1, 1, pieces, ROWS, 16], plain(5))


@gluon.jit
def room_for_scale(ROWS: gl.constexpr, BLOCK: gl.constexpr):
    """Allocates LDS for the block scales of one plane, see `Encoded`."""
    return gl.allocate_shared_memory(gl.uint8, [BLOCK // 512, 1, 1, ROWS, 4, 4], plain(5))


@gluon.jit
def store_codes(shared, quad: gl.constexpr, codes):
    """Stores the encoded values of whole quads, [rows, blocks, bytes], to LDS. ``quad`` is the first of these quads."""
    ROWS: gl.constexpr = codes.shape[0]
    pieces: gl.constexpr = shared.shape[3]
    quads: gl.constexpr = codes.shape[1] // 16
    # [row, quad, chunk, b] -> [quad, 1, 1, chunk, row, b]
    placed = codes.reshape(ROWS, 1, 1, quads, pieces, 16).permute(3, 1, 2, 4, 0, 5)
    if quads == 1:
        shared.index(quad).store(placed.reshape(1, 1, pieces, ROWS, 16))
    else:
        shared.reinterpret(gl.uint8, [quads, 1, 1, pieces, ROWS, 16], plain(6)).store(placed)


@gluon.jit
def store_scale(shared, quad: gl.constexpr, exponents):
    """Stores the block scales of whole quads, [rows, blocks], to LDS. ``quad`` is the first of these quads."""
    ROWS: gl.constexpr = exponents.shape[0]
    quads: gl.constexpr = exponents.shape[1] // 16
    # [row, quad, step, g] -> [quad, 1, 1, row, g, step]
    placed = exponents.reshape(ROWS, 1, 1, quads, 4, 4).permute(3, 1, 2, 0, 5, 4)
    if quads == 1:
        shared.index(quad).store(placed.reshape(1, 1, ROWS, 4, 4))
    else:
        shared.reinterpret(gl.uint8, [quads, 1, 1, ROWS, 4, 4], plain(6)).store(placed)


@gluon.constexpr_function
def elements_at_once(rows, block, warps):
    """Returns the number of elements of a row that are loaded and encoded as one chunk: 512 with one row per warp, otherwise the
    whole block. Chunks of 512 need no padding of the row to a power of two."""
    return 512 if warps == rows else block


@gluon.jit
def load_rows(x, row, k, ROWS: gl.constexpr, BLOCK: gl.constexpr):
    """Loads rows of k elements of x as a tuple of chunks for `encode`. ``row``: int32 [rows], the offsets of the rows' first
    elements from ``x``."""
    layout: gl.constexpr = activation_layout(ROWS, gl.num_warps())
    AT_ONCE: gl.constexpr = elements_at_once(ROWS, BLOCK, gl.num_warps())
    chunks = ()
    for chunk in gl.static_range(BLOCK // AT_ONCE):
        chunks += (load_activations(x, row, chunk * AT_ONCE, k, AT_ONCE, layout),)
    return chunks


@gluon.jit
def encode(
    chunks, dtype: gl.constexpr, static, encoding: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, SPLIT: gl.constexpr = 1
):
    """Encodes the rows of `load_rows` into LDS. Chunks that are already e4m3 are copied.

    Args:
        dtype: the dtype of the rows in memory.
        static: points to the static scale, if there is one.
        SPLIT: number of adjacent rows that belong to one token, and share its scale.

    Returns:
        The `Encoded` rows, their scales, float32 [rows] (1 with block scales), and whether some row may take exact passes. The last
        value is the same in all waves.
    """
    layout: gl.constexpr = activation_layout(ROWS, gl.num_warps())
    AT_ONCE: gl.constexpr = elements_at_once(ROWS, BLOCK, gl.num_warps())
    step = gl.full([ROWS], 1.0, gl.float32, axis_layout(layout, 3, 0))
    if encoding.scales == "tensor":
        step = step * gl.load(static)
    if encoding.scales == "token":
        largest = magnitudes(chunks[0])
        for chunk in gl.static_range(1, BLOCK // AT_ONCE):
            largest = gl.maximum(largest, magnitudes(chunks[chunk]))
        step = token_step(largest, dtype, SPLIT)
    first = room_for_codes(ROWS, BLOCK, encoding)
    second = first
    third = first
    first_scale = first
    second_scale = first
    third_scale = first
    held = gl.full([gl.num_warps() * 64], 32, gl.int32, gl.BlockedLayout([1], [64], [gl.num_warps()], [0]))
    if encoding.scales == "block":
        first_scale = room_for_scale(ROWS, BLOCK)
    if encoding.planes > 1:
        second = room_for_codes(ROWS, BLOCK, encoding)
        second_scale = room_for_scale(ROWS, BLOCK)
    if encoding.planes > 2:
        third = room_for_codes(ROWS, BLOCK, encoding)
        third_scale = room_for_scale(ROWS, BLOCK)
    for chunk in gl.static_range(BLOCK // AT_ONCE):
        values = chunks[chunk]
        if values.dtype == gl.float8e4nv:
            store_codes(first, chunk, values.to(gl.uint8, bitcast=True))
        elif encoding.scales != "block":
            store_codes(first, chunk, encode_e4m3(values.to(gl.float32), step, encoding.scales == "token"))
        else:
            values = values.to(gl.float32)
            planes, exponents = encode_by_block(values, encoding)
            if encoding.planes > 1 and not encoding.exact:
                held = gl.minimum(held, held_at_least(planes[0], exponents[0], encoding))
            store_codes(first, chunk, planes[0])
            store_scale(first_scale, chunk, exponents[0])
            if encoding.planes > 1:
                store_codes(second, chunk, planes[1])
                store_scale(second_scale, chunk, exponents[1])
            if encoding.planes > 2:
                store_codes(third, chunk, planes[2])
                store_scale(third_scale, chunk, exponents[2])
    return Encoded(first, second, third, first_scale, second_scale, third_scale), step, any_inexact(held, encoding)


@gluon.jit
def any_inexact(held, encoding: gl.constexpr):
    """Returns whether some row may take exact passes. The result is the same in all waves. ``held``: result of `held_at_least`, a
    lower bound of the number of a block's elements that the encoding represents exactly."""
    warps: gl.constexpr = gl.num_warps()
    if encoding.planes > 1 and not encoding.exact:
        shared = gl.allocate_shared_memory(gl.int8, [warps * 64], plain(1))
        shared.store(held.to(gl.int8))
        # Each wave reduces all values by itself, after the barrier that the encoded values need anyway.
        held = shared.load(gl.BlockedLayout([warps], [64], [warps], [0])).to(gl.int32)
        return gl.min(held, axis=0) < ENOUGH
    return gl.to_tensor(encoding.planes > 1)


@gluon.jit
def repeated_codes(shared, quad, encoding: gl.constexpr):
    """Reads a quad of one plane from LDS as the right operand of MMAs, [512, 16] (packed e2m1: [256, 16])."""
    pieces: gl.constexpr = shared.shape[3]
    ROWS: gl.constexpr = shared.shape[4]
    layout: gl.constexpr = repeated_codes_layout(ROWS, gl.num_warps())
    operand: gl.constexpr = gl.DotOperandLayout(1, accumulator_layout(gl.num_warps()), 16)
    once = shared.index(quad).load(layout)
    often, _ = gl.broadcast(once, gl.zeros([1, _COLUMNS // ROWS, pieces, ROWS, 16], gl.uint8, layout))
    tokens = often.permute(0, 1, 3, 2, 4).reshape(_COLUMNS, pieces * 16).permute(1, 0)
    tokens = gl.convert_layout(tokens, operand, assert_trivial=True)
    return tokens if encoding.format == "e2m1" else tokens.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def repeated_scale(shared, quad):
    """Reads the block scales of a quad of one plane from LDS, in the MMAs' scale layout, uint8 [16 columns, 16 blocks]."""
    ROWS: gl.constexpr = shared.shape[3]
    layout: gl.constexpr = repeated_scale_layout(ROWS, gl.num_warps())
    operand: gl.constexpr = gl.DotOperandLayout(1, accumulator_layout(gl.num_warps()), 16)
    scale_layout: gl.constexpr = isa.mfma_scale_layout(operand, [_COLUMNS, 16])
    once = shared.index(quad).load(layout)
    often, _ = gl.broadcast(once, gl.zeros([1, _COLUMNS // ROWS, ROWS, 4, 4], gl.uint8, layout))
    return gl.convert_layout(often.permute(0, 1, 2, 4, 3).reshape(_COLUMNS, 16), scale_layout, assert_trivial=True)


@gluon.jit
def operands_of(shared, quad, encoding: gl.constexpr):
    """Reads a quad of the encoded row from LDS. Returns a tuple of encoded values and a tuple of block scales, with one tensor per
    plane. Without block scales, the second tuple repeats the encoded values and is not used."""
    codes = (repeated_codes(shared.first, quad, encoding),)
    scales = codes
    if encoding.planes > 1:
        codes += (repeated_codes(shared.second, quad, encoding),)
    if encoding.planes > 2:
        codes += (repeated_codes(shared.third, quad, encoding),)
    if encoding.scales == "block":
        scales = (repeated_scale(shared.first_scale, quad),)
        if encoding.planes > 1:
            scales += (repeated_scale(shared.second_scale, quad),)
        if encoding.planes > 2:
            scales += (repeated_scale(shared.third_scale, quad),)
    return codes, scales


@gluon.jit
def by_column(values, ROWS: gl.constexpr, layout: gl.constexpr):
    """Replicates one value per row, [rows], across the 16 columns of an MMA: [16] in ``layout``."""
    wide: gl.constexpr = gl.BlockedLayout([1, 1], [1, 64], [1, gl.num_warps()], [0, 1])
    once = gl.convert_layout(values, gl.SliceLayout(0, wide))[None, :]
    often, _ = gl.broadcast(once, gl.zeros([_COLUMNS // ROWS, ROWS], values.dtype, wide))
    return gl.convert_layout(often.reshape(_COLUMNS), layout)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def first_kernel(operands, pairs, strips, k, blocks, swiglu, shape: gl.constexpr):
    """Computes the gate/up GEMM. Workgroups are numbered by (token, expert) pair and by block of strips of weights; the block
    varies fastest.

    A column of the MMAs is a pair. The workgroups of an expert's first pair compute up to ``shape.rows`` pairs of that expert,
    nearly always all. If there are more, the workgroups of the next pair compute the next ``shape.rows`` pairs, and so on. All
    other workgroups exit at once.

    Args:
        operands, swiglu, shape: the tensors, the activation's parameters and the constants of the GEMM, see `few`.
        pairs: number of (token, expert) pairs.
        strips: number of strips of an expert.
        k: the inner dimension.
        blocks: number of blocks of strips.
    """
    pair = gl.program_id(0) // blocks
    block = gl.program_id(0) % blocks
    lane = gl.arange(0, 64, gl.BlockedLayout([1], [64], [gl.num_warps()], [0]))
    expert = gl.load(operands.ids + pair)
    own = isa.buffer_load(operands.ids, lane, mask=lane < pairs, other=-1) == expert
    if (expert >= 0) & (expert < shape.num_experts):
        multiply_first(operands, own, lane, pair, expert, block, strips, k, swiglu, shape)


@gluon.jit
def routed_first_kernel(
    operands, logits, logits_stride, scaling, tokens, strips, k, blocks, swiglu, shape: gl.constexpr, routing: gl.constexpr
):
    """Routes tokens, then computes the same as `first_kernel`. Each workgroup chooses the tokens' experts from the logits by
    itself. One workgroup also writes the chosen ids and weights to ``operands``, for the down projection.

    Args:
        logits, logits_stride, scaling, tokens, routing: the router's logits and the routing's parameters, see `choose`.
        others: see `first_kernel`.
    """
    pair = gl.program_id(0) // blocks
    block = gl.program_id(0) % blocks
    layout: gl.constexpr = gl.BlockedLayout([1], [64], [gl.num_warps()], [0])
    ids, weights = choose(logits, logits_stride, tokens, shape.num_experts, scaling, routing)
    if gl.program_id(0) == 0:
        store_choice(ids, weights, operands.ids, operands.topk_weights, tokens, routing)
    lane = gl.arange(0, 64, layout)
    real = (lane % routing.slots < routing.top_k) & (lane < tokens * routing.slots)
    lane_pair = gl.where(real, lane // routing.slots * routing.top_k + lane % routing.slots, 64)
    lane_expert = gl.convert_layout(ids.reshape(64), layout)
    # The address of the expert's weights must be wave-uniform. The compiler knows that a maximum over all lanes is uniform.
    expert = gl.max(gl.where(lane_pair == pair, lane_expert, 0), axis=0)
    multiply_first(operands, real & (lane_expert == expert), lane_pair, pair, expert, block, strips, k, swiglu, shape)


@gluon.jit
def multiply_first(operands, own, lane_pair, pair, expert, block, strips, k, swiglu, shape: gl.constexpr):
    """Computes ``pair`` and the following pairs of ``expert``, up to ``shape.rows`` in all. Does nothing unless the number of the
    expert's earlier pairs is a multiple of ``shape.rows``: then another workgroup computes ``pair``.

    Args:
        own: [64], whether the lane's pair has this expert.
        lane_pair: int32 [64], the lane's pair. Lanes have pairs in ascending order, each pair at most once.
        pair, expert, block: the workgroup's pair, the pair's expert, and the workgroup's block of strips.
        operands, strips, k, swiglu, shape: see `first_kernel`.
    """
    own = own.to(gl.int32)
    earlier = gl.sum(gl.where(lane_pair < pair, own, 0), axis=0)
    if earlier % shape.rows == 0:
        # Positions of the expert's pairs, counted from 1 at the workgroup's own pair.
        place = gl.where(own != 0, gl.associative_scan(own, 0, add) - earlier, 0)
        multiply_pairs(operands, place, lane_pair, expert, block * gl.num_warps(), strips, k, swiglu, shape)


@gluon.jit
def add_pairs_exactly(gate, up, own, operands, token, k, inexact, shape: gl.constexpr):
    """Adds the exact passes of some tokens to the accumulators ``gate`` and ``up``. Does nothing unless ``inexact`` is set.
    ``token``: int32 [rows], the index of each row's token."""
    if inexact:
        repeated = by_column(token, shape.rows, source_layout(gl.num_warps()))
        source = Source(operands.x, repeated.to(gl.int64) * operands.x_stride, repeated * 0 + k)
        quads = (k + 511) // 512
        gate, up = add_exactly(gate, up, own, source, passes_of(source, quads, shape.encoding), quads, 1, 2, shape.encoding)
    return gate, up


@gluon.jit
def add_slots_exactly(acc, own, h, begins, length, ids, quads, inexact, shape: gl.constexpr):
    """If ``inexact``, adds the exact passes of each warp's row of ``h`` to the accumulator ``acc``.

    Args:
        begins, length: int32 [warps], the first element of a warp's row, and the row's number of elements.
        ids: pointers to the expert of each warp's row.
    """
    warps: gl.constexpr = gl.num_warps()
    if inexact:
        expert = gl.load(ids)
        # Slots without an expert have undefined rows.
        known = gl.where((expert >= 0) & (expert < shape.num_experts), length, 0)
        columns: gl.constexpr = source_layout(warps)
        source = Source(h, by_column(begins, warps, columns).to(gl.int64), by_column(known, warps, columns))
        acc, _ = add_exactly(acc, acc, own, source, passes_of(source, quads, shape.encoding), quads, 1, 1, shape.encoding)
    return acc


@gluon.jit
def multiply_pairs(operands, place, lane_pair, expert, first_strip, strips, k, swiglu, shape: gl.constexpr):
    """Computes the gate/up GEMM for up to ``shape.rows`` pairs of ``expert``: the workgroup's own pair and the pairs that follow
    it.

    Args:
        place: int32 [64], the position of the lane's pair, counted from 1 at the workgroup's own pair; at most 0 for other pairs.
        lane_pair: int32 [64], the lane's pair.
        first_strip: the strip of weights of the first warp.
        operands, strips, k, swiglu, shape: see `first_kernel`.
    """
    warps: gl.constexpr = gl.num_warps()
    encoding: gl.constexpr = shape.encoding
    acc_layout: gl.constexpr = accumulator_layout(warps)
    own = strips_at(operands.weight, operands.weight_scale, expert, first_strip, strips, k, warps)
    row = gl.arange(0, shape.rows, axis_layout(activation_layout(shape.rows, warps), 3, 0))
    column = gl.arange(0, _COLUMNS, gl.SliceLayout(0, acc_layout))
    count = gl.max(place, axis=0)
    token = row * 0
    column_pair = column * 0
    for index in gl.static_range(shape.rows):
        pair = gl.max(gl.where(place == gl.minimum(count, index + 1), lane_pair, 0), axis=0)
        token = gl.where(row == index, pair // shape.top_k, token)
        column_pair = gl.where(column == index, pair, column_pair)
    # Loads return in order, and activations are needed before weights.
    chunks = load_rows(operands.x, token * operands.x_stride, k, shape.rows, shape.block)
    gate = gl.zeros([16 * warps, _COLUMNS], gl.float32, acc_layout)
    up = gl.zeros([16 * warps, _COLUMNS], gl.float32, acc_layout)
    if shape.bias and encoding.scales == "block":  # accumulators begin with the bias
        gate_bias, up_bias = load_biases(operands.bias, expert, first_strip, strips, gl.SliceLayout(1, acc_layout))
        gate, _ = gl.broadcast(gate_bias[:, None], gate)
        up, _ = gl.broadcast(up_bias[:, None], up)
    even = load_quad(own, 0, warps)
    gl.inline_asm("", "~{memory}")  # otherwise the compiler loads some of ``even`` last, and each iteration waits for all loads
    odd = load_quad(own, 1, warps)
    shared, step, inexact = encode(chunks, operands.x.dtype.element_ty, operands.static, encoding, shape.rows, shape.block)
    for quad in range(0, (k + 511) // 512, 2):
        codes, scales = operands_of(shared, quad, encoding)
        gate = add_mfmas(gate, even.first, even.first_scale, codes, scales, encoding)
        up = add_mfmas(up, even.second, even.second_scale, codes, scales, encoding)
        even = load_quad(own, quad + 2, warps)
        if quad + 1 < (k + 511) // 512:
            codes, scales = operands_of(shared, quad + 1, encoding)
            gate = add_mfmas(gate, odd.first, odd.first_scale, codes, scales, encoding)
            up = add_mfmas(up, odd.second, odd.second_scale, codes, scales, encoding)
        odd = load_quad(own, quad + 3, warps)
    if encoding.planes > 1:
        gate, up = add_pairs_exactly(gate, up, own, operands, token, k, inexact, shape)
    if encoding.scales != "block":
        scale = by_column(step, shape.rows, gl.SliceLayout(0, acc_layout))
        gate *= scale[None, :]
        up *= scale[None, :]
        if shape.bias:
            gate_bias, up_bias = load_biases(operands.bias, expert, first_strip, strips, gl.SliceLayout(1, acc_layout))
            gate += gate_bias[:, None]
            up += up_bias[:, None]
    row = gl.arange(0, 16 * warps, gl.SliceLayout(1, acc_layout))
    strip = first_strip + row // 16
    result = activated(gate, up, swiglu, shape.limited)
    if encoding.scales == "tensor":
        result *= 1.0 / gl.load(operands.out_static)
    exists = (column < shape.rows) & (column < count)
    isa.buffer_store(
        result.to(operands.out.dtype.element_ty), operands.out,
        (strip * 16 + row % 16)[:, None] + (column_pair * (strips * 16))[None, :], mask=(strip < strips)[:, None] & exists[None, :],
    )  # fmt: skip


@gluon.jit
def second_kernel(operands, strips, k, shape: gl.constexpr):
    """Computes the down projection and the sum over slots. The grid is [half strips of weights, tokens]. Each warp handles one
    split of k of one slot: its rows of the accumulator belong to that slot's expert. Each column belongs to one split of one slot
    as well. Only the diagonal blocks of the accumulator are used, where row and column have the same slot and split.

    Args:
        operands, shape: the tensors and the constants of the GEMM, see `few`.
        strips: number of strips of an expert.
        k: the inner dimension.
    """
    warps: gl.constexpr = gl.num_warps()
    encoding: gl.constexpr = shape.encoding
    top_k: gl.constexpr = shape.top_k
    acc_layout: gl.constexpr = accumulator_layout(warps)
    SPLIT: gl.constexpr = shape.split
    part_quads = ((k + 511) // 512 + SPLIT - 1) // SPLIT
    half = gl.program_id(0)
    ids = operands.ids + gl.program_id(1) * top_k
    own = halves_at(operands.weight, operands.weight_scale, ids, half, strips, k, shape.num_experts, top_k, SPLIT, warps)
    warp = gl.arange(0, warps, axis_layout(activation_layout(warps, warps), 3, 0))
    slot = gl.minimum(warp // SPLIT, top_k - 1)
    begins = warp % SPLIT * part_quads * 512
    h = operands.x + gl.program_id(1) * top_k * k
    length = gl.minimum(k - begins, part_quads * 512)
    row = gl.arange(0, 16 * warps, gl.SliceLayout(1, acc_layout))
    row_slot = gl.minimum(row // 16 // SPLIT, top_k - 1)
    row_expert = gl.load(ids + row_slot)
    present = (row // 16 // SPLIT < top_k) & (row_expert >= 0) & (row_expert < shape.num_experts)
    weight = gl.load(operands.topk_weights + gl.program_id(1) * top_k + row_slot)
    bias = weight * 0.0
    if shape.bias:
        at = gl.where(present, row_expert, 0).to(gl.int64) * (strips * 32) + half * 16 + row % 16
        bias = gl.load(operands.bias + at, mask=row // 16 % SPLIT == 0, other=0.0)
    chunks = load_rows(h, slot * k + begins, length[:, None, None], warps, shape.block)
    even = load_half_quad(own, 0, warps)
    odd = load_half_quad(own, 1, warps)
    shared, step, inexact = encode(chunks, h.dtype.element_ty, operands.static, encoding, warps, shape.block, SPLIT)
    acc = gl.zeros([16 * warps, _COLUMNS], gl.float32, acc_layout)
    for quad in range(0, part_quads, 2):
        codes, scales = operands_of(shared, quad, encoding)
        acc = add_mfmas(acc, even.first, even.first_scale, codes, scales, encoding)
        even = load_half_quad(own, quad + 2, warps)
        if quad + 1 < part_quads:
            codes, scales = operands_of(shared, quad + 1, encoding)
            acc = add_mfmas(acc, odd.first, odd.first_scale, codes, scales, encoding)
        odd = load_half_quad(own, quad + 3, warps)
    if encoding.planes > 1:
        acc = add_slots_exactly(acc, own, h, slot * k + begins, length, ids + slot, part_quads, inexact, shape)
    if encoding.scales != "block":
        acc *= by_column(step, warps, gl.SliceLayout(0, acc_layout))[None, :]
    column = gl.arange(0, _COLUMNS, gl.SliceLayout(0, acc_layout))
    result = gl.sum(gl.where((row // 16)[:, None] == column[None, :], acc, 0.0), axis=1)
    result = gl.where(present, (result + bias) * weight, 0.0)
    total = gl.sum(result.reshape(warps, 16), axis=0)
    feature = gl.arange(0, 16, total.type.layout)
    out = operands.out + gl.program_id(1).to(gl.int64) * operands.out_stride + half * 16
    isa.buffer_store(total.to(operands.out.dtype.element_ty), out, feature)
