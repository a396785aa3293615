"""Merging attention states: results over some keys become the result over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from . import device as devices
from . import rules
from .device import Device
from .errors import Text, bad_type, bad_value

if TYPE_CHECKING:
    from .binaries import Repeatable

Tensors = torch.Tensor | Sequence[torch.Tensor]


def merge_states(outs: Tensors, lses: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge results of the same queries over different keys into one over all of these keys.

    outs: n >= 1 tensors ``[T, H, Dv]``, float16, bfloat16 or float32, all of one dtype, shape and
        GPU, last stride 1; a list, a tuple, or one stacked tensor ``[n, T, H, Dv]``.
    lses: n tensors ``[H, T]`` float32, natural-log log-sum-exp as ``return_lse=True`` gives it; or
        one ``[n, H, T]``.

    Returns ``out [T, H, Dv]`` of the same dtype and ``lse [H, T]`` float32.  A state whose lse is
    -inf is empty: whatever its output holds, NaN too, is not used.  A single state that is not
    empty passes unchanged, bit for bit; of empty states alone come 0 and -inf.  If several states
    count the same attention sink, the sum counts it several times.

    Raises ArgumentTypeError or ArgumentValueError (both TritonAttnError) for shapes, dtypes or
    devices that do not agree.

    >>> import torch
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> outs = torch.tensor([0.0, 1.0], device=device).view(2, 1, 1, 1)
    >>> lses = torch.tensor([12.0, 4.0], device=device).log().view(2, 1, 1)
    >>> out, lse = merge_states(outs, lses)
    >>> round(out.item(), 4), round(lse.exp().item(), 3)
    (0.25, 16.0)
    """
    _check(outs, lses)
    # An lse may come transposed, from a library that keeps it as [T, H]; it is small beside outs.
    stacked_out = outs if isinstance(outs, torch.Tensor) else torch.stack(tuple(outs))
    stacked_lse = lses.contiguous() if isinstance(lses, torch.Tensor) else torch.stack(tuple(lses))
    out = torch.empty(stacked_out.shape[1:], dtype=stacked_out.dtype, device=stacked_out.device)
    lse = torch.empty(stacked_lse.shape[1:], dtype=torch.float32, device=stacked_out.device)
    merge_partials(stacked_out, stacked_lse, out, lse, devices.describe(out.device))
    return out, lse


def merge_partials(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    device: Device,
) -> Repeatable | None:
    """Merge the parts of a softmax whose keys were split.

    ``partial_out [S, T, H, Dv]`` and ``partial_lse [S, H, T]`` become ``out [T, H, Dv]`` and, where
    it is given, ``lse [H, T]``.  Last strides are 1, the others and the float dtypes of
    ``partial_out`` and ``out`` any; both lse are float32.  What ``binaries.launch`` returns.
    """
    import triton

    from . import binaries
    from .kernels.reduce import merge_kernel
    from .kernels.tiles import Output

    num_parts, num_tokens, num_heads, head_dim = partial_out.shape
    num_rows = num_tokens * num_heads
    block_d = max(1, triton.next_power_of_2(head_dim))
    # The interpreter pays by the operation, a GPU by the time its few programs wait for memory.
    block_rows = 256 if device.is_interpreter else max(1, 256 // block_d)
    parts = Output(
        partial_out, partial_out.stride(0), partial_out.stride(1), partial_out.stride(2),
        partial_lse, partial_lse.stride(0), partial_lse.stride(1),
    )  # fmt: skip
    lse_stride = 0 if lse is None else lse.stride(0)
    merged = Output(out, 0, out.stride(0), out.stride(1), lse, 0, lse_stride)
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_ROWS": block_rows,
        "BLOCK_D": block_d,
        "INTERPRETED": device.is_interpreter,
    }
    grid = -(-num_rows // block_rows)
    options = binaries.Options(num_warps=2 if block_d <= 256 else 4)
    args = (parts, merged, num_parts, num_rows, num_heads)
    return binaries.launch(merge_kernel, grid, args, constants, options, device, out.device)


def _check(outs: Tensors, lses: Tensors) -> None:
    f = "merge_states"
    named_outs = _named(f, "outs", outs, "[T, H, Dv]", "[n, T, H, Dv]", 3)
    first_name, first = named_outs[0]
    *_, num_tokens, num_heads, _ = first.shape
    for name, out in named_outs:
        rules.dtype(f, name, out, rules.COMPUTE_DTYPES, f"Pass {name}.float().")
        rules.same_dtype(f, name, out, first.dtype, first_name)
        rules.same_device(f, name, out, first.device, first_name)
        rules.unit_stride(f, name, out)
        rules.no_grad(f, name, out)
        if out.shape != first.shape:
            rule = f"must have the shape of {first_name}, {list(first.shape)}"
            raise bad_value(f, name, rule, out, "Merge states of the same queries and heads.")

    named_lses = _named(f, "lses", lses, "[H, T]", "[n, H, T]", 2)
    states = _states(outs)
    if _states(lses) != states:
        rule = f"must hold one lse for each of the {states} outputs"
        raise bad_value(f, "lses", rule, Text(str(_states(lses))), "Pass as many lses as outs.")
    for name, lse in named_lses:
        if lse.dtype != torch.float32:
            raise bad_type(f, name, "must be float32", lse, f"Pass {name}.float().")
        rules.same_device(f, name, lse, first.device, first_name)
        rules.no_grad(f, name, lse)
        if list(lse.shape[-2:]) != [num_heads, num_tokens]:
            shape = [num_heads, num_tokens]
            rule = f"must end in [H, T] = {shape}, as {first_name} is {list(first.shape)}"
            fix = "An lse has its heads first; transpose one that comes as [T, H]."
            raise bad_value(f, name, rule, lse, fix)
    if first.dtype == torch.bfloat16:
        rules.bfloat16(f, "outs", devices.describe(first.device))


def _named(
    f: str, name: str, states: Tensors, each: str, stacked: str, ndim: int
) -> list[tuple[str, torch.Tensor]]:
    """The tensors and what a message calls them; a stacked tensor stays one."""
    if isinstance(states, torch.Tensor):
        fix = f"Stack the states to {stacked}, or pass a list of {each}."
        rules.rank(f, name, states, ndim + 1, stacked, fix)
        named = [(name, states)]
    elif isinstance(states, list | tuple):
        named = [(f"{name}[{i}]", state) for i, state in enumerate(states)]
        for part, state in named:
            rules.tensor(f, part, state, each)
            rules.rank(f, part, state, ndim, each)
    else:
        rule = f"must be a list of tensors {each} or one tensor {stacked}"
        raise bad_type(f, name, rule, states, f"Pass [{name}] for a single state.")
    if _states(states) == 0:
        raise bad_value(
            f, name, "must hold at least one state", Text("none"), "Pass n >= 1 states."
        )
    return named


def _states(states: Tensors) -> int:
    return states.shape[0] if isinstance(states, torch.Tensor) else len(states)
