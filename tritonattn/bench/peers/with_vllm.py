"""vLLM's Triton kernel, ``unified_attention``, called as its Triton backend does."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ...call import Call
from ...inputs import cumulative
from ..cases import Case
from . import require
from .layouts import paged

HOMES = ("vllm.v1.attention.ops", "vllm.attention.ops")  # newer releases first
SEGMENTS = 16  # parts that the keys of a decode are cut into
LEAST_GRID = 128  # programs that make it leave the keys whole


def _unified_attention() -> Callable[..., None]:
    problems = []
    for home in HOMES:
        try:
            return importlib.import_module(f"{home}.triton_unified_attention").unified_attention
        except ImportError as error:
            problems.append(error)
    raise problems[0]


def load() -> str:
    _unified_attention()
    try:
        return version("vllm")
    except PackageNotFoundError:
        return "of unknown version"


def prepare(case: Case, calls: Sequence[Call]) -> list[Callable[[], Any]]:
    require(case, "window", "softcap", "ALiBi", "sinks", "fp8 cache", "cached keys")
    attend = _unified_attention()
    return [_run(case, call, attend) for call in calls]


def _run(case: Case, call: Call, attend: Callable[..., None]) -> Callable[[], torch.Tensor]:
    pool, device = paged(case, call), call.q.device
    out = torch.empty_like(call.q)
    options: dict[str, Any] = {
        "q": call.q,
        "k": pool.k_cache,
        "v": pool.v_cache,
        "out": out,
        "cu_seqlens_q": call.cu_seqlens_q,
        "max_seqlen_q": max(case.queries),
        "seqused_k": pool.seq_lens,
        "max_seqlen_k": max(case.keys),
        "softmax_scale": case.head_dims[0] ** -0.5,
        "causal": True,
        "window_size": (-1, -1) if case.window is None else (case.window - 1, 0),
        "block_table": pool.block_table,
        "softcap": case.softcap,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
        "alibi_slopes": call.alibi_slopes,
        "sinks": call.sinks,
    }
    if call.cu_seqlens_q is None:
        options["cu_seqlens_q"] = cumulative(case.queries, device)
    # Its arguments changed between releases.
    takes = inspect.signature(attend).parameters
    for name in ("k", "v"):
        scale = getattr(call, f"{name}_scale") or 1.0
        tensor = torch.tensor([scale], dtype=torch.float32, device=device)
        options[f"{name}_descale"] = tensor.expand(case.batch, case.heads[1])
    if case.cache_dtype is not None and "kv_quant_mode" in takes:
        modes = importlib.import_module("vllm.v1.kv_cache_interface").KVQuantMode
        options["kv_quant_mode"] = modes.FP8_PER_TENSOR
    if "seq_threshold_3D" in takes:
        options |= _scratch(case, device)
    if "is_uniform_decode" in takes:
        options["is_uniform_decode"] = case.is_decode
    run = partial(attend, **{name: x for name, x in options.items() if name in takes})

    def call_it() -> torch.Tensor:
        run()
        return out

    return call_it


def _scratch(case: Case, device: torch.device) -> dict[str, Any]:
    """What its backend allocates once, for decodes of few sequences."""
    threshold = LEAST_GRID // case.heads[1]
    shape = (threshold, case.heads[0], SEGMENTS)
    width = 1 << (case.head_dims[0] - 1).bit_length()

    def floats(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.float32, device=device)

    return {
        "seq_threshold_3D": threshold,
        "num_par_softmax_segments": SEGMENTS,
        "softmax_segm_output": floats(*shape, width),
        "softmax_segm_max": floats(*shape),
        "softmax_segm_expsum": floats(*shape),
    }
