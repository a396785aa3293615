"""What a consumer makes of the products of queries and keys: scores, masked, and their softmax.

The arithmetic is kernels.softmax's, in base 2.  What is the same for all keys and grows with the
product, a positive scale or a cap's, is folded into the exponent, after the maximum.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .. import masks
from . import ring
from .products import rescale
from .spec import LANES as _LANES

LANES = gl.constexpr(_LANES)
# A product and its difference from a maximum, if rounded once, are not 0 for the maximum but what
# that was rounded by: of no matter up to here, from where on a tile is announced again.
HUGE = gl.constexpr(2.0**29)
SLACK = gl.constexpr(8.0)  # in base 2, by which a maximum may grow before sums are rescaled
LOG2E = gl.constexpr(1.4426950408889634)


class Rows(NamedTuple):
    """A consumer's rows of a tile, and what scores them."""

    pos: object  # [M]
    first: object  # [M] keys first <= j < last are seen
    last: object
    full_low: object  # keys that every row sees
    full_high: object
    unit: object  # what a product is multiplied with first; [M] if HAS_QUERY_SCALE
    gain: object  # what a score is multiplied with last, a positive scalar
    slope: object  # in base 2


@gluon.constexpr_function
def is_folded(softcap, alibi, query_scale):
    """Whether scores are something times one positive number: that may wait until after the
    maximum, where it costs nothing."""
    return not alibi and (softcap or not query_scale)


@gluon.jit
def reciprocal(x):
    """1 / x, to the last bit or so."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def tanh(y, IS_ROUGH: gl.constexpr):
    """To some 1e-7, or 2^-11 relative if IS_ROUGH: by one instruction where the other way takes
    two of those that exponentials wait for, too.

    Scores that PyTorch rounds to bfloat16 have 2^-9, to float16 2^-12.
    """
    if IS_ROUGH:
        return gl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=r,r", [y], dtype=gl.float32, is_pure=True, pack=1
        )
    else:
        # 1 - 2 / (e^2y + 1) has no inf / inf at either end.
        return 1.0 - 2.0 * reciprocal(gl.exp2(y * (2.0 * LOG2E)) + 1.0)


@gluon.jit
def rows_of(pos, first, last, full_low, full_high, scale, softcap, slope, SPEC: gl.constexpr):
    """``scale`` a positive scalar, or [M] of any sign, and ``slope`` in natural units."""
    gain = 1.0
    if SPEC.HAS_SOFTCAP:
        unit = scale * (1.0 / softcap)
        gain = softcap * LOG2E
    else:
        unit = scale * LOG2E
        if is_folded(SPEC.HAS_SOFTCAP, SPEC.HAS_ALIBI, SPEC.HAS_QUERY_SCALE):
            gain = unit
    return Rows(pos, first, last, full_low, full_high, unit, gain, slope * LOG2E)


@gluon.jit
def with_bias(x, rows, key, SPEC: gl.constexpr):
    """x [M, BLOCK_N] less slope |pos - j|; if IS_CAUSAL, but for what is the same all along a row,
    ``row_bias``.

    Integer differences are exact, and so are their float32 up to 2^24.  Columns are 8 a + b, where
    a thread has few b and a is known when compiling: nothing waits in registers.
    """
    M: gl.constexpr = SPEC.BLOCK_M // ring.CONSUMERS
    LAYOUT: gl.constexpr = x.type.layout
    x = gl.reshape(x, [M, SPEC.BLOCK_N // 8, 8])
    PARTS: gl.constexpr = x.type.layout
    a = gl.arange(0, SPEC.BLOCK_N // 8, gl.SliceLayout(0, gl.SliceLayout(2, PARTS)))
    a = gl.expand_dims(gl.expand_dims(a, 0), 2).to(gl.float32)
    b = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, PARTS)))
    b = gl.expand_dims(gl.expand_dims(b, 0), 1)
    if SPEC.IS_CAUSAL:
        # Of keys that are seen, |pos - j| = (pos - key) - (8 a + b).  The shift is a zero that the
        # compiler cannot see through: else it would hold all columns' biases through the loop.
        b = (b + (key >> 31)).to(gl.float32) * rows.slope
        a = a.broadcast_to([1, SPEC.BLOCK_N // 8, 8])
        eight = gl.full(a.shape, 8.0 * rows.slope, gl.float32, PARTS)
        x = x + gl.fma(a, eight, b.broadcast_to(a.shape))
    else:
        ahead = gl.convert_layout(rows.pos - key, gl.SliceLayout(1, gl.SliceLayout(2, PARTS)))
        ahead = (gl.expand_dims(gl.expand_dims(ahead, 1), 2) - b).to(gl.float32)  # [M, 1, 8]
        x = x - gl.abs(ahead - 8.0 * a) * rows.slope
    return gl.convert_layout(gl.reshape(x, [M, SPEC.BLOCK_N]), LAYOUT, assert_trivial=True)


@gluon.jit
def row_bias(rows, key, SPEC: gl.constexpr):
    """What ``with_bias`` leaves to add to a row, [M] or 0."""
    if SPEC.HAS_ALIBI and SPEC.IS_CAUSAL:
        return (key - rows.pos).to(gl.float32) * rows.slope
    else:
        return 0.0


@gluon.jit
def times(x, factor, IS_PLAIN: gl.constexpr):
    """x by a scalar, or [M], positive or not; but for IS_PLAIN, rounded before all else."""
    factor = factor + gl.zeros([x.shape[0]], gl.float32, gl.SliceLayout(1, x.type.layout))
    if IS_PLAIN:
        return x * gl.expand_dims(factor, 1)
    else:
        return rescale(x, factor)


@gluon.jit
def score(qk, rows, key, limit, IS_PLAIN: gl.constexpr, IS_ROUGH: gl.constexpr, SPEC: gl.constexpr):
    """[M, BLOCK_N] scores of the keys from ``key`` on, in base 2; -inf where one is not seen.  Keys
    from ``limit`` on are not there.

    If IS_PLAIN, every row sees them all; and what they are multiplied with last, ``gain``, is left
    to do, if is_folded.
    """
    offs_n = gl.arange(0, SPEC.BLOCK_N, gl.SliceLayout(0, qk.type.layout))
    x = qk
    if SPEC.HAS_SOFTCAP or SPEC.HAS_ALIBI or SPEC.HAS_QUERY_SCALE:
        x = times(x, rows.unit, IS_PLAIN)
    if SPEC.HAS_SOFTCAP:
        x = tanh(x, IS_ROUGH)
        if SPEC.HAS_ALIBI:
            x = x * rows.gain
    if SPEC.HAS_ALIBI:
        x = with_bias(x, rows, key, SPEC)
    if IS_PLAIN:
        return x
    if is_folded(SPEC.HAS_SOFTCAP, SPEC.HAS_ALIBI, SPEC.HAS_QUERY_SCALE):
        x = times(x, rows.gain, IS_PLAIN)
    last = gl.minimum(rows.last, limit) - key
    if SPEC.HAS_LEFT or SPEC.HAS_CHUNK:
        is_seen = masks.is_visible(offs_n, rows.first - key, last)
    else:
        is_seen = gl.expand_dims(offs_n, 0) < gl.expand_dims(last, 1)
    return gl.where(is_seen, x, float("-inf"))


@gluon.constexpr_function
def lift(dtype):
    """How far above a row's maximum, in base 2, weights are measured from, to have room to grow.

    What a weight of float16 loses below 2^-14 is 2^-19 of the largest.
    """
    return 6.0 if dtype == gl.float16 else 0.0


@gluon.constexpr_function
def most(dtype):
    """What float16 holds of a weight, or, beside large values, float32 of a sum."""
    return 2.0**15 if dtype == gl.float16 else 2.0**40


@gluon.jit
def marked(row_sum, row_max, dtype: gl.constexpr, SPEC: gl.constexpr):
    """``row_sum``, or infinity if weights in it may have been too large, or there was no maximum to
    measure them from; there is no way back from that, whatever the sum is scaled by."""
    more = gl.where(row_max == float("-inf"), float("inf"), 0.0)
    if SPEC.FORM & LANES:
        more = gl.convert_layout(more, gl.SliceLayout(1, row_sum.type.layout))
        more = gl.expand_dims(more, 1)
    return gl.where(row_sum < most(dtype), row_sum, float("inf")) + more


@gluon.jit
def shift_of(row_max, rows, key, SPEC: gl.constexpr):
    """What to subtract from ``score``, [M]."""
    # A row that has seen no key yet keeps -inf; -inf - -inf would be NaN.
    shift = gl.where(row_max == float("-inf"), 0.0, row_max)
    return shift - row_bias(rows, key, SPEC)


@gluon.jit
def raise_max(x, row_max, rows, key, dtype: gl.constexpr, SPEC: gl.constexpr):
    """(new row_max, shift_of it, what to scale the sums so far by), all [M].

    It is raised only where it would grow by more than SLACK: what is scaled by 1 need not be.
    """
    most = gl.max(x, 1)
    most += row_bias(rows, key, SPEC) + lift(dtype)
    most = gl.where(most > row_max + SLACK, most, row_max)
    alpha = gl.exp2(row_max - gl.where(most == float("-inf"), 0.0, most))
    return most, shift_of(most, rows, key, SPEC), alpha


@gluon.jit
def weigh(x, shift, rows, IS_PLAIN: gl.constexpr, SPEC: gl.constexpr):
    """[M, BLOCK_N] weights."""
    if IS_PLAIN and is_folded(SPEC.HAS_SOFTCAP, SPEC.HAS_ALIBI, SPEC.HAS_QUERY_SCALE):
        x = x * rows.gain
    return gl.exp2(x - gl.expand_dims(shift, 1))


@gluon.jit
def row_sums(p, SPEC: gl.constexpr):
    """[M], or [M, 2] if LANES: a row lies in four lanes, whose columns are 8 a + 2 lane + e.

    One exchange between lanes there must be: it keeps ptxas from putting the exponentials off until
    after the wait for P V, which they should fill.
    """
    if SPEC.FORM & LANES:
        M: gl.constexpr = SPEC.BLOCK_M // ring.CONSUMERS
        lanes = gl.sum(gl.sum(gl.reshape(p, [M, p.shape[1] // 8, 4, 2]), 3), 1)
        return gl.sum(gl.reshape(lanes, [M, 2, 2]), 2)
    else:
        return gl.sum(p, 1)


@gluon.jit
def row_sums_like(sums, p, SPEC: gl.constexpr):
    """``row_sums`` of some of the columns, in the layout of all columns' ``sums``."""
    return gl.convert_layout(row_sums(p, SPEC), sums.type.layout, assert_trivial=True)


@gluon.jit
def rescale_sums(row_sum, alpha, SPEC: gl.constexpr):
    if SPEC.FORM & LANES:
        LAYOUT: gl.constexpr = row_sum.type.layout
        alpha = gl.convert_layout(alpha, gl.SliceLayout(1, LAYOUT))
        return row_sum * gl.expand_dims(alpha, 1)
    else:
        return row_sum * alpha


@gluon.jit
def whole_sums(row_sum, LAYOUT: gl.constexpr, SPEC: gl.constexpr):
    if SPEC.FORM & LANES:
        row_sum = gl.convert_layout(gl.sum(row_sum, 1), LAYOUT)
    return row_sum


@gluon.jit
def no_sums(row_max, SPEC: gl.constexpr):
    """What row_sums gives of nothing."""
    LAYOUT: gl.constexpr = row_max.type.layout
    p = gl.full([row_max.shape[0], SPEC.BLOCK_N], 0.0, gl.float32, LAYOUT.parent)
    return row_sums(p, SPEC)


@gluon.jit
def with_sink(sink, row_max, row_sum, SPEC: gl.constexpr):
    """(row_max, row_sum) that hold a sink's logit, which counts once and has no value."""
    ONE: gl.constexpr = 0.5 if SPEC.FORM & LANES else 1.0
    row_max = gl.full(row_max.shape, sink * LOG2E, gl.float32, row_max.type.layout)
    row_sum += gl.where(sink == float("-inf"), 0.0, ONE)
    return row_max, row_sum
