"""Which keys a query sees: one rule, read two ways.

Every rule but the tree lets a query at position ``pos`` see an interval of keys, first <= j < last,
whose ends never move back as ``pos`` grows.  So the predicate is two comparisons, and what a tile
of queries needs to visit, and which part of that needs no mask at all, follow from the intervals of
its first and its last query.  A further rule is a few lines in ``interval``.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Masking(NamedTuple):
    left: object
    right: object
    chunk: object
    tree: object  # [total_q, width] bytes or None
    stride_tree_row: object
    stride_tree_col: object
    tree_width: object


@triton.jit
def interval(
    pos,
    num_keys,
    left,
    right,
    chunk,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
):
    """Keys first <= j < last seen from ``pos``; empty where first >= last.

    ``right`` is 0 for a causal mask.
    """
    first = pos * 0
    last = first + num_keys
    if HAS_LEFT:
        first = tl.maximum(first, pos - left)
    if HAS_RIGHT:
        last = tl.minimum(last, pos + right + 1)
    if HAS_CHUNK:
        # Division truncates, and positions are negative where there are fewer keys than queries:
        # floor by hand.
        below = -(((-1 - pos) // chunk + 1) * chunk)
        start = tl.where(pos < 0, below, pos // chunk * chunk)
        first = tl.maximum(first, start)
        last = tl.minimum(last, start + chunk)
    return first, last


@triton.jit
def tile_ranges(first_of_first, last_of_first, first_of_last, last_of_last):
    """From the intervals of a tile's first and last query: (low, high) of the keys that any of its
    queries sees, and (full_low, full_high) of those that every one sees."""
    return first_of_first, last_of_last, first_of_last, last_of_first


@triton.jit
def is_visible(offs_n, first, last):
    """[BLOCK_M, BLOCK_N] from keys [BLOCK_N] and each query's interval [BLOCK_M]."""
    return (offs_n[None, :] >= first[:, None]) & (offs_n[None, :] < last[:, None])


@triton.jit
def is_visible_in_tree(offs_n, first_new, tree_rows, row_ok, width, stride):
    """[BLOCK_M, BLOCK_N]: all keys before ``first_new``; from there on those that the tree mask
    names."""
    new = offs_n - first_new  # [BLOCK_N]
    known = row_ok[:, None] & (new >= 0)[None, :] & (new < width)[None, :]
    named = tl.load(tree_rows[:, None] + new[None, :].to(tl.int64) * stride, mask=known, other=0)
    return (new < 0)[None, :] | (named != 0)
