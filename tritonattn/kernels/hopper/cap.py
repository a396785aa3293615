"""Capped scores.  Of key tiles that all queries see, their tanh is a polynomial where it may be.

Exponentials come from a unit that two consumers' weights keep busy for half the time of their
products; tanh from it, too, is what all would wait for.  Multiplications are another unit's.
Scores are looked at in groups of GROUP of a thread: if one of a warp's is above LIMIT caps, tanh of
that group is computed as everywhere else.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

GROUP = gl.constexpr(8)
LIMIT = gl.constexpr(1.0)
# tanh y = y p(y^2) for |y| <= LIMIT, to 7e-6 or 6e-7 of itself: p's coefficients, lowest first.
ROUGH = gl.constexpr((0.9999930895, -0.3329806538, 0.1303681163, -0.04481755848, 0.009036425463))
FINE = gl.constexpr(
    (0.9999994136, -0.3332904234, 0.1328143362, -0.05160566961, 0.01674311278, -0.003067060268)
)


@gluon.constexpr_function
def tanh_ptx(x, is_rough):
    """PTX that turns x into its tanh: see ``tanh``."""
    if is_rough:
        return [f"tanh.approx.f32 {x}, {x};"]
    # 1 - 2 / (e^2x + 1) has no inf / inf at either end.
    return [
        f"mul.f32 {x}, {x}, 2.8853900817779268;",  # 2 log2(e)
        f"ex2.approx.ftz.f32 {x}, {x};",
        f"add.f32 {x}, {x}, 1.0;",
        f"rcp.approx.ftz.f32 {x}, {x};",
        f"fma.rn.f32 {x}, {x}, -2.0, 1.0;",
    ]


@gluon.constexpr_function
def one_tanh_ptx(is_rough):
    return " ".join(["mov.f32 $0, $1;", *tanh_ptx("$0", is_rough)])


@gluon.jit
def tanh(y, IS_ROUGH: gl.constexpr):
    """To some 1e-7, or 2^-11 relative if IS_ROUGH: by one instruction where the other way takes
    two of those that exponentials wait for, too.

    Scores that PyTorch rounds to bfloat16 have 2^-9, to float16 2^-12.
    """
    return gl.inline_asm_elementwise(
        one_tanh_ptx(IS_ROUGH), "=f,f", [y], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def capped_ptx(count, is_rough, is_weight):
    """PTX of gain tanh(unit x) + rest of ``count`` numbers x, pairs of one row and of another in
    turn, each with rest, limit, unit, gain; or of its exp2 if ``is_weight``.

    Branches keep ptxas, which would save registers by it, from computing one polynomial after the
    other, each step waiting for the one before.  Between two of them stand a group's polynomials,
    exponentials of the group before, and whether the next one's are small.
    """
    group = GROUP.value
    series = ROUGH.value if is_rough else FINE.value
    terms = range(len(series))
    x, rest, limit, unit, gain = (
        [f"${(1 + position) * count + i}" for i in range(count)] for position in range(5)
    )

    def is_wide(start):
        lines = []
        for row in (0, 1):
            first, *others = (i for i in range(start, start + group) if i // 2 % 2 == row)
            lines += [f"abs.f32 m{row}, {x[first]};"]
            for i in others:
                lines += [f"abs.f32 t0, {x[i]};", f"max.f32 m{row}, m{row}, t0;"]
        return [
            *lines,
            f"setp.gt.f32 p, m0, {limit[0]};",
            f"setp.gt.or.f32 p, m1, {limit[2]}, p;",
            "vote.sync.any.pred p, p, 0xffffffff;",
        ]

    def narrow(start):
        own = [(j, start + j) for j in range(group)]
        lines = [f"mul.f32 z{j}, {x[i]}, {x[i]};" for j, i in own]
        lines += [f"mov.f32 t{j}, k{terms[-1]};" for j, _ in own]
        for k in reversed(terms[:-1]):
            lines += [f"fma.rn.f32 t{j}, t{j}, z{j}, k{k};" for j, _ in own]
        return lines + [f"fma.rn.f32 ${i}, t{j}, {x[i]}, {rest[i]};" for j, i in own]

    def wide(start):
        lines = []
        for i in range(start, start + group):
            lines += [f"mul.f32 t0, {x[i]}, {unit[0]};", *tanh_ptx("t0", is_rough)]
            lines += [f"fma.rn.f32 ${i}, t0, {gain[0]}, {rest[i]};"]
        return lines

    def weights(start):
        if start < 0 or not is_weight:
            return []
        return [f"ex2.approx.ftz.f32 ${i}, ${i};" for i in range(start, start + group)]

    lines = [
        "{ .reg .pred p; .reg .f32 f, square, m<2>;",
        f".reg .f32 k<{len(series)}>, t<{group}>, z<{group}>;",
        f"mul.f32 f, {gain[0]}, {unit[0]};",
        f"mul.f32 square, {unit[0]}, {unit[0]};",
    ]
    for k in terms:  # so that gain tanh(unit x) = x p(x^2)
        lines += ["mul.f32 f, f, square;"] * (k > 0) + [f"mul.f32 k{k}, f, {series[k]};"]
    lines += [*is_wide(0), "@p bra WIDE0;"]
    for way, name, other in ((narrow, "NARROW", "@p bra WIDE"), (wide, "WIDE", "@!p bra NARROW")):
        for start in range(0, count, group):
            following = start + group
            lines += [f"{name}{start}:", *way(start), *weights(start - group)]
            if following < count:
                lines += [*is_wide(following), f"{other}{following};"]
        lines += ["bra DONE;"]
    return " ".join([*lines, "DONE:", *weights(count - group), "}"])


@gluon.constexpr_function
def constraints(count):
    """Of ``count`` results, and the five numbers that each is made of."""
    return ",".join(["=&f"] * count + ["f"] * (5 * count))


@gluon.jit
def limit_of(is_row, unit, gain):
    """[M] numbers up to which a polynomial may be their tanh.  What is no row's has no say: the
    others' results would depend on what it is."""
    square = unit * unit
    last = gain * unit * square * square * square * square * square
    limit = gl.where(is_row, LIMIT / unit, float("inf"))
    # None where coefficients for products, which are those times powers of unit, are out of range.
    return gl.where((last > 2.0**-116) & (last < float("inf")), limit, -1.0)


@gluon.jit
def capped(x, rest, limit, unit, gain, IS_WEIGHT: gl.constexpr, IS_ROUGH: gl.constexpr):
    """gain tanh(unit x) + rest of x [M, N], rest, limit [M], or exp2 of that if IS_WEIGHT."""
    COUNT: gl.constexpr = min(64, x.shape[0] * x.shape[1] // 128)
    ROWS: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    limit = gl.convert_layout(limit, ROWS, assert_trivial=True)
    rest = gl.expand_dims(rest, 1).broadcast_to(x.shape)
    limit = gl.expand_dims(limit, 1).broadcast_to(x.shape)
    return gl.inline_asm_elementwise(
        capped_ptx(COUNT, IS_ROUGH, IS_WEIGHT), constraints(COUNT), [x, rest, limit, unit, gain],
        dtype=gl.float32, is_pure=True, pack=COUNT,
    )  # fmt: skip
