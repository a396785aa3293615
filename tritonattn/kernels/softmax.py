"""Scores and the online softmax, in base 2; of float32 inputs in natural units up to the exponent,
as a bias that is exact there would be rounded by log2(e), and its rounding grows with the bias.

With s the scores times log2(e), m the running maximum and l the running sum of a row:

    m' = max(m, max_j s_j)    p_j = 2^(s_j - m')
    l' = 2^(m - m') l + sum_j p_j    acc' = 2^(m - m') acc + sum_j p_j v_j

and at the end out = acc / l, lse = ln(2) (m + log2(l)).
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
HUGE: tl.constexpr = tl.constexpr(2.0**20)


class Scoring(NamedTuple):
    softmax_scale: object
    softcap: object
    query_scale: object  # [total_q] or None
    alibi_slopes: object  # [Hq] or [B, Hq] or None
    stride_alibi_seq: object
    stride_alibi_head: object
    sinks: object  # [Hq] or None
    stride_sinks: object


@triton.jit
def logits(
    qk,
    row_scale,
    softcap,
    slopes,
    pos,
    offs_n,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] scores: scaled, capped, biased; not yet masked.

    ``row_scale`` [BLOCK_M] multiplies the raw products, ``slopes`` [BLOCK_M] are ALiBi's, both in
    natural units.
    """
    if HAS_SOFTCAP:
        y = qk * (row_scale / softcap)[:, None]
        # 1 - 2 / (e^2y + 1), for tanh y, has no inf / inf at either end.
        tanh = 1.0 - 2.0 / (tl.math.exp2(y * (2.0 * LOG2E)) + 1.0)
        s = (softcap * LOG2E) * tanh
    else:
        s = qk * (row_scale * LOG2E)[:, None]
    if HAS_ALIBI:
        s -= (slopes * LOG2E)[:, None] * distance(pos, offs_n)
    return s


@triton.jit
def distance(pos, offs_n):
    """[BLOCK_M, BLOCK_N], exact up to 2^24: an integer difference first."""
    return tl.abs(pos[:, None] - offs_n[None, :]).to(tl.float32)


@triton.jit
def exact_logits(
    qk,
    row_scale,
    softcap,
    slopes,
    pos,
    offs_n,
    shift,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
):
    """Scores in natural units less ``shift`` [BLOCK_M].  A score next to it, which is what counts,
    is small then, and only sums with that have roundings of that size."""
    rest = tl.broadcast_to(-shift[:, None], qk.shape)
    if HAS_ALIBI:
        rest = tl.fma(tl.broadcast_to(-slopes[:, None], qk.shape), distance(pos, offs_n), rest)
    if HAS_SOFTCAP:
        whole, qk = tanh(qk * (row_scale / softcap)[:, None])
        factor = tl.zeros(qk.shape, tl.float32) + softcap
        rest = tl.fma(whole, factor, rest)
    else:
        factor = tl.broadcast_to(row_scale[:, None], qk.shape)
    return tl.fma(qk, factor, rest)


@triton.jit
def tanh(y):
    """Two numbers whose sum it is: -1, 0 or 1, and the rest, to some 1e-7 of itself."""
    z = y * y
    # Cephes' polynomial near 0.
    series = ((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z
    series = ((series + 1.33314422036e-1) * z - 3.33332819422e-1) * z
    to_one = 2.0 / (tl.math.exp2(tl.abs(y) * (2.0 * LOG2E)) + 1.0)
    is_small = z < 0.390625
    whole = tl.where(is_small, 0.0, tl.where(y < 0.0, -1.0, 1.0))
    return whole, tl.where(is_small, y + y * series, -whole * to_one)


@triton.jit
def unit(IS_EXACT: tl.constexpr):
    """What a natural logit is in the scores' unit."""
    return 1.0 if IS_EXACT else LOG2E


@triton.jit
def power(x, IS_EXACT: tl.constexpr):
    """What a difference of scores is a logarithm of."""
    if IS_EXACT:
        x *= LOG2E
    return tl.math.exp2(x)


@triton.jit
def start(sink, HAS_SINK: tl.constexpr, IS_EXACT: tl.constexpr):
    """(row_max, row_sum) before the first key: nothing, or the sink's logit, which counts once and
    has no value.  ``sink`` [BLOCK_M], -inf where there is none."""
    row_max = sink * unit(IS_EXACT)
    if HAS_SINK:
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
    else:
        row_sum = tl.zeros(sink.shape, tl.float32)
    return row_max, row_sum


@triton.jit
def step(
    row_max,
    row_sum,
    s,
    qk,
    factor,
    MASKED: tl.constexpr,
    IS_PRODUCT: tl.constexpr,
    IS_RISING: tl.constexpr,
):
    """One tile of scores: probabilities p [BLOCK_M, BLOCK_N], the rescaling of what was summed
    before, and the new (row_max, row_sum).

    IS_PRODUCT: s = qk factor, none of it masked: the difference from the maximum needs no s.
    IS_RISING: nor does the maximum, as no factor is negative.
    """
    highest = tl.max(qk, 1) * factor if IS_PRODUCT and IS_RISING else tl.max(s, 1)
    if not MASKED:
        # A product and its difference d from the maximum may be rounded only once: d of the maximum
        # is what that was rounded by, then, and not 0.  Huge ones are lowered, so that d is cut off
        # at 0.  A mask stands between the two.
        highest -= tl.where(tl.abs(highest) > HUGE, tl.abs(highest) * 2.0**-22, 0.0)
    m_new = tl.maximum(row_max, highest)
    shift = finite(m_new) if MASKED else m_new
    if IS_PRODUCT:
        below = tl.broadcast_to(-shift[:, None], qk.shape)
        d = tl.fma(qk, tl.broadcast_to(factor[:, None], qk.shape), below)
    else:
        d = s - shift[:, None]
    if not MASKED:
        d = tl.minimum(d, 0.0, propagate_nan=tl.PropagateNan.ALL)
    p = power(d, False)
    alpha = power(row_max - shift, False)
    return p, alpha, m_new, add(row_sum, alpha, p)


@triton.jit
def spread(row_sum, WIDTH: tl.constexpr):
    """[BLOCK_M, WIDTH] whose rows add up to ``row_sum`` [BLOCK_M]; as it is if WIDTH is 1.

    What a thread sums by itself waits for no other warp before all sums are gathered.
    """
    if WIDTH > 1:
        row_sum = tl.where(tl.arange(0, WIDTH)[None, :] == 0, row_sum[:, None], 0.0)
    return row_sum


@triton.jit
def gather(row_sum):
    """Undoes ``spread``."""
    return row_sum if len(row_sum.shape) == 1 else tl.sum(row_sum, 1)


@triton.jit
def add(row_sum, alpha, p):
    """``row_sum`` alpha, and a tile's probabilities to it."""
    if len(row_sum.shape) == 1:
        total = row_sum * alpha + tl.sum(p, 1)
    else:
        width: tl.constexpr = row_sum.shape[1]
        parts = tl.reshape(p, (p.shape[0], p.shape[1] // width, width))
        alpha = tl.broadcast_to(alpha[:, None], row_sum.shape)
        total = tl.fma(row_sum, alpha, tl.sum(parts, 1))
    return total


@triton.jit
def finite(row_max):
    """A row that has seen no key yet keeps row_max = -inf; -inf - -inf would be NaN."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def exact_step(
    row_max,
    row_sum,
    qk,
    row_scale,
    softcap,
    slopes,
    pos,
    offs_n,
    visible,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    MASKED: tl.constexpr,
):
    """``logits`` and ``step`` in one, of float32 inputs.

    The maximum is rounded up to a whole number: beside one, a cap and most biases lose nothing.
    """
    s = exact_logits(
        qk, row_scale, softcap, slopes, pos, offs_n, tl.zeros_like(row_max), HAS_SOFTCAP, HAS_ALIBI
    )
    if MASKED:
        s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(row_max, tl.ceil(tl.max(s, 1)))
    shift = finite(m_new) if MASKED else m_new
    d = exact_logits(qk, row_scale, softcap, slopes, pos, offs_n, shift, HAS_SOFTCAP, HAS_ALIBI)
    if MASKED:
        d = tl.where(visible, d, float("-inf"))
    p = power(d, True)
    alpha = power(row_max - shift, True)
    return p, alpha, m_new, row_sum * alpha + tl.sum(p, 1)


@triton.jit
def finish(acc, row_max, row_sum, IS_EXACT: tl.constexpr):
    """(out, natural-log lse): 0 and -inf for a row that saw nothing.  NaN passes through."""
    is_empty = row_sum == 0.0
    divisor = tl.where(is_empty, 1.0, row_sum)
    if IS_EXACT:
        out = tl.math.div_rn(acc, tl.broadcast_to(divisor[:, None], acc.shape))
    else:
        out = acc * (1.0 / divisor)[:, None]
    if IS_EXACT:
        lse = row_max + tl.math.log2(divisor) * LN2
    else:
        lse = (row_max + tl.math.log2(divisor)) * LN2
    lse = tl.where(is_empty, float("-inf"), lse)
    return out, lse
