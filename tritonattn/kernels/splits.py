"""How the keys of a tile of queries are cut: into parts, each a program's, or by equal shares.

Lengths are known on the device alone, so programs settle here who does what.

*Parts*: the grid has room for ``most`` parts of every tile; those that find nothing left to do
leave at once.  A second kernel merges them.

*Shares*: as many programs as run at a time each take an equal share of the batch's key tiles, laid
end to end: the rest of one query tile's, some whole ones, and the beginning of another's.  So
whatever the lengths are, all programs finish together, and none waits behind another.  A query tile
that lies in several shares is merged by the last of its programs to get there.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Splits(NamedTuple):
    """Parts of ``tiles`` key tiles each, or else ``most`` equal ones."""

    most: object
    tiles: object  # 0: not fixed


class Shares(NamedTuple):
    """Equal shares for all programs of the grid, each with room for two partial results: of the
    query tile that began in an earlier share, and of the one that goes on in a later one."""

    ptr: object  # [programs, 2, BLOCK_M, BLOCK_DV] float32
    lse: object  # [programs, 2, BLOCK_M] float32
    arrivals: object  # [programs] int32: programs done with the tile that begins there; 0 when idle
    least: object  # key tiles that are worth a program
    widest: object  # a bound on the keys that a tile of queries sees, by window and chunk


class Work(NamedTuple):
    """A sequence's place in the order of all work, in key tiles."""

    sequence: object
    start: object
    end: object
    keys: object  # key tiles of each of its query tiles


@triton.jit
def tiles_per_part(num_tiles, splits):
    """Key tiles a part, at least 1, of a query tile that sees ``num_tiles`` of them."""
    share = splits.tiles
    if share == 0:
        share = tl.cdiv(num_tiles, splits.most)
    return tl.maximum(share, 1)


@triton.jit
def _tiles(start, batch, widest, STEP: tl.constexpr, BLOCK_Q: tl.constexpr, SPEC):
    """(query tiles, key tiles of each) of STEP sequences from ``start`` on.

    A query tile counts as seeing all that its sequence's last one may see, and one key tile at
    least: its rows are written whether or not they see any.  Rows past the last sequence are a
    sequence without keys.
    """
    offs = start + tl.arange(0, STEP)
    known = offs < batch.num_seqs
    len_k = tl.load(batch.lens + offs, mask=known, other=0)
    if not SPEC.HAS_CACHE:
        len_k = tl.load(batch.lens + offs + 1, mask=known, other=0) - len_k
    len_k = tl.maximum(len_k, 0)
    queries = known.to(tl.int32)
    if batch.cu_seqlens_q is not None:
        is_row = offs <= batch.num_seqs
        first = tl.load(batch.cu_seqlens_q + offs, mask=is_row, other=batch.total_q)
        last = tl.load(batch.cu_seqlens_q + offs + 1, mask=known, other=batch.total_q)
        queries = tl.cdiv(last - first, BLOCK_Q)
        if SPEC.HAS_CACHE and SPEC.HAS_NEW:
            len_k += tl.where(known, last - first, 0)
    # What a window leaves may begin anywhere in a tile.
    keys = tl.minimum(tl.cdiv(len_k, SPEC.BLOCK_N), tl.cdiv(widest, SPEC.BLOCK_N) + 1)
    return queries, tl.maximum(keys, 1)


@triton.jit
def batch_work(batch, widest, BLOCK_Q: tl.constexpr, SPEC):
    """Of the whole batch: (key tiles of all query tiles, the most of one, query tiles)."""
    STEP: tl.constexpr = 128
    total = tl.zeros([STEP], tl.int32)
    most = tl.zeros([STEP], tl.int32)
    count = tl.zeros([STEP], tl.int32)
    for start in tl.range(0, batch.num_seqs + 1, STEP):
        queries, keys = _tiles(start, batch, widest, STEP, BLOCK_Q, SPEC)
        total += queries * keys
        most = tl.maximum(most, keys)
        count += queries
    return tl.sum(total, 0), tl.max(most, 0), tl.sum(count, 0)


@triton.jit
def share_out(batch, shares, programs, walks, BLOCK_Q: tl.constexpr, SPEC):
    """(key tiles a program, key tiles in all, of one query tile where all are alike or else 0).

    Where all query tiles are alike, and equal parts of them are hardly longer than equal shares,
    the parts are taken: merging costs more.  The last part may then be shorter than it counts.
    """
    total, most, count = batch_work(batch, shares.widest, BLOCK_Q, SPEC)
    is_even = total == most * count
    total *= walks
    count *= walks
    share = tl.maximum(tl.cdiv(total, programs), shares.least)
    even = 0
    if is_even & (count > 0):
        part = tl.cdiv(count, programs) * most
        padded = most
        if count < programs:
            part = tl.minimum(tl.maximum(tl.cdiv(most, programs // count), shares.least), most)
            padded = tl.cdiv(most, part) * part
        if part * 16 <= share * 17:
            share = part
            even = padded
            total = count * padded
    return share, total, even


@triton.jit
def find_work(at, batch, widest, walks, even, BLOCK_Q: tl.constexpr, SPEC):
    """The sequence in whose work ``at`` lies; it must lie in one's.

    ``even``: key tiles of every query tile, if they are alike; else 0.
    """
    STEP: tl.constexpr = 128
    first = 0
    start = at * 0
    queries, keys = _tiles(first, batch, widest, STEP, BLOCK_Q, SPEC)
    keys = tl.where(even > 0, even, keys)
    work = queries * keys * walks
    step = tl.sum(work, 0)
    while start + step <= at:
        first += STEP
        start += step
        queries, keys = _tiles(first, batch, widest, STEP, BLOCK_Q, SPEC)
        keys = tl.where(even > 0, even, keys)
        work = queries * keys * walks
        step = tl.sum(work, 0)
    ends = start + tl.cumsum(work, 0)
    lane = tl.sum((ends <= at).to(tl.int32), 0)
    is_here = tl.arange(0, STEP) == lane
    end = tl.sum(tl.where(is_here, ends, 0), 0)
    own = tl.sum(tl.where(is_here, work, 0), 0)
    return Work(first + lane, end - own, end, tl.sum(tl.where(is_here, keys, 0), 0))
