"""The loaders: one warp has queries and keys copied as soon as there is room, one the values."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from . import ring
from .ring import COLUMNS, swizzled


class Place(NamedTuple):
    """Where a tile of keys and values lies."""

    is_new: object  # packed, not cached
    row: object  # packed: its first row
    pages: object  # cached: page ids, one a lane; -1 where no key is seen
    slot: object  # cached, in pages longer than a tile: the first slot
    head: object


@gluon.jit
def copy_packed(box, place, bar, buffer, stage, BLOCK: gl.constexpr, SPEC: gl.constexpr):
    """One box for every 64 columns."""
    STRIPS: gl.constexpr = BLOCK // COLUMNS
    strips = ring.view_as(
        buffer, buffer.dtype, [SPEC.STAGES * STRIPS, SPEC.BLOCK_N, 1, COLUMNS], swizzled(3)
    )
    for strip in gl.static_range(STRIPS):
        where = [place.row, place.head, strip * COLUMNS]
        ring.copy_box(
            box, where, bar, strips.index(ring.strip_of(stage, strip, SPEC.STAGES, BLOCK))
        )


@gluon.jit
def copy_paged(pages, place, bar, buffer, stage, lane, BLOCK: gl.constexpr, SPEC: gl.constexpr):
    """One box for every page and 64 columns; one of page -1 lies outside of the cache: zeros."""
    ROWS: gl.constexpr = min(SPEC.PAGE_SIZE, SPEC.BLOCK_N)
    PARTS: gl.constexpr = SPEC.BLOCK_N // ROWS
    STRIPS: gl.constexpr = BLOCK // COLUMNS
    parts = ring.view_as(
        buffer, buffer.dtype, [SPEC.STAGES * STRIPS * PARTS, 1, ROWS, 1, COLUMNS], swizzled(4)
    )
    for part in gl.static_range(PARTS):
        page = gl.sum(gl.where(lane == part, place.pages, 0), 0)
        for strip in gl.static_range(STRIPS):
            where = [page, place.slot, place.head, strip * COLUMNS]
            to = ring.strip_of(stage, strip, SPEC.STAGES, BLOCK) * PARTS + part
            ring.copy_box(pages, where, bar, parts.index(to))


@gluon.jit
def copy_tile(box, pages, place, full, buffer, i, lane, BLOCK: gl.constexpr, SPEC: gl.constexpr):
    """Have [BLOCK_N, BLOCK], in strips of 64 columns, copied into the i-th use of ``buffer``."""
    stage = ring.place(i, SPEC.STAGES)
    bar = full.index(stage)
    mbarrier.expect(bar, SPEC.BLOCK_N * BLOCK * 2)
    if SPEC.HAS_NEW and SPEC.HAS_CACHE:
        if place.is_new:
            copy_packed(box, place, bar, buffer, stage, BLOCK, SPEC)
        else:
            copy_paged(pages, place, bar, buffer, stage, lane, BLOCK, SPEC)
    elif SPEC.HAS_NEW:
        copy_packed(box, place, bar, buffer, stage, BLOCK, SPEC)
    else:
        copy_paged(pages, place, bar, buffer, stage, lane, BLOCK, SPEC)


@gluon.jit
def page_ids(table, sequence, key, low, high, lane, SPEC: gl.constexpr):
    """Ids of the pages from ``key`` on, one a lane; -1 of those without a key of low..high, whose
    ids may be anything."""
    PARTS: gl.constexpr = SPEC.BLOCK_N // min(SPEC.PAGE_SIZE, SPEC.BLOCK_N)
    page = key // SPEC.PAGE_SIZE + lane
    begin = page * SPEC.PAGE_SIZE
    is_seen = (lane < PARTS) & (begin < high) & (begin + SPEC.PAGE_SIZE > low) & (page >= 0)
    if table.indptr is not None:
        ids = table.ptr + gl.load(table.indptr + sequence)
    else:
        ids = table.ptr + gl.cast(sequence, gl.int64) * table.stride_seq
    return gl.load(ids + page, mask=is_seen, other=-1).to(gl.int32)


@gluon.jit
def place_of(i, tile, table, lane, SPEC: gl.constexpr):
    """Of the i-th key tile to visit."""
    is_new = i < tile.num_new
    row = 0
    if SPEC.HAS_NEW:
        row = tile.packed + tile.top_new - i * SPEC.BLOCK_N
    pages = lane
    slot = 0
    if SPEC.HAS_CACHE:
        key = tile.top_old - (i - tile.num_new) * SPEC.BLOCK_N
        high = gl.where(is_new | (i >= tile.num_tiles), 0, tile.keep_high)
        pages = page_ids(table, tile.sequence, key, tile.keep_low, high, lane, SPEC)
        if SPEC.PAGE_SIZE > SPEC.BLOCK_N:
            slot = key % SPEC.PAGE_SIZE
    return Place(is_new, row, pages, slot, tile.kv_head)


class Tile(NamedTuple):
    """What the loader needs to know of a tile of queries."""

    num_tiles: object
    num_new: object
    top_new: object
    top_old: object
    packed: object
    keep_low: object
    keep_high: object  # of the cached keys
    sequence: object
    kv_head: object


@gluon.jit
def read_tile(tiles, slot, num_tiles, SPEC: gl.constexpr):
    keep_high = ring.field(tiles, slot, ring.KEEP_HIGH, 1)
    return Tile(
        num_tiles,
        ring.field(tiles, slot, ring.NUM_NEW, 1),
        ring.field(tiles, slot, ring.TOP_NEW, 1),
        ring.field(tiles, slot, ring.TOP_OLD, 1),
        ring.field(tiles, slot, ring.PACKED, 1),
        ring.field(tiles, slot, ring.KEEP_LOW, 1),
        gl.minimum(keep_high, ring.field(tiles, slot, ring.CONTEXT, 1)),
        ring.field(tiles, slot, ring.SEQUENCE, 1),
        ring.field(tiles, slot, ring.HEAD, 1) // SPEC.GROUP,
    )


@gluon.jit
def copy_queries(q_box, tiles, slot, qs, bars, count, SPEC: gl.constexpr):
    M: gl.constexpr = SPEC.BLOCK_M // ring.CONSUMERS
    STRIPS: gl.constexpr = SPEC.BLOCK_D // COLUMNS
    COUNT: gl.constexpr = SPEC.Q_SLOTS * ring.CONSUMERS
    strips = ring.view_as(qs, qs.dtype, [COUNT * STRIPS, M, 1, COLUMNS], swizzled(3))
    token = ring.field(tiles, slot, ring.TOKEN, 1)
    head = ring.field(tiles, slot, ring.HEAD, 1)
    ring.wait_empty(bars.q_empty, count, SPEC.Q_SLOTS)
    for part in gl.static_range(ring.CONSUMERS):
        i = ring.place(count, SPEC.Q_SLOTS) * ring.CONSUMERS + part
        bar = bars.q_full.index(i)
        mbarrier.expect(bar, M * SPEC.BLOCK_D * 2)
        for strip in gl.static_range(STRIPS):
            where = [token + part * M, head, strip * COLUMNS]
            to = ring.strip_of(i, strip, COUNT, SPEC.BLOCK_D)
            ring.copy_box(q_box, where, bar, strips.index(to))


@gluon.jit
def load_tiles(
    box, pages, table, buffer, full, empty, q_box, qs, tiles, bars,
    BLOCK: gl.constexpr, HAS_QUERIES: gl.constexpr, SPEC: gl.constexpr,
):  # fmt: skip
    """A loader's whole work: all keys and the queries, or all values."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 32, LANES)
    count = 0  # tiles of queries
    uses = 0  # of the buffer
    ring.wait_full(bars.tile_full, 0, ring.SLOTS)
    n = ring.field(tiles, 0, ring.NUM_TILES, 1)
    while n > 0:
        slot = ring.place(count, ring.SLOTS)
        tile = read_tile(tiles, slot, n, SPEC)
        place = place_of(0, tile, table, lane, SPEC)
        for i in range(n):
            # The next pages' ids arrive while these are waited for.
            following = place_of(i + 1, tile, table, lane, SPEC)
            ring.wait_empty(empty, uses, SPEC.STAGES)
            copy_tile(box, pages, place, full, buffer, uses, lane, BLOCK, SPEC)
            if HAS_QUERIES and i == 0:
                copy_queries(q_box, tiles, slot, qs, bars, count, SPEC)
            place = following
            uses += 1
        ring.give_back(bars.tile_empty, slot)
        count += 1
        ring.wait_full(bars.tile_full, count, ring.SLOTS)
        n = ring.field(tiles, ring.place(count, ring.SLOTS), ring.NUM_TILES, 1)


@gluon.jit
def load_keys(q_box, k_box, k_pages, table, qs, ks, tiles, bars, SPEC: gl.constexpr):
    load_tiles(
        k_box, k_pages, table, ks, bars.k_full, bars.k_empty, q_box, qs, tiles, bars,
        SPEC.BLOCK_D, True, SPEC,
    )  # fmt: skip


@gluon.jit
def load_values(v_box, v_pages, table, vs, tiles, bars, SPEC: gl.constexpr):
    load_tiles(
        v_box, v_pages, table, vs, bars.v_full, bars.v_empty, None, None, tiles, bars,
        SPEC.BLOCK_DV, False, SPEC,
    )  # fmt: skip
