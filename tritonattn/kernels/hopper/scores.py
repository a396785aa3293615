"""What a consumer makes of the products of queries and keys: scores, masked, and their softmax.

The arithmetic is kernels.softmax's, in base 2.  What is the same for all keys and grows with the
product, a positive scale or a cap's, is folded into the exponent, after the maximum.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .. import masks
from . import ring
from .spec import LANES as _LANES

LANES = gl.constexpr(_LANES)
LOG2E = gl.constexpr(1.4426950408889634)


class Rows(NamedTuple):
    """A consumer's rows of a tile, and what scores them."""

    pos: object  # [M]
    first: object  # [M] keys first <= j < last are seen
    last: object
    full_low: object  # keys that every row sees
    full_high: object
    unit: object  # what a product is multiplied with first; [M] but for a lone scale
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
def tanh(y, ok):
    """To some 1e-7; relative where ``ok`` and all |y| < 1, of which NaN are none.

    There it is a polynomial, y p(y^2), which the units of multiplication compute: those of
    exponentials and reciprocals, which the rest would need twice a score, are busy already.
    """
    if ok & (gl.max(gl.max(gl.abs(y), 1), 0) < 1.0):
        z = y * y
        p = 0.0009637702605687082 * z - 0.005951274652034044
        p = p * z + 0.019973276183009148
        p = p * z - 0.053265832364559174
        p = p * z + 0.13319583237171173
        p = p * z - 0.33332130312919617
        t = y * (p * z + 0.9999997019767761)
    else:
        # 1 - 2 / (e^2y + 1) has no inf / inf at either end.
        t = 1.0 - 2.0 * reciprocal(gl.exp2(y * (2.0 * LOG2E)) + 1.0)
    return t


@gluon.jit
def rows_of(
    pos, is_row, first, last, full_low, full_high, scale, softcap, slope, SPEC: gl.constexpr
):
    """``scale`` a positive scalar, or [M] of any sign, and ``slope`` in natural units."""
    gain = 1.0
    if SPEC.HAS_SOFTCAP:
        # What is no row's must not have a say either, even if it is infinite: 0 inf is NaN.
        unit = gl.where(is_row, scale * (1.0 / softcap), 0.0)
        gain = softcap * LOG2E
    else:
        unit = scale * LOG2E
        if is_folded(SPEC.HAS_SOFTCAP, SPEC.HAS_ALIBI, SPEC.HAS_QUERY_SCALE):
            gain = unit
    return Rows(pos, first, last, full_low, full_high, unit, gain, slope * LOG2E)


@gluon.jit
def with_bias(x, rows, key, SPEC: gl.constexpr):
    """x [M, BLOCK_N] less slope |pos - j|.

    Integer differences are exact, and so are their float32 up to 2^24.  Columns are 8 a + b, where
    a thread has few b and a is known when compiling: nothing waits in registers.
    """
    M: gl.constexpr = SPEC.BLOCK_M // ring.CONSUMERS
    LAYOUT: gl.constexpr = x.type.layout
    x = gl.reshape(x, [M, SPEC.BLOCK_N // 8, 8])
    PARTS: gl.constexpr = x.type.layout
    ahead = gl.convert_layout(rows.pos - key, gl.SliceLayout(1, gl.SliceLayout(2, PARTS)))
    ahead = gl.expand_dims(gl.expand_dims(ahead, 1), 2)
    a = gl.arange(0, SPEC.BLOCK_N // 8, gl.SliceLayout(0, gl.SliceLayout(2, PARTS)))
    a = gl.expand_dims(gl.expand_dims(a, 0), 2).to(gl.float32)
    b = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, PARTS)))
    ahead = (ahead - gl.expand_dims(gl.expand_dims(b, 0), 1)).to(gl.float32)  # [M, 1, 8]
    if SPEC.IS_CAUSAL:  # ahead - 8 a is no less than 0 where it matters
        bias = (ahead * -rows.slope).broadcast_to(x.shape)
        eight = gl.full(x.shape, 8.0 * rows.slope, gl.float32, PARTS)
        x = x + gl.fma(a.broadcast_to(x.shape), eight, bias)
    else:
        x = x - gl.abs(ahead - 8.0 * a) * rows.slope
    return gl.convert_layout(gl.reshape(x, [M, SPEC.BLOCK_N]), LAYOUT, assert_trivial=True)


@gluon.jit
def score(qk, rows, key, limit, SPEC: gl.constexpr):
    """[M, BLOCK_N] scores of the keys from ``key`` on, in base 2; what they are multiplied with
    last, ``gain``, is left to do, if is_folded.  -inf where a key is not seen; keys from ``limit``
    on are not there."""
    offs_n = gl.arange(0, SPEC.BLOCK_N, gl.SliceLayout(0, qk.type.layout))
    is_masked = (key < rows.full_low) | (key + SPEC.BLOCK_N > gl.minimum(rows.full_high, limit))
    x = qk
    if SPEC.HAS_SOFTCAP:
        # Keys that are not seen must not have a say in how the others' scores are computed.
        x = tanh(x * gl.expand_dims(rows.unit, 1), ~is_masked)
        if SPEC.HAS_ALIBI:
            x = x * rows.gain
    elif SPEC.HAS_QUERY_SCALE:
        x = x * gl.expand_dims(rows.unit, 1)
    elif SPEC.HAS_ALIBI:
        x = x * rows.unit
    if SPEC.HAS_ALIBI:
        x = with_bias(x, rows, key, SPEC)
    if is_masked:
        last = gl.minimum(rows.last, limit) - key
        x = gl.where(masks.is_visible(offs_n, rows.first - key, last), x, float("-inf"))
    return x


@gluon.jit
def raise_max(x, row_max, rows, SPEC: gl.constexpr):
    """(new row_max, what to subtract from scores, what to scale the sums so far by), all [M]."""
    most = gl.max(x, 1)
    if is_folded(SPEC.HAS_SOFTCAP, SPEC.HAS_ALIBI, SPEC.HAS_QUERY_SCALE):
        most = most * rows.gain
    most = gl.maximum(row_max, most)
    # A row that has seen no key yet keeps -inf; -inf - -inf would be NaN.
    shift = gl.where(most == float("-inf"), 0.0, most)
    return most, shift, gl.exp2(row_max - shift)


@gluon.jit
def weigh(x, shift, rows, SPEC: gl.constexpr):
    """[M, BLOCK_N] weights."""
    if is_folded(SPEC.HAS_SOFTCAP, SPEC.HAS_ALIBI, SPEC.HAS_QUERY_SCALE):
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
        lanes = gl.sum(gl.sum(gl.reshape(p, [M, SPEC.BLOCK_N // 8, 4, 2]), 3), 1)
        return gl.sum(gl.reshape(lanes, [M, 2, 2]), 2)
    else:
        return gl.sum(p, 1)


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
