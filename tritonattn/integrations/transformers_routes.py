"""From transformers' dense tensors and its mask to one call of this package.

Queries, keys and values come as ``[batch, heads, tokens, dim]`` views of what a cache or a
projection left.  Keys and values are not copied: with their strides as they are, row j of sequence
b is row ``b * step + j`` of one packed tensor, so that the prefix sums that ``varlen_attention``
takes alternate between a sequence's keys and a gap, which has no queries.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..api import paged_attention, varlen_attention
from ..errors import bad_value
from .transformers_masks import Rule, is_spans, remembered, rule_of

FUNCTION = "tritonattn in transformers"


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    rule: Rule,
    *,
    by_lists: bool = False,
    **options: Any,
) -> Tensor:
    """``[batch, queries, heads, value dim]``.

    ``rule`` holds where the mask does not say more; ``options`` are those of the attention
    functions that have no say in what is visible.  ``by_lists``: ALiBi counts the tokens that a
    dense mask shows, not the rows.
    """
    if mask is None or is_spans(mask):
        return _by_rule(query, key, value, mask, rule_of(mask) or rule, options)
    _check(mask, query, key)
    if query.shape[2] == key.shape[2] and not by_lists:
        return _by_tree(query, key, value, mask, options)
    return _by_lists(query, key, value, mask, options)


def visibility(rule: Rule) -> dict[str, Any]:
    """A rule as options of the attention functions."""
    window = None
    if rule.window is not None:
        window = (rule.window - 1, 0 if rule.causal else rule.window - 1)
    return {"causal": rule.causal, "window_size": window, "chunk_size": rule.chunk}


def _by_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor | None,
    rule: Rule,
    options: dict[str, Any],
) -> Tensor:
    batch, num_keys = key.shape[0], key.shape[2]
    k, v, step = _packed(key, value)

    def ends() -> Tensor:
        assert spans is not None
        starts = torch.arange(batch, dtype=torch.int32, device=spans.device) * step
        return (starts[:, None] + spans.flatten(1)).flatten()

    if spans is None:
        cu_seqlens_k = _even(batch, num_keys, step, key.device)
    else:
        cu_seqlens_k = remembered(spans, ("ends", step), ends)
    return _varlen(query, k, v, cu_seqlens_k, num_keys, visibility(rule) | options)


def _by_tree(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: dict[str, Any]
) -> Tensor:
    """As many queries as keys: among "new" keys a mask replaces the causal rule."""
    batch, num_keys = key.shape[0], key.shape[2]
    k, v, step = _packed(key, value)
    tree_mask = remembered(
        mask, "tree", lambda: mask[:, 0].expand(batch, -1, -1).reshape(-1, num_keys)
    )
    cu_seqlens_k = _even(batch, num_keys, step, key.device)
    return _varlen(query, k, v, cu_seqlens_k, num_keys, {"tree_mask": tree_mask} | options)


def _by_lists(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: dict[str, Any]
) -> Tensor:
    """Every query is a sequence of its own, whose pages of one token are the keys that it sees."""
    batch, heads, num_queries, _ = query.shape
    k, v, step = _packed(key, value)
    table, counts = remembered(
        mask, ("lists", step), lambda: _lists(mask[:, 0].expand(batch, -1, -1), step)
    )
    out = paged_attention(
        packed_rows(query),
        k[:, None],
        v[:, None],
        table,
        counts,
        max_seqlen_k=key.shape[2],
        **options,
    )
    return out.view(batch, num_queries, heads, -1)  # type: ignore[union-attr]


def _lists(visible: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """(page ids ``[batch * queries, keys]``, how many of them count), ``visible`` being ``[batch,
    queries, keys]``.  What lies past a count is left as it was."""
    batch, num_queries, num_keys = visible.shape
    dtype = torch.int32 if batch * step < 2**31 else torch.int64
    place = (visible.cumsum(-1) - 1).masked_fill(~visible, num_keys)
    ids = torch.arange(num_keys, dtype=dtype, device=visible.device)
    ids = ids + step * torch.arange(batch, dtype=dtype, device=visible.device)[:, None, None]
    table = ids.new_empty(batch, num_queries, num_keys + 1)  # a column for those that are not seen
    table = table.scatter_(2, place, ids.expand_as(place)).flatten(0, 1)[:, :num_keys]
    return table, visible.sum(-1, dtype=torch.int32).flatten()


def _varlen(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_k: Tensor,
    num_keys: int,
    options: dict[str, Any],
) -> Tensor:
    batch, heads, num_queries, _ = query.shape
    cu_seqlens_q = _even(batch, num_queries, num_queries, query.device)
    out = varlen_attention(
        packed_rows(query), k, v, cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q=num_queries, max_seqlen_k=num_keys, **options,
    )  # fmt: skip
    return out.view(batch, num_queries, heads, -1)  # type: ignore[union-attr]


def packed_rows(x: Tensor) -> Tensor:
    """``[batch, heads, tokens, dim]`` as ``[batch * tokens, heads, dim]``, mostly a view."""
    return x.transpose(1, 2).flatten(0, 1)


def _packed(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, int]:
    """Views ``[rows, heads, dim]`` of keys and values, and how many rows lie from one sequence to
    the next."""
    step = _step(key)
    if step is None or step != _step(value):
        key, value = key.contiguous(), value.contiguous()
        step = key.shape[1] * key.shape[2]
    rows = (key.shape[0] - 1) * step + key.shape[2]
    k, v = (
        x.as_strided((rows, x.shape[1], x.shape[3]), (x.stride(2), x.stride(1), 1))
        for x in (key, value)
    )
    return k, v, step


def _step(x: Tensor) -> int | None:
    """None where the strides of a packed view cannot say where every row is."""
    batch, _, tokens, _ = x.shape
    if x.stride(3) != 1 or x.stride(2) < 1:
        return None
    if batch == 1:
        return tokens
    step, rest = divmod(x.stride(0), x.stride(2))
    return step if rest == 0 and step >= tokens else None


def _even(batch: int, length: int, step: int, device: torch.device) -> Tensor:
    """``[0, length, step, step + length, ...]``, ``[2 * batch]`` int32.

    Made on the device, as a copy from the host would wait; kept, as all layers ask for the same.
    """
    if device.type != "cuda":
        return _make_even(batch, length, step, device, 0)
    if torch.cuda.is_current_stream_capturing():  # its memory is filled when the graph is replayed
        return _make_even.__wrapped__(batch, length, step, device, 0)
    return _make_even(batch, length, step, device, torch.cuda.current_stream(device).cuda_stream)


@functools.lru_cache(maxsize=64)
def _make_even(batch: int, length: int, step: int, device: torch.device, _stream: int) -> Tensor:
    starts = torch.arange(batch, dtype=torch.int32, device=device) * step
    return torch.stack([starts, starts + length], dim=1).flatten()


def _check(mask: Tensor, query: Tensor, key: Tensor) -> None:
    if mask.dtype != torch.bool:
        rule = "must be None or bool, True where a query sees a key: additive masks are not taken"
        fix = 'Pass it as mask == 0, or load the model with attn_implementation="eager".'
        raise bad_value(FUNCTION, "attention_mask", rule, mask, fix)
    batch, num_queries, num_keys = query.shape[0], query.shape[2], key.shape[2]
    shapes = [[b, 1, num_queries, num_keys] for b in {1, batch}]
    if list(mask.shape) not in shapes:
        rule = f"must be [batch or 1, 1, queries, keys] = {shapes[-1]}, the same for all heads"
        fix = 'Load the model with attn_implementation="eager" for masks of another kind.'
        raise bad_value(FUNCTION, "attention_mask", rule, mask, fix)
