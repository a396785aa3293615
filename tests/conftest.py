"""Profiles, the device that tests run on, and what is skipped where there is no GPU.

``pytest`` draws the same examples every time; ``--hypothesis-profile=hunt`` looks for new ones.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from tritonattn.device import interpreting

# An interpreted kernel is slow and a GPU's first call compiles: neither is a fault of the test.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", derandomize=True, max_examples=25, database=None, **_COMMON)
settings.register_profile("hunt", max_examples=2000, print_blob=True, **_COMMON)

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # workers share the cores


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("hypothesis_profile", None):
        settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpus = 0 if interpreting() else torch.cuda.device_count()
    found = f"{gpus} GPUs found" if torch.cuda.device_count() == gpus else "kernels are interpreted"
    for item in items:
        needed = 2 if item.get_closest_marker("two_gpus") else 1
        wants = item.get_closest_marker("gpu") or item.get_closest_marker("two_gpus")
        if wants and gpus < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s): {found}"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where tensors go: the GPU, or the CPU where kernels run through Triton's interpreter."""
    return torch.device("cpu" if interpreting() else "cuda")
