"""What the mask function hands over says what transformers' dense mask says; no kernel runs."""

from __future__ import annotations

import random
from typing import Any

import hf_models
import pytest
import torch

from tritonattn import reference
from tritonattn.integrations import transformers_versions as versions
from tritonattn.integrations.transformers_masks import (
    Rule,
    is_spans,
    make_mask,
    remembered,
    rule_of,
    speaks_of_tokens,
)
from tritonattn.integrations.transformers_routes import _lists

masking: Any = hf_models.transformers.masking_utils


def asked(
    function: Any, queries: int, offset: int, keys: int, tokens: Any = None, **more: Any
) -> dict[str, Any]:
    """The arguments of a mask function, as every supported version names them."""
    position = torch.arange(offset, offset + queries)
    given = {
        "batch_size": 2, "q_length": queries, "q_offset": offset, "kv_length": keys, "kv_offset": 0,
        "mask_function": function, "attention_mask": tokens, "device": torch.device("cpu"),
    } | more  # fmt: skip
    if versions.version() < (5, 5):
        del given["q_length"], given["q_offset"]
        given["cache_position"] = position
    return given


def seen_through(spans: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    """``[batch, queries, keys]``: what spans mean, by this package's own contract."""
    rule = rule_of(spans)
    assert rule is not None
    window = None if rule.window is None else (rule.window - 1, 0)
    seen = torch.zeros(spans.shape[0], queries, keys, dtype=torch.bool)
    for b, (start, end) in enumerate(spans.flatten(1).tolist()):
        seen[b, :, start:end] = reference.visible(
            queries, end - start, rule.causal, window, rule.chunk
        )
    return seen


def left_padding(*padding: int, length: int) -> torch.Tensor:
    return torch.arange(length) >= torch.tensor(padding)[:, None]


@pytest.mark.parametrize("seed", range(40))
def test_spans_say_what_the_dense_mask_says(seed):
    draw = random.Random(seed)
    length = draw.randint(2, 20)  # tokens so far
    queries = draw.randint(2, length)
    dropped = draw.randint(0, length - queries)  # keys that a sliding cache no longer has
    keys = length - dropped + draw.choice([0, 5])  # a static cache has room for more
    padding = draw.randint(0, length), draw.randint(0, length)
    tokens = left_padding(*padding, length=length)
    kind = draw.choice(["causal", "sliding", "chunked"])
    size = draw.randint(1, 8)
    function = {
        "causal": masking.causal_mask_function,
        "sliding": masking.sliding_window_causal_mask_function(size),
        "chunked": masking.chunked_causal_mask_function(size, torch.tensor(padding)),
    }[kind]
    given = asked(function, queries, length - queries, keys, tokens, kv_offset=dropped)
    mask = make_mask(**given)
    if mask is None:
        pytest.fail("padding was dropped")
    if kind == "chunked" and dropped:
        assert mask.dtype == torch.bool  # its chunks start with tokens that are gone
        return
    assert is_spans(mask)
    assert rule_of(mask) == {
        "causal": Rule(), "sliding": Rule(window=size), "chunked": Rule(chunk=size)
    }[kind]  # fmt: skip
    dense = versions.dense_mask(given)[:, 0]
    is_token = tokens[:, length - queries :, None]
    assert torch.equal(seen_through(mask, queries, keys) & is_token, dense & is_token)


@pytest.mark.parametrize("keys", [6, 9])
def test_spans_end_where_a_static_cache_ends_on_the_device(keys):
    given = asked(masking.causal_mask_function, 2, 4, keys)
    if "q_offset" in given:
        given["q_offset"] = torch.tensor(4)
    mask = make_mask(**given)
    assert mask is not None
    assert mask.flatten(1).tolist() == [[0, 6], [0, 6]]


def test_no_mask_is_made_for_plain_causal_attention():
    if versions.version() < (5, 5):
        pytest.skip("this version gives positions on the device, so spans are made")
    assert make_mask(**asked(masking.causal_mask_function, 3, 2, 5)) is None


@pytest.mark.parametrize(
    "function",
    [
        lambda *index: index[3] <= index[2],
        masking.and_masks(masking.causal_mask_function, masking.causal_mask_function),
        masking.and_masks(masking.sliding_window_overlay(3), masking.sliding_window_overlay(4)),
        masking.or_masks(masking.sliding_window_overlay(3), masking.causal_mask_function),
        masking.and_masks(
            masking.sliding_window_causal_mask_function(3), masking.causal_mask_function
        ),
    ],
    ids=["own", "twice", "two windows", "union", "nested"],
)
def test_mask_function_that_is_not_known_makes_the_dense_mask(function):
    given = asked(function, 4, 0, 4)
    mask = make_mask(**given)
    assert mask is not None
    assert torch.equal(mask, versions.dense_mask(given))


@pytest.mark.parametrize(
    "tokens", [[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 0], [0, 1, 1, 0, 1, 1], [0, 0, 1, 1, 1, 0]]
)
def test_holes_and_right_padding_make_the_dense_mask(tokens):
    both = torch.tensor([[1] * 6, tokens], dtype=torch.bool)
    given = asked(masking.causal_mask_function, 6, 0, 6, both)
    mask = make_mask(**given)
    assert mask is not None
    assert torch.equal(mask, versions.dense_mask(given))


def test_tokens_that_are_not_named_are_not_taken_for_tokens():
    """A 2D mask shorter than the keys: transformers pads it with padding."""
    given = asked(masking.causal_mask_function, 3, 3, 6, torch.ones(2, 4, dtype=torch.bool))
    mask = make_mask(**given)
    assert mask is not None
    assert torch.equal(mask, versions.dense_mask(given))


@pytest.mark.parametrize("tokens", [[0, 1, 1, 1], [1, 1, 1, 0], [0, 1, 1, 0], [1, 1, 1, 1]])
def test_encoders_keep_their_padding_on_either_side(tokens):
    function = getattr(masking, "bidirectional_mask_function", None)
    if function is None:
        pytest.skip("this version has no masks for encoders")
    both = torch.tensor([[1] * 4, tokens], dtype=torch.bool)
    given = asked(function, 4, 0, 4, both)
    mask = make_mask(**given)
    assert mask is not None
    assert rule_of(mask) == Rule(causal=False)
    assert torch.equal(seen_through(mask, 4, 4), versions.dense_mask(given)[:, 0])


def test_a_decode_step_has_a_dense_mask_which_names_its_keys():
    tokens = left_padding(2, 0, length=6)
    mask = make_mask(**asked(masking.causal_mask_function, 1, 5, 8, tokens))
    assert mask is not None
    assert mask.shape == (2, 1, 1, 8)
    table, counts = _lists(mask[:, 0], step=100)
    assert counts.tolist() == [4, 6]
    assert table[0, :4].tolist() == [2, 3, 4, 5]
    assert table[1, :6].tolist() == [100, 101, 102, 103, 104, 105]


def test_a_mask_says_whether_tokens_are_behind_it():
    tokens = left_padding(2, 0, length=4)
    function = masking.sliding_window_causal_mask_function(2)
    assert not speaks_of_tokens(make_mask(**asked(function, 4, 0, 4)))
    assert speaks_of_tokens(make_mask(**asked(function, 4, 0, 4, tokens)))
    assert speaks_of_tokens(torch.ones(1, 1, 4, 4, dtype=torch.bool))


def test_only_a_mask_of_our_own_remembers_what_was_made_of_it():
    made: list[int] = []
    ours = make_mask(**asked(masking.sliding_window_causal_mask_function(2), 4, 0, 4))
    theirs = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    for mask in (ours, theirs):
        for _ in range(2):
            remembered(mask, "key", lambda: made.append(1))
    assert len(made) == 1 + 2
