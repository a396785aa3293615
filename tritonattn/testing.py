"""Comparing this package with its oracle: the error budget, a call that applies it, and inputs.

    >>> from tritonattn.testing import Case, check
    >>> case = Case("paged_attention", k_lens=(5, 17), options={"softcap": 9.0}, poison="nan")
    >>> out = check(case)

A failure prints the call and, where a Case made it, the line to paste into a Python prompt.

**The budget.**  A kernel's largest error against the float64 oracle on the same rounded inputs may
be ``factor`` times the largest error of attention written in PyTorch in the inputs' own dtype, plus
one rounding step of the output's dtype at the size of the result.  ``factor`` is 2; 3 with softcap;
4 for a float8 cache.  ``lse``, float32, has the same budget with a step of 2**-20 of max(1, |lse|):
GPUs approximate exp2 and log2, each to some 2**-22.  Errors of float32 are those of a few sums
q k, and small results have few of them: PyTorch's is the larger of two, with the dims of q and k in
their order and in reverse.  A row that sees no key is exact: 0 and the
oracle's own -inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import reference
from .case import Case
from .errors import dtype_name
from .inputs import (
    FP8_NAN_INF,
    PACKED_LAYOUTS,
    POOL_LAYOUTS,
    SCALE_SHAPES,
    Device,
    block_table,
    cumulative,
    generator,
    kv_pool,
    normal,
    packed_keys,
    packed_rows,
    poison,
    probe,
)

__all__ = [
    "PACKED_LAYOUTS",
    "POOL_LAYOUTS",
    "SCALE_SHAPES",
    "Budget",
    "Case",
    "assert_close",
    "block_table",
    "check",
    "cumulative",
    "describe_call",
    "error_factor",
    "generator",
    "kv_pool",
    "normal",
    "packed_keys",
    "packed_rows",
    "poison",
    "probe",
    "same_bytes",
]

Result = Tensor | tuple[Tensor, Tensor]

LSE_STEP = 2.0**-20


class Budget:
    """What results of one call are held against, worked out once for all of them.

    ``oracle`` is the truth; ``same_dtype`` the reference computed in the inputs' dtype; results
    must have ``dtype`` and the oracle's shape; ``name`` is "out" or "lse".
    """

    def __init__(
        self, oracle: Tensor, same_dtype: Tensor, *, dtype: torch.dtype, name: str = "out"
    ) -> None:
        self.dtype, self.name = dtype, name
        self.oracle, fair = (x.detach().to(torch.float64) for x in (oracle, same_dtype))
        self._finite = self.oracle.isfinite()
        self._exact = ~self._finite
        if name == "out":
            self._exact = self._exact | (self.oracle == 0).all(-1, keepdim=True)
        self.fair_error = self.step = 0.0
        if oracle.numel():
            size = torch.where(self._finite, self.oracle.abs(), 0.0).max()
            known = self._finite & fair.isfinite()  # float16 may overflow
            error = torch.where(known, (fair - self.oracle).abs(), 0.0).max()
            largest, self.fair_error = torch.stack([size, error]).tolist()
            self.step = torch.finfo(dtype).eps * largest
            if name == "lse":
                self.step = LSE_STEP * max(1.0, largest)

    def check(self, actual: Tensor, factor: float = 2.0, note: str = "") -> None:
        """Raise AssertionError, whose message ``note`` ends, unless ``actual`` is within it.

        The device is waited for once where it is.
        """
        if actual.dtype != self.dtype or actual.shape != self.oracle.shape:
            where = f"{self.name} must be {dtype_name(self.dtype)} {list(self.oracle.shape)}"
            got = f"got {dtype_name(actual.dtype)} {list(actual.shape)}"
            raise AssertionError(_say(f"{where}; {got}", note))
        if actual.numel() == 0:
            return
        actual, budget = actual.detach().to(torch.float64), factor * self.fair_error + self.step
        # NaN is within nothing.
        far = self._finite & ~((actual - self.oracle).abs() <= budget)
        wrong = self._exact & (actual != self.oracle) & ~(actual.isnan() & self.oracle.isnan())
        if not bool((far | wrong).any()):
            return
        if bool(wrong.any()):
            rule, badness = "must be exact", wrong.double()
        else:
            badness = torch.where(self._finite, (actual - self.oracle).abs(), 0.0)
            badness = badness.nan_to_num(nan=math.inf)
            rule = (
                f"off by {float(badness.max()):.3g}, more than {budget:.3g} = {factor:g} * "
                f"{self.fair_error:.3g} (PyTorch's own error) + {self.step:.3g} (one rounding "
                f"step), in {int(far.sum())} of {far.numel()} places"
            )
        raise AssertionError(_say(_worst(rule, self.name, badness, actual, self.oracle), note))


def assert_close(
    actual: Tensor,
    oracle: Tensor,
    same_dtype: Tensor,
    *,
    dtype: torch.dtype,
    factor: float = 2.0,
    name: str = "out",
    note: str = "",
) -> None:
    """``actual``, which must have ``dtype`` and the oracle's shape, is within the budget.

    ``same_dtype`` is the reference computed in the inputs' dtype; ``name`` is "out" or "lse".
    ``note`` ends the message of the AssertionError.
    """
    Budget(oracle, same_dtype, dtype=dtype, name=name).check(actual, factor, note)


def error_factor(args: tuple[Any, ...], options: dict[str, Any]) -> float:
    """The budget's factor for a call."""
    if any(isinstance(x, Tensor) and x.dtype in FP8_NAN_INF for x in args):
        return 4.0
    return 3.0 if options.get("softcap", 0.0) else 2.0


def check(
    function: str | Callable[..., Result] | Case,
    *args: Any,
    device: Device = "cpu",
    poison_out: bool = True,
    factor: float | None = None,
    note: str = "",
    **options: Any,
) -> Result:
    """Run one attention function and the oracle on the same arguments; the result, if it is right.

    ``function`` is the name of one of the three, a callable that has such a name, or a Case, which
    is built on ``device`` (``options`` then add to its own).  With ``poison_out`` the function
    writes into an ``out`` full of NaN, one of its own where the call has none; memory around a
    strided ``out`` must stay as it was.
    """
    if isinstance(function, Case):
        note = note or f"check({function!r}, device={str(device)!r})"
        args, built = function.build(device)
        function, options = function.function, built | options
    run, name = _resolve(function)
    note = f"{describe_call(name, args, options)}\n{note}".rstrip()
    q, oracle_of = args[0], getattr(reference, name)
    to_oracle = {key: x for key, x in options.items() if key != "out"} | {"return_lse": True}
    oracle, oracle_lse = oracle_of(*args, **to_oracle)
    fair, fair_lse = oracle_of(*args, **to_oracle, compute_dtype=q.dtype)
    if q.dtype == torch.float32:
        others = oracle_of(*_reversed_dims(name, args), **to_oracle, compute_dtype=q.dtype)
        fair, fair_lse = _worse(fair, others[0], oracle), _worse(fair_lse, others[1], oracle_lse)

    out: Tensor | None = options.get("out")
    if out is None and poison_out:
        out = options["out"] = torch.empty(oracle.shape, dtype=q.dtype, device=q.device)
    if out is not None and poison_out:
        out.fill_(math.nan)
    around = None if out is None or out._base is None else out._base.clone()
    try:
        result = run(*args, **options)
    except Exception as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(note)
        raise
    actual, lse = result if isinstance(result, tuple) else (result, None)
    if (lse is not None) != bool(options.get("return_lse", False)):
        raise AssertionError(_say("lse must be returned if return_lse=True, and only then", note))
    if out is not None and actual.data_ptr() != out.data_ptr():
        raise AssertionError(_say("the result is not the out that was passed", note))
    factor = error_factor(args, options) if factor is None else factor
    dtype = q.dtype if out is None else out.dtype
    assert_close(actual, oracle, fair, dtype=dtype, factor=factor, note=note)
    if lse is not None:
        budget: dict[str, Any] = {
            "dtype": torch.float32,
            "factor": factor,
            "name": "lse",
            "note": note,
        }
        assert_close(lse, oracle_lse, fair_lse, **budget)
    if around is not None and out is not None and out._base is not None:
        around.as_strided(out.shape, out.stride(), out.storage_offset()).copy_(out)
        if not same_bytes(around, out._base):
            raise AssertionError(_say("memory around out was written", note))
    return result


def _reversed_dims(function: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A call that differs in nothing but the order in which q k is summed."""
    places = {"varlen_attention": (0, 1), "prefix_attention": (0, 1, 3), "paged_attention": (0, 1)}
    order = torch.arange(args[0].shape[2] - 1, -1, -1, device=args[0].device)
    return tuple(x[..., order] if i in places[function] else x for i, x in enumerate(args))


def _worse(a: Tensor, b: Tensor, oracle: Tensor) -> Tensor:
    """Place by place, whichever is farther from the oracle."""
    return torch.where((b - oracle).abs() > (a - oracle).abs(), b, a)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    a, b = (x.contiguous().view(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def describe_call(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> str:
    """The call on one line: shapes, the values of small integer tensors, options."""
    parts = [_describe(x) for x in args] + [f"{key}={_describe(x)}" for key, x in options.items()]
    return f"{name}({', '.join(parts)})"


def _describe(x: Any) -> str:
    if not isinstance(x, Tensor):
        return repr(x)
    text = f"{dtype_name(x.dtype)}{list(x.shape)}"
    if x.dtype in (torch.int32, torch.int64) and x.numel() <= 64:
        return f"{text} {x.tolist()}"
    return text if x.is_contiguous() else f"{text} strides {list(x.stride())}"


def _resolve(function: str | Callable[..., Result]) -> tuple[Callable[..., Result], str]:
    if not isinstance(function, str):
        return function, function.__name__
    from . import api  # here, so that the oracle and the inputs work where no kernel does

    return getattr(api, function), function


def _worst(rule: str, name: str, badness: Tensor, actual: Tensor, oracle: Tensor) -> str:
    place = tuple(int(i) for i in torch.unravel_index(badness.argmax(), badness.shape))
    value, right = float(actual[place]), float(oracle[place])
    return f"{name}{list(place)} is {value:.9g}, not {right:.9g}: {rule}"


def _say(problem: str, note: str) -> str:
    return f"{problem}\n{note}".rstrip()
