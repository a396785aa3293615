"""Walking over the keys that a tile of queries sees: what each tile of them adds."""

from typing import NamedTuple

import triton
import triton.language as tl

from . import softmax
from .casts import round_to
from .keys import load_k, load_v, locate, pages_at
from .tiles import dot


class Queries(NamedTuple):
    """A tile's rows: what they are multiplied with and what they see."""

    q: object  # a tuple: [BLOCK_M, width] for each of BLOCKS
    pos: object  # [BLOCK_M] absolute position
    first: object  # [BLOCK_M] keys first <= j < last are seen; None: all that are visited
    last: object
    slopes: object  # [BLOCK_M]
    softcap: object
    row_ok: object  # [BLOCK_M]
    tree_rows: object  # [BLOCK_M] pointers
    tree: object  # Masking
    first_new: object  # the first key that the tree mask speaks of


@triton.jit
def multiply_block(rows, blocks, INDEX: tl.constexpr, qk, SPEC):
    """q k^T [BLOCK_M, BLOCK_N] over the dims of one of BLOCKS, added to ``qk``; None: zero."""
    for i in tl.static_range(len(blocks)):
        qk = dot(rows.q[INDEX * len(blocks) + i], tl.trans(blocks[i]), qk, SPEC.INTERPRETED)
    return qk


@triton.jit
def multiply_blocks(
    rows,
    source,
    tile,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    FORMAT: tl.constexpr,
    GUARDED: tl.constexpr,
    SPEC,
):
    """q k^T over COUNT blocks, each summed by itself and then in pairs: that rounds less than one
    long sum."""
    if COUNT == 1:
        blocks = load_k(source, tile, FIRST, FORMAT, rows.q[0].dtype, GUARDED, SPEC)
        qk = multiply_block(rows, blocks, FIRST, None, SPEC)
    else:
        HALF: tl.constexpr = COUNT // 2
        qk = multiply_blocks(rows, source, tile, FIRST, HALF, FORMAT, GUARDED, SPEC)
        more = multiply_blocks(
            rows, source, tile, FIRST + HALF, COUNT - HALF, FORMAT, GUARDED, SPEC
        )
        # Not a plain sum: Triton makes dot(a, b, 0) + c the long sum dot(a, b, c).
        qk = tl.fma(qk, tl.full(qk.shape, 1.0, tl.float32), more)
    return qk


@triton.jit
def multiply_keys(rows, source, tile, FORMAT: tl.constexpr, GUARDED: tl.constexpr, SPEC):
    """q k^T [BLOCK_M, BLOCK_N], and the keys' dims that the first of BLOCKS covers, for where they
    are the values too."""
    blocks = ()
    if rows.q[0].dtype == tl.float32:
        qk = multiply_blocks(rows, source, tile, 0, len(SPEC.BLOCKS), FORMAT, GUARDED, SPEC)
    else:
        blocks = load_k(source, tile, 0, FORMAT, rows.q[0].dtype, GUARDED, SPEC)
        qk = multiply_block(rows, blocks, 0, None, SPEC)
        for i in tl.static_range(1, len(SPEC.BLOCKS)):
            more = load_k(source, tile, i, FORMAT, rows.q[0].dtype, GUARDED, SPEC)
            qk = multiply_block(rows, more, i, qk, SPEC)
    return qk, blocks


@triton.jit
def weigh(row_max, row_sum, row_scale, rows, tile, qk, MASKED: tl.constexpr, SPEC):
    """A tile's probabilities, the factor of what was summed before, and (row_max, row_sum)."""
    # float32 rows want a relative precision that 16-bit ones would not show.
    if rows.q[0].dtype == tl.float32:
        p, alpha, row_max, row_sum = softmax.exact_step(
            row_max, row_sum, qk, row_scale, rows.softcap, rows.slopes, rows.pos, tile.offs_n,
            tile.visible, SPEC.HAS_SOFTCAP, SPEC.HAS_ALIBI, MASKED,
        )  # fmt: skip
    else:
        IS_PRODUCT: tl.constexpr = not (MASKED or SPEC.HAS_SOFTCAP or SPEC.HAS_ALIBI)
        IS_RISING: tl.constexpr = not SPEC.HAS_SIGNED_SCALE
        s = softmax.logits(
            qk, row_scale, rows.softcap, rows.slopes, rows.pos, tile.offs_n,
            SPEC.HAS_SOFTCAP, SPEC.HAS_ALIBI,
        )  # fmt: skip
        if MASKED:
            s = tl.where(tile.visible, s, float("-inf"))
        p, alpha, row_max, row_sum = softmax.step(
            row_max, row_sum, s, qk, row_scale * softmax.LOG2E, MASKED, IS_PRODUCT, IS_RISING
        )
    return round_to(p, rows.q[0].dtype, SPEC.INTERPRETED), alpha, row_max, row_sum


@triton.jit
def no_values(SPEC):
    """What ``add_values`` starts from: as many blocks as values come in."""
    COUNT: tl.constexpr = 2 if SPEC.PAIRS else 1
    acc = ()
    for _ in tl.static_range(COUNT):
        acc += (tl.zeros([SPEC.BLOCK_M, SPEC.BLOCK_DV // COUNT], tl.float32),)
    return acc


@triton.jit
def add_values(acc, alpha, p, rows, blocks, SPEC):
    """alpha acc + p v, block by block."""
    alpha = tl.broadcast_to(alpha[:, None], acc[0].shape)
    sums = ()
    for i in tl.static_range(len(blocks)):
        if rows.q[0].dtype == tl.float32:  # a tile's sum by itself first: shorter chains
            sums += (tl.fma(acc[i], alpha, dot(p, blocks[i], None, SPEC.INTERPRETED)),)
        else:
            sums += (dot(p, blocks[i], acc[i] * alpha, SPEC.INTERPRETED),)
    return sums


@triton.jit
def all_values(acc):
    """[BLOCK_M, BLOCK_DV] of all blocks."""
    return tl.interleave(acc[0], acc[1]) if len(acc) == 2 else acc[0]


@triton.jit
def visit(
    acc,
    row_max,
    row_sum,
    row_scale,
    rows,
    source,
    begin,
    low,
    high,
    pages,
    FORMAT: tl.constexpr,
    MASKED: tl.constexpr,
    GUARDED: tl.constexpr,
    SPEC,
):
    """One tile of keys, ``begin`` onward; MASKED where not every row sees all of it, GUARDED where
    not all of it may be read; ``pages`` None: they are looked up."""
    tile = locate(source, begin, low, high, rows, pages, MASKED, GUARDED, SPEC)
    qk, values = multiply_keys(rows, source, tile, FORMAT, GUARDED, SPEC)
    p, alpha, row_max, row_sum = weigh(row_max, row_sum, row_scale, rows, tile, qk, MASKED, SPEC)
    if not SPEC.IS_LATENT:
        values = load_v(source, tile, FORMAT, rows.q[0].dtype, GUARDED, SPEC)
    acc = add_values(acc, alpha, p, rows, values, SPEC)
    return acc, row_max, row_sum


@triton.jit
def attend(
    acc,
    row_max,
    row_sum,
    row_scale,
    rows,
    source,
    low,
    high,
    full_low,
    full_high,
    FORMAT: tl.constexpr,
    SPEC,
):
    """All tiles of one source's keys low..high, of which full_low..full_high are seen by every
    row."""
    if SPEC.FEW_ROWS:
        acc, row_max, row_sum = attend_in_one_loop(
            acc, row_max, row_sum, row_scale, rows, source, low, high, FORMAT, SPEC
        )
    else:
        acc, row_max, row_sum = attend_by_kinds(
            acc, row_max, row_sum, row_scale, rows, source,
            low, high, full_low, full_high, FORMAT, SPEC,
        )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def attend_in_one_loop(
    acc, row_max, row_sum, row_scale, rows, source, low, high, FORMAT: tl.constexpr, SPEC
):
    """Few rows wait for memory: one loop is one pipeline to fill, not two, and reads without masks,
    as the last tile reaches back over keys that have been visited.  Page ids are a tile ahead."""
    BLOCK_N: tl.constexpr = SPEC.BLOCK_N
    IS_PAGED: tl.constexpr = source.page_ids is not None
    if high - low >= BLOCK_N:
        row_sum = softmax.spread(row_sum, SPEC.ROW_SUMS)
        last = high - BLOCK_N
        pages = source.pages
        for begin in tl.range(low, high, BLOCK_N):
            if IS_PAGED:
                next_pages = pages_at(source, tl.minimum(begin + BLOCK_N, last), SPEC)
            acc, row_max, row_sum = visit(
                acc, row_max, row_sum, row_scale, rows, source,
                tl.minimum(begin, last), begin, high, pages, FORMAT, True, False, SPEC,
            )  # fmt: skip
            if IS_PAGED:
                pages = next_pages
        row_sum = softmax.gather(row_sum)
    elif low < high:
        acc, row_max, row_sum = visit(
            acc, row_max, row_sum, row_scale, rows, source,
            low, low, high, None, FORMAT, True, True, SPEC,
        )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def attend_by_kinds(
    acc,
    row_max,
    row_sum,
    row_scale,
    rows,
    source,
    low,
    high,
    full_low,
    full_high,
    FORMAT: tl.constexpr,
    SPEC,
):
    """First the edges, masked, then the interior that every row sees."""
    BLOCK_N: tl.constexpr = SPEC.BLOCK_N
    start = low
    if source.page_ids is not None:
        start = low // BLOCK_N * BLOCK_N  # whole pages a tile
    end = start + tl.cdiv(tl.maximum(high - start, 0), BLOCK_N) * BLOCK_N
    full_low = tl.maximum(full_low, low)
    full_high = tl.minimum(full_high, high)
    full_start = start + tl.cdiv(full_low - start, BLOCK_N) * BLOCK_N
    full_start = tl.minimum(full_start, end)
    full_end = tl.maximum(start + tl.maximum(full_high - start, 0) // BLOCK_N * BLOCK_N, full_start)
    before = (full_start - start) // BLOCK_N
    edges = before + (end - full_end) // BLOCK_N
    for i in tl.range(0, edges):
        begin = tl.where(i < before, start + i * BLOCK_N, full_end + (i - before) * BLOCK_N)
        acc, row_max, row_sum = visit(
            acc, row_max, row_sum, row_scale, rows, source,
            begin, low, high, None, FORMAT, True, True, SPEC,
        )  # fmt: skip
    for begin in tl.range(full_start, full_end, BLOCK_N):
        acc, row_max, row_sum = visit(
            acc, row_max, row_sum, row_scale, rows, source,
            begin, low, high, None, FORMAT, False, False, SPEC,
        )  # fmt: skip
    return acc, row_max, row_sum
