"""How the keys of a tile of queries are cut into parts, each for a program of its own.

Lengths are known on the device alone, so the grid has room for ``most`` parts a tile and the
programs settle here how many there are; those that find nothing left to do leave at once.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Splits(NamedTuple):
    """The rule in force: of ``tiles`` each, or else equal shares for ``programs`` programs, or else
    ``most`` parts of every tile."""

    most: object
    tiles: object  # key tiles a part; 0: not fixed
    programs: object  # that the whole batch should keep busy; 0: not asked
    least: object  # key tiles that are worth a program
    widest: object  # a bound on the keys that a tile of queries sees, by window and chunk


@triton.jit
def batch_tiles(batch, widest, BLOCK_Q: tl.constexpr, SPEC):
    """Pairs of a query tile and a key tile in the whole batch, by its lengths: float32, as it is an
    estimate and may be large."""
    STEP: tl.constexpr = 128
    total = tl.zeros([STEP], tl.float32)
    for start in tl.range(0, batch.num_seqs, STEP):
        offs = start + tl.arange(0, STEP)
        inside = offs < batch.num_seqs
        len_k = tl.load(batch.lens + offs, mask=inside, other=0)
        if not SPEC.HAS_CACHE:
            len_k = tl.load(batch.lens + offs + 1, mask=inside, other=0) - len_k
        len_k = tl.maximum(len_k, 0)
        query_tiles = tl.full([STEP], 1, tl.int32)
        if batch.cu_seqlens_q is not None:
            len_q = tl.load(batch.cu_seqlens_q + offs + 1, mask=inside, other=0)
            len_q -= tl.load(batch.cu_seqlens_q + offs, mask=inside, other=0)
            query_tiles = tl.cdiv(len_q, BLOCK_Q)
            if SPEC.HAS_CACHE and SPEC.HAS_NEW:
                len_k += len_q
        key_tiles = tl.cdiv(tl.minimum(len_k, widest), SPEC.BLOCK_N)
        total += (key_tiles * inside).to(tl.float32) * query_tiles.to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def tiles_per_part(num_tiles, splits, batch, heads, BLOCK_Q: tl.constexpr, SPEC):
    """Key tiles a part, at least 1, of a query tile that sees ``num_tiles`` of them.

    ``heads``: how often the batch's tiles are walked over, once for each block of heads.
    """
    share = splits.tiles
    if splits.tiles == 0:
        share = tl.cdiv(num_tiles, splits.most)
        if splits.programs > 0:
            total = batch_tiles(batch, splits.widest, BLOCK_Q, SPEC) * heads
            even = tl.minimum(total / splits.programs, 16777216.0).to(tl.int32)
            even = tl.maximum(even, splits.least)
            # What is little longer than an even share stays whole: merging costs more.  What is
            # longer is cut small, so that its parts fill the gaps that others leave.
            cut = tl.maximum((even + 1) // 2, splits.least)
            share = tl.maximum(share, tl.where(num_tiles <= even + even // 4, num_tiles, cut))
    return tl.maximum(share, 1)
