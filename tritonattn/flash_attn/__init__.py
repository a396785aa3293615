"""flash-attn's inference functions under its own names, so that an import is all that changes.

    >>> from tritonattn.flash_attn import flash_attn_func, flash_attn_with_kvcache

Names, positional order, defaults and return values are those of flash-attn 2 (2.7 and later, whose
masks are aligned to the last key).  flash-attn 3's further arguments are keywords here.  Everything
runs on the public functions of this package and has their freedom: any head size up to 576, values
of a head size of their own, float32, float8 caches, any page size, any strides.

What differs from flash-attn:

- There is no backward pass and no dropout: an input that requires grad while grad mode is on, and
  ``dropout_p`` above 0, are refused.  ``deterministic`` is accepted, as a forward pass is.
- A row that sees no key has ``softmax_lse`` -inf, where flash-attn has +inf; its output is 0 in
  both.  So states can be merged.
- Under ALiBi ``softmax_lse`` is that of the scores with the documented bias,
  ``-slope * |i + seqlen_k - seqlen_q - j|``.  If causal, flash-attn adds ``slope * j``: the same
  output, and a ``softmax_lse`` greater by ``slope`` times the row's position.
- ``return_attn_probs`` returns ``(out, softmax_lse, S_dmask)`` with an empty ``S_dmask``, as
  flash-attn does without dropout.
- A negative ``cache_seqlens`` (a row that pads a CUDA graph) writes nothing, and its output is 0.
  New tokens past the end of a cache are not written; to attend to them is an error, which
  TRITONATTN_CHECK=1 names.
- Keys and values may be float8 beside queries of 16 or 32 bits; float8 queries are refused.
- ``cache_leftpad`` and ``cache_batch_idx`` also work with a paged cache.
- Where keys do not start or end as memory does (``cache_leftpad``, ``seqused_k`` of packed keys),
  they are read token by token, which is somewhat slower.
- The window counts as local, which decides how ``flash_attn_with_kvcache`` rotates its queries,
  whenever one of its sides is limited; flash-attn does not count one that is as long as the cache.
- ``softmax_lse`` of ``flash_attn_with_kvcache`` comes alone, as in flash-attn 2; flash-attn 3
  appends its partial results.
- flash-attn 3's ``qv``, ``pack_gqa``, ``sm_margin`` and ``scheduler_metadata`` are refused: the
  first asks for another computation, the others steer kernels that are not here.

No call waits for the GPU, so each can be captured in a CUDA graph.  ``max_seqlen_q`` and
``max_seqlen_k`` are bounds that change no result; a bound that is a tensor is not read.
"""

from .dense import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from .kvcache import flash_attn_with_kvcache
from .varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
