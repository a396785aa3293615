"""The public functions as operators of torch: what torch.compile and torch.export see of them.

``torch.ops.tritonattn`` has an operator for each function that runs a kernel or writes in place.
Eager calls do not go through it, as torch's dispatcher costs more than all the rest of a call.
Where ``is_traced`` says so, a function turns its call into its operator's: a compiler then has one
opaque node, which runs the function's own eager path whenever the compiled program runs.  The fake
implementation is the function's own validation, on tensors without memory: a bad call is refused
while it is traced, in the same words, which torch.compile wraps in an error of its own.

**Mutation.**  The attention operators return nothing: they write ``out`` and ``lse``, as an
operator may not return an argument, and ``out=`` would otherwise want an operator of its own.
Where the caller gives none, both are allocated before the operator, inside the traced program:
Inductor writes into such a tensor in place and plans its memory with that of the program's other
tensors.  Caches are marked as written too, so that what reads a cache stays behind what writes it.

**Schemas** come from the functions' own signatures, by the annotation of each argument: no option
is listed here.  Sizes and lengths are symbols (``SymInt``).  What a schema cannot say travels as
two arguments or in another form, which ``_KINDS`` has in one place.

Forward only: an argument that requires grad is refused while grad mode is on, as in eager.
``alibi_slopes`` and ``attention_temperature`` are plain torch, which compilers see through.

>>> import torch, tritonattn
>>> torch.ops.tritonattn.swap_blocks.default._schema
tritonattn::swap_blocks(Tensor source, Tensor(a!) destination, Tensor block_mapping) -> ()
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from . import api, cache_launch, cache_rules, kv_cache, merge, validate
from .attend import attend
from .call import Call, Result
from .rules import INTS, MAX_FLOAT32

_LIBRARY = torch.library.Library("tritonattn", "FRAGMENT")


class _Kind(NamedTuple):
    """How arguments of one annotation travel.

    ``schema`` has their place for a mark of mutation and for a name; ``fits`` says whether a value
    has a type that can travel.  ``pack`` turns it into the ``width`` values that the schema
    declares, and ``unpack`` turns these back; None: the value travels as it is.
    """

    schema: str
    fits: Callable[[Any], bool]
    pack: Callable[[Any], Sequence[Any]] | None = None
    unpack: Callable[..., Any] | None = None
    width: int = 1


Arguments = Sequence[tuple[str, _Kind]]


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _is_int(x: Any) -> bool:
    return isinstance(x, INTS) and not isinstance(x, bool)


def _is_float(x: Any) -> bool:
    # An int travels as a float, in which a refused one would read otherwise.
    if not isinstance(x, float | torch.SymFloat) and not _is_int(x):
        return False
    return -MAX_FLOAT32 <= x <= MAX_FLOAT32


def _is_window(x: Any) -> bool:
    return x is None or (isinstance(x, tuple | list) and len(x) == 2)


def _pack_window(x: Any) -> tuple[Any, ...]:
    return (None if x is None else [-1 if side is None else side for side in x],)


def _pack_scale(x: Any) -> tuple[Any, ...]:
    return (x, None) if x is None or _is_tensor(x) else (None, x)


def _pack_tensors(x: Any) -> tuple[Any, ...]:
    return ([x], True) if _is_tensor(x) else (list(x), False)


_tensors = _Kind(
    "Tensor{0}[] {1}, bool {1}_is_one",
    lambda x: _is_tensor(x) or (isinstance(x, tuple | list) and all(map(_is_tensor, x))),
    _pack_tensors,
    lambda tensors, is_one: tensors[0] if is_one else tensors,
    2,
)
_KINDS = {
    "torch.Tensor": _Kind("Tensor{0} {1}", _is_tensor),
    "torch.Tensor | None": _Kind("Tensor{0}? {1}", lambda x: x is None or _is_tensor(x)),
    "torch.Tensor | Sequence[torch.Tensor]": _tensors,
    "Tensors": _tensors,
    "Scale": _Kind(
        "Tensor{0}? {1}, float? {1}_number",
        lambda x: x is None or _is_tensor(x) or _is_float(x),
        _pack_scale,
        lambda tensor, number: number if tensor is None else tensor,
        2,
    ),
    "Window | None": _Kind(
        "SymInt[]? {1}", _is_window, _pack_window, lambda sides: sides and tuple(sides)
    ),
    "bool": _Kind("bool {1}", lambda x: isinstance(x, bool)),
    "int": _Kind("SymInt {1}", _is_int),
    "int | None": _Kind("SymInt? {1}", lambda x: x is None or _is_int(x)),
    "float": _Kind("float {1}", _is_float),
    "float | None": _Kind("float? {1}", lambda x: x is None or _is_float(x)),
    "torch.dtype | None": _Kind(
        "ScalarType? {1}", lambda x: x is None or isinstance(x, torch.dtype)
    ),
}


class _Operator(NamedTuple):
    call: Any  # the OpOverload
    arguments: Arguments
    check: Callable[..., Any]

    def pack(self, values: Sequence[Any]) -> list[Any]:
        """The operator's arguments; raises what the function raises for types it does not take."""
        packed: list[Any] = []
        for (_, kind), value in zip(self.arguments, values, strict=True):
            if not kind.fits(value):
                self.check(*values)
            packed += (value,) if kind.pack is None else kind.pack(value)
        return packed


def _unpacker(arguments: Arguments) -> Callable[[Sequence[Any]], list[Any]]:
    """What turns an operator's arguments into the function's; quick, as it is in each call."""
    changed = [(i, kind.width, kind.unpack) for i, (_, kind) in enumerate(arguments) if kind.unpack]

    def unpack(packed: Sequence[Any]) -> list[Any]:
        values = list(packed)
        for at, width, unpack_one in changed:  # those before are one value each by now
            values[at : at + width] = [unpack_one(*values[at : at + width])]
        return values

    return unpack


_operators: dict[str, _Operator] = {}


def traced(function: str, *values: Any) -> Any:
    """Call the operator of ``function``, whose arguments are ``values`` in its order."""
    operator = _operators[function]
    return operator.call(*operator.pack(values))


def traced_attention(call: Call) -> Result:
    """The same for an attention function, with tensors for its results."""
    operator = _operators[call.function]
    validate.scalars(call)  # before they travel, to be named as they were given
    q, out, lse = call.q, call.out, None
    v = call.v if call.v_cache is None else call.v_cache
    if isinstance(q, torch.Tensor) and isinstance(v, torch.Tensor):
        # Slices, which suit any rank: a wrong one is the operator's to refuse.
        if out is None:
            out = q.new_empty((*q.shape[:-1], *v.shape[-1:]))
        if call.return_lse is True:
            lse = q.new_empty((*q.shape[1:2], *q.shape[:1]), dtype=torch.float32)
    values = [getattr(call, name) for name, _ in operator.arguments[:-2]]
    operator.call(*operator.pack([*values, out, lse]))
    return out if lse is None else (out, lse)  # type: ignore[return-value]


def _signature(function: Callable[..., Any]) -> Arguments:
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, _KINDS[str(p.annotation)]) for p in parameters]


def _define(
    function: Callable[..., Any],
    run: Callable[..., Any],
    check: Callable[..., Any],
    *,
    arguments: Arguments | None = None,
    mutates: str = "",
    returns: str = "()",
) -> None:
    """Register the operator of a public function.

    ``run`` and ``check`` take ``arguments``, None for the function's own, in their order.
    ``check`` works on tensors without memory and returns such in place of the results, if there are
    any.  ``mutates`` names the arguments that are written.
    """
    name = function.__name__
    if arguments is None:
        arguments = _signature(function)
    marks = dict(zip(mutates.split(), ("(a!)", "(b!)"), strict=False))
    schema = ", ".join(kind.schema.format(marks.get(n, ""), n) for n, kind in arguments)
    # Strides are a part of what was validated.
    exact = (torch.Tag.needs_exact_strides,)
    _LIBRARY.define(f"{name}({schema}) -> {returns}", tags=exact)
    overload = getattr(torch.ops.tritonattn, name).default
    _operators[name] = _Operator(overload, arguments, check)

    unpack = _unpacker(arguments)

    def kernel(*packed: Any) -> Any:
        return run(*unpack(packed))

    def fake(*packed: Any) -> Any:
        results = check(*unpack(packed))
        return None if returns == "()" else results

    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tritonattn::{name}", fake, lib=_LIBRARY)


_arguments = operator.attrgetter(*list(Call.__dataclass_fields__)[:-2])


def _define_attention(function: Callable[..., Any]) -> None:
    written = [("out", _KINDS["torch.Tensor"]), ("lse", _KINDS["torch.Tensor | None"])]
    arguments = [(n, kind) for n, kind in _signature(function) if n != "out"] + written
    names = [n for n, _ in arguments]

    def call(values: Sequence[Any]) -> Call:
        given = dict(zip(names, values, strict=True))
        return Call(function.__name__, is_operator=True, **given)

    def run(*values: Any) -> None:
        given = call(values)
        attend(*_arguments(given), is_operator=True, lse=given.lse)

    def check(*values: Any) -> None:
        validate.check(call(values))

    _define(function, run, check, arguments=arguments, mutates="out lse")


def _check_gather(k_cache: torch.Tensor, v_cache: torch.Tensor, *rest: Any) -> Any:
    dtype = cache_rules.check_gather(k_cache, v_cache, *rest)
    total_k = rest[3]
    return cache_launch.gathered(k_cache, v_cache, total_k, dtype)


_define_attention(api.varlen_attention)
_define_attention(api.prefix_attention)
_define_attention(api.paged_attention)
_two = "(Tensor, Tensor)"
_define(merge.merge_states, merge.merge, merge.merged, returns=_two)
_define(kv_cache.gather_kv_cache, cache_launch.gather, _check_gather, returns=_two)
_define(
    kv_cache.write_kv_cache, cache_launch.write, cache_rules.check_write, mutates="k_cache v_cache"
)
_define(kv_cache.copy_blocks, cache_launch.copy, cache_rules.check_copy, mutates="caches")
_define(kv_cache.swap_blocks, cache_launch.swap, cache_rules.check_swap, mutates="destination")
