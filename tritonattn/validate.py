"""Tensors to a Problem, or an error that says what to pass instead.

No value on a device is read, so nothing here waits for one: the rules look at shapes, strides,
dtypes, devices and Python scalars.
"""

from __future__ import annotations

import torch

from . import boxes, call_rules, rules
from .call import Call
from .errors import bad_type, bad_value
from .problem import MaskSpec, Problem

MAX_SPLITS = 256

_DIFFERENTIABLE = (
    "q", "k", "v", "k_cache", "v_cache", "alibi_slopes", "sinks", "query_scale", "k_scale",
    "v_scale", "out",
)  # fmt: skip
_Tensor = torch.Tensor


def validate(call: Call) -> Problem:
    """The call's Problem; raises for the first rule that the call breaks."""
    left, right = scalars(call)
    sizes = call_rules.check(call)
    refuse_grad(call)
    return _problem(call, sizes, left is not None, right is not None)


def rounded(bound: int) -> int:
    """A bound up to the next power of two.

    It only steers a choice, and the longest sequence grows by one a step: so a decode loop has one
    Problem for long.  No bound that the rules refuse becomes one that they take.
    """
    return 1 << (bound - 1).bit_length() if bound > 1 else bound


def check(call: Call) -> None:
    """The rules alone, for tensors without memory, whose sizes may be symbols.

    A size is compared with what it has to equal and with nothing else, so that a program compiled
    for some lengths holds for all.
    """
    scalars(call)
    call_rules.check(call)
    refuse_grad(call)


def scalars(call: Call) -> tuple[int | None, int | None]:
    """The window's left and right side, None without a limit."""
    f = call.function
    causal, splits, invariant = call.causal, call.num_splits, call.batch_invariant
    scale, cap, chunk = call.softmax_scale, call.softcap, call.chunk_size
    left = right = None
    if causal is not True and causal is not False:
        rules.flag(f, "causal", causal)
    if invariant is not True and invariant is not False:
        rules.flag(f, "batch_invariant", invariant)
    if call.return_lse is not True and call.return_lse is not False:
        rules.flag(f, "return_lse", call.return_lse)
    if scale is not None:
        rules.finite(f, "softmax_scale", scale)
    if type(cap) is not float or cap != 0.0:
        rules.finite(f, "softcap", cap, 0.0, fix="Pass softcap=0.0 for no cap.")
    if type(splits) is not int or splits != 0:
        fix = "Pass num_splits=0 to leave the number to the library."
        rules.integer(f, "num_splits", splits, 0, MAX_SPLITS, fix=fix)
    if call.window_size is not None:
        left, right = _window(f, call.window_size)
    if chunk is not None:
        fix = "Pass chunk_size=None for attention without chunks."
        rules.integer(f, "chunk_size", chunk, 1, fix=fix)
    if call.k_scale is not None and not isinstance(call.k_scale, _Tensor):
        rules.scalar_scale(f, "k_scale", call.k_scale)
    if call.v_scale is not None and not isinstance(call.v_scale, _Tensor):
        rules.scalar_scale(f, "v_scale", call.v_scale)
    if call.max_seqlen_q is not None:
        rules.integer(f, "max_seqlen_q", call.max_seqlen_q, 0)
    if call.max_seqlen_k is not None:
        rules.integer(f, "max_seqlen_k", call.max_seqlen_k, 0)
    return left, right


def _window(f: str, window: object) -> tuple[int | None, int | None]:
    """(left, right), None for a side without a limit."""
    rule = "must be None or (left, right), each None or an int of at least -1 (-1: no limit)"
    if not isinstance(window, tuple | list) or len(window) != 2:
        fix = "A sliding window of W tokens, the query's own counted, is (W - 1, 0)."
        raise bad_type(f, "window_size", rule, window, fix)
    for side in window:
        if side is None:
            continue
        if isinstance(side, bool) or not isinstance(side, rules.INTS):
            fix = "Pass both sides as Python ints or None."
            raise bad_type(f, "window_size", rule, window, fix)
        if side < -1:
            raise bad_value(f, "window_size", rule, window, "Pass -1 for a side without a limit.")
    left, right = window
    return None if left == -1 else left, None if right == -1 else right


def refuse_grad(call: Call) -> None:
    if not torch.is_grad_enabled():
        return
    for name in _DIFFERENTIABLE:
        value = getattr(call, name)
        if isinstance(value, _Tensor):
            rules.no_grad(call.function, name, value)


def _is_latent(call: Call) -> bool:
    """Whether all values are the first dims of their keys, in the same memory."""
    k, v = call.k_cache, call.v_cache
    if k is None or v is None or call.k is not None:
        return False
    axes = zip(k.shape[:3], k.stride()[:3], v.stride()[:3], strict=True)
    lies_alike = all(n <= 1 or mine == other for n, mine, other in axes)
    return lies_alike and v.shape[3] < k.shape[3] and v.data_ptr() == k.data_ptr()


def _problem(call: Call, sizes: call_rules.Sizes, left: bool, right: bool) -> Problem:
    f, q = call.function, call.q
    bound_q = None if call.max_seqlen_q is None else rounded(call.max_seqlen_q)
    bound_k = None if call.max_seqlen_k is None else rounded(call.max_seqlen_k)
    total_q, num_heads, head_dim = q.shape
    is_decode = f == "paged_attention" and call.cu_seqlens_q is None
    max_q = total_q if bound_q is None else min(bound_q, total_q)
    if is_decode:
        max_q = 1
    max_k = capacity_k = sizes.total_k
    if f == "prefix_attention":  # a sequence has as many new keys as queries
        max_k, capacity_k = max_q, total_q
    max_k += sizes.pages * sizes.page_size
    capacity_k += sizes.pages * sizes.page_size
    has_tree = call.tree_mask is not None
    sources = q, call.k, call.v, call.k_cache, call.v_cache
    scales = call.k_scale, call.v_scale
    return Problem(
        function=f,
        dtype=q.dtype,
        out_dtype=sizes.out_dtype,
        head_dim=head_dim,
        head_dim_v=sizes.head_dim_v,
        num_kv_heads=sizes.num_kv_heads,
        group=num_heads // sizes.num_kv_heads,
        mask=MaskSpec(
            causal=call.causal,
            has_left=left,
            has_right=right or (call.causal and not has_tree),
            has_chunk=call.chunk_size is not None,
            has_tree=has_tree,
        ),
        cache_dtype=sizes.cache_dtype,
        page_size=sizes.page_size,
        has_softcap=call.softcap != 0.0,
        has_alibi=call.alibi_slopes is not None,
        has_sinks=call.sinks is not None,
        has_query_scale=call.query_scale is not None,
        is_decode=is_decode,
        is_latent=_is_latent(call),
        has_scales=any(isinstance(x, _Tensor) or x not in (None, 1) for x in scales),
        is_positive=call.softmax_scale is None or call.softmax_scale > 0,
        rows_aligned=all(x is None or rules.keeps_alignment(x) for x in (*sources, call.out)),
        has_boxes=all(x is None or boxes.has_boxes(x) for x in sources),
        types=tuple(
            x.dtype if isinstance(x, _Tensor) else None
            for x in (
                call.block_table,
                call.block_indptr,
                call.alibi_slopes,
                call.sinks,
                call.k_scale,
                call.v_scale,
            )
        ),
        batch_invariant=call.batch_invariant,
        num_splits=call.num_splits,
        batch=sizes.batch,
        total_q=total_q,
        max_q=max(max_q, 1),
        capacity_k=max(capacity_k, 1),
        max_k=max(max_k if bound_k is None else min(bound_k, max_k), 1),
    )
