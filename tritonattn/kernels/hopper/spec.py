"""What selects the Hopper kernel's machine code, and the boxes in which it copies."""

from typing import NamedTuple

CONSUMERS = 2  # warpgroups that share a tile of queries
COLUMNS = 64  # of 16 bits: what one row of a swizzled box holds


class HopperSpec(NamedTuple):
    """Everything here is known when the kernel compiles; lengths, strides, windows, scales are not.

    FORM is a sum of switches for the order of the work, which change no result's meaning: TURNS,
    LANES, MID, DRAWN.
    """

    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int  # a multiple of 64 that holds HEAD_DIM, 64 and a power of two at most
    BLOCK_DV: int  # a power of two that holds HEAD_DIM_V, 64 or more
    BLOCK_M: int  # queries of a tile, of one head; both consumers' together
    BLOCK_N: int  # keys of a tile
    GROUP: int  # query heads a KV head
    PAGE_SIZE: int  # a power of two, 8 or more; 0 without a cache
    STAGES: int  # key and value tiles that shared memory holds
    Q_SLOTS: int  # query tiles that it holds
    FORM: int
    HAS_CACHE: bool
    HAS_NEW: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_CHUNK: bool
    IS_CAUSAL: bool  # no query sees a key after it
    HAS_SOFTCAP: bool
    HAS_ALIBI: bool
    HAS_SINK: bool
    HAS_QUERY_SCALE: bool
    HAS_LSE: bool
    OUT_ALIGNED: bool  # every row of the output starts on 16 bytes


TURNS = 1  # the warpgroups take turns at the tensor cores
LANES = 2  # a row's sum is kept in two parts until the end
MID = 4  # the last values' product is waited for amid the exponentials, not after them
DRAWN = 8  # programs draw their tiles from a counter, where dealing them out would leave gaps


def boxes(spec: HopperSpec) -> dict[str, tuple[int, ...]]:
    """The block shape of each descriptor; all have 128-byte swizzling of 16-bit elements.

    Packed rows are [tokens, heads, dim], caches [pages, slots, heads, dim], with any strides that
    are multiples of 16 bytes.  What a box covers outside of its tensor arrives as zeros: columns
    past the head's dimension, too.
    """
    shapes: dict[str, tuple[int, ...]] = {
        "q_box": (spec.BLOCK_M // CONSUMERS, 1, COLUMNS),
    }
    if spec.HAS_NEW:
        shapes["k_box"] = shapes["v_box"] = (spec.BLOCK_N, 1, COLUMNS)
    if spec.HAS_CACHE:
        slots = min(spec.PAGE_SIZE, spec.BLOCK_N)
        shapes["k_pages"] = shapes["v_pages"] = (1, slots, 1, COLUMNS)
    return shapes
