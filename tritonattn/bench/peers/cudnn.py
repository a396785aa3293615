"""cuDNN's attention, through torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from ...call import Call
from ..cases import Case
from . import torch_sdpa


def load() -> str:
    found = torch.backends.cudnn.version()
    if found is None:
        raise ImportError("this torch has no cuDNN")
    return f"{found} through {torch_sdpa.version()}"


def prepare(case: Case, calls: Sequence[Call]) -> list[Callable[[], Any]]:
    return torch_sdpa.prepare(case, calls, SDPBackend.CUDNN_ATTENTION)
