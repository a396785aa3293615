"""Keys that all rows of a tile see: Hopper's kernel does not look for their maximum."""

from __future__ import annotations

import pytest
import torch
from faults import PATHS, PREFIX, arrange, case, check, rows

FP16, BF16 = torch.float16, torch.bfloat16
# Tiles of their usual size alone: small ones are many, and see the same.
every_large_path = pytest.mark.parametrize(
    "path", [path for path in PATHS if not path.small_tiles], ids=str
)


@every_large_path
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("height", [0.6, 4.0, 99.0], ids=["above", "far_above", "past_float32"])
def test_attention_to_a_key_above_all_others_is_right(path, dtype, height, device):
    """Weights from 2^9 to past what float32 holds, measured from the later keys' maximum."""
    how = {"heads": (2, 1), "head_dims": (64, 64), "dtype": dtype, "poison": "nan"}
    args, options = case(path, (150, 90), (70, 33), **how).build(device)
    args[0].abs_()
    key = args[2 if path.function == PREFIX else 1]
    if path.function == "varlen_attention":
        key[[3, 150 + 20]] = height
    else:
        table = args[5 if path.function == PREFIX else 3]
        key = args[3] if path.function == PREFIX else key
        page_size = key.shape[1]
        for b, j in ((0, 3), (1, 20)):
            key[table[b, j // page_size], j % page_size] = height
    check(path, args, options | {"softmax_scale": 0.5})


# Where a tile of keys ends with the last key that its first query sees, that query has no maximum
# yet when the tile is reached from behind.
ON_A_TILES_EDGE = {
    "window": ((600, 400), (600, 400), {"window_size": (255, 0)}),
    "chunk": ((600, 400), (600, 400), {"chunk_size": 128}),
    "context": ((327, 511), (200, 129), {}),
    "right": ((600, 400), (300, 400), {"window_size": (None, 128), "causal": False}),
}


@every_large_path
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("edge", ON_A_TILES_EDGE)
def test_attention_that_ends_with_a_tile_of_keys_is_right(path, dtype, edge, device):
    k_lens, q_lens, options = ON_A_TILES_EDGE[edge]
    how = {"heads": (2, 1), "head_dims": (64, 64), "dtype": dtype, "poison": "nan"}
    args, more = case(path, k_lens, q_lens, **how).build(device)
    check(path, args, more | options)


@every_large_path
def test_attention_of_low_scores_that_end_with_a_tile_is_right(path, device):
    """Measured from nothing, one of these scores leaves 2^-125 and the other 0."""
    n, logits, values = 255, [-86.9, -87.9], [1.0, 2.0]
    made = rows([logits[j % 2] for j in range(n)], [values[j % 2] for j in range(n)], lq=128)
    args, options = arrange(path, *made, device, softmax_scale=1.0)
    check(path, args, options)
