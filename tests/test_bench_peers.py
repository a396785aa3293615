"""The adapters of ``tritonattn bench`` against libraries played by the oracle.

What is shown is that an adapter hands over what the library's documentation asks for; that the
library computes the same thing is checked by the bench before it times anything.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tritonattn import reference
from tritonattn.bench import peers
from tritonattn.bench.cases import FP8, Case
from tritonattn.bench.correctness import Oracle
from tritonattn.bench.inputs import build, copies
from tritonattn.inputs import cumulative

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"heads": (4, 2), "head_dims": (32, 32)}
EQUAL = Case("test", "equal", "varlen_attention", (33, 33), (33, 33), **SMALL)
VARLEN = Case("test", "varlen", "varlen_attention", (50, 7), (50, 7), **SMALL)
PREFIX = Case("test", "prefix", "prefix_attention", (24, 5), (39, 3), **SMALL)
PREFIX_EQUAL = Case("test", "prefix, equal", "prefix_attention", (24, 24), (9, 9), **SMALL)
DECODE = Case("test", "decode", "paged_attention", (50, 3), **SMALL)
DECODE_EQUAL = Case("test", "decode, equal", "paged_attention", (20, 20), page_size=7, **SMALL)
MIXED = Case("test", "mixed", "paged_attention", (61, 17), (1, 9), page_size=12, **SMALL)
CASES = [EQUAL, VARLEN, PREFIX, PREFIX_EQUAL, DECODE, DECODE_EQUAL, MIXED]
CASES += [replace(EQUAL, causal=False), replace(MIXED, window=6), replace(VARLEN, softcap=9.0)]


def check(name: str, case: Case) -> None:
    """Every copy's callable gives the right result."""
    call = build(case, CPU)
    oracle = Oracle(case, call)
    found, notes = peers.load([name])
    assert name in found, notes[name]
    runs = found[name].prepare(case, copies(case, call, case.bytes // 2))
    assert len(runs) == 2
    for run in runs:
        oracle.check(run(), is_peer=True)


def window_of(left: int, right: int) -> tuple[int | None, int | None]:
    return (None if left < 0 else left, None if right < 0 else right)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fa3_adapter(case: Case, monkeypatch: pytest.MonkeyPatch):
    def varlen(q, k, v, cu_q, cu_k, max_q, max_k, **options):
        assert max_k == int((cu_k[1:] - cu_k[:-1]).max())
        assert options.pop("num_splits", 1) == (0 if case.is_cached else 1)
        options["window_size"] = window_of(*options.get("window_size", (-1, -1)))
        return reference.varlen_attention(q, k, v, cu_q, cu_k, **options).to(q.dtype)

    def dense(q, k, v, **options):
        cu_q, cu_k = (cumulative([x.shape[1]] * x.shape[0]) for x in (q, k))
        flat = (x.flatten(0, 1) for x in (q, k, v))
        return varlen(*flat, cu_q, cu_k, q.shape[1], k.shape[1], **options).view(q.shape)

    interface = SimpleNamespace(flash_attn_func=dense, flash_attn_varlen_func=varlen)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", interface)
    monkeypatch.setattr("tritonattn.bench.peers.fa3.version", lambda _: "0", raising=True)
    check("fa3", case)


class Wrapper:
    """The part of FlashInfer's wrappers that is used here: NHD, plan, run."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str, **how: Any) -> None:
        assert workspace.dtype == torch.uint8
        assert not workspace.any()
        assert kv_layout == "NHD"
        self.how = how

    def options(self, planned: dict[str, Any]) -> dict[str, Any]:
        assert planned["q_data_type"] == torch.bfloat16
        assert planned["pos_encoding_mode"] == "NONE"
        return {
            "causal": planned.get("causal", False),
            "window_size": window_of(planned["window_left"], -1),
            "softcap": planned["logits_soft_cap"] or 0.0,
        }

    def pages(self, cu_q, indptr, indices, last, page_size, q, caches, options, **scales):
        pages = indptr[1:] - indptr[:-1]
        assert len(indices) == indptr[-1]
        seq_lens = (pages - 1) * page_size + last
        how = options | {"cu_seqlens_q": cu_q, "block_indptr": indptr} | scales
        return reference.paged_attention(q, *caches, indices, seq_lens, **how).to(q.dtype)


class Ragged(Wrapper):
    def plan(self, cu_q, cu_k, heads, kv_heads, dim, head_dim_vo, **planned):
        assert (heads, kv_heads, dim, head_dim_vo) == (4, 2, 32, 32)
        self.planned = cu_q, cu_k, self.options(planned)

    def run(self, q, k, v):
        cu_q, cu_k, options = self.planned
        return reference.varlen_attention(q, k, v, cu_q, cu_k, **options).to(q.dtype)


class Paged(Wrapper):
    def plan(self, cu_q, indptr, indices, last, heads, kv_heads, dim, page_size, **planned):
        assert (heads, kv_heads, dim) == (4, 2, 32)
        self.planned = cu_q, indptr, indices, last, page_size
        self.chosen = self.options(planned)

    def run(self, q, caches, **scales):
        return self.pages(*self.planned, q, caches, self.chosen, **scales)


class Decode(Paged):
    def plan(self, *args, **planned):
        assert self.how == {"use_tensor_cores": True, "backend": "fa2"}
        super().plan(None, *args, **planned, causal=True)


class Latent(Wrapper):
    def __init__(self, workspace: torch.Tensor) -> None:
        super().__init__(workspace, "NHD")

    def plan(
        self, cu_q, indptr, indices, seq_lens, heads, dim_ckv, dim_kpe, page_size, causal,
        sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert (heads, dim_ckv, dim_kpe) == (4, 512, 64)
        assert q_data_type == kv_data_type == torch.bfloat16
        assert torch.equal(cu_q, torch.arange(len(seq_lens) + 1).int())
        last = (seq_lens - 1) % page_size + 1
        self.planned = cu_q, indptr, indices, last, page_size
        self.chosen = {"causal": causal, "softmax_scale": sm_scale}

    def run(self, q_nope, q_pe, ckv, kpe):
        q, k = torch.cat([q_nope, q_pe], -1), torch.cat([ckv, kpe], -1)[:, :, None]
        return self.pages(*self.planned, q, (k, ckv[:, :, None]), self.chosen)


LATENT = Case(
    "test", "latent", "paged_attention", (50, 3), heads=(4, 1), head_dims=(576, 512), latent=True
)


@pytest.mark.parametrize("case", [*CASES, replace(DECODE, cache_dtype=FP8), LATENT], ids=str)
def test_flashinfer_adapter(case: Case, monkeypatch: pytest.MonkeyPatch):
    library = SimpleNamespace(
        __version__="0",
        BatchPrefillWithRaggedKVCacheWrapper=Ragged,
        BatchPrefillWithPagedKVCacheWrapper=Paged,
        BatchDecodeWithPagedKVCacheWrapper=Decode,
        BatchMLAPagedAttentionWrapper=Latent,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr("tritonattn.bench.peers.with_flashinfer.WORKSPACE_BYTES", 64)
    check("flashinfer", case)


@pytest.mark.parametrize(
    "case",
    [
        *(case for case in CASES if case.causal),
        replace(MIXED, alibi=True, sinks=True),
        replace(DECODE, cache_dtype=FP8),
    ],
    ids=str,
)
def test_vllm_adapter(case: Case, monkeypatch: pytest.MonkeyPatch):
    def unified_attention(
        q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal,
        window_size, block_table, softcap, q_descale, k_descale, v_descale, seq_threshold_3D=None,
        num_par_softmax_segments=None, softmax_segm_output=None, softmax_segm_max=None,
        softmax_segm_expsum=None, alibi_slopes=None, sinks=None,
    ):  # fmt: skip
        assert softmax_segm_output.shape == (seq_threshold_3D, 4, num_par_softmax_segments, 32)
        assert softmax_segm_max.shape == softmax_segm_output.shape[:3]
        assert q_descale is None
        reference.paged_attention(
            q, k, v, block_table, seqused_k, cu_seqlens_q=cu_seqlens_q,
            softmax_scale=softmax_scale, causal=causal, window_size=window_of(*window_size),
            softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, k_scale=k_descale,
            v_scale=v_descale, out=out,
        )  # fmt: skip

    module = ModuleType("triton_unified_attention")
    module.unified_attention = unified_attention  # type: ignore[attr-defined]
    home = "vllm.v1.attention.ops"
    parts = home.split(".")
    for i in range(1, len(parts) + 1):
        package = ModuleType(".".join(parts[:i]))
        package.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, f"{home}.triton_unified_attention", module)
    check("vllm", case)


@pytest.mark.parametrize("case", [EQUAL, replace(EQUAL, causal=False, heads=(4, 4))], ids=str)
def test_fa2_adapter(case: Case):
    check("fa2", case)
