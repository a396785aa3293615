"""FlashInfer: its ragged and paged prefill wrappers, its decode wrapper with tensor cores, and for
latent attention its wrapper for that.

Its plans are made outside what is timed.  Decode gets ``backend="fa2"``: what "auto" chooses does
not split the keys of a sequence.  It compiles its kernels at first use, minutes in all, into
``$FLASHINFER_WORKSPACE_BASE/.cache/flashinfer``; ``compile_ahead`` does so for many cases at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...call import Call
from ...inputs import cumulative
from ..cases import Case
from . import Unsupported, require
from .layouts import Paged, paged

WORKSPACE_BYTES = 512 << 20
USUAL_DIMS = {64, 128, 256}
LATENT_DIMS = (576, 512)


def load() -> str:
    import flashinfer

    return str(flashinfer.__version__)


def prepare(case: Case, calls: Sequence[Call]) -> list[Callable[[], Any]]:
    _check(case)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=calls[0].q.device)
    if case.function == "varlen_attention":
        return _ragged(case, calls, workspace)
    if case.latent:
        return _latent(case, calls, workspace)
    return _paged(case, calls, workspace)


def _check(case: Case) -> None:
    if case.latent:
        require(case, "cached keys", "values of another size")
        if not case.is_decode or case.head_dims != LATENT_DIMS or case.heads[1] != 1:
            raise Unsupported("does latent attention for decodes of 576/512 dims alone")
        return
    features = ["not causal", "window", "softcap", "ALiBi", "fp8 cache", "cached keys"]
    if not case.is_cached:
        features.append("values of another size")
    require(case, *features)
    if not case.causal and case.window is not None:
        raise Unsupported("has no way to do: a window that is not causal")


def _options(case: Case) -> dict[str, Any]:
    return {
        "window_left": -1 if case.window is None else case.window - 1,
        "logits_soft_cap": case.softcap or None,
        "pos_encoding_mode": "ALIBI" if case.alibi else "NONE",
        "q_data_type": case.dtype,
        "kv_data_type": case.cache_dtype or case.dtype,
    }


def _ragged(case: Case, calls: Sequence[Call], workspace: Tensor) -> list[Callable[[], Any]]:
    import flashinfer

    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    first, (dim, dim_v) = calls[0], case.head_dims
    wrapper.plan(
        first.cu_seqlens_q, first.cu_seqlens_k, *case.heads, dim, head_dim_vo=dim_v,
        causal=case.causal, **_options(case),
    )  # fmt: skip
    return [partial(wrapper.run, call.q, call.k, call.v) for call in calls]


def _paged(case: Case, calls: Sequence[Call], workspace: Tensor) -> list[Callable[[], Any]]:
    import flashinfer

    device, size = calls[0].q.device, case.page_size
    pools = [paged(case, call) for call in calls]
    indptr, indices = _page_lists(case, pools[0])
    last = torch.tensor([(n - 1) % size + 1 for n in case.keys], dtype=torch.int32, device=device)
    wrapper: Any
    if case.is_decode:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True, backend="fa2"
        )
        wrapper.plan(indptr, indices, last, *case.heads, case.head_dims[0], size, **_options(case))
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        cu_seqlens_q = calls[0].cu_seqlens_q
        wrapper.plan(
            cu_seqlens_q, indptr, indices, last, *case.heads, case.head_dims[0], size,
            causal=case.causal, **_options(case),
        )  # fmt: skip
    scales = {}
    if case.cache_dtype is not None:
        scales = {"k_scale": calls[0].k_scale, "v_scale": calls[0].v_scale}
    return [
        partial(wrapper.run, call.q, (pool.k_cache, pool.v_cache), **scales)
        for call, pool in zip(calls, pools, strict=True)
    ]


def _page_lists(case: Case, pool: Paged) -> tuple[Tensor, Tensor]:
    """Where each sequence's pages begin in the list of all, and that list."""
    counts = [-(-length // case.page_size) for length in case.keys]
    pages = [row[:n] for row, n in zip(pool.block_table, counts, strict=True)]
    return cumulative(counts, pool.block_table.device), torch.cat(pages)


def _latent(case: Case, calls: Sequence[Call], workspace: Tensor) -> list[Callable[[], Any]]:
    import flashinfer

    pools = [paged(case, call) for call in calls]
    dim, dim_v = case.head_dims
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=workspace.device)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace)
    wrapper.plan(
        starts, *_page_lists(case, pools[0]), pools[0].seq_lens, case.heads[0], dim_v, dim - dim_v,
        case.page_size, True, dim**-0.5, case.dtype, case.dtype,
    )  # fmt: skip
    return [
        partial(
            wrapper.run, call.q[..., :dim_v], call.q[..., dim_v:],
            pool.k_cache[:, :, 0, :dim_v], pool.k_cache[:, :, 0, dim_v:],
        )
        for call, pool in zip(calls, pools, strict=True)
    ]  # fmt: skip


def compile_ahead(cases: Sequence[Case], device: torch.device) -> str:
    """Compile what the cases need, many at a time; what happened, in a few words.

    This asks FlashInfer's inner modules; where they have changed, each case compiles its own later.
    """
    from flashinfer.jit import build_jit_specs, gen_batch_mla_module, gen_batch_prefill_module
    from flashinfer.utils import (
        PosEncodingMode,
        determine_attention_backend,
        determine_mla_backend,
    )

    usual: dict[str, Any] = {}
    unusual: dict[str, Any] = {}  # apart, since one that does not compile stops all beside it
    for case in cases:
        with contextlib.suppress(Unsupported):
            _check(case)
            if case.latent:
                dim, dim_v = case.head_dims
                spec = gen_batch_mla_module(
                    determine_mla_backend(device), *(case.dtype,) * 3, torch.int32, dim_v,
                    dim - dim_v, False,
                )  # fmt: skip
                unusual[spec.name] = spec
                continue
            position = PosEncodingMode["ALIBI" if case.alibi else "NONE"].value
            dtypes = case.dtype, case.cache_dtype or case.dtype
            backend = determine_attention_backend(device, position, False, False, *dtypes)
            spec = gen_batch_prefill_module(
                "fa2" if case.is_decode else backend, *dtypes, case.dtype, torch.int32,
                *case.head_dims, position, case.window is not None, case.softcap > 0, False,
            )  # fmt: skip
            (usual if set(case.head_dims) <= USUAL_DIMS else unusual)[spec.name] = spec
    build_jit_specs(list(usual.values()), verbose=False)
    with contextlib.suppress(Exception):
        build_jit_specs(list(unusual.values()), verbose=False)
    return f"{len(usual) + len(unusual)} modules are built, or tried"
