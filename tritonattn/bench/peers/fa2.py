"""FlashAttention-2 as torch brings it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.nn.attention import SDPBackend

from ...call import Call
from ..cases import Case
from . import torch_sdpa


def load() -> str:
    return torch_sdpa.version()


def prepare(case: Case, calls: Sequence[Call]) -> list[Callable[[], Any]]:
    return torch_sdpa.prepare(case, calls, SDPBackend.FLASH_ATTENTION)
