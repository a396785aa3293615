"""Scores and the online softmax, in base 2; of float32 inputs in natural units up to the exponent,
as a bias that is exact there would be rounded by log2(e), and its rounding grows with the bias.

With s the scores times log2(e), m the running maximum and l the running sum of a row:

    m' = max(m, max_j s_j)    p_j = 2^(s_j - m')
    l' = 2^(m - m') l + sum_j p_j    acc' = 2^(m - m') acc + sum_j p_j v_j

and at the end out = acc / l, lse = ln(2) (m + log2(l)).
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(y, IS_EXACT: tl.constexpr):
    """To some 1e-7, absolute; if IS_EXACT relative, by Cephes' polynomial near 0."""
    # 1 - 2 / (e^2y + 1) has no inf / inf at either end.
    result = 1.0 - 2.0 / (tl.math.exp2(y * (2.0 * LOG2E)) + 1.0)
    if IS_EXACT:
        z = y * y
        series = ((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z
        series = ((series + 1.33314422036e-1) * z - 3.33332819422e-1) * z
        result = tl.where(z < 0.390625, y + y * series, result)
    return result


@triton.jit
def logits(
    qk,
    row_scale,
    softcap,
    slopes,
    pos,
    offs_n,
    HAS_SOFTCAP: tl.constexpr,
    IS_EXACT: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] scores: scaled, capped, biased; not yet masked.

    ``row_scale`` [BLOCK_M] multiplies the raw products, ``slopes`` [BLOCK_M] are ALiBi's, both in
    natural units.
    """
    if HAS_SOFTCAP:
        s = (softcap * unit(IS_EXACT)) * tanh(qk * (row_scale / softcap)[:, None], IS_EXACT)
    else:
        s = qk * (row_scale * unit(IS_EXACT))[:, None]
    if HAS_ALIBI:
        # An integer difference first: it is exact, and so is its float32 up to 2^24.
        distance = tl.abs(pos[:, None] - offs_n[None, :]).to(tl.float32)
        s -= (slopes * unit(IS_EXACT))[:, None] * distance
    return s


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
    has no value.  ``sink`` [BLOCK_M]."""
    if HAS_SINK:
        row_max = sink * unit(IS_EXACT)
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
    else:
        row_max = tl.full(sink.shape, float("-inf"), tl.float32)
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
    IS_EXACT: tl.constexpr,
):
    """One tile of scores: probabilities p [BLOCK_M, BLOCK_N], the rescaling of what was summed
    before, and the new (row_max, row_sum).

    IS_PRODUCT: s = qk factor, so that the difference from the maximum needs no rounded s.
    IS_RISING: nor does the maximum, as no factor is negative and nothing is masked.
    """
    highest = tl.max(qk, 1) * factor if IS_PRODUCT and IS_RISING else tl.max(s, 1)
    m_new = tl.maximum(row_max, highest)
    shift = m_new
    if MASKED:
        # A row that has seen no key yet keeps row_max = -inf; -inf - -inf would be NaN.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    if IS_PRODUCT:
        below = tl.broadcast_to(-shift[:, None], qk.shape)
        d = tl.fma(qk, tl.broadcast_to(factor[:, None], qk.shape), below)
        if MASKED:
            d = tl.where(s == float("-inf"), s, d)
    else:
        d = s - shift[:, None]
    p = power(d, IS_EXACT)
    alpha = power(row_max - shift, IS_EXACT)
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
