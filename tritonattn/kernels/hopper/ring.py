"""What the warps of a program tell each other, and how.

Roles: the scheduler, one warp, works out which tile of queries comes next (schedule.py); two
loaders, a warp each, have its queries and keys, and its values, copied (load.py); two consumers, a
warpgroup each, compute half of its rows (consume.py).

All signals are mbarriers, and every use flips their phase:

    tile_full[t]               the scheduler -> the others: a row of ``tiles`` says what to do
    tile_empty[t]              the others -> the scheduler: the row has been read
    tile_judged[t]             the consumers -> the scheduler: ``failed`` says whether to announce
                               it again (see walk.py)
    q_full[s, consumer]        a loader -> a consumer: its queries have arrived
    k_full[b], v_full[b]       a loader -> the consumers: a tile of keys, of values
    q_empty, k_empty, v_empty  the consumers -> a loader: may be overwritten

Consumers give back through cp.async.mbarrier.arrive.noinc, one arrival a thread: ``arrive`` would
have Triton put a barrier of the whole warpgroup before and after itself.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from .spec import COLUMNS as _COLUMNS
from .spec import CONSUMERS as _CONSUMERS

# Names of triton 3.8 and later, and of those before.
copy_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_memory = gl.shared_memory_descriptor
view_as = getattr(_memory, "reinterpret", None) or _memory._reinterpret

NONE = gl.constexpr(1 << 30)  # past all keys
SLOTS = gl.constexpr(4)  # tiles that may be announced at a time
WIDTH = gl.constexpr(32)  # numbers that describe a tile: the first are the fields below
COLUMNS = gl.constexpr(_COLUMNS)
CONSUMERS = gl.constexpr(_CONSUMERS)
CONSUMER_THREADS = gl.constexpr(128)

# Key tiles to visit, from the last to the first; the packed keys' come before the cached ones'.
NUM_TILES = gl.constexpr(0)  # in all, 1 or more; negative: there is no more work
NUM_NEW = gl.constexpr(1)  # of packed keys
TOP_NEW = gl.constexpr(2)  # first key of the first packed tile to visit
TOP_OLD = gl.constexpr(3)  # and of the first cached one
TOKEN = gl.constexpr(4)  # first query, over the batch
HEAD = gl.constexpr(5)
ROWS = gl.constexpr(6)  # queries that there are
POS = gl.constexpr(7)  # position of the first one
LEN_K = gl.constexpr(8)
FULL_LOW = gl.constexpr(9)  # keys that all queries of the tile see; NONE: it is announced again
FULL_HIGH = gl.constexpr(10)
KEEP_LOW = gl.constexpr(11)  # keys that some query of the sequence sees
KEEP_HIGH = gl.constexpr(12)
CONTEXT = gl.constexpr(13)  # keys in the cache
SEQUENCE = gl.constexpr(14)
PACKED = gl.constexpr(15)  # row of packed keys that would hold key 0


@gluon.jit
def field(tiles, slot, FIELD: gl.constexpr, WARPS: gl.constexpr):
    """One number of the tile in ``slot``, as a scalar of all threads."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(tiles.index(slot * WIDTH + FIELD).load(ONE), 0)


@gluon.jit
def place(i, N: gl.constexpr):
    """Where in a ring of N its i-th use lies."""
    # The compiler does not know that no count is negative, and would provide for that.
    if N & (N - 1) == 0:
        return i & (N - 1)
    else:
        return i % N


@gluon.jit
def phase(i, N: gl.constexpr):
    """0 or 1: of the barriers of the i-th use of a ring of N."""
    if N & (N - 1) == 0:
        return (i & N) // N
    else:
        return (i // N) & 1


@gluon.jit
def following(slot, parity, N: gl.constexpr):
    """``place`` and ``phase`` of the use after that of which these are."""
    if N == 2:
        return slot ^ 1, parity ^ slot
    else:
        is_last = slot == N - 1
        return gl.where(is_last, 0, slot + 1), gl.where(is_last, parity ^ 1, parity)


@gluon.jit
def wait_full(bars, i, N: gl.constexpr):
    """Until the i-th use of a ring of N is there to be read."""
    mbarrier.wait(bars.index(place(i, N)), phase(i, N))


@gluon.jit
def wait_empty(bars, i, N: gl.constexpr):
    """Until the i-th use of a ring of N may be written."""
    mbarrier.wait(bars.index(place(i, N)), phase(i, N) ^ 1)


@gluon.jit
def give_back(bars, slot):
    async_copy.mbarrier_arrive(bars.index(slot), increment_count=False)


@gluon.constexpr_function
def swizzled(rank):
    """Shared memory of boxes; the first axes make up the rows, so all ranks have the same bytes."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


@gluon.constexpr_function
def main_part(columns):
    """The largest power of two in it: what one product takes."""
    return 1 << (columns.bit_length() - 1)


@gluon.jit
def strip_of(i, STRIP: gl.constexpr, COUNT: gl.constexpr, BLOCK: gl.constexpr):
    """Where among a buffer's strips of 64 columns the STRIP-th of its i-th tile lies.

    A buffer holds COUNT tiles of BLOCK columns: their main parts, then what is left of each.
    """
    MAIN: gl.constexpr = main_part(BLOCK) // COLUMNS
    if STRIP < MAIN:
        return i * MAIN + STRIP
    else:
        return COUNT * MAIN + i * (BLOCK // COLUMNS - MAIN) + (STRIP - MAIN)


@gluon.jit
def main_of(buffer, i, ROWS: gl.constexpr, COUNT: gl.constexpr, BLOCK: gl.constexpr):
    """The main part of a buffer's i-th tile."""
    tiles = view_as(buffer, buffer.dtype, [COUNT, ROWS, main_part(BLOCK)], swizzled(2))
    return tiles.index(i)


@gluon.jit
def rest_of(buffer, i, COUNT: gl.constexpr, BLOCK: gl.constexpr):
    """What is left of it, one strip."""
    return buffer.index(strip_of(i, main_part(BLOCK) // COLUMNS, COUNT, BLOCK))
