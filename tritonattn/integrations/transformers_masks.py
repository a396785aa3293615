"""What the mask function of transformers hands to the attention of each layer.

transformers calls the mask function once a forward pass and kind of layer, and passes what it
returns, unread, to all layers of that kind.  So padding is looked at here, once, and told in the
least form that says all:

``None``
    all keys count and the last query stands on the last key; the module's options say the rest;
spans, ``[batch, 2, 1, 1]`` int32
    rows ``spans[b, 0] <= row < spans[b, 1]`` of sequence b's keys count, its last query stands on
    the last of them, and ``rule_of(spans)`` is the pattern: left padding, static caches;
a dense mask, ``[batch or 1, 1, queries, keys]`` bool
    anything else: True where the query sees the key.

The last two have four axes since transformers takes a mask with four for a finished one.

That the tokens' 2D mask has no holes is a value on the GPU, and asking for it waits: once a forward
pass and kind of layer.  A decode step does not ask: with one query a sequence, the dense mask is as
short as the keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import transformers_versions as versions


@dataclass(frozen=True)
class Rule:
    """A pattern that the kernels have themselves; ``window`` counts the query's own token."""

    causal: bool = True
    window: int | None = None
    chunk: int | None = None


CAUSAL, BIDIRECTIONAL = Rule(), Rule(causal=False)
T = TypeVar("T")


def make_mask(*, ask: bool = False, **given: Any) -> Tensor | None:
    """The mask function: takes what transformers gives to every registered one.

    ``ask``: look for holes in a decode step's mask too.
    """
    rule = _recognise(given.get("mask_function"))
    num_queries, q_offset, device = versions.queries(given)
    num_keys, k_offset = given["kv_length"], given.get("kv_offset", 0)
    tokens = given.get("attention_mask")  # [batch, tokens] bool, False for padding
    # Chunks count from a sequence's first token, which a cache that dropped keys no longer has.
    if rule is None or (rule.chunk is not None and k_offset):
        return _own(versions.dense_mask(given), tokens)
    # The row after the last query's key; with a static cache a number on the GPU.
    end = q_offset + num_queries - k_offset if rule.causal else num_keys
    if tokens is None:
        if rule == CAUSAL and isinstance(end, int) and end == num_keys:
            return None
        start = torch.zeros(given["batch_size"], dtype=torch.int32, device=device)
        return _own(_spans(start, end), tokens, rule)
    if (num_queries == 1 and not ask) or must_not_wait(tokens):
        return _own(versions.dense_mask(given), tokens)
    spans = _without_holes(tokens, k_offset, end, rule.causal)
    if spans is None:
        return _own(versions.dense_mask(given), tokens)
    return _own(spans, tokens, rule)


def rule_of(mask: Tensor | None) -> Rule | None:
    """The pattern that ``make_mask`` left with its spans."""
    return getattr(mask, "_tritonattn", {}).get("rule")


def speaks_of_tokens(mask: Tensor) -> bool:
    """Whether more than the layer's own pattern and packed positions went into a mask."""
    return getattr(mask, "_tritonattn", {}).get("tokens", True)


def remembered(mask: Tensor, key: Hashable, make: Callable[[], T]) -> T:
    """``make()``, once for all layers that get this mask.

    A mask that somebody else made may be changed in place and is looked at by every layer.
    """
    memory = getattr(mask, "_tritonattn", None)
    if memory is None:
        return make()
    if key not in memory:
        memory[key] = make()
    return memory[key]


def is_spans(mask: Tensor) -> bool:
    return mask.dtype == torch.int32 and mask.shape[1:] == (2, 1, 1)


def _without_holes(tokens: Tensor, k_offset: int, end: int | Tensor, causal: bool) -> Tensor | None:
    """Spans, if each sequence's tokens lie together and, if causal, reach to ``end``."""
    row = torch.arange(tokens.shape[1], device=tokens.device) - k_offset
    start = ((tokens.cumsum(-1) == 0).sum(-1) - k_offset).to(torch.int32)  # [batch]
    last = end
    if not causal:  # padding may follow
        last = (tokens * (row + 1)).amax(-1).to(torch.int32)
    spans = _spans(start.clamp(min=0), last)
    together = (row >= spans[:, 0, 0]) & (row < spans[:, 1, 0])
    matters = (row >= 0) & (row < end)  # keys that the cache still has and a query may see
    wrong = ((tokens != together) & matters).any()
    if causal:  # tokens that the mask does not name are padding
        wrong = wrong | (tokens.shape[1] - k_offset < end)
    return None if wrong else spans


def _spans(start: Tensor, end: int | Tensor) -> Tensor:
    if isinstance(end, int):
        end = torch.full_like(start, end)
    end = end.to(torch.int32).expand(start.shape)
    return torch.stack([torch.minimum(start, end), end], dim=1)[:, :, None, None]


def _own(mask: Tensor, tokens: Tensor | None, rule: Rule | None = None) -> Tensor:
    mask = mask.contiguous()  # transformers would make it so, and lose what is noted on it
    note = {"rule": rule, "tokens": tokens is not None}
    mask._tritonattn = note  # type: ignore[attr-defined]
    return mask


def _recognise(function: Any) -> Rule | None:
    """The pattern of one of transformers' own mask functions; None for any other function.

    They are closures, so what they were made from is what their closures hold.
    """
    masking = versions.masking()
    if function is masking.causal_mask_function:
        return CAUSAL
    if function is getattr(masking, "bidirectional_mask_function", None):
        return BIDIRECTIONAL
    if getattr(function, "__qualname__", "") != "and_masks.<locals>.and_mask":
        return None
    parts = _held(function).get("mask_functions", ())
    if len(parts) != 2 or parts[1] is not masking.causal_mask_function:
        return None
    held = _held(parts[0])
    name = parts[0].__qualname__
    if name == "sliding_window_overlay.<locals>.inner_mask" and set(held) == {"sliding_window"}:
        return Rule(window=held["sliding_window"])
    if name == "chunked_overlay.<locals>.inner_mask" and set(held) == {
        "chunk_size",
        "left_padding",
    }:
        return Rule(chunk=held["chunk_size"])
    return None


def _held(function: Any) -> dict[str, Any]:
    return dict(inspect.getclosurevars(function).nonlocals)


def must_not_wait(tensor: Tensor) -> bool:
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
