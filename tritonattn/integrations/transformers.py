"""transformers' models on this package: ``attn_implementation="tritonattn"``.

    import tritonattn.integrations.transformers as integration
    integration.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="tritonattn")
    model.generate(...)

**Supported**, transformers 4.57 to 5.24:

- every model that reaches its attention through transformers' ``AttentionInterface``: causal,
  sliding-window and chunked (Llama 4) layers, softcap (Gemma 2), sinks (GPT-OSS), any ratio of
  query to KV heads, values of another head size than the keys', encoders;
- dynamic and static caches, left and right padding, and any bool mask ``[batch or 1, 1, queries,
  keys]``, True where a query sees a key; sequences packed in one row, by ``cu_seq_lens_q`` and
  ``cu_seq_lens_k`` or by positions that start again;
- continuous batching, ``model.generate_batch(...)``, from transformers 5.5 on (up to 5.10, with
  sliding layers, its tokens are not those of ``generate()``, whatever computes the attention; up to
  5.18 and where flash-attn is installed, load with ``attn_implementation="paged|tritonattn"``);
- Bloom, MPT and Falcon, whose attention never reaches that interface: ``patch_alibi(model)``, from
  transformers 5.5 on.

**Refused**, with the reason: training (dropout, inputs that require grad), attention weights as an
output, additive (float) masks, masks that differ between heads, position biases.

Padding is looked at once a forward pass and kind of layer, in the mask function, and reaches the
layers as two numbers a sequence; no layer waits for the GPU.  Only what has no such form, such as
padding between tokens, becomes a dense mask.  A query that sees no key, such as one of the left
padding, gets 0, where eager attention gives it the mean of all values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import bad_value
from . import transformers_versions as versions
from .transformers_alibi import patch_alibi
from .transformers_masks import Rule, make_mask
from .transformers_routes import FUNCTION, attend, visibility

__all__ = ["NAME", "attention", "patch_alibi", "register"]

NAME = "tritonattn"


def register(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` known to transformers; may be called again.

    Raises UnsupportedError where transformers is missing or older than 4.57.

    >>> import torch, transformers
    >>> register()
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
    ...     num_attention_heads=2, attn_implementation="tritonattn",
    ... )
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> model = transformers.LlamaForCausalLM(config).to(device).eval()
    >>> prompt = torch.tensor([[5, 6, 7]], device=device)
    >>> mask = torch.ones_like(prompt)
    >>> out = model.generate(
    ...     prompt, attention_mask=mask, max_new_tokens=2, min_new_tokens=2, pad_token_id=0
    ... )
    >>> out.shape
    torch.Size([1, 5])
    """
    versions.require()
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    # Without a mask function of the same name transformers would pass no mask, padding or not.
    AttentionMaskInterface.register(name, make_mask)
    versions.allow_batching(name, attention)


@torch.compiler.disable
def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls for every layer.

    query: ``[batch, heads, queries, dim]``; key, value: ``[batch, KV heads, keys, dim]``, those of
        the cache included; s_aux: ``[heads]``, the sinks.
    attention_mask: what ``make_mask`` made, or bool ``[batch or 1, 1, queries, keys]``.

    Returns ``[batch, queries, heads, value dim]``, and None in place of the attention weights.
    """
    _refuse(dropout, kwargs)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    rule = Rule(is_causal, sliding_window, _chunk_size(module))
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    if kwargs.get("cu_seq_lens_q") is not None:
        from .transformers_batching import attend_packed

        options |= visibility(rule)
        return attend_packed(module, query, key, value, attention_mask, options, kwargs), None
    return attend(query, key, value, attention_mask, rule, **options), None


def _chunk_size(module: torch.nn.Module) -> int | None:
    """The chunk of a layer of Llama 4, which does not pass it."""
    config = getattr(module, "config", None)
    chunk = getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None)
    if chunk is None or kinds is None:
        return chunk
    return chunk if kinds[module.layer_idx] == "chunked_attention" else None  # type: ignore[index]


def _refuse(dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        rule = "must be 0: this package is for inference"
        raise bad_value(FUNCTION, "dropout", rule, dropout, "Call model.eval().")
    for name in ("output_attentions", "position_bias", "head_mask"):
        value = kwargs.get(name)
        if value is not None and value is not False:
            rule = "cannot be had from a kernel that never writes the attention weights"
            if name != "output_attentions":
                rule = "is not taken: a mask may say what is visible, and no more"
            fix = 'Load the model with attn_implementation="eager".'
            raise bad_value(FUNCTION, name, rule, value, fix)
