"""A consumer's two matrix products, of queries and keys and of weights and values, and what they
take from shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
)

from . import ring
from .ring import COLUMNS, swizzled
from .spec import MID as _MID

MID = gl.constexpr(_MID)


@gluon.constexpr_function
def products(columns):
    """Where a warpgroup's products lie: [M, columns] of float32."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.constexpr_function
def multiply_or_leave(count):
    """PTX that multiplies ``count`` numbers, pairs of one row and of another in turn, with as many
    factors, unless all of the warp's are 1."""
    factor = [f"${2 * count + i}" for i in range(count)]
    lines = [
        "{ .reg .pred p;",
        f"setp.neu.f32 p, {factor[0]}, 1.0;",
        f"setp.neu.or.f32 p, {factor[2]}, 1.0, p;",
        "vote.sync.any.pred p, p, 0xffffffff;",
        "@!p bra LEAVE;",
        *(f"mul.rn.f32 ${i}, ${i}, {factor[i]};" for i in range(count)),
        "LEAVE: }",
    ]
    return " ".join(lines)


@gluon.constexpr_function
def in_place(count):
    """Constraints of ``count`` numbers that change where they are, and as many other inputs."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def turn(GIVE: gl.constexpr, OF: gl.constexpr):
    """Wait for a consumer's turn at the tensor cores, or give it."""
    BAR: gl.constexpr = 13 + OF
    OP: gl.constexpr = "bar.arrive" if GIVE else "bar.sync"
    gl.inline_asm_elementwise(
        OP + " $1, 256; mov.b32 $0, $1;", "=r,r", [gl.to_tensor(BAR)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def clear_unseen(vs, stage, key, low, high, SPEC: gl.constexpr):
    """Zero the values of keys outside low..high in a tile: 0 x NaN would reach the sums."""
    STRIPS: gl.constexpr = SPEC.BLOCK_DV // COLUMNS
    PARTS: gl.constexpr = SPEC.BLOCK_N // 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    parts = ring.view_as(vs, vs.dtype, [SPEC.STAGES * STRIPS * PARTS, 16, COLUMNS], swizzled(2))
    offs = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
    for part in range(PARTS):
        begin = key + part * 16
        if (begin < low) | (begin + 16 > high):
            is_seen = gl.expand_dims((begin + offs >= low) & (begin + offs < high), 1)
            for strip in gl.static_range(STRIPS):
                rows = parts.index((stage * STRIPS + strip) * PARTS + part)
                rows.store(gl.where(is_seen, rows.load(LAYOUT), 0.0))
    fence_async_shared()
    ring.barrier()


@gluon.jit
def begin_scores(qs, part, ks, stage, SPEC: gl.constexpr):
    """Begin Q K of part ``part`` of ``qs`` and the keys in ``stage``."""
    M: gl.constexpr = SPEC.BLOCK_M // ring.CONSUMERS
    PARTS: gl.constexpr = SPEC.Q_SLOTS * ring.CONSUMERS
    zero = gl.full([M, SPEC.BLOCK_N], 0.0, gl.float32, products(SPEC.BLOCK_N))
    q = ring.main_of(qs, part, M, PARTS, SPEC.BLOCK_D)
    k = ring.main_of(ks, stage, SPEC.BLOCK_N, SPEC.STAGES, SPEC.BLOCK_D)
    qk = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    if ring.main_part(SPEC.BLOCK_D) < SPEC.BLOCK_D:
        q = ring.rest_of(qs, part, PARTS, SPEC.BLOCK_D)
        k = ring.rest_of(ks, stage, SPEC.STAGES, SPEC.BLOCK_D)
        qk = warpgroup_mma(q, k.permute((1, 0)), qk, is_async=True)
    return qk


@gluon.jit
def begin_values(p, rest, vs, stage, acc, SPEC: gl.constexpr):
    """Begin acc + P V of the values in ``stage``; if MID, two products, of ``p`` and ``rest``."""
    values = ring.main_of(vs, stage, SPEC.BLOCK_N, SPEC.STAGES, SPEC.BLOCK_DV)
    if SPEC.FORM & MID:
        HALF: gl.constexpr = SPEC.BLOCK_N // 2
        acc = warpgroup_mma(p, values.slice(0, HALF), acc, is_async=True)
        return warpgroup_mma(rest, values.slice(HALF, HALF), acc, is_async=True)
    else:
        return warpgroup_mma(p, values, acc, is_async=True)


@gluon.jit
def rescale(acc, alpha):
    """acc * alpha [M]; a warp of whose rows all stay as they are goes past it."""
    LAYOUT: gl.constexpr = acc.type.layout
    PACK: gl.constexpr = min(64, acc.shape[0] * acc.shape[1] // 128)
    alpha = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, LAYOUT)), 1)
    return gl.inline_asm_elementwise(
        multiply_or_leave(PACK), in_place(PACK),
        [acc, alpha.broadcast_to(acc.shape)], dtype=gl.float32, is_pure=True, pack=PACK,
    )  # fmt: skip


@gluon.jit
def halves(x):
    """The first and the last half of the columns."""
    x = gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2])
    return gl.split(gl.permute(x, [0, 2, 1]))


@gluon.jit
def operand(w, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """A half's weights as P V takes them.

    The compiler left to itself would round neighbours from different halves together, and then
    sort them.
    """
    if dtype == gl.bfloat16:
        w = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [w], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        w = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [w], dtype=gl.float16, is_pure=True, pack=2
        )
    return gl.convert_layout(w, LAYOUT)
