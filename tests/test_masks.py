"""The interval rule of ``kernels/masks.py`` against the predicate, over thousands of masks."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import tritonattn.kernels  # noqa: F401  first: it decides who runs the kernel below
from tritonattn.kernels import masks
from tritonattn.reference import visible

DRAWN = 1024  # masks a case


@triton.jit
def ranges_kernel(
    drawn,
    found,
    N: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    offs = tl.arange(0, N)
    first_pos = tl.load(drawn + offs)
    last_pos = tl.load(drawn + N + offs)
    num_keys = tl.load(drawn + 2 * N + offs)
    left = tl.load(drawn + 3 * N + offs)
    right = tl.load(drawn + 4 * N + offs)
    chunk = tl.load(drawn + 5 * N + offs)
    first_a, last_a = masks.interval(first_pos, num_keys, left, right, chunk, LEFT, RIGHT, CHUNK)
    first_b, last_b = masks.interval(last_pos, num_keys, left, right, chunk, LEFT, RIGHT, CHUNK)
    low, high, full_low, full_high = masks.tile_ranges(first_a, last_a, first_b, last_b)
    tl.store(found + offs, first_a)
    tl.store(found + N + offs, last_a)
    tl.store(found + 2 * N + offs, low)
    tl.store(found + 3 * N + offs, high)
    tl.store(found + 4 * N + offs, full_low)
    tl.store(found + 5 * N + offs, full_high)


@pytest.fixture(params=[(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)], ids=str)
def case(request, device):
    """Drawn masks, and what the kernel's arithmetic says of each."""
    has_left, has_right, has_chunk = request.param
    rng = np.random.default_rng(7)
    num_keys = rng.integers(0, 60, DRAWN)
    len_q = rng.integers(1, 40, DRAWN)
    start = rng.integers(0, len_q)
    rows = 1 + rng.integers(0, len_q - start)  # the tile's rows, start onward
    first_pos = start + num_keys - len_q
    drawn = np.stack([
        first_pos, first_pos + rows - 1, num_keys,
        rng.integers(0, 25, DRAWN),
        rng.integers(0, 25, DRAWN) * rng.integers(0, 2, DRAWN),  # 0, as a causal mask has, often
        rng.integers(1, 30, DRAWN),
    ]).astype(np.int32)  # fmt: skip
    found = torch.zeros(6, DRAWN, dtype=torch.int32, device=device)
    ranges_kernel[(1,)](torch.from_numpy(drawn).to(device), found, DRAWN, *map(bool, request.param))
    masks_ = []
    for first, last, lk, left, right, chunk in drawn.T.tolist():
        lq = lk - first  # so that row 0 stands at ``first``
        window = (left if has_left else None, right if has_right else None)
        seen = visible(lq, lk, False, window, chunk if has_chunk else None)
        masks_.append(seen[: last - first + 1])
    return masks_, found.cpu().T.tolist()


def test_interval_is_the_predicate(case):
    for seen, (first, last, *_) in zip(*case, strict=True):
        assert seen[0].nonzero().flatten().tolist() == list(range(first, last))


def test_tile_ranges_never_cut_a_visible_key(case):
    for seen, (*_, low, high, _, _) in zip(*case, strict=True):
        keys = seen.any(0).nonzero().flatten().tolist()
        assert keys == [] or (low <= keys[0] and keys[-1] < high)


def test_tile_ranges_hold_no_key_that_no_row_sees(case):
    for seen, (*_, low, high, _, _) in zip(*case, strict=True):
        assert seen.any(0).nonzero().flatten().tolist() == list(range(low, high))


def test_tile_ranges_interior_is_what_every_row_sees(case):
    for seen, (*_, full_low, full_high) in zip(*case, strict=True):
        assert seen.all(0).nonzero().flatten().tolist() == list(range(full_low, full_high))
