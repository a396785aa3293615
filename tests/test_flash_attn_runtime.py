"""What flash-attn's functions may not do while they run: wait for the GPU, or freeze a length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flash_cached import Cached
from launches import recorded
from test_faults_runtime import H200, refusing_to_wait
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tritonattn.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from tritonattn.kernels.attention import attention_kernel
from tritonattn.kernels.tiles import Pages
from tritonattn.testing import cumulative, generator, normal, same_bytes

fp16, fp8 = torch.float16, torch.float8_e4m3fn

CACHED = [
    Cached(lens=(5, 5), new=1, seqlens="int"),
    Cached(lens=(5, 2), q_lens=2, seqlens="none", causal=True),
    Cached(lens=(5, -1), new=2, q_lens=2, rotary=4, batch_idx=True, leftpad=(2, 0), causal=True),
    Cached(lens=(5, -1), new=1, page_size=4, rotary=4, leftpad=(2, 0), alibi=2, sinks="s_aux"),
    Cached(
        lens=(5, 3), new=(2, 1), q_lens=(3, 1), page_size=4, rotary=4, rotary_seqlens=True,
        window_size=(3, 0), cache_dtype=fp8, dtype=fp16, descale="[Hkv]", batch_idx=True,
    ),
]  # fmt: skip


def calls(device: torch.device) -> list[tuple[Callable[..., Any], dict[str, Any]]]:
    """Every way through the functions."""

    def rows(*shape: int) -> Tensor:
        return normal(*shape, dtype=fp16, generator=generator(0), device=device)

    q, k = rows(2, 3, 4, 16), rows(2, 5, 2, 16)
    other = {"k": k.transpose(1, 2).contiguous().transpose(1, 2), "v": k}
    starts, lens = cumulative([2, 3], device), cumulative([3], device)[1:].expand(2).contiguous()
    packed = {
        "q": rows(6, 4, 16), "k": rows(5, 2, 16), "v": rows(5, 2, 16), "cu_seqlens_q": starts,
        "cu_seqlens_k": starts, "max_seqlen_q": starts.diff().max(), "max_seqlen_k": None,
        "return_attn_probs": True,
    }  # fmt: skip
    scale = torch.ones(2, 2, device=device)
    pages = {
        "k": rows(4, 2, 2, 16), "v": rows(4, 2, 2, 16),
        "block_table": torch.zeros(2, 2, dtype=torch.int32, device=device),
    }  # fmt: skip
    return [
        (flash_attn_func, {"q": q, "k": k, "v": k, "return_attn_probs": True}),
        (flash_attn_func, {"q": q, **other, "q_descale": scale, "k_descale": scale}),
        (flash_attn_varlen_func, packed),
        (flash_attn_varlen_func, packed | {"seqused_q": lens, "v_descale": scale}),
        (flash_attn_varlen_func, packed | {"seqused_q": lens, "seqused_k": lens}),
        (flash_attn_varlen_func, packed | pages),
        (flash_attn_varlen_func, packed | pages | {"seqused_q": lens, "seqused_k": lens}),
        *((flash_attn_with_kvcache, call.build(device)) for call in CACHED),
    ]


@pytest.mark.parametrize("i", range(len(calls(torch.device("cpu")))))
def test_flash_attn_asks_no_tensor_for_its_value(i, monkeypatch):
    """Fake tensors have shapes and no values: whatever depends on one raises."""
    function, args = calls(torch.device("cpu"))[i]
    shapes = {name: x.shape for name, x in args.items() if isinstance(x, Tensor)}
    with FakeTensorMode() as mode, recorded(H200):
        monkeypatch.setattr(FakeTensor, "data_ptr", lambda _: 0, raising=False)
        fake = {n: mode.from_tensor(x) if isinstance(x, Tensor) else x for n, x in args.items()}
        result = function(**fake)
    out = result[0] if isinstance(result, tuple) else result
    assert out.shape[:-1] == shapes["q"][:-1]


@pytest.mark.parametrize("i", [0, 2, 7])
def test_flash_attn_splits_keys_into_as_many_parts_as_asked(i):
    function, args = calls(torch.device("cpu"))[i]
    with recorded(H200) as launches:
        function(**(args | {"num_splits": 3}))
    attention = next(x for x in launches if x.kernel is attention_kernel)
    assert attention.args[-2] == 3


def test_flash_attn_func_reads_keys_where_they_are():
    """No copy where each head's keys lie together, as in a cache of transformers."""
    q = normal(2, 3, 4, 16, dtype=fp16, generator=generator(0))
    k, v = normal(2, 2, 2, 5, 16, dtype=fp16, generator=generator(1)).transpose(2, 3)
    with recorded(H200) as launches:
        flash_attn_func(q, k, v)
    addresses = {x.ptr.data_ptr() for x in launches[0].args if isinstance(x, Pages)}
    assert addresses == {k.data_ptr(), v.data_ptr()}


@pytest.mark.parametrize("i", [1, 6, 9, 11])
def test_flash_attn_compiles_without_a_break(i, device):
    """One graph, whose caches and results are those of the eager call."""
    pytest.importorskip("tritonattn.torch_ops")
    (function, eager), (_, traced) = (calls(device)[i] for _ in range(2))
    torch._dynamo.reset()
    expected = function(**eager)
    result = torch.compile(function, fullgraph=True, backend="aot_eager")(**traced)
    for a, b in zip(outputs(expected, eager), outputs(result, traced), strict=True):
        assert same_bytes(a, b)


def outputs(result: Any, args: dict[str, Any]) -> list[Tensor]:
    results = list(result) if isinstance(result, tuple) else [result]
    return results + [args[name] for name in ("k_cache", "v_cache") if name in args]


@pytest.mark.gpu
def test_flash_attn_waits_for_nothing_on_the_gpu(device):
    for function, args in calls(device):
        function(**args)  # compiling may wait
        torch.cuda.synchronize()
        with refusing_to_wait():
            for _ in range(2):
                function(**args)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [0, 16])
def test_flash_attn_with_kvcache_replays_with_other_lengths(page_size, device):
    """One captured decode step, replayed for growing sequences and for padded rows."""
    shape = {"page_size": page_size, "rotary": 8, "leftpad": (1, 0, 0), "causal": True}
    call = Cached(lens=(3, 9, 200), new=1, dtype=fp16, head_dims=(64, 64), **shape)
    args = call.build(device)
    for name in ("k_cache", "v_cache"):
        args[name].nan_to_num_(0.0)
    flash_attn_with_kvcache(**args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_attn_with_kvcache(**args)
    for lens in ([5, 20, 100], [1, -1, 0], [-1, -1, 200]):
        args["cache_seqlens"].copy_(torch.tensor(lens))
        same = {name: x.clone() if isinstance(x, Tensor) else x for name, x in args.items()}
        graph.replay()
        expected, expected_lse = flash_attn_with_kvcache(**same)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
        assert torch.equal(args["k_cache"], same["k_cache"])
