"""Which tile of queries a program computes next, worked out by one of its warps.

Tiles are numbered; each program takes the first that is left, or, without counters, every n-th of
n programs.  Sequences are cut into blocks of
``section``, one a lane of the warp, whose keys are read at about the same time; the rows past the
last sequence count as one more, without keys.  Blocks come one after another, in a block the KV
heads, and of one head the query tiles by falling *level*, so that the heavy ones come first.  Where
the future is hidden, tile i of a sequence with c keys before its queries has level
i + ceil(c / BLOCK_M); else all tiles of a sequence with c keys have level ceil(c / BLOCK_M).
Within a level they are in the order of their sequences.  The query heads of a group, which share
keys and values, come last.

The number of tiles at or above a level is a sum over the lanes, so the level of a tile is found by
bisection, and its sequence by the sum of the lanes before it.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .. import masks
from . import ring

LONG = gl.constexpr(4)  # key tiles of a long tile of queries


class Block(NamedTuple):
    """Sequences, one a lane."""

    q_start: object
    len_q: object
    k_start: object
    len_k: object
    context: object
    base: object  # level of the first tile, or of all
    tiles: object  # tiles of queries


@gluon.jit
def add(x, y):
    return x + y


@gluon.jit
def load_block(batch, first, section, lane, SPEC: gl.constexpr):
    sequence = first + lane
    is_sequence = (lane < section) & (sequence < batch.num_seqs)
    has_rows = (lane < section) & (sequence <= batch.num_seqs)
    q_start = gl.load(batch.cu_seqlens_q + sequence, mask=has_rows, other=0)
    q_end = gl.load(batch.cu_seqlens_q + sequence + 1, mask=is_sequence, other=0)
    q_end = gl.where(is_sequence, q_end, batch.total_q)
    len_q = gl.where(has_rows, gl.maximum(q_end - q_start, 0), 0)
    is_mine = (len_q >= batch.least_q) & (len_q <= batch.most_q)
    tiles = gl.where(is_mine, gl.cdiv(len_q, SPEC.BLOCK_M), 0)
    context = lane * 0
    lens = gl.load(batch.lens + sequence, mask=is_sequence, other=0)
    if not SPEC.HAS_CACHE:
        k_start = lens
        len_k = gl.load(batch.lens + sequence + 1, mask=is_sequence, other=0) - k_start
        len_k = gl.maximum(len_k, 0)
    else:
        k_start = q_start
        context = gl.maximum(lens, 0)
        len_k = context
        if SPEC.HAS_NEW:
            len_k += gl.where(is_sequence, len_q, 0)
    before = len_k
    if SPEC.HAS_RIGHT:
        before = gl.maximum(len_k - len_q, 0)
    base = gl.cdiv(before, SPEC.BLOCK_M)
    return Block(q_start, len_q, k_start, len_k, context, base, tiles)


@gluon.jit
def tiles_from(block, level, SPEC: gl.constexpr):
    """How many tiles of a block, of one head, are at ``level`` or above."""
    if SPEC.HAS_RIGHT:
        above = gl.minimum(gl.maximum(block.base + block.tiles - level, 0), block.tiles)
    else:
        above = gl.where(block.base >= level, block.tiles, 0)
    return gl.sum(above, 0)


@gluon.jit
def find(block, number, SPEC: gl.constexpr):
    """(which lane's, which of its tiles) tile ``number`` of a block is; the first as a mask of the
    lanes."""
    level = number * 0
    end = gl.max(block.base + block.tiles, 0) + 1
    while end - level > 1:
        middle = (level + end) // 2
        if tiles_from(block, middle, SPEC) > number:
            level = middle
        else:
            end = middle
    rank = number - tiles_from(block, level + 1, SPEC)
    if SPEC.HAS_RIGHT:
        has_level = (block.base <= level) & (level < block.base + block.tiles)
        here = has_level.to(gl.int32)
    else:
        here = gl.where(block.base == level, block.tiles, 0)
    after = gl.associative_scan(here, 0, add)
    is_it = (after - here <= rank) & (rank < after)
    if SPEC.HAS_RIGHT:
        tile = level - of_lane(is_it, block.base)
    else:
        tile = rank - of_lane(is_it, after - here)
    return is_it, tile


@gluon.jit
def of_lane(is_it, values):
    return gl.sum(gl.where(is_it, values, 0), 0)


@gluon.jit
def visible_keys(pos, num_keys, masking, SPEC: gl.constexpr):
    return masks.interval(
        pos, num_keys, masking.left, masking.right, masking.chunk,
        SPEC.HAS_LEFT, SPEC.HAS_RIGHT, SPEC.HAS_CHUNK,
    )  # fmt: skip


@gluon.jit
def describe(block, is_it, tile, sequence, head, masking, lane, SPEC: gl.constexpr):
    """The fields of a tile, one a lane, and how many key tiles it visits."""
    BLOCK_N: gl.constexpr = SPEC.BLOCK_N
    len_q = of_lane(is_it, block.len_q)
    len_k = of_lane(is_it, block.len_k)
    context = of_lane(is_it, block.context)
    begin = tile * SPEC.BLOCK_M
    rows = gl.minimum(len_q - begin, SPEC.BLOCK_M)
    shift = len_k - len_q
    pos = begin + shift
    first_a, last_a = visible_keys(pos, len_k, masking, SPEC)
    first_b, last_b = visible_keys(pos + rows - 1, len_k, masking, SPEC)
    low, high, full_low, full_high = masks.tile_ranges(first_a, last_a, first_b, last_b)
    keep_low, _ = visible_keys(shift, len_k, masking, SPEC)
    _, keep_high = visible_keys(shift + len_q - 1, len_k, masking, SPEC)
    high = gl.maximum(high, low)

    num_new = tile * 0
    top_new = num_new
    if SPEC.HAS_NEW:
        bottom = gl.maximum(low, context)
        num_new = gl.cdiv(gl.maximum(high - bottom, 0), BLOCK_N)
        top_new = bottom + (num_new - 1) * BLOCK_N
    num_old = tile * 0
    top_old = num_old
    if SPEC.HAS_CACHE:
        PAGE: gl.constexpr = SPEC.PAGE_SIZE if SPEC.PAGE_SIZE < BLOCK_N else BLOCK_N
        bottom = low // PAGE * PAGE
        end = gl.where(high > low, gl.minimum(high, context), 0)
        num_old = gl.cdiv(gl.maximum(end - bottom, 0), BLOCK_N)
        top_old = bottom + (num_old - 1) * BLOCK_N

    packed = of_lane(is_it, block.k_start) - context
    # Queries that see nothing visit one tile that is hidden from them: of no rows, or no pages.
    if num_new + num_old == 0:
        if SPEC.HAS_NEW:
            num_new += 1
            top_new = 0
            packed = -BLOCK_N
        else:
            num_old += 1
            top_old = 0
    fields = gl.where(lane == ring.NUM_TILES, num_new + num_old, 0)
    fields = gl.where(lane == ring.NUM_NEW, num_new, fields)
    fields = gl.where(lane == ring.TOP_NEW, top_new, fields)
    fields = gl.where(lane == ring.TOP_OLD, top_old, fields)
    fields = gl.where(lane == ring.TOKEN, of_lane(is_it, block.q_start) + begin, fields)
    fields = gl.where(lane == ring.HEAD, head, fields)
    fields = gl.where(lane == ring.ROWS, rows, fields)
    fields = gl.where(lane == ring.POS, pos, fields)
    fields = gl.where(lane == ring.LEN_K, len_k, fields)
    fields = gl.where(lane == ring.FULL_LOW, full_low, fields)
    fields = gl.where(lane == ring.FULL_HIGH, full_high, fields)
    fields = gl.where(lane == ring.KEEP_LOW, keep_low, fields)
    fields = gl.where(lane == ring.KEEP_HIGH, keep_high, fields)
    fields = gl.where(lane == ring.CONTEXT, context, fields)
    fields = gl.where(lane == ring.SEQUENCE, sequence, fields)
    fields = gl.where(lane == ring.PACKED, packed, fields)
    return fields, num_new + num_old


@gluon.jit
def rows_of(tiles):
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return ring.view_as(tiles, gl.int32, [ring.SLOTS, ring.WIDTH], ROW)


@gluon.jit
def publish(fields, tiles, bars, count):
    ring.wait_empty(bars.tile_empty, count, ring.SLOTS)
    rows_of(tiles).index(ring.place(count, ring.SLOTS)).store(fields)
    mbarrier.arrive(bars.tile_full.index(ring.place(count, ring.SLOTS)), count=1)


@gluon.jit
def repeat_failed(i, count, lane, tiles, failed, bars, SPEC: gl.constexpr):
    """Announce the i-th tile again, if it was not right, as if no keys were seen by all: then all
    maxima are looked for.  Gives how many have been announced."""
    M: gl.constexpr = SPEC.BLOCK_M // ring.CONSUMERS
    ring.wait_full(bars.tile_judged, i, ring.SLOTS)
    slot = ring.place(i, ring.SLOTS)
    has_failed = 0
    for part in gl.static_range(ring.CONSUMERS):
        flags = failed.index(slot * ring.CONSUMERS + part)
        has_failed |= gl.max(flags.load(gl.BlockedLayout([M // 32], [32], [1], [0])), 0)
    if has_failed > 0:
        fields = rows_of(tiles).index(slot).load(lane.type.layout)
        publish(gl.where(lane == ring.FULL_LOW, ring.NONE, fields), tiles, bars, count)
        count += 1
    return count


@gluon.jit
def leave(counters):
    """The last program to come here sets the counters back to zero."""
    if gl.atomic_add(counters + 1, 1) == gl.num_programs(0) - 1:
        gl.atomic_xchg(counters, 0)
        gl.atomic_xchg(counters + 1, 0)


@gluon.jit
def schedule(
    batch, masking, counters, section, num_kv_heads, tiles, failed, bars, SPEC: gl.constexpr
):
    """The scheduler's whole work."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 32, LANES)
    tile = gl.program_id(0)
    first = 0  # sequence of the block
    before = 0  # tiles of the blocks before it
    count = 0  # tiles announced
    judged = 0  # and of these, known to be right or announced again
    block = load_block(batch, first, section, lane, SPEC)
    in_block = gl.sum(block.tiles, 0)
    while first <= batch.num_seqs:
        number = tile - before
        if number < in_block * num_kv_heads * SPEC.GROUP:
            kv_head = number // (in_block * SPEC.GROUP)
            number -= kv_head * (in_block * SPEC.GROUP)
            is_it, index = find(block, number // SPEC.GROUP, SPEC)
            sequence = first + of_lane(is_it, lane)
            head = kv_head * SPEC.GROUP + number % SPEC.GROUP
            fields, n = describe(block, is_it, index, sequence, head, masking, lane, SPEC)
            # Before a row is overwritten, its tile must be known to be right.
            while judged + ring.SLOTS <= count:
                count = repeat_failed(judged, count, lane, tiles, failed, bars, SPEC)
                judged += 1
            publish(fields, tiles, bars, count)
            count += 1
            if counters is None:
                tile += gl.num_programs(0)
            else:
                # Long tiles are not taken far ahead: some other program may be free sooner.
                if (n >= LONG) & (count >= 2):
                    ring.wait_empty(bars.tile_empty, count - 2 + ring.SLOTS, ring.SLOTS)
                tile = gl.num_programs(0) + gl.atomic_add(counters, 1, sem="relaxed")
        else:
            before += in_block * num_kv_heads * SPEC.GROUP
            first += section
            block = load_block(batch, first, section, lane, SPEC)
            in_block = gl.sum(block.tiles, 0)
    if counters is not None:
        leave(counters)
    while judged < count:
        count = repeat_failed(judged, count, lane, tiles, failed, bars, SPEC)
        judged += 1
    publish(lane * 0 - 1, tiles, bars, count)
