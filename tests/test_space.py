"""Which configurations the tuner tries, and how an entry is fitted to a call."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tuner import H200

from tritonattn import UnsupportedError
from tritonattn import device as devices
from tritonattn.plan import HOPPER, plan
from tritonattn.tuning import space
from tritonattn.tuning.config import KernelConfig, invalid
from tritonattn.tuning.heuristics import heuristic
from tritonattn.tuning.models import PRESETS
from tritonattn.tuning.tasks import tasks


@pytest.mark.parametrize("arch", [75, 80, 90, 100, 120, "gfx942", "gfx1100"])
def test_candidates_are_valid_and_begin_with_the_heuristic(arch: int | str) -> None:
    device = devices.target(arch)
    for preset in PRESETS.values():
        for task in tasks(preset, dtype=torch.float16):
            try:
                default = heuristic(task.problem, device)
            except UnsupportedError:
                continue
            found = space.candidates(task.problem, device)
            assert found[0] == default
            assert len(set(found)) == len(found) <= 120
            assert not any(invalid(config, task.problem, device) for config in found)


@pytest.mark.parametrize("arch", [80, 90, 100, 120, "gfx942"])
def test_candidates_copy_packed_keys_as_boxes_where_that_is_possible(arch: int | str) -> None:
    """On Hopper its own kernel does; beside it stands one portable configuration, with boxes."""
    device = devices.target(arch)
    for task in tasks(PRESETS["llama3-8b"], dtype=torch.float16):
        has_boxes = arch in (90, 100) and task.family in ("prefill", "prefix")
        found = space.candidates(task.problem, device)
        portable = [config for config in found if config.kernel != HOPPER]
        assert ("boxes" in {config.form for config in portable}) == has_boxes, task
        assert plan(task.problem, device).kernel != HOPPER or len(portable) == 1


def test_entry_with_boxes_is_fitted_to_calls_that_cannot_have_them() -> None:
    prefill = tasks(PRESETS["llama3-8b"], ["prefill"])[0].problem
    boxes = KernelConfig(64, 64, 1, 4, 3, "boxes")
    assert space.fit(boxes, prefill, H200) == boxes
    odd = dataclasses.replace(prefill, has_boxes=False)
    assert space.fit(boxes, odd, H200) == dataclasses.replace(boxes, form="textbook")


def test_config_that_needs_more_registers_than_there_are_is_invalid_for_all() -> None:
    prefill = tasks(PRESETS["llama3-8b"], ["prefill"])[0].problem
    spills = KernelConfig(128, 128, 1, 4, 2)
    assert "registers" in invalid(spills, prefill, H200)
    assert not invalid(dataclasses.replace(spills, num_warps=8), prefill, H200)
    assert spills not in space.candidates(prefill, H200)
    amd = dataclasses.replace(devices.target("gfx942"), shared_memory=H200.shared_memory)
    assert not invalid(spills, prefill, amd)
