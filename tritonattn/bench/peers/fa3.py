"""FlashAttention-3, the forward-only wheel ``fa3-fwd``: cached keys are given to it contiguous."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from ...call import Call
from ...inputs import cumulative
from ..cases import Case
from . import require
from .layouts import dense, packed


def load() -> str:
    import fa3_fwd_interface

    assert callable(fa3_fwd_interface.flash_attn_func)
    return version("fa3-fwd")


def prepare(case: Case, calls: Sequence[Call]) -> list[Callable[[], Any]]:
    require(
        case, "not causal", "window", "chunk", "softcap", "values of another size", "cached keys"
    )
    import fa3_fwd_interface as interface

    options: dict[str, Any] = {"causal": case.causal, "softcap": case.softcap}
    if case.window is not None:
        options["window_size"] = (case.window - 1, 0)
    if case.chunk is not None:
        options["attention_chunk"] = case.chunk
    if case.is_cached:
        options["num_splits"] = 0  # its own choice; its default is never to split the keys
    runs: list[Callable[[], Any]] = []
    for call in calls:
        k, v, cu_seqlens_k = packed(case, call)
        if case.is_equal:
            q = dense(case, call.q, case.queries)
            k, v = (dense(case, x, case.keys) for x in (k, v))
            runs.append(partial(interface.flash_attn_func, q, k, v, **options))
            continue
        most = max(case.queries), max(case.keys)
        cu_seqlens_q = call.cu_seqlens_q
        if cu_seqlens_q is None:
            cu_seqlens_q = cumulative(case.queries, call.q.device)
        runs.append(
            partial(
                interface.flash_attn_varlen_func, call.q, k, v, cu_seqlens_q, cu_seqlens_k, *most,
                **options,
            )
        )  # fmt: skip
    return runs
