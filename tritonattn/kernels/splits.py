"""How the keys of a tile of queries are cut: into parts that the host counts, or into shares.

Lengths are known on the device alone, so programs settle here who does what.

*Parts*: the grid has room for ``most`` parts of every tile; those that find nothing left to do
leave at once.  A second kernel merges them.

*Shares*: what is longer than an equal share of the whole batch's work is cut into pieces of at most
that length; a program takes one piece, and those that find none left leave at once.  So one long
sequence is cut however many short ones stand beside it.  The last program to be done with a tile
merges its pieces.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Splits(NamedTuple):
    """Parts of ``tiles`` key tiles each, or else ``most`` equal ones."""

    most: object
    tiles: object  # 0: not fixed


class Shares(NamedTuple):
    """At most ``programs`` equal shares, and room for two pieces to merge for each of them."""

    ptr: object  # [2 programs, BLOCK_M, BLOCK_DV] float32
    lse: object  # [2 programs, BLOCK_M] float32
    arrivals: object  # [2 programs] int32: programs done with the tile of this piece; 0 when idle
    programs: object
    residents: object  # programs that run at the same time
    least: object  # key tiles that are worth a program
    widest: object  # a bound on the keys that a tile of queries sees, by window and chunk


class Piece(NamedTuple):
    """A program's piece of the batch's work."""

    sequence: object
    tile: object  # counts a sequence's query tiles, once for each of the ``walks`` over its keys
    part: object  # of the tile's ``parts``
    parts: object
    keys: object  # key tiles of a part
    first: object  # where the tile's pieces lie among those to be merged


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
        len_q = last - first
        is_mine = (len_q >= batch.least_q) & (len_q <= batch.most_q)
        queries = tl.where(is_mine, tl.cdiv(len_q, BLOCK_Q), 0)
        if SPEC.HAS_CACHE and SPEC.HAS_NEW:
            len_k += tl.where(known, len_q, 0)
    # What a window leaves may begin anywhere in a tile.
    keys = tl.minimum(tl.cdiv(len_k, SPEC.BLOCK_N), tl.cdiv(widest, SPEC.BLOCK_N) + 1)
    return queries, tl.maximum(keys, 1)


@triton.jit
def find_piece(number, batch, shares, walks, BLOCK_Q: tl.constexpr, SPEC):
    """The piece with this number, sequence by sequence; past the last one its keys are 0."""
    # As many as a warp has threads: each warp sums them all, and none waits for another.
    STEP: tl.constexpr = 32
    total = tl.zeros([STEP], tl.int32)
    most = tl.zeros([STEP], tl.int32)
    count = tl.zeros([STEP], tl.int32)
    for start in tl.range(0, batch.num_seqs + 1, STEP):
        queries, keys = _tiles(start, batch, shares.widest, STEP, BLOCK_Q, SPEC)
        total += queries * keys
        most = tl.maximum(most, tl.where(queries > 0, keys, 0))
        count += queries
    work = tl.sum(total, 0)
    longest = tl.max(most, 0)
    tiles = batch.num_seqs if batch.cu_seqlens_q is None else tl.sum(count, 0)
    is_even = work == longest * tiles
    if not is_even:
        share = tl.cdiv(work * walks, shares.programs)
    else:
        # No piece is to wait for the end of another: as many of each tile as run at the same time.
        share = tl.cdiv(longest, tl.maximum(shares.residents // tl.maximum(tiles * walks, 1), 1))
    share = tl.maximum(share, shares.least)
    if batch.cu_seqlens_q is None and is_even:  # nothing to search for
        parts = tl.cdiv(longest, share)
        keys = tl.cdiv(longest, parts)
        tile = number // parts
        sequence = tile // walks
        keys = tl.where(sequence < batch.num_seqs, keys, 0)
        part = number % parts
        piece = Piece(sequence, tile % walks, part, parts, keys, number - part)
    else:
        piece = _search(number, share, batch, shares.widest, walks, BLOCK_Q, SPEC)
    return piece


@triton.jit
def _search(number, share, batch, widest, walks, BLOCK_Q: tl.constexpr, SPEC):
    STEP: tl.constexpr = 128
    start = 0  # the first sequence that is looked at
    pieces = number * 0  # before it, of all sequences
    cut = number * 0  # and of those tiles that are cut
    queries, keys = _tiles(start, batch, widest, STEP, BLOCK_Q, SPEC)
    parts = tl.cdiv(keys, share)
    own = queries * parts * walks
    here = tl.sum(own, 0)
    while (pieces + here <= number) & (start + STEP <= batch.num_seqs):
        pieces += here
        cut += tl.sum(tl.where(parts > 1, own, 0), 0)
        start += STEP
        queries, keys = _tiles(start, batch, widest, STEP, BLOCK_Q, SPEC)
        parts = tl.cdiv(keys, share)
        own = queries * parts * walks
        here = tl.sum(own, 0)
    ends = pieces + tl.cumsum(own, 0)
    is_before = ends <= number
    lane = tl.sum(is_before.to(tl.int32), 0)
    cut += tl.sum(tl.where(is_before & (parts > 1), own, 0), 0)
    inside = number - tl.maximum(tl.max(tl.where(is_before, ends, 0), 0), pieces)
    is_here = tl.arange(0, STEP) == lane
    its_keys = tl.sum(tl.where(is_here, keys, 0), 0)
    its_parts = tl.maximum(tl.cdiv(its_keys, share), 1)
    part = inside % its_parts
    return Piece(
        start + lane, inside // its_parts, part, its_parts, tl.cdiv(its_keys, its_parts),
        cut + inside - part,
    )  # fmt: skip
