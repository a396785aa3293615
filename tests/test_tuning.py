"""Configurations: what they are, which are valid, what the heuristic chooses, what a call compiles.

Nothing here needs a GPU: a device is described by its architecture, and calls with CPU tensors are
recorded up to their launch.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launches import ALL_CASES, Launch, recorded

import tritonattn
from tritonattn.device import INTERPRETER, SHARED_MEMORY, Device, target
from tritonattn.errors import UnsupportedError
from tritonattn.plan import PORTABLE
from tritonattn.problem import MaskSpec, Problem
from tritonattn.tuning import heuristics, store
from tritonattn.tuning.config import FORMS, KernelConfig, blocks, invalid, shared_memory
from tritonattn.tuning.heuristics import heuristic

fp16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
DEVICES = [target(arch) for arch in SHARED_MEMORY]
DECODE = Problem(
    "paged_attention", bf16, bf16, 128, 128, 8, 4, mask=MaskSpec(has_right=True),
    cache_dtype=bf16, page_size=16, is_decode=True,
)  # fmt: skip
CONFIG = KernelConfig(block_m=16, block_n=64, pack=4, num_warps=4, num_stages=3)


@pytest.mark.parametrize("form", FORMS)
def test_kernel_config_survives_json(form: str):
    config = dataclasses.replace(CONFIG, form=form)
    assert KernelConfig.from_json(config.to_json()) == config


def test_kernel_config_of_a_table_without_forms_is_the_textbook_one():
    fields = {name: x for name, x in dataclasses.asdict(CONFIG).items() if name != "form"}
    assert KernelConfig.from_json(json.dumps(fields)) == CONFIG


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[16, 64, 4, 4, 3]", "has the fields"),
        ('{"block_m": 16}', "has the fields"),
        (CONFIG.to_json()[:-1] + ', "num_ctas": 1}', "has the fields"),
        (CONFIG.to_json().replace("16", "16.0"), "fields are integers"),
        (CONFIG.to_json().replace("16", "true"), "fields are integers"),
        (CONFIG.to_json().replace("16", '"16"'), "fields are integers"),
        (CONFIG.to_json().replace('"textbook"', "1"), "a form's name"),
        ("{", "Expecting property name"),
    ],
)
def test_kernel_config_refuses_what_is_not_exactly_one(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        KernelConfig.from_json(text)


@given(st.integers(1, 576))
def test_blocks_cover_the_dims_with_least_waste(dim: int):
    whole, tail = (*blocks(dim, torch.bfloat16, target(90)), 0)[:2]
    assert whole >= 16
    assert whole & (whole - 1) == tail & (tail - 1 if tail else 0) == 0
    assert tail == 0 or 16 <= tail < whole < dim
    least = max(16, 1 << (dim - 1).bit_length())
    assert dim <= whole + tail <= least
    assert tail or whole == least


def test_blocks_of_known_dims():
    dims = {8: (16,), 64: (64,), 80: (64, 16), 120: (128,), 192: (128, 64), 576: (512, 64)}
    assert {dim: blocks(dim, torch.float16, target(90)) for dim in dims} == dims


@given(st.integers(1, 576))
def test_blocks_of_float32_are_equal_and_short(dim: int):
    widths = blocks(dim, torch.float32, target(90))
    assert set(widths) < {16, 32}
    assert sum(widths) - widths[0] < dim <= sum(widths)
    # In float64 a long sum rounds no more than a short one, and every block takes time.
    assert blocks(dim, torch.float32, INTERPRETER) == blocks(dim, torch.float16, INTERPRETER)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_m": 8}, "block_m must be a power of two from 16 to 256; got 8"),
        ({"block_m": 48}, "block_m must be a power of two from 16 to 256; got 48"),
        ({"block_n": 512}, "block_n must be a power of two from 16 to 256; got 512"),
        ({"num_warps": 3}, "num_warps must be a power of two from 1 to 16; got 3"),
        ({"num_stages": 0}, "num_stages must be from 1 to 8; got 0"),
        ({"num_stages": 9}, "num_stages must be from 1 to 8; got 9"),
        ({"pack": 0}, "pack must be at least 1; got 0"),
        ({"pack": 5}, r"pack must be from 1 to min\(block_m, heads a KV head\); got 5"),
        ({"block_n": 256, "num_stages": 8, "num_warps": 8}, r"shared memory; CUDA GPU \(sm_86\)"),
        ({"block_m": 256, "num_warps": 1}, "registers a thread"),
    ],
)
def test_invalid_says_why(change: dict[str, Any], message: str):
    config = dataclasses.replace(CONFIG, **change)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(invalid(config, DECODE, target(86)))
    assert not invalid(CONFIG, DECODE, target(86))


masks = st.builds(
    MaskSpec,
    causal=st.booleans(),
    has_left=st.booleans(),
    has_right=st.booleans(),
    has_chunk=st.booleans(),
    has_tree=st.booleans(),
)
dims = st.one_of(st.sampled_from([64, 80, 96, 128, 192, 256, 512, 576]), st.integers(1, 576))


@st.composite
def problems(draw: st.DrawFn, devices: st.SearchStrategy[Device]) -> tuple[Problem, Device]:
    device = draw(devices)
    function = draw(st.sampled_from(["varlen_attention", "prefix_attention", "paged_attention"]))
    dtype = draw(st.sampled_from([fp16, bf16, f32] if device.has_bf16 else [fp16, f32]))
    cache = None
    if function != "varlen_attention":
        cache = draw(st.sampled_from([dtype, torch.float8_e4m3fn, torch.float8_e5m2]))
    is_decode = function == "paged_attention" and draw(st.booleans())
    flags = {name: draw(st.booleans()) for name in ("has_softcap", "has_alibi", "has_sinks")}
    problem = Problem(
        function, dtype, dtype, draw(dims), min(512, draw(dims)), draw(st.integers(1, 8)),
        draw(st.integers(1, 128)), mask=draw(masks), cache_dtype=cache,
        page_size=draw(st.integers(1, 1024)) if cache else 0, is_decode=is_decode,
        batch_invariant=draw(st.booleans()), batch=draw(st.integers(1, 4096)),
        total_q=draw(st.integers(1, 1 << 20)), max_k=draw(st.integers(1, 1 << 20)),
        max_q=1 if is_decode else draw(st.integers(1, 1 << 17)), **flags,
    )  # fmt: skip
    return problem, device


@given(problems(st.sampled_from([*DEVICES, INTERPRETER])))
def test_heuristic_is_valid_on_every_gpu(drawn: tuple[Problem, Device]):
    problem, device = drawn
    is_wide = max(problem.head_dim, problem.head_dim_v) > 256
    try:
        config = heuristic(problem, device)
    except UnsupportedError:
        assert is_wide
        assert problem.dtype == f32 or device.arch == 75
    else:
        assert invalid(config, problem, device) == ""


def test_heuristic_refuses_heads_that_do_not_fit():
    problem = dataclasses.replace(DECODE, dtype=f32, head_dim=576, head_dim_v=512)
    message = r"head_dim 576 .* CUDA GPU \(sm_86\) has \(101376 bytes\).* Use float16 or bfloat16"
    with pytest.raises(UnsupportedError, match=message):
        heuristic(problem, target(86))


@given(problems(st.sampled_from(DEVICES)), st.data())
def test_heuristic_of_batch_invariant_mode_depends_on_no_size(
    drawn: tuple[Problem, Device], data: st.DataObject
):
    problem, device = drawn
    problem = dataclasses.replace(problem, batch_invariant=True)
    other = dataclasses.replace(
        problem,
        batch=data.draw(st.integers(1, 4096)),
        total_q=data.draw(st.integers(1, 1 << 20)),
        max_k=data.draw(st.integers(1, 1 << 20)),
        max_q=1 if problem.is_decode else data.draw(st.integers(1, 1 << 17)),
    )
    try:
        expected = heuristic(problem, device)
    except UnsupportedError:
        with pytest.raises(UnsupportedError):
            heuristic(other, device)
    else:
        assert heuristic(other, device) == expected


@pytest.mark.parametrize(("max_q", "block_m"), [(1, 16), (5, 32), (16, 64), (33, 128), (999, 128)])
def test_heuristic_of_the_interpreter_has_few_tiles_and_few_idle_rows(max_q: int, block_m: int):
    problem = dataclasses.replace(DECODE, max_q=max_q, is_decode=False)
    assert heuristic(problem, INTERPRETER) == KernelConfig(block_m, 64, 4, 4, 1)


def rows(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=fp16)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def decode(batch: int = 2, pages: int = 4, **options: Any) -> None:
    cache = rows(pages, 16, 2, 128)
    q, lens = rows(batch, 8, 128), ints(batch)
    tritonattn.paged_attention(q, cache, cache, ints(batch, pages), lens, **options)


def test_a_forced_configuration_is_obeyed():
    config = KernelConfig(block_m=32, block_n=128, pack=2, num_warps=8, num_stages=3)
    with recorded(target(90), store.lookup) as launches, store.force(config):
        decode(num_splits=1)
    (launch,) = launches
    spec: Any = launch.constants["SPEC"]
    assert (spec.BLOCK_M, spec.BLOCK_N, spec.PACK) == (32, 128, 2)
    assert launch.options[:2] == (8, 3)


@pytest.mark.parametrize("change", [{"block_n": 24}, {"pack": 8}, {"num_stages": 8}])
def test_a_forced_configuration_that_cannot_run_is_refused(change: dict[str, int]):
    config = dataclasses.replace(CONFIG, block_n=256, num_warps=8)
    config = dataclasses.replace(config, **change)
    with (
        recorded(target(86), store.lookup) as launches,
        store.force(config),
        pytest.raises(UnsupportedError, match="forced configuration cannot run here"),
    ):
        decode()
    assert not launches


SIZES = (1, 2, 15, 16, 17, 33)


def binaries_of(launches: list[Launch]) -> int:
    assert launches
    return len({launch.key for launch in launches})


def test_binaries_of_decode_do_not_depend_on_sizes():
    with recorded(target(90)) as launches:
        for batch, pages in itertools.product(SIZES, SIZES):
            decode(batch, pages, num_splits=1)
    assert binaries_of(launches) == 1


def test_binaries_of_split_decode_do_not_depend_on_sizes():
    with recorded(target(90)) as launches:
        for batch, pages, splits in itertools.product(SIZES, SIZES, (2, 15, 16, 17)):
            decode(batch, pages, num_splits=splits)
    assert binaries_of(launches) == 2  # attention, merging


@pytest.mark.parametrize("configure", [heuristics.portable, lambda p, _: heuristics.hopper(p)])
def test_binaries_of_prefill_do_not_depend_on_sizes(configure: Any):
    with recorded(target(90), configure) as launches:
        for batch, total in itertools.product(SIZES, SIZES):
            q, kv, starts = rows(total + 256, 8, 128), rows(total, 2, 128), ints(batch + 1)
            tritonattn.varlen_attention(q, kv, kv, starts, starts)
    # One for many queries a sequence, and of the portable kernel one for few.
    assert binaries_of(launches) == (2 if configure is heuristics.portable else 1)


def test_binaries_of_prefill_are_few_for_any_longest_query():
    with recorded(target(90)) as launches:
        for longest in range(1, 300):
            q, kv, starts = rows(longest, 8, 128), rows(longest, 2, 128), ints(2)
            tritonattn.varlen_attention(q, kv, kv, starts, starts)
    assert binaries_of(launches) <= 5


def test_binaries_depend_on_strides_by_alignment_alone():
    with recorded(target(90)) as launches:
        for pad_token, pad_page, page in itertools.product((0, 8, 5), (0, 1, 16), (3, 12, 33)):
            pool = rows(4, page + pad_page, 2, 128 + pad_token)[:, :page, :, :128]
            q, table, lens = rows(2, 8, 128), ints(2, 4), ints(2)
            tritonattn.paged_attention(q, pool, pool, table, lens, num_splits=1)
    assert binaries_of(launches) == 2


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
def test_every_case_of_the_compile_matrix_launches(case: Any):
    elsewhere = (target(75), target("gfx942"), target("gfx1100"))
    for device in (target(90), *(elsewhere if case.kernel == PORTABLE else ())):
        launches = case.launches(device)
        assert launches or max(case.dims) > 256
        for launch in launches:
            assert launch.grid > 0
            assert launch.estimate is None or launch.estimate <= device.shared_memory


@given(problems(st.sampled_from(DEVICES)))
def test_shared_memory_grows_with_the_tile(drawn: tuple[Problem, Device]):
    problem, device = drawn
    config = KernelConfig(64, 32, 1, 8, 2)
    needed = shared_memory(config, problem, device)
    for change in ({"block_m": 128}, {"block_n": 64}, {"num_stages": 3}):
        larger = dataclasses.replace(config, **change)
        assert shared_memory(larger, problem, device) >= needed


@pytest.mark.parametrize("arch", ["80", "90", "gfx942"])
def test_kernels_compile_without_a_gpu(arch: str, tmp_path: Path):
    script = Path(__file__).with_name("compile_matrix.py")
    cases = ["causal, D 64", "decode, split", "write, e4m3"]
    done = subprocess.run(
        [sys.executable, script, "--targets", arch, "--cases", *cases, "--jobs", "1"],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    # Parts are merged by a kernel of their own, shares by the last program.
    binaries = 4 if arch == "gfx942" else 3
    assert f"{binaries} binaries" in done.stdout


@pytest.mark.parametrize("dim", [80, 96, 192])
def test_no_tile_is_chosen_whose_second_product_is_miscompiled(dim: int) -> None:
    """Read past the end of shared memory on an H200, with heads of 96 off 16 bytes."""
    gpu = target(90)
    aligned = dataclasses.replace(
        DECODE, head_dim=dim, head_dim_v=dim, is_decode=False, total_q=4096, max_q=1024, batch=4
    )
    problem = dataclasses.replace(aligned, rows_aligned=False)
    small, large = KernelConfig(64, 32, 1, 4, 2), KernelConfig(128, 32, 1, 8, 2)
    two_groups = KernelConfig(64, 32, 1, 8, 2)
    assert "8 warps need 128 rows" in invalid(two_groups, aligned, gpu)
    assert "off 16 bytes" in invalid(small, problem, gpu)
    assert "off 16 bytes" in invalid(large, problem, gpu)
    for config in (small, large):
        assert not invalid(config, aligned, gpu)
    whole = dataclasses.replace(problem, head_dim=64, head_dim_v=64)
    assert not invalid(two_groups, whole, gpu)
    tree = dataclasses.replace(problem, mask=MaskSpec(has_tree=True))
    for case in (aligned, problem, tree):
        assert not invalid(heuristics.portable(case, gpu), case, gpu)
