"""When Hopper's kernel is chosen, and with what it is launched.  It runs in test_hopper_gpu.py."""

from __future__ import annotations

import dataclasses
import json
from typing import Any
from unittest import mock

import hopper
import pytest
import torch
from calls import NEW, PAGED, PREFIX, VARLEN
from hypothesis import given
from hypothesis import strategies as st
from launches import recorded
from tuner import H200, TASK, Fake, user_tables  # noqa: F401 -- a fixture

import tritonattn
from tritonattn import binaries, boxes, launch
from tritonattn import device as devices
from tritonattn import hopper as host
from tritonattn.case import Case
from tritonattn.commands import doctor
from tritonattn.errors import UnsupportedError
from tritonattn.inputs import cumulative
from tritonattn.kernels.hopper import spec as hopper_spec
from tritonattn.plan import HOPPER, PORTABLE, Plan, plan, why_not_hopper
from tritonattn.problem import MaskSpec, Problem
from tritonattn.tuning import heuristics, space, store
from tritonattn.tuning.compile import Report
from tritonattn.tuning.config import (
    HOPPER_FORMS,
    HOPPER_SWITCHES,
    KernelConfig,
    invalid,
    shared_memory,
)
from tritonattn.tuning.keys import key_of
from tritonattn.tuning.search import tune
from tritonattn.tuning.source import source_hash
from tritonattn.tuning.tables import Entry
from tritonattn.tuning.tasks import Shape

bf16, fp16, f32 = torch.bfloat16, torch.float16, torch.float32
PREFILL = Problem(
    VARLEN, bf16, bf16, 128, 128, 8, 4, mask=MaskSpec(has_right=True), batch=4, total_q=4096,
    max_q=1024, max_k=4096, capacity_k=4096,
)  # fmt: skip
CHUNK = dataclasses.replace(PREFILL, function=PAGED, cache_dtype=bf16, page_size=16)
CONFIG = heuristics.hopper(PREFILL)
SMALL = KernelConfig(128, 64, 1, 8, 2)  # the portable kernel's


@pytest.mark.parametrize(
    ("problem", "changes", "reason"),
    [
        (PREFILL, {"dtype": f32}, "float16 and bfloat16"),
        (PREFILL, {"head_dim": 264}, "at most 256 dims"),
        (PREFILL, {"head_dim_v": 512}, "at most 256 dims"),
        (PREFILL, {"mask": MaskSpec(has_tree=True)}, "no tree masks"),
        (PREFILL, {"has_scales": True}, "neither k_scale nor v_scale"),
        (PREFILL, {"is_positive": False}, "softmax_scale is not above 0"),
        (PREFILL, {"num_splits": 2}, "num_splits is 2"),
        (PREFILL, {"has_boxes": False}, "TMA cannot copy"),
        (CHUNK, {"cache_dtype": fp16}, "another dtype"),
        (CHUNK, {"cache_dtype": torch.float8_e4m3fn}, "another dtype"),
        (CHUNK, {"page_size": 4}, "pages hold 4 tokens"),
        (CHUNK, {"page_size": 24}, "pages hold 24 tokens"),
        (CHUNK, {"is_decode": True, "max_q": 1}, "one query"),
    ],
)
def test_plan_says_why_hoppers_kernel_cannot_run(
    problem: Problem, changes: dict[str, Any], reason: str
) -> None:
    assert why_not_hopper(problem, H200) == ""
    changed = dataclasses.replace(problem, **changes)
    assert reason in why_not_hopper(changed, H200)
    chosen = plan(changed, H200)
    assert (chosen.kernel, reason in chosen.why) == (PORTABLE, True)
    assert reason in invalid(CONFIG, changed, H200)


@pytest.mark.parametrize("arch", [80, 89, 100, 120, "gfx942"])
def test_plan_leaves_other_gpus_to_the_portable_kernel(arch: int | str) -> None:
    gpu = devices.target(arch)
    assert "sm_90" in plan(PREFILL, gpu).why
    assert "sm_90" in plan(PREFILL, devices.INTERPRETER).why
    assert "sm_90" in invalid(CONFIG, PREFILL, gpu)
    assert heuristics.heuristic(PREFILL, gpu).kernel == PORTABLE


@pytest.mark.parametrize(
    ("problem", "changes", "reason"),
    [
        (PREFILL, {"head_dim": 80, "head_dim_v": 80}, "pad heads of 80"),
        (PREFILL, {"batch": 64}, "64 queries in the mean"),
        (PREFILL, {"max_q": 64}, "64 queries in the mean"),
        (CHUNK, {"batch": 1, "total_q": 128, "max_k": 1 << 17}, "unless keys are split"),
        (CHUNK, {"batch_invariant": True}, "parts of 2048"),
    ],
)
def test_plan_prefers_the_portable_kernel_and_says_why(
    problem: Problem, changes: dict[str, Any], reason: str
) -> None:
    """What is preferred can be forced otherwise."""
    assert plan(problem, H200) == Plan(kernel=HOPPER)
    changed = dataclasses.replace(problem, **changes)
    assert reason in plan(changed, H200).why
    assert plan(changed, H200).kernel == PORTABLE
    assert invalid(CONFIG, changed, H200) == ""
    assert plan(changed, H200, HOPPER) == Plan(kernel=HOPPER)


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("problem", [PREFILL, CHUNK], ids=["packed", "paged"])
def test_heuristic_takes_hoppers_kernel_where_it_serves(
    problem: Problem, dims: tuple[int, int]
) -> None:
    problem = dataclasses.replace(problem, head_dim=dims[0], head_dim_v=dims[1])
    config = heuristics.heuristic(problem, H200)
    assert config.kernel == HOPPER
    assert invalid(config, problem, H200) == ""
    assert "Hopper" in space.describe(config)


@given(st.data())
def test_plan_of_batch_invariant_mode_depends_on_no_size(data: st.DataObject) -> None:
    problem = dataclasses.replace(
        data.draw(st.sampled_from([PREFILL, CHUNK])), batch_invariant=True,
        num_splits=data.draw(st.sampled_from([0, 1])),
    )  # fmt: skip
    sizes = st.integers(1, 1 << 20)
    other = dataclasses.replace(
        problem, batch=data.draw(sizes), total_q=data.draw(sizes), max_q=data.draw(sizes),
        max_k=data.draw(sizes), capacity_k=data.draw(sizes),
    )  # fmt: skip
    assert plan(other, H200).kernel == plan(problem, H200).kernel
    for config in (CONFIG, SMALL):
        assert space.fit(config, other, H200) == space.fit(config, problem, H200)


# Configurations


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_m": 64}, "block_m must be 128"),
        ({"pack": 4}, "pack must be 1"),
        ({"num_warps": 8}, "num_warps must be 4"),
        ({"num_stages": 1}, "num_stages must be at least 2"),
        ({"num_stages": 4}, "bytes of shared memory"),
        ({"block_n": 32}, "block_n 32 is not for"),
        ({"block_n": 256}, "block_n 256 is not for"),
        ({"form": "textbook"}, "form must be one of plain"),
        ({"kernel": "fastest"}, "kernel must be one of portable, hopper"),
        ({"kernel": PORTABLE}, "form must be one of textbook"),
    ],
)
def test_invalid_says_why_not_on_hopper(changes: dict[str, Any], message: str) -> None:
    assert invalid(CONFIG, PREFILL, H200) == ""
    assert message in invalid(dataclasses.replace(CONFIG, **changes), PREFILL, H200)


def test_kernel_config_of_a_table_without_kernels_is_the_portable_ones() -> None:
    for config in (CONFIG, SMALL):
        assert KernelConfig.from_json(config.to_json()) == config
    fields = dataclasses.asdict(SMALL)
    del fields["kernel"], fields["form"]
    assert KernelConfig.from_json(json.dumps(fields)) == SMALL


def test_forms_are_the_kernels_switches() -> None:
    numbers = [sum(host.SWITCHES[name] for name in form.split("+")) for form in HOPPER_FORMS]
    assert sorted(numbers) == list(range(2 ** len(HOPPER_SWITCHES)))
    flags = (getattr(hopper_spec, name.upper()) for name in HOPPER_SWITCHES)
    assert {host.SWITCHES[name] for name in HOPPER_SWITCHES} == set(flags)


def test_candidates_are_of_both_kernels_where_both_serve() -> None:
    found = space.candidates(PREFILL, H200)
    assert found[0].kernel == HOPPER
    kernels = {config.kernel for config in found}
    assert kernels == {HOPPER, PORTABLE}
    assert {config.form for config in found if config.kernel == HOPPER} >= {"lanes", "turns+lanes"}
    elsewhere = space.candidates(PREFILL, devices.target(80))
    assert {config.kernel for config in elsewhere} == {PORTABLE}


def test_tune_holds_a_kernels_spills_against_that_kernel_alone() -> None:
    """Everything spills in Hopper's kernel where the portable one does not: both are timed."""
    task = dataclasses.replace(TASK, family="prefill", shape=Shape(4, 1024, 1024))
    best = dataclasses.replace(heuristics.hopper(task.problem), form="turns+lanes")

    def report(config: KernelConfig) -> Report:
        return Report(50_000, 168, 8, spills_in_loops=2 if config.kernel == HOPPER else 0)

    fake = Fake(lambda config: 5.0 if config == best else 10.0, report)
    assert tune(task, H200, fake).best == best


# Where a configuration comes from


def entry(config: KernelConfig) -> Entry:
    return Entry(config, 5.0, 9.0, source=source_hash())


@pytest.mark.usefixtures("user")
def test_a_tables_entry_chooses_either_kernel() -> None:
    store.record(H200, {key_of(PREFILL): entry(SMALL)})
    assert store.lookup(PREFILL, H200) == SMALL
    # In the same bucket, where sequences are too short in the mean: not what the table says.
    short = dataclasses.replace(PREFILL, batch=2048)
    turns = dataclasses.replace(CONFIG, form="turns")
    store.record(H200, {key_of(PREFILL): entry(turns)})
    assert store.lookup(PREFILL, H200) == turns
    assert key_of(short) == key_of(PREFILL)
    assert store.lookup(short, H200) == heuristics.portable(short, H200)


def rows(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def call(function: str, queries: int = 800, **options: Any) -> Any:
    """Two sequences of so many queries; nothing is computed."""
    q, starts, heads = rows(2 * queries, 8, 128), cumulative([queries] * 2), 2
    new = rows(2 * queries, heads, 128), rows(2 * queries, heads, 128)
    pages = (rows(40, 16, heads, 128), rows(40, 16, heads, 128), ints(2, 20))
    options.setdefault("max_seqlen_q", queries)  # else decodes may stand beside one long sequence
    if function == VARLEN:
        return tritonattn.varlen_attention(q, *new, starts, starts, **options)
    if function == PREFIX:
        return tritonattn.prefix_attention(q, *new, *pages, starts, ints(2), **options)
    return tritonattn.paged_attention(q, *pages, ints(2), cu_seqlens_q=starts, **options)


FUNCTIONS = (VARLEN, PREFIX, PAGED)
every_function = pytest.mark.parametrize("function", FUNCTIONS)


@every_function
def test_hoppers_kernel_takes_boxes_of_what_is_there(function: str) -> None:
    with recorded(H200) as launches:
        call(function)
    (run,) = launches
    assert run.kernel.__name__ == "prefill_kernel"
    named = dict(zip(run.kernel.arg_names, run.args, strict=False))
    shapes = hopper_spec.boxes(run.constants["SPEC"])  # type: ignore[arg-type]
    given = {name: arg for name, arg in named.items() if isinstance(arg, boxes.Box)}
    assert given.keys() == shapes.keys()
    assert set(shapes) == {
        "q_box",
        *(("k_box", "v_box") if function in NEW else ()),
        *(("k_pages", "v_pages") if function != VARLEN else ()),
    }
    for name, arg in given.items():
        assert arg.block_shape == shapes[name]
        assert len(arg.block_shape) == len(arg.shape) == len(arg.strides) == arg.layout.rank
        assert arg.strides == torch.empty(arg.shape).stride()
    assert 0 < run.grid <= H200.sm_count
    assert (named["table"] is None) == (function == VARLEN)


def test_grid_is_as_many_programs_as_there_is_work() -> None:
    with recorded(H200, store.lookup) as launches, store.force(CONFIG):
        call(VARLEN, queries=1)
        call(VARLEN, queries=20_000)
        call(VARLEN, queries=0)
    # A tile of padding is among them, as lengths are not known.
    assert [run.grid for run in launches] == [8 * 3, H200.sm_count, 0]


@given(
    batch=st.integers(0, 5000), mean=st.integers(0, 1 << 17), group=st.sampled_from([1, 4, 71]),
    max_k=st.integers(1, 1 << 20),
)  # fmt: skip
def test_section_is_a_number_of_lanes(batch: int, mean: int, group: int, max_k: int) -> None:
    problem = dataclasses.replace(
        PREFILL, batch=batch, total_q=batch * mean, group=group, max_k=max_k
    )
    assert 1 <= host.section(problem, H200) <= host.MOST_SEQUENCES


def test_section_is_more_sequences_the_shorter_they_are() -> None:
    def section(batch: int, length: int) -> int:
        sized = {"total_q": batch * length, "max_q": length, "max_k": length}
        return host.section(dataclasses.replace(PREFILL, batch=batch, **sized), H200)

    assert [section(1, 16384), section(16, 1024), section(64, 512)] == [2, 17, 32]


@every_function
def test_a_forced_kernel_is_obeyed_or_refused(function: str) -> None:
    with recorded(H200, store.lookup) as launches:
        with store.force(CONFIG):
            call(function, queries=3)
        with store.force(SMALL):
            call(function)
        for options in ({"softmax_scale": 0.0}, {"num_splits": 2}, {"k_scale": 2.0}):
            with store.force(CONFIG), pytest.raises(UnsupportedError, match="cannot run here"):
                call(function, **options)
    assert [run.kernel.__name__ for run in launches] == ["prefill_kernel", "attention_kernel"]


@every_function
def test_scales_of_1_do_not_stand_in_the_way(function: str) -> None:
    with recorded(H200) as launches:
        call(function, k_scale=1.0, v_scale=1)
        call(function, k_scale=torch.ones(1))
    assert [run.kernel.__name__ for run in launches] == ["prefill_kernel", "attention_kernel"]


# Boxes

STRIDED = {
    "packed": (rows(6, 4, 128), True),
    "a slice of a fused projection": (rows(6, 12, 128)[:, 4:8], True),
    "head major": (rows(4, 6, 128).transpose(0, 1), True),
    "rows with room behind them": (rows(6, 4, 136)[..., :128], True),
    "rows off 16 bytes": (rows(6, 4, 129)[..., :128], False),
    "float32": (rows(6, 4, 132, dtype=f32)[..., :128], True),
    "one for all heads": (rows(6, 1, 128).expand(6, 4, 128), False),
    "one head": (rows(6, 1, 128), True),
    "one row": (rows(1, 4, 128), True),
    "no rows": (rows(0, 4, 128), True),
    "one row, of an odd stride": (
        torch.empty_strided((1, 4, 128), (513, 128, 1), dtype=bf16), False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STRIDED)
def test_box_has_the_strides_that_tma_takes_where_has_boxes_says_so(name: str) -> None:
    x, expected = STRIDED[name]
    assert boxes.has_boxes(x) == expected
    if expected:
        spare = rows(1, 1, 8)
        made = boxes.box(x, (64, 1, 128), None, spare)
        assert made.data_ptr() == (x if x.numel() else spare).data_ptr() != 0
        assert all(n >= 1 for n in made.shape)
        steps = [stride * x.element_size() for stride in made.strides[:-1]]
        assert all(step > 0 and step % boxes.ALIGNMENT == 0 for step in steps)
        assert made.strides[-1] == 1
        for n, mine, its in zip(x.shape, made.strides, x.stride(), strict=True):
            assert n <= 1 or mine == its or not x.numel()


def test_box_is_of_strides_below_2_to_the_40_bytes() -> None:
    far = torch.empty(1, dtype=bf16, device="meta").as_strided((2, 4, 128), (1 << 39, 128, 1))
    near = torch.empty(1, dtype=bf16, device="meta").as_strided((2, 4, 128), (1 << 38, 128, 1))
    assert (boxes.has_boxes(far), boxes.has_boxes(near)) == (False, True)


@torch.no_grad()
def test_queries_off_16_bytes_go_to_the_portable_kernel() -> None:
    """Strides are looked at once for all calls alike, addresses in each call."""
    k, starts = rows(1600, 2, 128), cumulative([800, 800])
    memory = rows(1600 * 8 * 128 + 8)
    with recorded(H200, store.lookup) as launches:
        for offset in (0, 1, 8):
            q = memory[offset : offset + 1600 * 8 * 128].view(1600, 8, 128)
            tritonattn.varlen_attention(q, k, k, starts, starts)
    names = [run.kernel.__name__ for run in launches]
    assert names == ["prefill_kernel", "attention_kernel", "prefill_kernel"]


@torch.no_grad()
def test_out_may_lie_anywhere() -> None:
    with recorded(H200) as launches:
        for width in (128, 129):
            call(VARLEN, out=rows(1600, 8, width)[..., :128])
    specs: list[Any] = [run.constants["SPEC"] for run in launches]
    assert {run.kernel.__name__ for run in launches} == {"prefill_kernel"}
    assert [spec.OUT_ALIGNED for spec in specs] == [True, False]


def test_doctor_makes_a_call_that_is_long_enough() -> None:
    function, k_lens, q_lens = doctor._CALLS["long"]
    args, options = Case(function, k_lens, q_lens, (16, 8), dtype=bf16).build()
    with recorded(H200, store.lookup) as launches:
        getattr(tritonattn, function)(*args, **options)
    assert [run.kernel.__name__ for run in launches] == ["prefill_kernel"]


def test_preferred_runs_hoppers_kernel_where_it_can_serve() -> None:
    """What test_hopper_gpu.py relies on."""
    run: list[str] = []

    def record(kernel, *_) -> None:
        run.append(kernel.__name__)

    with (
        mock.patch.object(binaries, "launch", record),
        mock.patch.object(devices, "describe", return_value=H200),
        hopper.preferred(block_n=64) as counts,
    ):
        call(VARLEN, queries=2)
        call(VARLEN, queries=2, softmax_scale=-1.0)
    launch.forget()
    assert run == ["prefill_kernel", "attention_kernel"]
    assert counts == {HOPPER: 1, PORTABLE: 1}


@pytest.mark.parametrize(
    ("dims", "block_n", "stages", "counted"),
    [
        ((64, 64), 128, 4, 170_756), ((64, 64), 64, 2, 72_452), ((64, 64), 128, 5, 203_652),
        ((128, 128), 128, 2, 203_524), ((128, 128), 64, 4, 203_524), ((64, 128), 128, 3, 187_140),
        ((192, 128), 128, 2, 219_908), ((192, 128), 64, 3, 228_100),
        ((256, 256), 64, 2, 203_524), ((256, 64), 64, 3, 195_332),
    ],
)  # fmt: skip
def test_shared_memory_is_what_triton_counted(
    dims: tuple[int, int], block_n: int, stages: int, counted: int
) -> None:
    """As the compiled kernel says; only the tiles' alignment is left open."""
    problem = dataclasses.replace(PREFILL, head_dim=dims[0], head_dim_v=dims[1])
    config = dataclasses.replace(CONFIG, block_n=block_n, num_stages=stages)
    assert 0 <= shared_memory(config, problem, H200) - counted <= 160
