"""What flash-attn's functions share: what is refused, options by our names, errors by theirs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import rules
from ..call import Scale
from ..errors import Text, TritonAttnError, bad_value

Window = tuple[int | None, int | None]

# Our names of arguments, and flash-attn's, for the messages of the functions that are built on.
NAMES = {
    "chunk_size": "attention_chunk",
    "return_lse": "return_attn_probs",
    "k_scale": "k_descale",
    "v_scale": "v_descale",
}

_REFUSED: dict[str, tuple[tuple[object, ...], str, str]] = {
    "dropout_p": (
        (0, 0.0),
        "must be 0, as tritonattn only infers and has no dropout",
        "Pass dropout_p=0.0, which is what a model in eval mode passes.",
    ),
    "qv": (
        (None,),
        "must be None, as no kernel here adds a second product of queries to the scores",
        "Pass torch.cat([q, qv], -1) as q and keys with the values' part behind them.",
    ),
    "pack_gqa": (
        (None,),
        "must be None, as how heads are packed into tiles is part of a tuned configuration here",
        "Leave pack_gqa out.",
    ),
    "sm_margin": (
        (0,),
        "must be 0, as kernels here do not stay on a share of the GPU",
        "Leave sm_margin out.",
    ),
    "scheduler_metadata": (
        (None,),
        "must be None, as it is a schedule of flash-attn 3's own kernels",
        "Leave scheduler_metadata out.",
    ),
}  # fmt: skip


def refuse(f: str, **given: object) -> None:
    """Raises for the first argument that asks for what cannot be done here."""
    for name, value in given.items():
        allowed, rule, fix = _REFUSED[name]
        if isinstance(value, Tensor | bool) or value not in allowed:
            raise bad_value(f, name, rule, value, fix)


def either(f: str, name: str, value: Any, other: str, same: Any) -> Any:
    """One argument that goes by two names."""
    if value is not None and same is not None:
        rule = f"must not be given together with {other}, which means the same"
        raise bad_value(f, name, rule, Text("both"), f"Pass {name} alone.")
    return same if value is None else value


def bound(value: object) -> Any:
    """A bound on lengths, None where it lies on a device: bounds change no result."""
    return None if isinstance(value, Tensor) else value


def options(
    f: str,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    num_splits: int,
    sinks: Tensor | None,
    s_aux: Tensor | None,
    attention_chunk: int,
) -> dict[str, Any]:
    """Keyword arguments of this package's attention functions."""
    rules.integer(f, "attention_chunk", attention_chunk, 0, fix="Pass 0 for no chunks.")
    return {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "chunk_size": attention_chunk or None,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": either(f, "s_aux", s_aux, "sinks", sinks),
        "num_splits": num_splits,
    }


def scales(
    f: str, q: Tensor, batch: int, kv_heads: int, q_scale: Scale, k_scale: Scale, v_scale: Scale
) -> dict[str, Scale]:
    """``k_scale`` and ``v_scale`` from flash-attn's descales.

    Those of the queries and of the keys are both factors on the scores, so one serves for the two.
    """
    for name, scale in (("q_descale", q_scale), ("k_descale", k_scale), ("v_descale", v_scale)):
        rules.scale(f, name, scale, kv_heads, q.device, batch)
    if q_scale is not None and k_scale is not None:
        k_scale = q_scale * k_scale
    return {"k_scale": q_scale if k_scale is None else k_scale, "v_scale": v_scale}


def run(
    f: str, names: Mapping[str, str], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """``function``'s result, or its error in the words of the caller of ``f``."""
    try:
        return function(*args, **kwargs)
    except TritonAttnError as error:
        raise type(error)(_retold(str(error), f, {**NAMES, **names})) from None


def _retold(message: str, f: str, names: Mapping[str, str]) -> str:
    _, colon, rest = message.partition(": ")
    words = re.compile(r"\b(" + "|".join(names) + r")\b")
    return f + colon + words.sub(lambda found: names[found[0]], rest)


def heads_last(
    f: str, name: str, value: object, what: str, sizes: Mapping[int, tuple[int, str]]
) -> Tensor:
    """``value`` with the axes of ``what`` and the sizes wanted; its last axis packed."""
    axes = what.count(",") + 1
    x = rules.tensor(f, name, value, what)
    rules.rank(f, name, x, axes, what)
    for axis, (size, of) in sizes.items():
        rules.size(f, name, x, axis, size, of, f"Pass {name} as {what}.")
    return packed(x)


def packed(x: Tensor) -> Tensor:
    """A copy where the last axis is not contiguous, as flash-attn makes one."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def every(step: int, count: int, device: torch.device) -> Tensor:
    """``cu_seqlens`` of ``count`` sequences of ``step`` tokens each."""
    if step == 0:
        return torch.zeros(count + 1, dtype=torch.int32, device=device)
    return torch.arange(0, count * step + 1, step, dtype=torch.int32, device=device)


def returned(
    q: Tensor, result: Tensor | tuple[Tensor, Tensor]
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """``out``, or ``(out, softmax_lse, S_dmask)``: without dropout the last is empty."""
    if isinstance(result, Tensor):
        return result
    return *result, q.new_empty(0)


def by_batch(
    result: Tensor | tuple[Tensor, Tensor], batch: int, length: int
) -> Tensor | tuple[Tensor, Tensor]:
    """Packed results as ``[B, Lq, Hq, Dv]`` and ``[B, Hq, Lq]``."""
    if isinstance(result, Tensor):
        return result.unflatten(0, (batch, length))
    out, lse = result
    lse = lse.unflatten(1, (batch, length)).transpose(0, 1).contiguous()
    return out.unflatten(0, (batch, length)), lse


def split_packed(f: str, name: str, value: object, what: str, axis: int) -> tuple[Tensor, ...]:
    """The parts along ``axis``, whose size ``what`` tells."""
    parts = int(what.strip("[]").split(", ")[axis])
    x = rules.tensor(f, name, value, what)
    rules.rank(f, name, x, what.count(",") + 1, what)
    rules.size(f, name, x, axis, parts, what, f"Stack the tensors on axis {axis} of {name}.")
    return x.unbind(axis)
