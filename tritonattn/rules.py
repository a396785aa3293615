"""Small checks that the public functions share: each passes in silence or raises a worded error.

None reads a value on a device: shapes, strides, dtypes and devices only.  ``f`` is always the
public function's name and ``name`` the argument's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .call import Scale
from .device import Device
from .errors import Text, bad_type, bad_value, describe, dtype_name, unsupported
from .problem import FP8_FORMATS

COMPUTE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FLOAT_DTYPES = (*COMPUTE_DTYPES, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)
FP8_DTYPES = tuple(FP8_FORMATS)
MAX_FLOAT32 = torch.finfo(torch.float32).max
MAX_HEAD_DIM = 576
MAX_HEAD_DIM_V = 512
INTS = (int, torch.SymInt)  # while a compiler traces, a size may be a symbol


def tensor(f: str, name: str, value: object, what: str = "") -> torch.Tensor:
    """``value``, a tensor; ``what`` is the layout wanted, such as ``[total_q, Hq, D]``."""
    wanted = f"must be a tensor {what}".rstrip()
    if not isinstance(value, torch.Tensor):
        fix = f"Pass {name} as a torch.Tensor."
        if isinstance(value, list | tuple):
            fix = f"Pass torch.tensor({name}) with the dtype and device that the rule asks for."
        raise bad_type(f, name, wanted, Text(_brief(value)), fix)
    if value.layout != torch.strided:
        got = Text(f"{describe(value)} with layout {value.layout}")
        fix = f"Pass {name} as a plain tensor, as .to_dense() or .to_padded_tensor() give."
        raise bad_type(f, name, wanted + " with strided layout", got, fix)
    return value


def rank(f: str, name: str, value: torch.Tensor, ndim: int, what: str, fix: str = "") -> None:
    if value.dim() != ndim:
        rule = f"must have {ndim} {'axis' if ndim == 1 else 'axes'}, {what}"
        raise bad_value(f, name, rule, value, fix or f"Reshape {name} to {what}.")


def has_shape(value: torch.Tensor, *shapes: tuple[int, ...]) -> bool:
    """Whether the shape is one of these.

    Ranks are compared first: tuples would compare a symbol with the size of another axis, and a
    compiler would hold it to that.
    """
    return any(
        value.dim() == len(shape) and all(a == b for a, b in zip(value.shape, shape, strict=True))
        for shape in shapes
    )


def size(f: str, name: str, value: torch.Tensor, axis: int, want: int, why: str, fix: str) -> None:
    """Axis ``axis`` must have ``want`` entries; ``why`` says which, such as ``Hkv of k_cache``."""
    if value.shape[axis] != want:
        raise bad_value(f, name, f"must have {want} on axis {axis} ({why})", value, fix)


def dtype(f: str, name: str, value: torch.Tensor, allowed: Sequence[torch.dtype], fix: str) -> None:
    if value.dtype not in allowed:
        raise bad_type(f, name, f"must be {one_of(allowed)}", value, fix)


def same_dtype(f: str, name: str, value: torch.Tensor, want: torch.dtype, of: str) -> None:
    if value.dtype != want:
        rule = f"must have the dtype of {of}, {dtype_name(want)}"
        raise bad_type(f, name, rule, value, f"Pass {name}.to({of}.dtype).")


def same_device(f: str, name: str, value: torch.Tensor, want: torch.device, of: str) -> None:
    if value.device != want:
        rule = f"must be on the device of {of}, {want}"
        got = Text(f"{describe(value)} on {value.device}")
        raise bad_value(f, name, rule, got, f"Pass {name}.to({of}.device).")


def unit_stride(f: str, name: str, value: torch.Tensor, fix: str = "") -> None:
    """Where no step is taken along the last axis, its stride says nothing and may be any."""
    if value.stride(-1) != 1 and value.shape[-1] > 1 and value.numel() > 0:
        got = Text(f"{describe(value)} with strides {list(value.stride())}")
        rule = "must have stride 1 on its last axis"
        raise bad_value(f, name, rule, got, fix or f"Pass {name}.contiguous().")


def no_overlap(f: str, name: str, value: torch.Tensor) -> None:
    """For a tensor that is written: an axis of stride 0 would put many results in one place."""
    strides = value.stride()
    if any(s == 0 and n > 1 for n, s in zip(value.shape, strides, strict=True)):
        got = Text(f"{describe(value)} with strides {list(strides)}")
        rule = "must have its own memory for every entry (no axis of stride 0)"
        raise bad_value(f, name, rule, got, f"Pass {name}.contiguous() or a torch.empty tensor.")


def no_grad(f: str, name: str, value: torch.Tensor) -> None:
    """The package is forward only; a result that silently had no gradient would be worse."""
    if value.requires_grad and torch.is_grad_enabled():
        raise bad_value(
            f,
            name,
            "must not require grad while grad mode is on, as tritonattn computes no gradients",
            Text(f"{describe(value)} with requires_grad=True"),
            f"Call under torch.no_grad() or torch.inference_mode(), or pass {name}.detach().",
        )


def int32_vector(
    f: str, name: str, value: object, what: str, device: torch.device, of: str = "q"
) -> torch.Tensor:
    """Lengths and prefix sums: int32, one axis, contiguous."""
    value = tensor(f, name, value, f"int32 {what}")
    if value.dtype != torch.int32:
        raise bad_type(f, name, f"must be int32 {what}", value, f"Pass {name}.int().")
    rank(f, name, value, 1, what)
    unit_stride(f, name, value)
    same_device(f, name, value, device, of)
    return value


def length(f: str, name: str, value: torch.Tensor, want: int, what: str, fix: str) -> None:
    """Entries of a vector; ``what`` names the size, such as ``B + 1, B = 4 of seq_lens``."""
    if value.shape[0] != want:
        raise bad_value(f, name, f"must have {want} entries ({what})", value, fix)


def scale(
    f: str,
    name: str,
    value: Scale,
    num_kv_heads: int,
    device: torch.device,
    batch: int | None = None,
    *,
    of: str = "q",
) -> None:
    """A float, or float32 ``[]``, ``[1]``, ``[Hkv]`` or, where ``batch`` is known, ``[B, Hkv]``."""
    if value is None:
        return
    if not isinstance(value, torch.Tensor):
        scalar_scale(f, name, value)
        return
    shapes = f"[], [1], [Hkv = {num_kv_heads}]"
    if batch is not None:
        shapes += f" or [B = {batch}, Hkv = {num_kv_heads}]"
    tensor(f, name, value, f"float32 {shapes}")
    rule = f"must be a float or float32 {shapes}"
    if value.dtype != torch.float32:
        raise bad_type(f, name, rule, value, f"Pass {name}.float().")
    allowed = [(), (1,), (num_kv_heads,)]
    if batch is not None:
        allowed.append((batch, num_kv_heads))
    if not has_shape(value, *allowed):
        fix = f"Reshape {name} to one of these shapes; the scale of one KV head comes as [Hkv]."
        raise bad_value(f, name, rule, value, fix)
    same_device(f, name, value, device, of)


def scalar_scale(f: str, name: str, value: object) -> None:
    finite(f, name, value, rule="must be a finite float or a float32 tensor")


def kv_rows(f: str, k: object, v: object, device: torch.device, of: str = "q") -> tuple[int, int]:
    """(Hkv, Dv) of packed keys and values; D and dtype are the caller's to compare."""
    what = "[total_k, Hkv, D]", "[total_k, Hkv, Dv]"
    k, v = tensor(f, "k", k, what[0]), tensor(f, "v", v, what[1])
    for name, x, layout in (("k", k, what[0]), ("v", v, what[1])):
        rank(f, name, x, 3, layout)
        unit_stride(f, name, x)
        same_device(f, name, x, device, of)
    size(f, "v", v, 0, k.shape[0], "total_k of k", "Pass one value row for each key row.")
    size(f, "v", v, 1, k.shape[1], "Hkv of k", "Pass k and v with the same KV heads.")
    _kv_sizes(f, "k", k, "v", v)
    return k.shape[1], v.shape[2]


def kv_pages(
    f: str, k_cache: object, v_cache: object, device: torch.device, of: str = "q"
) -> tuple[int, int]:
    """(Hkv, Dv) of a paged cache; D and dtype are the caller's to compare."""
    what = "[num_pages, page_size, Hkv, D]", "[num_pages, page_size, Hkv, Dv]"
    k, v = tensor(f, "k_cache", k_cache, what[0]), tensor(f, "v_cache", v_cache, what[1])
    for name, x, layout in (("k_cache", k, what[0]), ("v_cache", v, what[1])):
        fix = f"Permute {name} to {layout}: a view is enough, strides may be any."
        rank(f, name, x, 4, layout, fix)
        fix = f"Pass a view of {name} whose last axis is contiguous; the other strides may be any."
        unit_stride(f, name, x, fix)
        same_device(f, name, x, device, of)
    same_dtype(f, "v_cache", v, k.dtype, "k_cache")
    for axis, noun in enumerate(("num_pages", "page_size", "Hkv")):
        fix = "Pass k_cache and v_cache with the same pages and heads."
        size(f, "v_cache", v, axis, k.shape[axis], f"{noun} of k_cache", fix)
    if k.shape[1] < 1:
        fix = "Allocate pages of at least one token."
        raise bad_value(f, "k_cache", "must have page_size >= 1 on axis 1", k, fix)
    _kv_sizes(f, "k_cache", k, "v_cache", v)
    return k.shape[2], v.shape[3]


def _kv_sizes(f: str, k_name: str, k: torch.Tensor, v_name: str, v: torch.Tensor) -> None:
    if k.shape[-2] < 1:
        fix = "Pass at least one KV head."
        raise bad_value(f, k_name, f"must have Hkv >= 1 on axis {k.dim() - 2}", k, fix)
    for name, x, noun, most in (
        (k_name, k, "D", MAX_HEAD_DIM),
        (v_name, v, "Dv", MAX_HEAD_DIM_V),
    ):
        if not 1 <= x.shape[-1] <= most:
            rule = f"must have {noun} from 1 to {most} on its last axis"
            fix = "Larger heads have no kernel here." if x.shape[-1] else "Pass at least one dim."
            raise bad_value(f, name, rule, x, fix)


def block_table(
    f: str, table: object, indptr: object, batch: int, device: torch.device, of: str = "q"
) -> int:
    """The most pages that one sequence may have: the table's columns, or all of a flat table."""
    what = "[batch, max_pages]" if indptr is None else "[total_pages]"
    table = tensor(f, "block_table", table, f"int32 {what}")
    if table.dtype not in INDEX_DTYPES:
        rule = f"must be int32 or int64 {what}"
        raise bad_type(f, "block_table", rule, table, "Pass block_table.int().")
    if indptr is None:
        fix = "Pass one row of page ids for each sequence."
        if table.dim() == 1:
            fix = "Pass block_indptr as well, where each sequence's pages start in a flat table."
        rank(f, "block_table", table, 2, what, fix)
        fix = f"Pass block_table[:{batch}], or one row of page ids for each sequence."
        size(f, "block_table", table, 0, batch, "batch, one row a sequence", fix)
    else:
        fix = "Leave block_indptr out for a table of one row a sequence."
        rank(f, "block_table", table, 1, f"{what}, where block_indptr is given", fix)
        ptr = int32_vector(f, "block_indptr", indptr, "[batch + 1]", device, of)
        fix = "Pass where each sequence's pages start in block_table, then their total."
        length(f, "block_indptr", ptr, batch + 1, f"batch + 1, batch {batch}", fix)
    unit_stride(f, "block_table", table)
    same_device(f, "block_table", table, device, of)
    return table.shape[-1]


def finite(
    f: str,
    name: str,
    value: object,
    minimum: float | None = None,
    *,
    rule: str = "",
    fix: str = "",
) -> None:
    """``bool`` is refused: it would pass for 0 or 1 where a switch was meant."""
    if not rule:
        rule = "must be a finite float" + ("" if minimum is None else f" of at least {minimum:g}")
    if isinstance(value, bool) or not isinstance(value, float | int):
        fix = fix or f"Pass a Python number, such as float({name})."
        raise bad_type(f, name, rule, Text(_brief(value)), fix)
    if not -MAX_FLOAT32 <= value <= MAX_FLOAT32:  # kernels compute in float32; false for NaN too
        raise bad_value(f, name, rule, value, fix or f"Pass a {name} that is finite in float32.")
    if minimum is not None and value < minimum:
        raise bad_value(f, name, rule, value, fix or f"Pass {name} >= {minimum:g}.")


def integer(
    f: str, name: str, value: object, low: int, high: int | None = None, *, fix: str = ""
) -> None:
    bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, INTS):
        fix = f"Pass a Python int; {name} is never read from a device."
        raise bad_type(f, name, f"must be an int {bounds}", Text(_brief(value)), fix)
    if value < low or (high is not None and value > high):
        raise bad_value(f, name, f"must be an int {bounds}", value, fix or f"Pass {name} {bounds}.")


def flag(f: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        got = Text(_brief(value))
        raise bad_type(f, name, "must be True or False", got, f"Pass bool({name}).")


def bfloat16(f: str, name: str, device: Device) -> None:
    """Raises where the GPU does not have it."""
    if not device.has_bf16:
        raise unsupported(
            f,
            name,
            "may be bfloat16 only on a GPU of sm_80 or later",
            Text(f"bfloat16 on {device.title}"),
            f"Pass {name}.half(): float16 and float32 work here.",
        )


def one_of(dtypes: Sequence[torch.dtype]) -> str:
    names = [dtype_name(d) for d in dtypes]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _brief(value: object) -> str:
    """Type and value; a list of lengths may be long, and an array prints over many lines."""
    if isinstance(value, torch.Tensor):
        return f"a tensor, {describe(value)}"
    text = " ".join(repr(value).split())
    text = text if len(text) <= 60 else text[:57] + "..."
    return "None" if value is None else f"{type(value).__name__} {text}"


def keeps_alignment(x: torch.Tensor) -> bool:
    """Whether strides keep every row on 16 bytes; an axis of one entry is never stepped along."""
    steps = zip(x.shape[:-1], x.stride(), strict=False)
    return not any(length > 1 and step * x.element_size() % 16 for length, step in steps)
