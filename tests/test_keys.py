"""What a tuned configuration is remembered under."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from tuner import H200, user_tables  # noqa: F401 -- a fixture

from tritonattn.call import Call
from tritonattn.inputs import TENSORS
from tritonattn.problem import Problem
from tritonattn.tuning import source, store
from tritonattn.tuning.build import build, named
from tritonattn.tuning.keys import FAMILIES, Key, distance, family_of, key_of
from tritonattn.tuning.models import PRESETS, Layer
from tritonattn.tuning.tasks import Shape, Task, tasks
from tritonattn.validate import validate

LLAMA = PRESETS["llama3-8b"][0]
TASK = Task(LLAMA, "decode", Shape(32, 1, 8192))
PROBLEM, KEY = TASK.problem, TASK.key
pytestmark = pytest.mark.usefixtures("user")


def test_key_is_one_whatever_the_order_of_arguments(device: torch.device) -> None:
    task = Task(Layer(4, 2, 16, softcap=3.0), "decode", Shape(2, 1, 32))
    args, options = build(task, device)
    call = dict(zip(TENSORS["paged_attention"], args, strict=True)) | options
    keys = set()
    for seed in range(5):
        names = list(call)
        random.Random(seed).shuffle(names)
        keys.add(key_of(validate(Call("paged_attention", **{name: call[name] for name in names}))))
    assert len(keys) == 1


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("preset", PRESETS)
def test_key_is_read_as_it_is_written(preset: str, cache_dtype: torch.dtype | None) -> None:
    for task in tasks(PRESETS[preset], cache_dtype=cache_dtype, page_size=24):
        assert Key.parse(task.family, str(task.key)) == task.key
    for task in tasks(PRESETS[preset], batch_invariant=True):
        assert Key.parse(task.family, str(task.key)) == task.key


def test_key_has_buckets_and_classes_not_sizes() -> None:
    for change in (
        {"max_k": 5000}, {"max_k": 4097}, {"capacity_k": 1 << 20}, {"batch": 17, "total_q": 17},
        {"page_size": 32}, {"has_sinks": True}, {"num_splits": 3}, {"out_dtype": torch.float32},
    ):  # fmt: skip
        assert key_of(dataclasses.replace(PROBLEM, **change)) == KEY, change
    for change in (
        {"max_k": 8193}, {"max_k": 4096}, {"total_q": 33}, {"page_size": 64}, {"page_size": 24},
        {"has_softcap": True}, {"dtype": torch.float16}, {"group": 5},
        {"cache_dtype": torch.float8_e5m2}, {"head_dim_v": 64}, {"is_latent": True},
    ):  # fmt: skip
        assert key_of(dataclasses.replace(PROBLEM, **change)) != KEY, change


@pytest.mark.parametrize("family", FAMILIES)
def test_key_of_batch_invariant_calls_does_not_depend_on_the_batch(family: str) -> None:
    layer, problems = LLAMA, []
    for batch, q, k in ((1, 1, 64), (1, 3, 8192), (64, 300, 100_000)):
        q = 1 if family == "decode" else q
        problem = Task(layer, family, Shape(batch, q, k), batch_invariant=True).problem
        if family == "paged":
            problem = dataclasses.replace(problem, is_decode=False)
        problems.append(problem)
    assert len({key_of(problem) for problem in problems}) == 1
    assert family_of(problems[0]) == family
    assert len({store.find(problem, H200) for problem in problems}) == 1


@pytest.mark.parametrize(
    "layer",
    [
        Layer(4, 2, 16), Layer(6, 2, 16, 24, window=5, sinks=True), Layer(2, 1, 32, softcap=2.0),
        Layer(2, 2, 16, chunk=8, query_scale=True), Layer(3, 1, 16, alibi=True),
        Layer(4, 1, 24, 16, latent=True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("causal", [True, False])
def test_task_has_the_problem_that_its_call_makes(
    layer: Layer, causal: bool, device: torch.device
) -> None:
    for family, shape in (
        ("decode", Shape(3, 1, 33)), ("prefill", Shape(2, 9, 9)), ("prefix", Shape(2, 5, 21)),
        ("paged", Shape(2, 3, 17)), ("paged", Shape(2, 1, 40, 7)), ("prefill", Shape(1, 4, 6)),
    ):  # fmt: skip
        task = Task(layer, family, shape, torch.float16, None, 8, causal)
        call = Call(task.function, **named(task.function, build(task, device)))
        made, expected = validate(call), task.problem
        # Which dtypes the options' tensors have is known with the tensors alone.
        made = dataclasses.replace(made, types=(), rows_aligned=expected.rows_aligned)
        assert made == expected


def test_distance_is_none_where_other_tiles_would_be_right() -> None:
    assert distance(KEY, KEY) == 0
    assert distance(KEY, KEY._replace(k=KEY.k + 2)) == 2
    assert distance(KEY, KEY._replace(dtype="fp16")) == 0
    quantised = KEY._replace(cache="e4m3fn")
    assert distance(quantised, quantised._replace(dtype="fp16")) is None
    for change in (
        {"family": "paged"}, {"dtype": "fp32"}, {"cache": "e5m2"}, {"head_dim": 64},
        {"features": True}, {"latent": True}, {"invariant": True}, {"q": 3}, {"group": 32},
        {"rows": 20, "k": 4},
    ):  # fmt: skip
        assert distance(KEY, KEY._replace(**change)) is None, change
    assert distance(KEY, KEY._replace(page=1)) == distance(KEY._replace(page=1), KEY) == 2
    assert distance(KEY, KEY._replace(page=0)) == distance(KEY._replace(page=0), KEY) == 2


# The kernels' source


def test_source_hash_changes_with_a_helper_and_not_with_a_comment(tmp_path: Path) -> None:
    kernel, helper = tmp_path / "kernel.py", tmp_path / "inner" / "helper.py"
    helper.parent.mkdir()
    kernel.write_text("from .inner import helper\n")
    helper.write_text('"""Doc."""\n\ndef f(x):\n    """Doc."""\n    return x + 1  # why\n')
    before = source.hash_of(tmp_path)
    helper.write_text('def f(x):\n    "Other."\n    # because\n    return (x +\n            1)\n')
    assert source.hash_of(tmp_path) != before  # parentheses are code
    helper.write_text('def f(x):\n    "Other."\n\n    # because\n    return x + 1\n')
    assert source.hash_of(tmp_path) == before
    helper.write_text("def f(x):\n    return x + 2\n")
    assert source.hash_of(tmp_path) != before
    helper.rename(tmp_path / "inner" / "renamed.py")
    assert source.hash_of(tmp_path) != before


def test_source_hash_is_the_same_in_every_python(tmp_path: Path) -> None:
    """From 3.12 on an f-string is many tokens, and tables would be taken for another source's."""
    kernel = tmp_path / "a.py"
    kernel.write_text(
        'def text(n):\n    return [f"{n:>{4}} {n!r}", rf"\\d{{{n}}}", f"""a\n    {n}"""]\n'
    )
    assert source.hash_of(tmp_path) == "9932e853a58c"
    kernel.write_text(kernel.read_text().replace("{n}}}", "{m}}}"))
    assert source.hash_of(tmp_path) == "6c41e14da8ac"


@pytest.mark.parametrize(
    "text",
    [
        "", "x" * 1000, "bf16", str(KEY) + " ", str(KEY).replace("q1", "q3"),
        str(KEY).replace("d128", "d0128"), str(KEY).replace("d128", "d128/128"),
        str(KEY).replace("d128", "d" + "9" * 500), str(KEY).replace("causal", "casual"),
        str(KEY).replace("page16", "page٣"),
    ],
)  # fmt: skip
def test_bucket_that_no_key_writes_is_left_out(text: str) -> None:
    with pytest.raises(ValueError, match="no bucket"):
        Key.parse("decode", text)


def test_family_of_gives_every_problem_one_that_is_known() -> None:
    problems: list[Problem] = [task.problem for task in tasks([LLAMA])]
    assert {family_of(problem) for problem in problems} == set(FAMILIES)
