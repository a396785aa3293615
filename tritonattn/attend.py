"""A call's whole way: validate, plan, configure, launch; or, of a call like an earlier one, launch.

A serving loop repeats its calls with the same facts: all that a call is but the addresses and the
contents of its tensors.  Those of a call that passed vouch for all that have them, and what it
launched is what these launch.  So a call looks itself up by its facts first, which is most of what
a decode step costs the host, and goes the whole way where it is the first of its kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import settings
from .call import Call, Result
from .checks import check_values
from .problem import Problem
from .tracing import is_traced
from .tuning.store import forced
from .validate import refuse_grad, rounded, validate

if TYPE_CHECKING:
    from .launch import Repeats


_Tensor = torch.Tensor
_grad_enabled = torch.is_grad_enabled


class _Known(NamedTuple):
    """What calls with the same facts share."""

    problem: Problem
    repeats: Repeats | None  # None: each has to be prepared anew


_known: dict[tuple, _Known] = {}  # by facts; cleared when full
_MOST_KNOWN = 4096


def attend(
    function: str, *given: Any, is_operator: bool = False, lse: _Tensor | None = None
) -> Result:
    """Run the Call of these fields; what is ``given`` comes in their order.

    No Call is made of a call that is known.
    """
    # fmt: off
    (
        q, k, v, k_cache, v_cache, block_table, block_indptr, cu_seqlens_q, cu_seqlens_k,
        context_lens, seq_lens, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size,
        chunk_size, softcap, alibi_slopes, sinks, query_scale, tree_mask, k_scale, v_scale,
        return_lse, out, num_splits, batch_invariant,
    ) = given
    if not is_operator and is_traced(q):
        from .torch_ops import traced_attention

        return traced_attention(Call(function, *given))
    facts = known = None
    try:
        left, right = (None, None) if window_size is None else window_size
        k_number = v_number = None
        if not isinstance(k_scale, _Tensor):
            k_scale, k_number = None, k_scale
        if not isinstance(v_scale, _Tensor):
            v_scale, v_number = None, v_scale
        numbers = (
            causal, left, right, chunk_size, softcap, softmax_scale, k_number, v_number,
            batch_invariant, num_splits, return_lse,
        )
        # The types as well, as True == 1 == 1.0.
        listed: list[object] = [
            function, *numbers, *map(type, numbers), type(window_size), forced(),
            type(max_seqlen_q), None if max_seqlen_q is None else rounded(max_seqlen_q),
            type(max_seqlen_k), None if max_seqlen_k is None else rounded(max_seqlen_k),
        ]
        addresses = []
        for x in (  # as kernels take them
            q, k, v, k_cache, v_cache, k_scale, v_scale, block_table, block_indptr, cu_seqlens_q,
            cu_seqlens_k, context_lens, seq_lens, query_scale, alibi_slopes, sinks, tree_mask,
        ):
            if x is None:
                listed.append(None)
            else:
                listed.append((x.shape, x.stride(), x.dtype, x.device))
                addresses.append(x.data_ptr())
        # Of the addresses, whether the rows that are read, and those of out, start on 16 bytes.
        starts = addresses[0] | addresses[1] | addresses[2]
        if function == "prefix_attention":
            starts |= addresses[3] | addresses[4]
        listed.append(starts % 16 == 0)
        if out is not None:
            listed += out.shape, out.stride(), out.dtype, out.device, out.data_ptr() % 16 == 0
        known = _known.get(hashed := tuple(listed))
        facts = hashed
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        pass  # not all is what it should be, and the rules say what is not
    # fmt: on
    if known is None or known.repeats is None or settings.CHECK:
        call = Call(function, *given)
        call.is_operator, call.lse = is_operator, lse
        return _attend(call, facts, known)
    if _grad_enabled():
        tensors = q, k, v, k_cache, v_cache, alibi_slopes, sinks, query_scale, k_scale, v_scale, out
        if any(x is not None and x.requires_grad for x in tensors):
            refuse_grad(Call(function, *given))
    return known.repeats(q, addresses, out, lse, shared=not is_operator)


def forget() -> None:
    """Go the whole way again with every call."""
    _known.clear()


def _attend(call: Call, facts: tuple | None, known: _Known | None) -> Result:
    """The whole way, for a call of which at most the problem is known."""
    if known is None:
        problem = validate(call)
    else:
        problem = known.problem
        refuse_grad(call)
    if settings.CHECK:
        check_values(call, problem)
    result, repeats = _launcher()(call, problem)
    if facts is not None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[facts] = _Known(problem, repeats)
    return result


@functools.cache
def _launcher() -> Callable[[Call, Problem], tuple[Result, Repeats | None]]:
    """Found at the first call, so that importing the package neither imports triton nor asks for a
    GPU."""
    from .launch import run

    return run
