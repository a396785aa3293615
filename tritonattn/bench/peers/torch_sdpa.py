"""``scaled_dot_product_attention`` of torch with one backend: equally long sequences, no cache."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...call import Call
from ..cases import Case
from . import Unsupported, require
from .layouts import dense


def prepare(case: Case, calls: Sequence[Call], backend: SDPBackend) -> list[Callable[[], Any]]:
    require(case, "not causal")
    if not case.is_equal:
        raise Unsupported("takes sequences of one length only")
    if case.causal and case.queries != case.keys:
        raise Unsupported("is causal from the first key, not the last")
    made = [_heads_first(case, call) for call in calls]
    runs = [_run(case, *tensors, backend) for tensors in made]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # why a backend refuses; its error says enough
        try:
            runs[0]()
        except RuntimeError:
            if case.heads[0] == case.heads[1]:
                raise
            # Perhaps no grouped heads in this backend: give every query head keys of its own.
            group = case.heads[0] // case.heads[1]
            runs = [
                _run(case, q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), backend)
                for q, k, v in made
            ]
            runs[0]()
    return runs


def _heads_first(case: Case, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    assert call.k is not None
    assert call.v is not None
    q = dense(case, call.q, case.queries).transpose(1, 2)
    k, v = (dense(case, x, case.keys).transpose(1, 2) for x in (call.k, call.v))
    return q, k, v


def _run(case: Case, q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Callable[[], Tensor]:
    grouped = q.shape[1] != k.shape[1]

    def run() -> Tensor:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return run


def version() -> str:
    return f"torch {torch.__version__}"
