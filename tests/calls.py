"""Small calls of the three attention functions, and changes to them: nothing here runs a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tritonattn.call import Call

VARLEN, PREFIX, PAGED = "varlen_attention", "prefix_attention", "paged_attention"
ALL, NEW, CACHED = (VARLEN, PREFIX, PAGED), (VARLEN, PREFIX), (PREFIX, PAGED)
fp16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
i32, i64, fp8 = torch.int32, torch.int64, torch.float8_e4m3fn

Change = Callable[[Call, Any], Any]


def good(function: str, where: torch.device | str = "cpu", /, **changes: Any) -> Call:
    """Two sequences: 4 query heads of 16 dims, 2 KV heads, values of 24, pages of 8 tokens.

    A change that is callable is called with the call and with what it has by that name.
    """

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=i32, device=where)

    def halves(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=fp16, device=where)

    call = Call(function, q=halves(2 if function == PAGED else 3, 4, 16))
    if function != PAGED:
        call.cu_seqlens_q = ints(0, 2, 3)
        total_k = 7 if function == VARLEN else 3
        call.k, call.v = halves(total_k, 2, 16), halves(total_k, 2, 24)
    if function == VARLEN:
        call.cu_seqlens_k = ints(0, 4, 7)
    else:
        call.k_cache, call.v_cache = halves(6, 8, 2, 16), halves(6, 8, 2, 24)
        call.block_table = ints(*range(6)).view(2, 3)
        setattr(call, "seq_lens" if function == PAGED else "context_lens", ints(9, 20))
    for name, change in changes.items():
        value = change(call, getattr(call, name)) if callable(change) else change
        setattr(call, name, value)
    return call


def new(*shape: int, dtype: torch.dtype = fp16) -> Change:
    return lambda call, _: torch.zeros(shape, dtype=dtype, device=call.q.device)


def to(where_or_dtype: Any) -> Change:
    return lambda _, old: old.to(where_or_dtype)


META = to("meta")


def strided(_: Call, old: torch.Tensor) -> torch.Tensor:
    return old.repeat_interleave(2, dim=-1)[..., ::2]


def rows(n: int) -> Change:
    return lambda _, old: old.new_zeros(n, *old.shape[1:])


def axis(at: int, n: int) -> Change:
    def change(_: Call, old: torch.Tensor) -> torch.Tensor:
        shape = list(old.shape)
        shape[at] = n
        return old.new_zeros(shape)

    return change


def listed(_: Call, old: torch.Tensor) -> list[Any]:
    return old.tolist()
