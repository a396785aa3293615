"""Tensors to a Problem, or an error that says what to pass instead.

No value on a device is read, so nothing here waits for one: the rules look at shapes, strides,
dtypes, devices and Python scalars.  A serving loop repeats its calls with the same facts; those
that passed once are remembered, so that a decode step pays for one look-up in a dictionary.
"""

from __future__ import annotations

import torch

from . import device as devices
from . import rules
from .call import Call
from .errors import Text, bad_type, bad_value
from .problem import MaskSpec, Problem

MAX_SPLITS = 256

# Calls that passed, by all that they are but addresses and contents: the Problem, and the launches
# that such calls share.  Cleared when full.
_seen: dict[tuple[object, ...], tuple[Problem, dict]] = {}
_SEEN_LIMIT = 4096

_DIFFERENTIABLE = (
    "q", "k", "v", "k_cache", "v_cache", "alibi_slopes", "sinks", "query_scale", "k_scale",
    "v_scale", "out",
)  # fmt: skip
_Tensor = torch.Tensor
_grad_enabled = torch.is_grad_enabled


def validate(call: Call) -> Problem:
    """The call's Problem; raises for the first rule that the call breaks."""
    f = call.function
    causal, splits, invariant = call.causal, call.num_splits, call.batch_invariant
    scale, cap, chunk = call.softmax_scale, call.softcap, call.chunk_size
    bound_q, bound_k = call.max_seqlen_q, call.max_seqlen_k
    k_scale, v_scale = call.k_scale, call.v_scale
    k_number = v_number = None
    window, left, right = call.window_size, None, None

    # Scalars are looked at in every call, as a remembered one cannot vouch for them: True == 1.0.
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
    if window is not None:
        left, right = _window(f, window)
    if chunk is not None:
        fix = "Pass chunk_size=None for attention without chunks."
        rules.integer(f, "chunk_size", chunk, 1, fix=fix)
    if k_scale is not None and not isinstance(k_scale, _Tensor):
        rules.scalar_scale(f, "k_scale", k_scale)
        k_scale, k_number = None, k_scale
    if v_scale is not None and not isinstance(v_scale, _Tensor):
        rules.scalar_scale(f, "v_scale", v_scale)
        v_scale, v_number = None, v_scale
    # The bounds only steer a choice, and the longest sequence grows by one a step: rounding up
    # keeps a decode loop on one Problem.
    if bound_q is not None:
        rules.integer(f, "max_seqlen_q", bound_q, 0)
        bound_q = 1 << (bound_q - 1).bit_length() if bound_q > 1 else 1
    if bound_k is not None:
        rules.integer(f, "max_seqlen_k", bound_k, 0)
        bound_k = 1 << (bound_k - 1).bit_length() if bound_k > 1 else 1

    key = seen = None
    try:
        facts = [f, causal, left, right, chunk, cap, scale, k_number, v_number, invariant, splits]
        facts += (bound_q, bound_k, call.return_lse)
        for x in (
            call.q, call.k, call.v, call.k_cache, call.v_cache, call.block_table,
            call.block_indptr, call.cu_seqlens_q, call.cu_seqlens_k, call.context_lens,
            call.seq_lens, call.alibi_slopes, call.sinks, call.query_scale, call.tree_mask,
            call.out, k_scale, v_scale,
        ):  # fmt: skip
            if x is None:
                facts.append(None)
            else:
                facts += (x.shape, x.stride(), x.dtype, x.device)
        known = tuple(facts)
        seen = _seen.get(known)
        key = known
    except (AttributeError, TypeError, RuntimeError):
        pass  # not a plain tensor, or sizes that are symbols: _check says which, or lets it pass
    if seen is None:
        seen = _check(call, left is not None, right is not None, bound_q, bound_k), {}
        if key is not None:
            if len(_seen) >= _SEEN_LIMIT:
                _seen.clear()
            _seen[key] = seen
    if _grad_enabled():
        _refuse_grad(call)
    problem, repeats = seen
    call.repeats = repeats if key is not None else None
    return problem


def forget() -> None:
    """Check every call anew, and launch it as if it were the first of its kind."""
    _seen.clear()


def _window(f: str, window: object) -> tuple[int | None, int | None]:
    """(left, right), None for a side without a limit."""
    rule = "must be None or (left, right), each None or an int of at least -1 (-1: no limit)"
    if not isinstance(window, tuple | list) or len(window) != 2:
        fix = "A sliding window of W tokens, the query's own counted, is (W - 1, 0)."
        raise bad_type(f, "window_size", rule, window, fix)
    for side in window:
        if side is None:
            continue
        if isinstance(side, bool) or not isinstance(side, int):
            fix = "Pass both sides as Python ints or None."
            raise bad_type(f, "window_size", rule, window, fix)
        if side < -1:
            raise bad_value(f, "window_size", rule, window, "Pass -1 for a side without a limit.")
    left, right = window
    return None if left == -1 else left, None if right == -1 else right


def _refuse_grad(call: Call) -> None:
    for name in _DIFFERENTIABLE:
        value = getattr(call, name)
        if isinstance(value, _Tensor):
            rules.no_grad(call.function, name, value)


def _check(
    call: Call, left: bool, right: bool, bound_q: int | None, bound_k: int | None
) -> Problem:
    """Every rule about tensors, the cheap ones before the one that asks what the GPU can do."""
    f = call.function
    q = rules.tensor(f, "q", call.q, "[total_q, Hq, D]")
    fix = "Pass q in the model's dtype, such as q.half()."
    rules.dtype(f, "q", q, rules.COMPUTE_DTYPES, fix)
    rules.rank(f, "q", q, 3, "[total_q, Hq, D]", "Pack the tokens of all sequences on axis 0.")
    rules.unit_stride(f, "q", q)
    total_q, num_heads, head_dim = q.shape
    batch = _lengths(call, q)

    num_kv_heads = head_dim_v = max_k = page_size = 0
    cache_dtype = None
    max_q = total_q if bound_q is None else min(bound_q, total_q)
    if f == "paged_attention":
        max_q = 1 if call.cu_seqlens_q is None else max_q
    else:
        num_kv_heads, head_dim_v, max_k = _new_keys(call, q)
    capacity_k = max_k
    if f == "prefix_attention":  # a sequence has as many new keys as queries
        max_k, capacity_k = max_q, total_q
    if f != "varlen_attention":
        cache = _cache(call, q)
        num_kv_heads, head_dim_v, page_size, cache_dtype = cache
        pages = rules.block_table(f, call.block_table, call.block_indptr, batch, q.device)
        max_k += pages * page_size
        capacity_k += pages * page_size
    if num_heads < 1 or num_heads % num_kv_heads:
        got = Text(f"{num_heads} query heads and {num_kv_heads} KV heads")
        fix = "Pass q with a whole number of query heads for each KV head."
        raise bad_value(f, "q", "must have a multiple of the KV heads, Hq % Hkv == 0", got, fix)

    _options(call, q, batch, num_kv_heads)
    out_dtype = q.dtype if call.out is None else _out(call.out, f, q, head_dim_v)
    device = devices.describe(q.device)
    if not device.has_bf16:
        for name, dtype in (("q", q.dtype), ("out", out_dtype)):
            if dtype == torch.bfloat16:
                rules.bfloat16(f, name, device)
    has_tree = call.tree_mask is not None
    return Problem(
        function=f,
        dtype=q.dtype,
        out_dtype=out_dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        num_kv_heads=num_kv_heads,
        group=num_heads // num_kv_heads,
        mask=MaskSpec(
            causal=call.causal,
            has_left=left,
            has_right=right or (call.causal and not has_tree),
            has_chunk=call.chunk_size is not None,
            has_tree=has_tree,
        ),
        cache_dtype=cache_dtype,
        page_size=page_size,
        has_softcap=call.softcap != 0.0,
        has_alibi=call.alibi_slopes is not None,
        has_sinks=call.sinks is not None,
        has_query_scale=call.query_scale is not None,
        is_decode=f == "paged_attention" and call.cu_seqlens_q is None,
        rows_aligned=all(
            x is None or rules.keeps_alignment(x)
            for x in (q, call.k, call.v, call.k_cache, call.v_cache, call.out)
        ),
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
        batch=batch,
        total_q=total_q,
        max_q=max(max_q, 1),
        capacity_k=max(capacity_k, 1),
        max_k=max(max_k if bound_k is None else min(bound_k, max_k), 1),
    )


def _lengths(call: Call, q: torch.Tensor) -> int:
    """The number of sequences."""
    f, device = call.function, q.device
    starts = call.cu_seqlens_q
    batch = 0
    if f == "paged_attention":
        seq_lens = rules.int32_vector(f, "seq_lens", call.seq_lens, "[batch]", device)
        batch = seq_lens.shape[0]
        if starts is None:
            fix = "Pass one query a sequence, or cu_seqlens_q for several."
            rules.size(f, "q", q, 0, batch, "batch of seq_lens, as cu_seqlens_q is None", fix)
            return batch
    fix = "Pass the prefix sums of the lengths: 0 first, the total last."
    starts = rules.int32_vector(f, "cu_seqlens_q", starts, "[batch + 1]", device)
    if f == "paged_attention":
        what = f"batch + 1, batch {batch} of seq_lens"
        rules.length(f, "cu_seqlens_q", starts, batch + 1, what, fix)
        return batch
    if starts.shape[0] < 1:
        raise bad_value(f, "cu_seqlens_q", "must have batch + 1 entries", starts, fix)
    batch = starts.shape[0] - 1
    if f == "varlen_attention":
        ends = rules.int32_vector(f, "cu_seqlens_k", call.cu_seqlens_k, "[batch + 1]", device)
        what = f"batch + 1, batch {batch} of cu_seqlens_q"
        rules.length(f, "cu_seqlens_k", ends, batch + 1, what, fix)
    else:
        lens = rules.int32_vector(f, "context_lens", call.context_lens, "[batch]", device)
        fix = "Pass one cached length for each sequence, 0 where nothing is cached."
        rules.length(f, "context_lens", lens, batch, "batch of cu_seqlens_q", fix)
    return batch


def _new_keys(call: Call, q: torch.Tensor) -> tuple[int, int, int]:
    """(Hkv, Dv, total_k) of the packed keys and values."""
    f = call.function
    heads, head_dim_v = rules.kv_rows(f, call.k, call.v, q.device)
    k = rules.tensor(f, "k", call.k)
    rules.same_dtype(f, "k", k, q.dtype, "q")
    rules.same_dtype(f, "v", rules.tensor(f, "v", call.v), q.dtype, "q")
    rules.size(f, "k", k, 2, q.shape[2], "D of q", "Pass q and k with the same head size.")
    if f == "prefix_attention":
        fix = "Pass one new key for each query row; padding rows of q want padding rows of k."
        rules.size(f, "k", k, 0, q.shape[0], "total_q of q", fix)
    return heads, head_dim_v, k.shape[0]


def _cache(call: Call, q: torch.Tensor) -> tuple[int, int, int, torch.dtype]:
    """(Hkv, Dv, page_size, dtype) of the paged cache."""
    f = call.function
    heads, head_dim_v = rules.kv_pages(f, call.k_cache, call.v_cache, q.device)
    k_cache = rules.tensor(f, "k_cache", call.k_cache)
    fix = "Pass a cache of q's dtype or of float8; float8 values take k_scale and v_scale."
    rules.dtype(f, "k_cache", k_cache, (q.dtype, *rules.FP8_DTYPES), fix)
    fix = "Pass q and k_cache with the same head size."
    rules.size(f, "k_cache", k_cache, 3, q.shape[2], "D of q", fix)
    if call.k is not None and call.v is not None:
        fix = "Pass new keys and values with the heads and head sizes of the cache."
        rules.size(f, "k", call.k, 1, heads, "Hkv of k_cache", fix)
        rules.size(f, "v", call.v, 2, head_dim_v, "Dv of v_cache", fix)
    return heads, head_dim_v, k_cache.shape[1], k_cache.dtype


def _options(call: Call, q: torch.Tensor, batch: int, num_kv_heads: int) -> None:
    f, device = call.function, q.device
    total_q, num_heads, _ = q.shape
    if call.alibi_slopes is not None:
        what = f"[Hq = {num_heads}] or [batch = {batch}, Hq = {num_heads}]"
        _floats(f, "alibi_slopes", call.alibi_slopes, what, ((num_heads,), (batch, num_heads)), q)
    if call.sinks is not None:
        _floats(f, "sinks", call.sinks, f"[Hq = {num_heads}]", ((num_heads,),), q)
    if call.query_scale is not None:
        scale = rules.tensor(f, "query_scale", call.query_scale, "float32 [total_q]")
        rules.dtype(f, "query_scale", scale, (torch.float32,), "Pass query_scale.float().")
        _floats(f, "query_scale", scale, f"[total_q = {total_q}]", ((total_q,),), q)
    if call.tree_mask is not None:
        what = f"[total_q = {total_q}, max_seqlen_q]"
        mask = rules.tensor(f, "tree_mask", call.tree_mask, f"bool {what}")
        rules.dtype(f, "tree_mask", mask, (torch.bool,), "Pass tree_mask.bool().")
        rules.rank(f, "tree_mask", mask, 2, what)
        fix = "Pass one row for each query row, one column for each of its sequence's new keys."
        rules.size(f, "tree_mask", mask, 0, total_q, "total_q of q", fix)
        if mask.shape[1] < 1:
            raise bad_value(f, "tree_mask", "must have at least one column", mask, fix)
        rules.same_device(f, "tree_mask", mask, device, "q")
        if not call.causal:
            rule = "replaces the causal rule among the new keys, so causal must be True"
            got = Text("tree_mask with causal=False")
            raise bad_value(f, "tree_mask", rule, got, "Pass causal=True, or no tree_mask.")
    rules.scale(f, "k_scale", call.k_scale, num_kv_heads, device, batch)
    rules.scale(f, "v_scale", call.v_scale, num_kv_heads, device, batch)


def _floats(
    f: str,
    name: str,
    value: object,
    what: str,
    shapes: tuple[tuple[int, ...], ...],
    q: torch.Tensor,
) -> None:
    """A small float tensor of any float dtype and strides: launching converts it."""
    x = rules.tensor(f, name, value, what)
    rules.dtype(f, name, x, rules.FLOAT_DTYPES, f"Pass {name}.float().")
    if tuple(x.shape) not in shapes:
        raise bad_value(f, name, f"must be {what}", x, f"Pass {name} in that shape.")
    rules.same_device(f, name, x, q.device, "q")


def _out(value: object, f: str, q: torch.Tensor, head_dim_v: int) -> torch.dtype:
    shape = (q.shape[0], q.shape[1], head_dim_v)
    what = f"[total_q, Hq, Dv] = {list(shape)}"
    out = rules.tensor(f, "out", value, what)
    fix = "Pass an out of a dtype that attention is computed in."
    rules.dtype(f, "out", out, rules.COMPUTE_DTYPES, fix)
    if tuple(out.shape) != shape:
        fix = "Pass torch.empty of that shape; Dv is the last axis of the values."
        raise bad_value(f, "out", f"must be {what}", out, fix)
    rules.unit_stride(f, "out", out, "Pass an out whose last axis is contiguous.")
    rules.no_overlap(f, "out", out)
    rules.same_device(f, "out", out, q.device, "q")
    return out.dtype
