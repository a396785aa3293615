"""After warming up no call compiles."""

from __future__ import annotations

import dataclasses
import random
from unittest import mock

import pytest
import torch
from launches import Launch
from tuner import H200, Fake, best_is, user_tables  # noqa: F401 -- a fixture

from tritonattn import ArgumentValueError, api, binaries, launch, settings
from tritonattn import device as devices
from tritonattn.inputs import cumulative
from tritonattn.plan import plan
from tritonattn.tuning import space, store
from tritonattn.tuning.models import PRESETS
from tritonattn.tuning.search import (
    tune,
)
from tritonattn.tuning.tasks import tasks
from tritonattn.warmup import choices, warmup

pytestmark = pytest.mark.usefixtures("user")


@pytest.mark.parametrize(
    ("family", "bounds"),
    [
        ("decode", (256, 1, 100_000, 256)),
        ("paged", (8, 512, 9000, 2048)),
        ("prefill", (9, 300, 700, 2700)),
    ],
)
@pytest.mark.parametrize("is_tuned", [False, True])
def test_warmup_covers_every_length_up_to_its_bounds(
    family: str, bounds: tuple[int, int, int, int], is_tuned: bool
) -> None:
    layer = PRESETS["qwen2-7b"][0]
    problem = next(t for t in tasks([layer]) if t.family == family).problem
    if is_tuned:
        rng = random.Random(5)
        for task in tasks([layer], [family]):
            found = space.candidates(task.problem, H200)
            entry = tune(task, H200, Fake(best_is(rng.choice(found)))).entry()
            store.record(H200, {task.key: entry})
    most_batch, most_q, most_k, most_total = bounds
    covered = set(choices(problem, H200, *bounds))
    assert len(covered) > (family != "decode" or is_tuned)
    rng = random.Random(0)
    for _ in range(1500):
        total_q = rng.choice((rng.randint(1, most_total), rng.randint(1, min(most_total, 70))))
        max_q = rng.choice((total_q, min(total_q, 1 << rng.randint(0, (most_q - 1).bit_length()))))
        max_q = 1 if family == "decode" else max_q
        fewest = -(-total_q // min(max_q, most_q))
        batch = rng.randint(fewest, max(fewest, min(total_q, most_batch)))
        max_k = rng.choice((rng.randint(1, most_k), rng.randint(1, 1000)))
        max_k *= most_batch if family == "prefill" and rng.random() < 0.5 else 1
        sized = dataclasses.replace(
            problem, batch=batch, total_q=total_q, max_q=max_q, max_k=max_k, capacity_k=max_k
        )
        config = store.find(sized, H200).config
        its_plan = plan(sized, H200, config.kernel)
        splits = 0 if its_plan.cut == "shares" else min(2, its_plan.num_splits)
        assert (config, splits) in covered, sized


def test_warmup_launches_what_later_calls_launch() -> None:
    """Calls as on an H200, listed and not run: after warming up none has a new binary."""
    launched: set[tuple] = set()

    def record(kernel, grid, args, constants, options, *_) -> None:
        launched.add(Launch(kernel, grid, args, constants, options, None).key)

    dtype = torch.bfloat16
    layer = {"dtype": dtype, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    with (
        mock.patch.object(binaries, "launch", record),
        mock.patch.object(devices, "describe", return_value=H200),
    ):
        launch.forget()
        options = {"sinks": True, "k_scale": True, "block_table": torch.zeros(1, dtype=torch.int64)}
        cache = {"page_size": 16, "cache_dtype": torch.float8_e4m3fn}
        warmup("paged_attention", **layer, **cache, max_batch=40, max_seqlen_k=2000, **options)
        shared = {
            "dtype": dtype,
            "num_heads": 4,
            "num_kv_heads": 1,
            "head_dim": 96,
            "head_dim_v": 64,
        }
        warmup("paged_attention", **shared, max_batch=9, max_seqlen_k=300)
        warmup("write_kv_cache", dtype=dtype, num_kv_heads=2, head_dim=64, page_size=16)
        warmup(api.varlen_attention, **layer, max_batch=3, max_seqlen_q=50, max_seqlen_k=50,
               return_lse=True, window_size=(7, 0))  # fmt: skip
        known = set(launched)
        assert len(known) > 4
        rng = random.Random(0)
        for _ in range(60):
            batch, k = rng.randint(1, 40), rng.randint(1, 2000)
            pages = -(-k // 16)
            pool = torch.zeros(1, 16, 2, 64, dtype=torch.float8_e4m3fn).expand(
                batch * pages, -1, -1, -1
            )
            table = torch.zeros(batch, pages, dtype=torch.int64)
            api.paged_attention(
                torch.empty(batch, 8, 64, dtype=dtype), pool, pool, table,
                torch.zeros(batch, dtype=torch.int32), sinks=torch.zeros(8, dtype=dtype),
                k_scale=torch.ones(2), max_seqlen_k=rng.choice((None, k)),
            )  # fmt: skip
            one = torch.zeros(1, 16, 1, 96, dtype=dtype).expand(20, -1, -1, -1)
            api.paged_attention(
                torch.empty(min(batch, 9), 4, 96, dtype=dtype), one,
                rng.choice((one, one.clone()))[..., :64],
                torch.zeros(min(batch, 9), rng.randint(1, 18), dtype=torch.int32),
                torch.zeros(min(batch, 9), dtype=torch.int32),
            )  # fmt: skip
            lens = [rng.randint(1, 50) for _ in range(rng.randint(1, 3))]
            q, k_new = (torch.empty(sum(lens), n, 64, dtype=dtype) for n in (8, 2))
            api.varlen_attention(
                q, k_new, k_new, cumulative(lens), cumulative(lens), return_lse=True,
                window_size=(99, 0), max_seqlen_q=rng.choice((None, max(lens))),
            )  # fmt: skip
        launch.forget()
    assert launched == known


def test_warmup_does_nothing_under_the_interpreter_and_says_so(
    device: torch.device, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cuda":
        pytest.skip("kernels are compiled here")
    monkeypatch.setattr(settings, "QUIET", False)
    layer = {"dtype": torch.float16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    assert warmup("paged_attention", **layer, max_seqlen_k=99) == 0
    assert "interpreter" in capsys.readouterr().err


def test_warmup_refuses_what_is_no_function_or_size() -> None:
    with pytest.raises(ArgumentValueError, match="paged_attention"):
        warmup("flash", dtype=torch.float16, num_kv_heads=1, head_dim=16)
    with pytest.raises(ArgumentValueError, match="max_batch"):
        warmup("varlen_attention", dtype=torch.float16, num_heads=1, num_kv_heads=1, head_dim=16,
               max_batch=0)  # fmt: skip


@pytest.mark.gpu
def test_warmup_leaves_nothing_to_compile(device: torch.device) -> None:
    # Such heads as no other test has: what a process has compiled is not compiled again.
    layer = {"dtype": torch.float16, "num_heads": 10, "num_kv_heads": 2, "head_dim": 88}
    assert warmup("paged_attention", **layer, max_batch=16, max_seqlen_k=3000) > 0
    before = binaries.count()
    for batch, k in ((1, 1), (1, 3000), (7, 700), (16, 3000), (16, 20)):
        pages = -(-k // 16)
        pool = torch.randn(batch * pages, 16, 2, 88, dtype=torch.float16, device=device)
        table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
        q = torch.randn(batch, 10, 88, dtype=torch.float16, device=device)
        lens = torch.full((batch,), k, dtype=torch.int32, device=device)
        api.paged_attention(q, pool, pool, table, lens)
    assert binaries.count() == before
