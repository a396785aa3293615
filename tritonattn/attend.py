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
    from .launch import Again


_Tensor = torch.Tensor
_address = torch.Tensor.data_ptr  # of tensors, and of nothing that passes for one
_grad_enabled = torch.is_grad_enabled


class _Known(NamedTuple):
    """What calls with the same facts share."""

    is_like: Callable[..., bool]  # whether tensors have the same facts
    wants_grad: bool  # whether any of those that are alike requires grad
    problem: Problem
    again: Again | None  # what launches them; None: each has to be prepared anew


_known: dict[tuple, _Known] = {}  # by facts; cleared when full
_recent: dict[tuple, _Known] = {}  # by the facts that are not of tensors, the last of each
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
    tensors: list[_Tensor] = []
    try:
        left, right = (None, None) if window_size is None else window_size
        k_number = v_number = None
        if k_scale is not None and not isinstance(k_scale, _Tensor):
            k_scale, k_number = None, k_scale
        if v_scale is not None and not isinstance(v_scale, _Tensor):
            v_scale, v_number = None, v_scale
        tensors = [x for x in (  # as kernels take them
            q, k, v, k_cache, v_cache, k_scale, v_scale, block_table, block_indptr, cu_seqlens_q,
            cu_seqlens_k, context_lens, seq_lens, query_scale, alibi_slopes, sinks, tree_mask, out,
        ) if x is not None]
        addresses = [*map(_address, tensors)]
        # Whether the rows that are read, and those of out, start on 16 bytes.
        starts = addresses[0] | addresses[1] | addresses[2]
        if function == "prefix_attention":
            starts |= addresses[3] | addresses[4]
        numbers = (
            causal, left, right, chunk_size, softcap, softmax_scale, k_number, v_number,
            batch_invariant, num_splits, return_lse,
        )
        options = (
            # The types as well, as True == 1 == 1.0.
            function, *numbers, *map(type, numbers), type(window_size),
            type(max_seqlen_q), None if max_seqlen_q is None else rounded(max_seqlen_q),
            type(max_seqlen_k), None if max_seqlen_k is None else rounded(max_seqlen_k),
            k_scale is None, v_scale is None, block_indptr is None, cu_seqlens_q is None,
            query_scale is None, alibi_slopes is None, sinks is None, tree_mask is None,
            starts % 16 == 0, None if out is None else addresses[-1] % 16 == 0, forced(),
            addresses[1] == addresses[2],  # keys that may be values too
        )
        known = _recent.get(options)
        if known is None or not known.is_like(*tensors):
            facts = options, *[(x.shape, x.stride(), x.dtype, x.device) for x in tensors]
            known = _known.get(facts)
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        facts = known = None  # not all is what it should be, and the rules say what is not
    # fmt: on
    if known is None or known.again is None or settings.CHECK:
        call = Call(function, *given)
        call.is_operator, call.lse = is_operator, lse
        return _attend(call, known, facts, tensors)
    # Tensors that are alike require grad alike.
    if _grad_enabled() and (
        known.wants_grad if facts is None else True in [x.requires_grad for x in tensors]
    ):
        refuse_grad(Call(function, *given))
    if facts is not None:
        _recent[options] = known
    return known.again(addresses, q, out, lse, not is_operator)


def forget() -> None:
    """Go the whole way again with every call."""
    _known.clear()
    _recent.clear()


def _attend(
    call: Call, known: _Known | None, facts: tuple | None, tensors: list[_Tensor]
) -> Result:
    """The whole way, for a call of which at most the problem is known."""
    if known is None:
        problem = validate(call)
    else:
        problem = known.problem
        refuse_grad(call)
    if settings.CHECK:
        check_values(call, problem)
    result, again = _launcher()(call, problem)
    if known is None and facts is not None:
        if len(_known) >= _MOST_KNOWN:
            forget()
        wants_grad = True in [x.requires_grad for x in tensors]
        known = _Known(_alike(tensors), wants_grad, problem, again)
        _known[facts] = _recent[facts[0]] = known
    return result


def _alike(tensors: list[_Tensor]) -> Callable[..., bool]:
    """A quick way to tell other tensors that have the facts of these, if there is one.

    It is how torch.compile guards its programs' inputs, and takes a fifth of the time that looking
    at facts one by one takes.  It keeps no tensor.  Of two arguments that are one tensor, such as
    the lengths of queries and keys, it is given the first.
    """
    guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    if guards is None:
        return _never
    places = {id(x): i for i, x in reversed([*enumerate(tensors)])}
    firsts = sorted(places.values())
    chosen = [tensors[i] for i in firsts]
    sizes, strides = [[*x.shape] for x in chosen], [[*x.stride()] for x in chosen]
    check = guards(*chosen, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    if len(chosen) == len(tensors):
        return check
    twins = [(i, places[id(x)]) for i, x in enumerate(tensors) if places[id(x)] != i]

    def is_like(*given: _Tensor) -> bool:
        is_same = [given[i] is given[j] for i, j in twins]
        return False not in is_same and check(*[given[i] for i in firsts])

    return is_like


def _never(*_: _Tensor) -> bool:
    return False


@functools.cache
def _launcher() -> Callable[[Call, Problem], tuple[Result, Again | None]]:
    """Found at the first call, so that importing the package neither imports triton nor asks for a
    GPU."""
    from .launch import run

    return run
