"""Everything that differs between versions of transformers, or reaches into what it keeps private.

Supported: 4.57 to 5.24, and later ones as far as they stay as they are.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError

OLDEST = (4, 57)


def require() -> None:
    """Raise unless a supported transformers is installed."""
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            "tritonattn.integrations.transformers: needs the package transformers, which is not "
            "installed. pip install transformers"
        ) from error
    if version() < OLDEST:
        raise UnsupportedError(
            "tritonattn.integrations.transformers: needs transformers "
            f"{'.'.join(map(str, OLDEST))} or later; got {transformers.__version__}. "
            "pip install --upgrade transformers"
        )


def version() -> tuple[int, int]:
    import transformers

    major, minor = transformers.__version__.split(".")[:2]
    return int(major), int(minor)


def masking() -> Any:
    from transformers import masking_utils

    return masking_utils


def queries(given: dict[str, Any]) -> tuple[int, int | Tensor, torch.device]:
    """(number of queries, position of the first, device) from a mask function's arguments."""
    position = given.get("cache_position")  # 4.57 to 5.4: the queries' positions
    if position is not None:
        return position.shape[0], position[0], position.device
    offset = given["q_offset"]
    tokens = given.get("attention_mask")
    device = given.get("device") if tokens is None else tokens.device
    if device is None and isinstance(offset, Tensor):
        device = offset.device
    return given["q_length"], offset, torch.device(device or "cpu")


def dense_mask(given: dict[str, Any]) -> Tensor:
    """The whole mask, ``[batch, 1, queries, keys]`` bool, by transformers' own function."""
    never = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return masking().sdpa_mask(**{**given, **never})


_batching: set[str] = set()  # names that continuous batching takes for flash-attn's


def allow_batching(name: str, attention: Any) -> None:
    """Make ``generate_batch`` take models whose attention is ``name``."""
    if version() < (5, 0):
        return
    if version() < (5, 19):  # it puts "paged|" before a name
        from transformers import AttentionInterface

        AttentionInterface.register(f"paged|{name}", attention)
        return
    # It takes names that look like flash-attn's, and asks for its function with a cache.
    from transformers.generation.continuous_batching import cache, continuous_api, initialization

    if not _batching:
        modules: list[Any] = [cache, continuous_api, initialization]
        for module in modules:
            module.is_flash_attention_requested = _knowing(module.is_flash_attention_requested)
        start: Any = initialization
        start.lazy_import_flash_attention = _having(start.lazy_import_flash_attention)
    _batching.add(name)


def _knowing(is_flash: Any) -> Any:
    """``is_flash_attention_requested`` that says yes to our names too."""

    @functools.wraps(is_flash)
    def asked(
        config: Any = None, requested_attention_implementation: Any = None, **how: Any
    ) -> bool:
        name = requested_attention_implementation or getattr(config, "_attn_implementation", None)
        return name in _batching or is_flash(config, requested_attention_implementation, **how)

    return asked


def _having(load: Any) -> Any:
    """``lazy_import_flash_attention`` that has this package's functions for our names."""

    @functools.wraps(load)
    def loaded(implementation: Any, *args: Any, **kwargs: Any) -> Any:
        if implementation not in _batching:
            return load(implementation, *args, **kwargs)
        from .. import flash_attn as ours

        functions = (ours.flash_attn_func, ours.flash_attn_varlen_func)
        return (*functions, ours.flash_attn_with_kvcache, None, None), (None, None)

    return loaded


def update_paged_cache(
    module: Any, key: Tensor, value: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """(keys, values, arguments) of a layer in continuous batching, ``[1, heads, tokens, dim]``.

    Where the model has not done so, new tokens are written to the cache and all of a sequence are
    read; and what is kept for each kind of layer is chosen.
    """
    cache = kwargs.get("cache")
    if cache is None or type(cache).__name__ != "PagedAttentionCache":
        return key, value, kwargs
    kwargs = dict(kwargs)
    if "kwargs" in inspect.signature(cache.update).parameters:  # 5.19 and later; it changes kwargs
        key, value = cache.update(key, value, module.layer_idx, kwargs=kwargs)
        return key, value, kwargs
    kind = "sliding_attention" if getattr(module, "sliding_window", None) else "full_attention"
    for name in ("cu_seq_lens_k", "max_seqlen_k"):
        if isinstance(kwargs.get(name), dict):
            kwargs[name] = kwargs[name][kind]
    key, value = cache.update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=kwargs["read_index"],
        write_index=kwargs["write_index"],
    )
    return key.transpose(0, 1)[None], value.transpose(0, 1)[None], kwargs
