"""Bloom, MPT and Falcon, whose attention does not go through transformers' interface.

Their modules' ``forward`` is replaced, and ALiBi is what it is in the kernels: slopes, and float32
distances between positions, so that no bias tensor is read.  The three mean different things by it:

======  ============================================  =========================
model   bias                                          a position is
======  ============================================  =========================
Bloom   ``-slope * distance``                         a token's, padding not counted
Falcon  ``-slope * distance / sqrt(dim)``             a token's, padding not counted
MPT     ``-slope * distance``                         a row of the keys
======  ============================================  =========================

The two kinds of position differ only where padding lies between tokens.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError, bad_type, bad_value
from ..extras import alibi_slopes
from . import transformers_versions as versions
from .transformers_masks import CAUSAL, is_spans, make_mask, must_not_wait
from .transformers_routes import FUNCTION, attend

NAME = "tritonattn_alibi"  # known to the mask interface alone


def patch_alibi(model: torch.nn.Module) -> torch.nn.Module:
    """Make a Bloom, MPT or Falcon model of transformers compute its attention with this package.

    model: loaded with any ``attn_implementation`` but flash attention's.  It is changed in place
    and returned; other models of its class stay as they are.  A Falcon without ALiBi will do, too.

    Raises ArgumentTypeError for another model, UnsupportedError where transformers is older than
    5.5, whose masks for these models do not go through its mask interface.

    Source: ALiBi, Press et al. 2022; the models' code in transformers.

    >>> import torch, transformers
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> config = transformers.BloomConfig(vocab_size=32, hidden_size=32, n_layer=1, n_head=2)
    >>> model = patch_alibi(transformers.BloomForCausalLM(config).to(device).eval())
    >>> with torch.no_grad():
    ...     model(input_ids=torch.tensor([[5, 6, 7]], device=device)).logits.shape
    torch.Size([1, 3, 32])
    """
    versions.require()
    if versions.version() < (5, 5):
        raise UnsupportedError(
            "patch_alibi: needs transformers 5.5 or later; got "
            f"{'.'.join(map(str, versions.version()))}. pip install --upgrade transformers"
        )
    found = [(m, _FORWARDS[n]) for m in model.modules() if (n := type(m).__name__) in _FORWARDS]
    if not found:
        fix = 'For other models, register() and load with attn_implementation="tritonattn".'
        rule = f"must be a model with {', '.join(_FORWARDS)} layers"
        raise bad_type("patch_alibi", "model", rule, type(model).__name__, fix)
    from transformers import AttentionMaskInterface

    AttentionMaskInterface.register(NAME, _make_mask)
    for module, forward in found:
        module.forward = types.MethodType(forward, module)
    parts: list[Any] = [part for part in model.modules() if hasattr(part, "config")]
    for part in parts:
        part.config._attn_implementation = NAME
    # For a static cache generate() would make the mask beforehand, of which these models could not
    # make what they make of the tokens' mask.
    if hasattr(model, "prepare_inputs_for_generation"):
        model.create_masks_for_generate = _tokens_mask  # type: ignore[assignment]
    return model


class _Handed:
    """A mask on its way through a model that would otherwise compute with it."""

    ndim = 0

    def __init__(self, mask: Tensor | None):
        self.mask = mask

    def to(self, where: Any, *args: Any, **kwargs: Any) -> _Handed:
        if isinstance(where, torch.dtype) or self.mask is None:
            return self
        return _Handed(self.mask.to(where, *args, **kwargs))


@torch.compiler.disable  # between compiled graphs, where padding can be looked at
def _make_mask(**given: Any) -> _Handed:
    by_rows = given["config"].model_type == "mpt"
    mask = make_mask(ask=by_rows, **given)
    if by_rows and mask is not None and not is_spans(mask) and mask.shape[2] != mask.shape[3]:
        rule = "must have its padding at one end for MPT, whose ALiBi counts padding too"
        fix = "Pad on the left, or give the whole sequence without a cache."
        tokens = given["attention_mask"]
        if tokens is not None and must_not_wait(tokens):
            rule = "cannot be looked at in a captured graph, and MPT's ALiBi counts padding too"
            fix = "Leave it out there, without padding."
        raise bad_value(FUNCTION, "attention_mask", rule, given["attention_mask"], fix)
    return _Handed(mask)


def _tokens_mask(**given: Any) -> Tensor | None:
    return given["attention_mask"]


def _bloom(
    self: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Any,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    _refuse(self, output_attentions, self.attention_dropout.p)
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    out = attend(
        query, key, value, _mask(attention_mask), CAUSAL,
        by_lists=True,
        softmax_scale=self.inv_norm_factor,
        alibi_slopes=_slopes(self.num_heads, query.device),
    )  # fmt: skip
    return self.dense(out.flatten(2)) + residual, None


def _mpt(
    self: Any,
    hidden_states: Tensor,
    position_bias: Tensor,
    cache: Any = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    _refuse(self, False, self.attn_dropout_p)
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (
        x.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2) for x in mixed.chunk(3, dim=2)
    )
    cache = kwargs.get("past_key_values") if cache is None else cache
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx)
    out = attend(
        query, key, value, _mask(attention_mask), CAUSAL,
        softmax_scale=self.softmax_scale,
        alibi_slopes=_slopes(self.n_heads, query.device),
    )  # fmt: skip
    return self.out_proj(out.flatten(2)), None


def _falcon(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Any,
    position_ids: Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    _refuse(self, output_attentions, self.attention_dropout.p)
    query, key, value = (
        x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states))
    )
    options: dict[str, Any] = {"softmax_scale": self.inv_norm_factor}
    if alibi is None:
        from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

        assert position_embeddings is not None
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    else:  # Falcon's slopes are bfloat16; the bias is scaled together with the scores
        slopes = _slopes(self.num_heads, query.device, torch.bfloat16)
        options |= {"alibi_slopes": slopes * self.inv_norm_factor, "by_lists": True}
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    out = attend(query, key, value, _mask(attention_mask), CAUSAL, **options)
    return self.dense(out.flatten(2)), None


_FORWARDS: dict[str, Callable[..., tuple[Tensor, None]]] = {
    "BloomAttention": _bloom,
    "MptAttention": _mpt,
    "FalconAttention": _falcon,
}


@functools.cache
def _slopes(num_heads: int, device: torch.device, rounded: torch.dtype | None = None) -> Tensor:
    with torch.inference_mode(False):  # kept for calls outside of it too
        slopes = alibi_slopes(num_heads, device=device)
        return slopes if rounded is None else slopes.to(rounded).to(slopes.dtype)


def _mask(handed: Any) -> Tensor | None:
    """A finished mask that the caller gave has come by without being wrapped."""
    return handed.mask if isinstance(handed, _Handed) else handed


def _refuse(module: torch.nn.Module, output_attentions: bool, dropout: float) -> None:
    if module.training and dropout:
        rule = "must be 0: this package is for inference"
        raise bad_value(FUNCTION, "dropout", rule, dropout, "Call model.eval().")
    if output_attentions:
        rule = "cannot be had from a kernel that never writes the attention weights"
        fix = "Load the model anew, without patch_alibi."
        raise bad_value(FUNCTION, "output_attentions", rule, output_attentions, fix)
