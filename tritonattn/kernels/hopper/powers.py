"""Powers of 2, of which some are computed by multiplications instead of the unit for exponentials.

That unit takes 16 numbers a clock, and a tile of keys keeps it as busy as the tensor cores are where
heads are small or scores are capped; multiplications and additions have eight times its rate.
"""

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# 2^f = 1 + f (a + f (b + ...)) for |f| <= 1/2: to 1.0e-4 of itself, where bfloat16 rounds to 2e-3,
# and to 2.9e-6, where float16 rounds to 2.4e-4.  The 1 is exact: so is the power of a whole number.
_ROUGH = (0.6932829022407532, 0.2422109991312027, 0.05500894784927368)
_FINE = (0.6931241750717163, 0.24024099111557007, 0.05590642988681793, 0.009582854807376862)
_MAGIC = 1.5 * 2.0**23 + 127.0  # added to a number: its nearest integer plus 127 in the low bits
_PACK = 8  # numbers that one piece of assembly takes
_ORDER = (0, 5, 3, 6, 1, 4, 2, 7)  # of them, those that the series takes first


def _number(x: float) -> str:
    """As PTX writes a float32."""
    return "0f" + struct.pack(">f", x).hex().upper()


def _series(i: int, terms: tuple[float, ...]) -> list[str]:
    """Instructions for $i = 2^x, x = $(8 + i) <= 0; 2^-127 and less is 0, NaN is NaN."""
    rest = [f"fma.rn.f32 x{i}, x{i}, f{i}, {_number(term)};" for term in (*terms[-3::-1], 1.0)]
    return [
        f".reg .f32 x{i}, t{i}, f{i};",
        f".reg .b32 u{i};",
        f"max.NaN.f32 x{i}, ${_PACK + i}, {_number(-127.0)};",
        f"add.rn.f32 t{i}, x{i}, {_number(_MAGIC)};",
        f"sub.rn.f32 f{i}, t{i}, {_number(_MAGIC)};",
        f"sub.rn.f32 f{i}, x{i}, f{i};",
        f"mov.b32 u{i}, t{i};",
        f"shl.b32 u{i}, u{i}, 23;",
        f"mov.b32 t{i}, u{i};",
        f"fma.rn.f32 x{i}, f{i}, {_number(terms[-1])}, {_number(terms[-2])};",
        *rest,
        f"mul.rn.f32 ${i}, x{i}, t{i};",  # not a sum of bits: it passes NaN on
    ]


def _assembly(count: int, terms: tuple[float, ...]) -> str:
    """Of 8 numbers' powers, of which ``count`` by the series."""
    lines = ["{"]
    lines += [f"ex2.approx.ftz.f32 ${i}, ${_PACK + i};" for i in sorted(_ORDER[count:])]
    for i in _ORDER[:count]:
        lines += _series(i, terms)
    return " ".join([*lines, "}"])


ROUGH = gl.constexpr(tuple(_assembly(count, _ROUGH) for count in range(_PACK + 1)))
FINE = gl.constexpr(tuple(_assembly(count, _FINE) for count in range(_PACK + 1)))
REGISTERS = gl.constexpr(",".join(["=r"] * _PACK + ["r"] * _PACK))


@gluon.jit
def exp2(x, COUNT: gl.constexpr, IS_ROUGH: gl.constexpr):
    """2^x for x <= 0, COUNT of 8 by a series."""
    if COUNT == 0:
        return gl.exp2(x)
    else:
        TEXT: gl.constexpr = ROUGH[COUNT] if IS_ROUGH else FINE[COUNT]
        return gl.inline_asm_elementwise(
            TEXT, REGISTERS, [x], dtype=gl.float32, is_pure=True, pack=8
        )
