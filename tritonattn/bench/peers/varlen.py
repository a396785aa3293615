"""torch's ``varlen_attn``: packed sequences of any lengths, no cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ...call import Call
from ..cases import Case
from . import Unsupported, require


def load() -> str:
    from torch.nn.attention import varlen

    assert callable(varlen.varlen_attn)
    return f"torch {torch.__version__}"


def prepare(case: Case, calls: Sequence[Call]) -> list[Callable[[], Any]]:
    from torch.nn.attention import varlen

    attend: Callable[..., Any] = varlen.varlen_attn
    require(case, "not causal", "window")
    # Its arguments changed between releases of torch.
    takes = inspect.signature(attend).parameters
    options: dict[str, Any] = {}
    if "window_size" in takes:
        left = -1 if case.window is None else case.window - 1
        options["window_size"] = (left, 0 if case.causal else -1)
    elif case.window is not None:
        raise Unsupported("has no way to do: window")
    else:
        options["is_causal"] = case.causal
    if "enable_gqa" in takes:
        options["enable_gqa"] = case.heads[0] != case.heads[1]
    most = max(case.queries), max(case.keys)
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    return [
        partial(attend, *(getattr(call, name) for name in names), *most, **options)
        for call in calls
    ]
