"""What selects an attention kernel's machine code, as one constant argument."""

from typing import NamedTuple


class Spec(NamedTuple):
    """Everything here is known when the kernel compiles; lengths, strides, windows, scales are not.

    A key's dimension is covered by two blocks, powers of two, where that wastes less than one
    would: 192 by 128 and 64, 576 by 512 and 64; by many small ones in float32.  All but the last
    are equal.  A value's is covered by one: of a second one that comes from registers, ptxas 12.8,
    which triton 3.6 brings, writes part to the wrong place in shared memory (seen on sm_90; ptxas
    13.0 does not).
    """

    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCKS: tuple[int, ...]
    BLOCK_DV: int
    BLOCK_M: int  # rows of a tile: (token, head) pairs, heads fastest
    BLOCK_N: int  # keys of a tile
    GROUP: int  # query heads a KV head
    PACK: int  # of these, heads in one tile
    PAGE_SIZE: int  # 0: a run-time value, for pages that are no power of two
    CACHE_FORMAT: str  # float8 format of the cache's bytes, "" for the queries' own dtype
    NATIVE_FP8: bool  # the GPU converts float8 itself
    PAIRS: bool  # two bytes are read as one number, so that values need not be turned in memory
    HALF_FP8: bool  # float8 keys and values meet bfloat16 queries in float16
    FEW_ROWS: bool  # over cached keys: one loop
    IS_LATENT: bool  # what the first of BLOCKS covers are the values too
    ROW_SUMS: int  # that a row's sum is kept in there, each of them one thread's
    HAS_CACHE: bool
    HAS_NEW: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_CHUNK: bool
    HAS_TREE: bool
    HAS_SOFTCAP: bool
    HAS_ALIBI: bool
    HAS_SINK: bool
    HAS_QUERY_SCALE: bool
    HAS_SIGNED_SCALE: bool  # a scale may be negative
    HAS_LSE: bool
    SPLIT: str  # how a tile's keys may be cut: "" not at all, "parts" or "shares"
    SHARE_ROWS: int  # rows of a tile that can hold a query, where it is merged from shares
    SHARE_STEP: int  # of its parts, those whose loads are on their way at once
    ALIGNED: bool  # every row starts on 16 bytes
    BOXES: bool  # packed keys and values come as descriptors [heads, tokens, dim]
    EARLY: bool  # launched while the kernel before it ends, and waits for that itself
    INTERPRETED: bool
