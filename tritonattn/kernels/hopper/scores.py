"""What a consumer makes of the products of queries and keys: scores, masked, and their softmax.

The arithmetic is kernels.softmax's, in base 2; a positive scale alone is folded into the exponent,
so that the maximum is one of raw products.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .. import masks, softmax
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
    scale: object  # what makes a product a score, in base 2, if is_product
    row_scale: object  # [M] else, in natural units
    slopes: object  # [M]
    softcap: object


@gluon.constexpr_function
def is_product(softcap, alibi, query_scale):
    """Whether scores are products times one positive number."""
    return not (softcap or alibi or query_scale)


@gluon.jit
def score(qk, rows, key, limit, SPEC: gl.constexpr):
    """[M, BLOCK_N] scores of the keys from ``key`` on, -inf where one is not seen; keys from
    ``limit`` on are not there.  If is_product, they have yet to be scaled."""
    s = qk
    offs_n = key + gl.arange(0, SPEC.BLOCK_N, gl.SliceLayout(0, qk.type.layout))
    if not is_product(SPEC.HAS_SOFTCAP, SPEC.HAS_ALIBI, SPEC.HAS_QUERY_SCALE):
        s = softmax.logits(
            qk, rows.row_scale, rows.softcap, rows.slopes, rows.pos, offs_n,
            SPEC.HAS_SOFTCAP, False, SPEC.HAS_ALIBI,
        )  # fmt: skip
    if (key < rows.full_low) | (key + SPEC.BLOCK_N > gl.minimum(rows.full_high, limit)):
        last = gl.minimum(rows.last, limit)
        s = gl.where(masks.is_visible(offs_n, rows.first, last), s, float("-inf"))
    return s


@gluon.jit
def raise_max(s, row_max, rows, SPEC: gl.constexpr):
    """(new row_max, what to subtract from scores, what to scale the sums so far by), all [M]."""
    most = gl.max(s, 1)
    if is_product(SPEC.HAS_SOFTCAP, SPEC.HAS_ALIBI, SPEC.HAS_QUERY_SCALE):
        most = most * rows.scale
    most = gl.maximum(row_max, most)
    # A row that has seen no key yet keeps -inf; -inf - -inf would be NaN.
    shift = gl.where(most == float("-inf"), 0.0, most)
    return most, shift, gl.exp2(row_max - shift)


@gluon.jit
def weigh(s, shift, rows, SPEC: gl.constexpr):
    if is_product(SPEC.HAS_SOFTCAP, SPEC.HAS_ALIBI, SPEC.HAS_QUERY_SCALE):
        s = s * rows.scale
    return gl.exp2(s - gl.expand_dims(shift, 1))


@gluon.jit
def row_sums(p, SPEC: gl.constexpr):
    """[M], or [M, 4] if LANES: a row lies in four lanes, whose columns are 8 a + 2 lane + e."""
    if SPEC.FORM & LANES:
        M: gl.constexpr = SPEC.BLOCK_M // ring.CONSUMERS
        return gl.sum(gl.sum(gl.reshape(p, [M, SPEC.BLOCK_N // 8, 4, 2]), 3), 1)
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
    ONE: gl.constexpr = 0.25 if SPEC.FORM & LANES else 1.0
    row_max = gl.full(row_max.shape, sink * LOG2E, gl.float32, row_max.type.layout)
    row_sum += gl.where(sink == float("-inf"), 0.0, ONE)
    return row_max, row_sum
