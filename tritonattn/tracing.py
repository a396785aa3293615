"""Whether a call is traced or run: every public function asks, so the answer has to be cheap."""

from __future__ import annotations

import torch

# A compiler takes the first for True; run, it costs 20 ns, torch.compiler.is_compiling() 60.
_is_dynamo = torch.compiler.is_dynamo_compiling
_modes = torch._C._len_torch_dispatch_stack
_plain = torch._C._disabled_torch_dispatch_impl  # the __torch_dispatch__ of Tensor and Parameter


def is_traced(x: object) -> bool:
    """Whether a call with ``x``, one of its tensors, has to go through torch's dispatcher.

    That is so while torch.compile or torch.export traces, for fake tensors and whatever other class
    has a dispatch of its own, and under a dispatch mode.  Anything that is no tensor is left to
    validation.
    """
    if _is_dynamo() or _modes():
        return True
    kind = type(x)
    return kind is not torch.Tensor and getattr(kind, "__torch_dispatch__", _plain) is not _plain


def has_values(x: torch.Tensor) -> bool:
    """Whether there is memory behind ``x``, whose values may be looked at."""
    return x.device.type != "meta" and not isinstance(x, torch._subclasses.FakeTensor)
