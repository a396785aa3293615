"""Hopper's kernel against the oracle: what the tests of all kernels ask, at shapes that reach it.

What makes another binary (options, head sizes, pages, dtypes) comes from short lists; lengths are
drawn widely: more sequences than lanes, more tiles than programs, and edges on both sides of them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import hopper
import pytest
import torch
from faults import PAGED, PREFIX, VARLEN, assert_oracle, every_function
from hypothesis import given, settings
from hypothesis import strategies as st

import tritonattn
from tritonattn import binaries
from tritonattn.inputs import POOL_LAYOUTS, TENSORS, generator
from tritonattn.plan import HOPPER, PORTABLE
from tritonattn.testing import Case, check
from tritonattn.tuning.config import HOPPER_SWITCHES
from tritonattn.warmup import warmup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not hopper.is_here(), reason="needs a GPU of compute capability 9.0"),
]

bf16, fp16 = torch.bfloat16, torch.float16
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"options": {"causal": False}},
    "window": {"options": {"window_size": (70, None)}},
    "both sides": {"options": {"causal": False, "window_size": (130, 40)}},
    "chunk": {"options": {"chunk_size": 100}},
}
SCORES: dict[str, dict[str, Any]] = {
    "softcap": {"options": {"softcap": 5.0}},
    "alibi": {"alibi": 2},
    "sinks": {"sinks": True},
    "query_scale": {"query_scale": True},
    "all": {
        "alibi": 1, "sinks": True, "query_scale": True, "out": "float32",
        "options": {"softcap": 5.0, "window_size": (200, None), "chunk_size": 300},
    },
}  # fmt: skip
FEATURES = MASKS | SCORES
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (80, 80), (16, 40), (64, 128))
SHAPE: dict[str, Any] = {"heads": (4, 2), "head_dims": (64, 64), "dtype": bf16}


@pytest.fixture(autouse=True)
def counts() -> Iterator[Any]:
    """Of kinds of calls, by the kernel that ran them."""
    with hopper.preferred() as found:
        yield found


@st.composite
def lengths(draw: st.DrawFn, function: str) -> dict[str, tuple[int, ...]]:
    """Queries and keys of each sequence: a few that are long, or many that are short."""
    many = draw(st.integers(0, 3)) == 3
    batch = draw(st.integers(30, 70) if many else st.integers(0, 5))
    edges = st.sampled_from((0, 1, 2, 63, 64, 65, 127, 128, 129, 256, 300))
    one_q = st.integers(0, 9) if many else st.one_of(edges, st.integers(0, 600))
    one_k = st.integers(0, 40) if many else st.one_of(edges, st.integers(0, 900))
    q_lens = draw(st.lists(one_q, min_size=batch, max_size=batch))
    k_lens = draw(st.lists(one_k, min_size=batch, max_size=batch))
    if function != VARLEN and draw(st.booleans()):  # a length below 0 counts as 0
        k_lens = [-3 if i % 3 == 1 else n for i, n in enumerate(k_lens)]
    return {"q_lens": tuple(q_lens), "k_lens": tuple(k_lens)}


def drawn(data: st.DataObject, function: str, **fields: Any) -> Case:
    return Case(
        function, **data.draw(lengths(function)), padding_rows=data.draw(st.sampled_from((0, 3))),
        poison=data.draw(st.sampled_from(("nan", "inf"))), seed=data.draw(st.integers(0, 99)),
        **SHAPE | fields,
    )  # fmt: skip


@every_function
@pytest.mark.parametrize("feature", FEATURES)
@settings(max_examples=12)
@given(data=st.data())
def test_hopper_equals_the_oracle(function: str, feature: str, data, device) -> None:
    case = drawn(data, function, **FEATURES[feature])
    check(case, device=device, return_lse=True)


@every_function
@pytest.mark.parametrize("dims", DIMS, ids=lambda dims: "-".join(map(str, dims)))
@settings(max_examples=6)
@given(data=st.data())
def test_hopper_equals_the_oracle_for_heads_of_any_size(function: str, dims, data, device) -> None:
    case = drawn(data, function, head_dims=dims, dtype=fp16, heads=(3, 1), page_size=32)
    check(case, device=device)


@pytest.mark.parametrize("function", [PREFIX, PAGED])
@pytest.mark.parametrize("page_size", [8, 32, 64, 128, 256, 512])
@settings(max_examples=6)
@given(data=st.data())
def test_hopper_equals_the_oracle_for_pages_of_any_size(
    function: str, page_size: int, data, device
) -> None:
    fields = {"page_size": page_size, "table": "flat" if page_size % 64 else "int64"}
    check(drawn(data, function, **fields), device=device)


@every_function
@pytest.mark.parametrize("mask", MASKS)
@settings(max_examples=8)
@given(data=st.data())
def test_hopper_probe_sees_exactly_the_mask(function: str, mask: str, data, device) -> None:
    """q = 0 and V row j = e_j: out shows which keys a row saw, equally weighted, lse how many."""
    case = drawn(data, function, **MASKS[mask])
    check(dataclasses.replace(case, probe=True), device=device, return_lse=True)


LONG = Case(PREFIX, (700, 0, 1, 300, 129), (130, 600, 64, 0, 7), poison="nan", **SHAPE)


# Each switch alone, and such together as are chosen.
FORMS = (
    "plain", *HOPPER_SWITCHES, "lanes+drawn", "lanes+mid+drawn", "turns+lanes+mid+drawn",
    "turns+lanes", "lanes+mid",
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=["64", "128"])
@pytest.mark.parametrize("feature", ["causal", "all"])
def test_hopper_any_config_gives_the_same_result(feature, form, block_n, dims, device) -> None:
    case = dataclasses.replace(LONG, head_dims=dims, **FEATURES[feature])
    with hopper.preferred(form=form, block_n=block_n, num_stages=2) as counts:
        check(case, device=device, return_lse=True)
    assert counts[HOPPER]
    tritonattn.varlen_attention(*Case(VARLEN, (5,), (5,), **SHAPE).build(device)[0])  # for counts


def test_hopper_equals_the_oracle_at_long_mixed_lengths(device) -> None:
    """More tiles than programs, sections, and sequences of all lengths between."""
    q_lens = (37, 64, 128, 200, 331, 512, 700, 1000, 1024, 1500, 2048, 2777, 4096) * 2
    shape = SHAPE | {"heads": (8, 2), "head_dims": (128, 128)}
    check(Case(VARLEN, q_lens, q_lens, **shape), device=device, return_lse=True)


# Scores that grow: of most tiles of bfloat16 keys the maximum is not looked for, and where it would
# have been needed, the tile of queries is computed again.


@every_function
@pytest.mark.parametrize("dtype", [bf16, fp16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("scale", [1.0, 8.0, 64.0])
@settings(max_examples=8)
@given(data=st.data())
def test_hopper_equals_the_oracle_for_scores_of_any_size(
    function: str, dtype: torch.dtype, scale: float, data, device
) -> None:
    case = drawn(data, function, dtype=dtype, options={"softmax_scale": scale})
    check(case, device=device, return_lse=True)


@every_function
@pytest.mark.parametrize("form", ["lanes", "turns+lanes+mid+drawn"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=["64", "128"])
@pytest.mark.parametrize("often", [1, 3, 40])
def test_hopper_weighs_again_where_one_key_outweighs_all(
    function: str, form: str, dims: tuple[int, int], often: int, device
) -> None:
    """Key 3 of every ``often``-th sequence: exp of its score is not finite in float32."""
    lens = (700, 300, 900, 128, 1, 0, 513, 640) * 5
    shape = SHAPE | {"head_dims": dims, "heads": (8, 2)}
    args, options = Case(function, lens, lens, **shape).build(device)
    named = dict(zip(TENSORS[function], args, strict=True)) | options
    named["q"].abs_()
    for b in range(0, len(lens), often):
        if lens[b] < 4:
            continue
        if function == VARLEN:
            named["k"][named["cu_seqlens_k"][b] + 3] = 99.0
        else:
            named["k_cache"][named["block_table"][b, 0], 3] = 99.0
    with hopper.preferred(form=form) as counts:
        for _ in range(2):
            check(function, *args, **options, return_lse=True)
    assert counts[HOPPER]
    tritonattn.varlen_attention(*Case(VARLEN, (5,), (5,), **SHAPE).build(device)[0])  # for counts


@every_function
def test_hopper_same_call_gives_the_same_bits(function: str, device) -> None:
    case = dataclasses.replace(LONG, function=function, **FEATURES["all"])
    args, options = case.build(device)
    first, *others = (call_of(function)(*args, **options, return_lse=True) for _ in range(20))
    first = [x.clone() for x in first]
    for other in others:
        assert all(map(torch.equal, first, other))


@every_function
def test_hopper_bits_of_a_sequence_are_its_own(function: str, device) -> None:
    """They depend on no other sequence, nor on where in the batch it stands."""
    args, options = dataclasses.replace(LONG, function=function).build(device)
    named = dict(zip(TENSORS[function], args, strict=True)) | options
    whole = call_of(function)(**named)
    cu_q = named["cu_seqlens_q"].tolist()
    for b, (start, end) in enumerate(itertools.pairwise(cu_q)):
        alone = dict(named)
        for name, x in named.items():
            if name == "cu_seqlens_k":
                low, high = x[b : b + 2].tolist()
                alone |= {name: x[b : b + 2] - x[b], "k": named["k"][low:high]}
                alone |= {"v": named["v"][low:high]}
            elif name == "cu_seqlens_q":
                alone[name] = x[b : b + 2] - x[b]
            elif name == "q" or (name in "kv" and function == PREFIX):
                alone[name] = x[start:end]
            elif name in ("block_table", "context_lens", "seq_lens"):
                alone[name] = x[b : b + 1]
        assert torch.equal(call_of(function)(**alone), whole[start:end]), b


@every_function
def test_hopper_repeats_its_launch_with_other_addresses(function: str, device) -> None:
    case = dataclasses.replace(LONG, function=function)
    for seed in range(4):
        check(dataclasses.replace(case, seed=seed), device=device, poison_out=False)


@every_function
def test_hopper_graph_is_right_for_other_lengths(function: str, device) -> None:
    """Boxes are of addresses and sizes, which stay; lengths are read when the graph runs."""
    q_lens, k_lens = (300, 200, 100), (400, 300, 200)
    args, options = Case(function, k_lens, q_lens, **SHAPE).build(device)
    named = dict(zip(TENSORS[function], args, strict=True)) | options
    call_of(function)(**named, return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call_of(function)(**named, return_lse=True)
    lens_of = {PREFIX: "context_lens", PAGED: "seq_lens"}
    for cu_q, lens in (((0, 0, 600, 600), (0, 300, 5)), ((0, 1, 2, 300), (400, -1, 0))):
        named["cu_seqlens_q"].copy_(torch.tensor(cu_q))
        if function == VARLEN:
            named["cu_seqlens_k"].copy_(torch.tensor((0, 7, 700, 900)))
        else:
            named[lens_of[function]].copy_(torch.tensor(lens))
        out.fill_(torch.nan)
        graph.replay()
        rest = dict(named)
        positional = [rest.pop(name) for name in TENSORS[function]]
        assert_oracle(function, tuple(positional), rest, out, lse)


@every_function
def test_hopper_compiles_nothing_for_lengths(function: str, device) -> None:
    before = None
    gen = generator(0)
    for _ in range(8):
        batch = int(torch.randint(1, 50, (), generator=gen))
        q_lens, k_lens = torch.randint(0, 200, (2, batch), generator=gen).tolist()
        call, options = Case(function, tuple(k_lens), tuple(q_lens), **SHAPE).build(device)
        call_of(function)(*call, **options)
        assert before in (None, binaries.count())
        before = binaries.count()


def test_warmup_leaves_nothing_to_compile_on_hopper(counts, device) -> None:
    layer = {"dtype": bf16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    warmup("varlen_attention", **layer, max_batch=8, max_seqlen_q=600, max_seqlen_k=600)
    before, chosen = binaries.count(), counts[HOPPER]
    for lens in ((600,), (3,), (600, 600, 599), (100,) * 8, (1,) * 8):
        args, options = Case(VARLEN, lens, lens, **SHAPE).build(device)
        call_of(VARLEN)(*args, **options)
    assert binaries.count() == before
    assert counts[HOPPER] > chosen


# Strides

PACKED = {
    "contiguous": lambda x: x,
    "head major": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "room behind rows": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "a part of a fused projection": lambda x: torch.cat([x, x, x], 1)[:, x.shape[1] : -x.shape[1]],
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
}


@every_function
@pytest.mark.parametrize("layout", PACKED)
def test_hopper_takes_rows_of_any_aligned_strides(function: str, layout: str, counts, device):
    args, options = dataclasses.replace(LONG, function=function, poison="").build(device)
    names = TENSORS[function]
    args = tuple(
        PACKED[layout](x) if name in ("q", "k", "v") else x
        for name, x in zip(names, args, strict=True)
    )
    check(function, *args, **options)
    assert counts[PORTABLE] == 0


@pytest.mark.parametrize("function", [PREFIX, PAGED])
@pytest.mark.parametrize("pool_layout", POOL_LAYOUTS)
def test_hopper_takes_pools_of_any_aligned_strides(
    function: str, pool_layout: str, counts, device
) -> None:
    fields: dict[str, Any] = {"function": function, "pool_layout": pool_layout}
    check(dataclasses.replace(LONG, **fields), device=device)
    is_aligned = pool_layout != "sliced"  # whose rows are odd
    assert counts[HOPPER if is_aligned else PORTABLE] > 0
    check(dataclasses.replace(LONG, function=function), device=device)  # for counts


@every_function
def test_hopper_leaves_rows_off_16_bytes_to_the_portable_kernel(function: str, counts, device):
    args, options = dataclasses.replace(LONG, function=function, poison="").build(device)
    check(function, *args, **options)
    chosen = counts[HOPPER]
    assert chosen
    assert not counts[PORTABLE]
    q = args[0]
    memory = torch.empty(q.numel() + 1, dtype=q.dtype, device=device)
    moved = memory[1:].view(q.shape).copy_(q)  # the same strides at another address
    check(function, moved, *args[1:], **options)
    odd = torch.cat([q, q[..., :1]], -1)[..., : q.shape[-1]]
    check(function, odd, *args[1:], **options)
    one_head = Case(function, (90, 70), (90, 70), **SHAPE | {"heads": (4, 1)}).build(device)
    assert counts[HOPPER] == chosen
    assert counts[PORTABLE]
    portable = counts[PORTABLE]
    named = dict(zip(TENSORS[function], one_head[0], strict=True)) | one_head[1]
    for name in ("k", "v", "k_cache", "v_cache"):
        if name in named:
            named[name] = named[name].expand(*named[name].shape[:-2], 2, -1)
    positional = [named.pop(name) for name in TENSORS[function]]
    check(function, *positional, **named)
    assert counts[HOPPER] == chosen
    assert counts[PORTABLE] > portable


def test_hopper_offsets_are_64_bits_wide(device) -> None:
    """Each axis of each tensor in its turn: index 2 is past 2^31 elements."""
    case = Case(VARLEN, (3,), (3,), **SHAPE | {"heads": (3, 3)})
    (q, k, v, *starts), options = case.build(device)
    right = tritonattn.varlen_attention(q, k, v, *starts, **options)
    named = {"q": q, "k": k, "v": v, "out": torch.empty_like(q)}
    for name, x in named.items():
        for axis in (0, 1):
            strides = list(x.stride())
            strides[axis] = 1_200_000_000
            span = 1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True))
            memory = torch.empty(span, dtype=x.dtype, device=device)
            far = named | {name: memory.as_strided(x.shape, strides).copy_(x)}
            got = tritonattn.varlen_attention(*list(far.values())[:3], *starts, out=far["out"])
            assert torch.equal(got, right), (name, axis)
            del memory, far, got


def call_of(function: str) -> Any:
    return getattr(tritonattn, function)
