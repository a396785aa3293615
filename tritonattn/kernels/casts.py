"""Number formats by integer arithmetic: float8 to and from wider floats, and rounding.

A float8 byte is ``s e..e m..m`` and its value ``(-1)^s 2^(e - bias) 1.m``, or
``(-1)^s 2^(1 - bias) 0.m`` where e is 0.  Triton converts e4m3fn by an instruction from sm_89 on
and not at all before, and its interpreter rounds towards zero or worse, so what must be exact
everywhere is computed on the bits.
"""

import triton
import triton.language as tl


@triton.jit
def decode(raw, FORMAT: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """The values of float8 bytes, ``raw`` (uint8), as DTYPE: float16, bfloat16 or float32.

    Exact; NaN and infinities are kept.  NATIVE converts by the hardware's instructions, on sm_89
    and later, never under the interpreter.  Triton's own way from e5m2 to bfloat16 loses infinities
    and NaN, and that to float16 takes four instructions a pair.
    """
    if NATIVE and FORMAT == "e4m3fn":
        value = raw.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    elif NATIVE and FORMAT == "e5m2":
        value = tl.inline_asm_elementwise(
            """
            {
                .reg .b16 low, high;
                mov.b32 {low, high}, $2;
                cvt.rn.f16x2.e5m2x2 $0, low;
                cvt.rn.f16x2.e5m2x2 $1, high;
            }
            """,
            "=r,=r,r", [raw], dtype=tl.float16, is_pure=True, pack=4,
        ).to(DTYPE)  # fmt: skip
    else:
        value = _decode_to_fp16(raw, FORMAT).to(DTYPE)
    return value


@triton.jit
def decode_pairs(pairs, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Of pairs of float8 bytes (16 bits) the values of all lower ones, and of all upper ones.

    Pairs are laid out for a product as the 16-bit numbers that they become are, so they go straight
    from shared memory to its operands; bytes would be read one by one.  By NVIDIA's instructions,
    from sm_89 on.
    """
    tl.static_assert(FORMAT == "e4m3fn" or FORMAT == "e5m2", "unknown float8 format")
    CONVERT: tl.constexpr = "cvt.rn.f16x2.e4m3x2" if FORMAT == "e4m3fn" else "cvt.rn.f16x2.e5m2x2"
    ASM: tl.constexpr = (
        "{ .reg .b32 sorted; .reg .b16 low, high; prmt.b32 sorted, $2, 0, 0x3120;"
        "mov.b32 {low, high}, sorted; " + CONVERT + " $0, low; " + CONVERT + " $1, high; }"
    )
    low, high = tl.inline_asm_elementwise(
        ASM, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
    )
    return low.to(DTYPE), high.to(DTYPE)


@triton.jit
def as_loaded(tile, rows):
    """``tile`` [N, D] of 16-bit numbers, decoded in the layout in which its bytes were loaded.

    It then passes through shared memory as 16-bit numbers, of which the second operand of a product
    is read eight at a time, where bytes are read one by one.  An instruction that looks at
    ``rows`` [N] as well is not moved behind that; the assembler drops it.  As it is not said to be
    pure, the operands' layout is not chosen for the bytes that came before it either.
    """
    rows = tl.broadcast_to(rows[:, None], tile.shape)
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r", [tile, rows], dtype=tile.dtype, is_pure=False, pack=2
    )


@triton.jit
def _decode_to_fp16(raw, FORMAT: tl.constexpr):
    """float16 holds every value of the four formats; only the exponent's bias differs."""
    tl.static_assert(
        FORMAT == "e4m3fn" or FORMAT == "e5m2" or FORMAT == "e4m3fnuz" or FORMAT == "e5m2fnuz",
        "unknown float8 format",
    )
    byte = raw.to(tl.uint16)
    sign = (byte & 0x80) << 8
    if FORMAT == "e5m2":  # the upper byte of a float16
        value = (byte << 8).to(tl.float16, bitcast=True)
    elif FORMAT == "e4m3fn":
        # Placed in float16's fields the exponent is 15 - 7 too low.  A multiplication mends
        # subnormals as well.
        value = ((byte & 0x7F) << 7 | sign).to(tl.float16, bitcast=True) * 256.0
        value = tl.where((byte & 0x7F) == 0x7F, float("nan"), value)
    elif FORMAT == "e4m3fnuz":
        value = ((byte & 0x7F) << 7 | sign).to(tl.float16, bitcast=True) * 128.0
        value = tl.where(byte == 0x80, float("nan"), value)
    else:
        # One more than float16's bias.  The greatest exponent is float16's infinity, so it is
        # lowered on the bits; what has no lower exponent to go to becomes a float16 subnormal.
        magnitude = (byte & 0x7F) << 8
        lowered = tl.where(magnitude >= 0x800, magnitude - 0x400, magnitude >> 1).to(tl.uint16)
        value = (lowered | sign).to(tl.float16, bitcast=True)
        value = tl.where(byte == 0x80, float("nan"), value)
    return value.to(tl.float16)


@triton.jit
def encode(x, FORMAT: tl.constexpr):
    """The float8 bytes (uint8) nearest to ``x`` (float32): ties to even, NaN to NaN.

    What lies beyond the greatest finite value, infinities included, becomes that value.
    """
    tl.static_assert(
        FORMAT == "e4m3fn" or FORMAT == "e5m2" or FORMAT == "e4m3fnuz" or FORMAT == "e5m2fnuz",
        "unknown float8 format",
    )
    IS_FNUZ: tl.constexpr = FORMAT == "e4m3fnuz" or FORMAT == "e5m2fnuz"
    IS_E4M3: tl.constexpr = FORMAT == "e4m3fn" or FORMAT == "e4m3fnuz"
    MANTISSA: tl.constexpr = 3 if IS_E4M3 else 2
    BIAS: tl.constexpr = (7 if IS_E4M3 else 15) + (1 if IS_FNUZ else 0)
    # The greatest finite values as float32 bits: 448, 57344, 240, 57344.
    GREATEST: tl.constexpr = (
        0x43E00000 if FORMAT == "e4m3fn" else (0x43700000 if IS_E4M3 else 0x47600000)
    )
    DROPPED: tl.constexpr = 23 - MANTISSA  # float32's mantissa bits that float8 has not
    SMALLEST_NORMAL: tl.constexpr = (128 - BIAS) << 23
    # A float32 whose unit in the last place is the smallest subnormal: adding it rounds to a whole
    # number of these.
    ROUNDER: tl.constexpr = (127 + 23 + 1 - BIAS - MANTISSA) << 23

    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, GREATEST)

    odd = (magnitude >> DROPPED) & 1
    normal = (magnitude + odd + ((1 << (DROPPED - 1)) - 1)) >> DROPPED
    normal = normal - ((127 - BIAS) << MANTISSA)
    rounder = tl.full(x.shape, ROUNDER, tl.int32)
    shifted = magnitude.to(tl.float32, bitcast=True) + rounder.to(tl.float32, bitcast=True)
    subnormal = shifted.to(tl.int32, bitcast=True) - ROUNDER

    code = tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal)
    sign = (bits >> 24) & 0x80
    if IS_FNUZ:  # no negative zero: its byte is the NaN
        code = tl.where(code == 0, 0, code | sign)
        code = tl.where(is_nan, 0x80, code)
    else:
        code = tl.where(is_nan, 0x7F, code) | sign
    return code.to(tl.uint8)


@triton.jit
def widen(x, INTERPRETED: tl.constexpr):
    """``x`` (float16, bfloat16, float32) as float32.

    The interpreter by itself takes bfloat16's subnormals for 0.
    """
    if INTERPRETED and x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        value = bits.to(tl.float32, bitcast=True)
    else:
        value = x.to(tl.float32)
    return value


@triton.jit
def split_power(blocks, COUNT: tl.constexpr, INTERPRETED: tl.constexpr):
    """Rows of bfloat16, in ``blocks`` of their columns, in float16 times a power of two a row.

    Exact but for what is 2^-14 of a row's greatest magnitude or less.
    """
    greatest = tl.max(tl.abs(widen(blocks[0], INTERPRETED)), 1)
    for i in tl.static_range(1, COUNT):
        greatest = tl.maximum(greatest, tl.max(tl.abs(widen(blocks[i], INTERPRETED)), 1))
    exponent = greatest.to(tl.int32, bitcast=True) & 0x7F800000
    # Rows of zeros, infinities or NaN stay; a power's inverse must not be subnormal.
    exponent = tl.where((exponent == 0) | (exponent == 0x7F800000), 0x3F800000, exponent)
    exponent = tl.minimum(exponent, 0x7E800000)
    inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)[:, None]
    halves = ()
    for i in tl.static_range(COUNT):
        halves += ((widen(blocks[i], INTERPRETED) * inverse).to(tl.float16),)
    return halves, exponent.to(tl.float32, bitcast=True)


@triton.jit
def round_to(x, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """``x`` (float32, or DTYPE already) as DTYPE, rounded to nearest even.

    The interpreter by itself rounds to bfloat16 towards zero.
    """
    if x.dtype == DTYPE:
        value = x
    elif INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, 0x7FC0, rounded)
        value = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        value = x.to(DTYPE)
    return value
