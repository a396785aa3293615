"""Bad calls are refused while they are traced, in the words that eager has for them."""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import pytest
import torch
from calls import ALL, PAGED, good
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from traced import (
    CASES,
    as_fake,
    assert_same_bits,
    copy_call,
    gather_call,
    merge_call,
    public,
    swap_call,
    write_call,
)

import tritonattn
from tritonattn import errors, rules, settings
from tritonattn.errors import ArgumentValueError, TritonAttnError
from tritonattn.inputs import TENSORS


def refusal(call: Any) -> TritonAttnError:
    with pytest.raises(TritonAttnError) as caught:
        call()
    return caught.value


def bad_attention(function: str, **changes: Any) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    call, names = good(function, **changes), TENSORS[function]
    options = {
        name: getattr(call, name)
        for name in inspect.signature(public(function)).parameters
        if name not in names
    }
    return function, tuple(getattr(call, name) for name in names), options


def bad(build: Any, name: str, at: int | None = None, value: Any = None, **options: Any) -> Any:
    args, given = build()
    args = list(args)
    if at is not None:
        args[at] = value
    return name, tuple(args), given | options


BAD = [
    *(bad_attention(function, **change)
      for function in ALL
      for change in ({"window_size": (1, 2, 3)}, {"q": lambda _, q: q[..., 0]}, {"causal": 1})),
    bad_attention(PAGED, q=lambda _, q: q.tolist()),
    bad_attention(PAGED, block_table=lambda _, x: x.float()),
    bad_attention(PAGED, k_scale="1.0"),
    bad_attention(PAGED, k_scale=torch.ones(3)),
    bad_attention(PAGED, window_size=(1.5, 0)),
    bad_attention(PAGED, window_size=(-2, 0)),
    bad_attention(PAGED, window_size=[None, -2]),
    bad_attention(PAGED, window_size=()),
    bad_attention(PAGED, softcap=-1.0),
    bad_attention(PAGED, softcap=-1),
    bad_attention(PAGED, v_scale=10**40),
    bad_attention(PAGED, softmax_scale=float("nan")),
    bad_attention(PAGED, softmax_scale="auto"),
    bad_attention(PAGED, chunk_size=0),
    bad_attention(PAGED, num_splits=True),
    bad_attention(PAGED, max_seqlen_k=-1),
    bad_attention(PAGED, return_lse=1),
    bad_attention(PAGED, out=[1.0]),
    bad_attention(PAGED, out=lambda call, _: call.q.new_empty(2, 4, 16)),
    bad_attention(PAGED, sinks=lambda call, _: torch.zeros(3)),
    bad_attention(PAGED, v_cache=lambda _, v: v[0, 0, 0, 0]),
    bad(merge_call, "merge_states", 1, torch.zeros(3, 4, 3)),
    bad(merge_call, "merge_states", 0, [torch.zeros(3, 4, 16), 1.0]),
    bad(merge_call, "merge_states", 0, ()),
    bad(write_call, "write_kv_cache", 4, torch.zeros(3)),
    bad(write_call, "write_kv_cache", k_scale=None, v_scale="x"),
    bad(write_call, "write_kv_cache", k_scale=10**40),
    bad(gather_call, "gather_kv_cache", total_k=1.5),
    bad(gather_call, "gather_kv_cache", total_k=-1),
    bad(gather_call, "gather_kv_cache", out_dtype="float16"),
    bad(gather_call, "gather_kv_cache", out_dtype=torch.int32),
    bad(copy_call, "copy_blocks", 0, 3),
    bad(copy_call, "copy_blocks", 1, torch.zeros(3, 2)),
    bad(swap_call, "swap_blocks", 1, torch.zeros(2, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args", "options"), BAD)
def test_bad_call_is_refused_in_eager_words_while_it_is_traced(name, args, options, device) -> None:
    function = public(name)
    args, options = torch.utils._pytree.tree_map(
        lambda x: x.to(device) if isinstance(x, Tensor) else x, (args, options)
    )
    eager = refusal(lambda: function(*args, **options))
    fake_args, fake_options = as_fake((args, options), FakeTensorMode(), device)
    traced = refusal(lambda: function(*fake_args, **fake_options))
    assert (type(traced), str(traced)) == (type(eager), str(eager))

    torch._dynamo.reset()
    program = torch.compile(
        lambda args, options: function(*args, **options), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(Exception, match="tritonattn|" + name) as caught:
        program(args, options)
    assert str(eager) in str(caught.value).replace("\\'", "'")


def test_words_of_a_refusal_are_of_types_that_compilers_construct() -> None:
    """The compiler of torch 2.11 has no subclass of str, int or float."""
    made = [x for x in (*vars(errors).values(), *vars(rules).values()) if isinstance(x, type)]
    assert errors.Text in made
    own = [x for x in made if x.__module__.startswith("tritonattn")]
    assert not any(issubclass(x, str | int | float) for x in own)


def test_input_that_requires_grad_is_refused_while_it_is_traced(device) -> None:
    (q, *rest), options = CASES[0].build(device)

    def attend(q: Tensor) -> Tensor:
        return tritonattn.varlen_attention(q * 2, *rest, **options)

    program = torch.compile(attend, backend="aot_eager", fullgraph=True)
    learned = q.clone().requires_grad_()
    with pytest.raises(Exception, match="q must not require grad while grad mode is on"):
        program(learned)
    with torch.no_grad():
        expected = attend(q)
        assert_same_bits(program(learned), expected)
    with torch.inference_mode():
        assert_same_bits(program(learned), expected)
    pairs = torch.zeros(1, 2, dtype=torch.int64, device=device)
    with pytest.raises(ArgumentValueError, match="source must not require grad"):
        torch.ops.tritonattn.swap_blocks(learned, torch.zeros_like(q), pairs)


def test_values_are_checked_when_the_program_runs_not_while_it_is_traced(device) -> None:
    (k, v, *caches, slots), _ = write_call(device)
    program = torch.compile(tritonattn.write_kv_cache, backend="aot_eager", fullgraph=True)
    with mock.patch.object(settings, "CHECK", True):
        program(k, v, *caches, slots)
        slots[0] = 99
        with pytest.raises(ArgumentValueError, match=r"slot_mapping\[0\] is 99"):
            program(k, v, *caches, slots)
