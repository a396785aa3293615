"""Attention of packed queries on compute capability 9.0: one program a multiprocessor, each with a
scheduler, two loaders and two consumers that pass tiles on through shared memory (ring.py).

It computes what kernels.attention does, of the same arguments, for 16-bit queries, keys and values.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from . import ring
from .consume import consume
from .load import load_keys, load_values
from .ring import COLUMNS, swizzled
from .schedule import schedule


class Bars(NamedTuple):
    tile_full: object
    tile_empty: object
    tile_judged: object
    q_full: object
    q_empty: object
    k_full: object
    k_empty: object
    v_full: object
    v_empty: object


@gluon.jit
def make_bars(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def prefill_kernel(
    q_box,  # descriptors, of the block shapes that spec.boxes gives
    k_box,  # packed keys and values, or None
    v_box,
    k_pages,  # caches, or None
    v_pages,
    table,  # Table or None
    batch,  # Batch
    scoring,  # Scoring
    masking,  # Masking
    output,  # Output
    counters,  # two int32 zeros, left at zero; None: every n-th tile is a program's
    section,  # sequences, 1 to 32, whose keys are read at about the same time
    num_kv_heads,
    SPEC: gl.constexpr,
):
    M: gl.constexpr = SPEC.BLOCK_M // ring.CONSUMERS
    # A warpgroup's registers: of 512 a thread of three, less 8.
    CONSUMER_REGS: gl.constexpr = 232
    OTHER_REGS: gl.constexpr = 504 - 2 * CONSUMER_REGS
    THREADS: gl.constexpr = ring.CONSUMERS * ring.CONSUMER_THREADS
    dtype: gl.constexpr = q_box.dtype
    STRIPS: gl.constexpr = SPEC.BLOCK_D // COLUMNS
    STRIPS_V: gl.constexpr = SPEC.BLOCK_DV // COLUMNS
    qs = gl.allocate_shared_memory(
        dtype, [SPEC.Q_SLOTS * ring.CONSUMERS * STRIPS, M, COLUMNS], swizzled(2)
    )
    ks = gl.allocate_shared_memory(
        dtype, [SPEC.STAGES * STRIPS, SPEC.BLOCK_N, COLUMNS], swizzled(2)
    )
    vs = gl.allocate_shared_memory(
        dtype, [SPEC.STAGES * STRIPS_V, SPEC.BLOCK_N, COLUMNS], swizzled(2)
    )
    tiles = gl.allocate_shared_memory(
        gl.int32, [ring.SLOTS * ring.WIDTH, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    bars = Bars(
        make_bars(ring.SLOTS, 1),
        make_bars(ring.SLOTS, THREADS + 64),
        make_bars(ring.SLOTS, ring.CONSUMERS),
        make_bars(SPEC.Q_SLOTS * ring.CONSUMERS, 1),
        make_bars(SPEC.Q_SLOTS, THREADS),
        make_bars(SPEC.STAGES, 1),
        make_bars(SPEC.STAGES, THREADS),
        make_bars(SPEC.STAGES, 1),
        make_bars(SPEC.STAGES, THREADS),
    )
    failed = gl.allocate_shared_memory(  # rows of tiles
        gl.int32, [ring.SLOTS * ring.CONSUMERS, M], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    num_seqs = batch.num_seqs
    gl.warp_specialize([
        (consume, (0, scoring, masking, output, num_seqs, qs, ks, vs, tiles, failed, bars, SPEC)),
        (consume, (1, scoring, masking, output, num_seqs, qs, ks, vs, tiles, failed, bars, SPEC)),
        (load_keys, (q_box, k_box, k_pages, table, qs, ks, tiles, bars, SPEC)),
        (load_values, (v_box, v_pages, table, vs, tiles, bars, SPEC)),
        (schedule, (batch, masking, counters, section, num_kv_heads, tiles, failed, bars, SPEC)),
    ], [4, 1, 1, 1], [CONSUMER_REGS, OTHER_REGS, OTHER_REGS, OTHER_REGS])  # fmt: skip
