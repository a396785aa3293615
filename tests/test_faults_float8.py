"""float8 caches beside queries of any magnitude: products run in float16, whose range is small."""

from __future__ import annotations

import pytest
import torch
from faults import CACHED_PATHS, PREFIX, Path, check, every_cached_path

from tritonattn.testing import Case

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]


@every_cached_path
@pytest.mark.parametrize("cache_dtype", FORMATS, ids=lambda dtype: str(dtype).split("_")[-1])
@pytest.mark.parametrize("exponent", [-120, 30, 115])
def test_attention_float8_cache_takes_queries_of_any_magnitude(path, cache_dtype, exponent, device):
    """A bfloat16 query may be far outside of float16's range; the scale brings the logits back."""
    sizes = {"k_lens": (21, 40), "q_lens": (1, 3), "head_dims": (32, 32), "page_size": 8}
    case = Case(path.function, cache_dtype=cache_dtype, dtype=torch.bfloat16, **sizes)
    (q, *rest), options = case.build(device)
    q = q.clamp(-2, 2).mul(2.0**exponent)
    if path.function == PREFIX:  # whose new keys are of the queries' dtype
        rest[0] = rest[0].clamp(-2, 2)
    options |= {"softmax_scale": 32**-0.5 * 2.0**-exponent}
    check(path, (q, *rest), options)


@pytest.mark.parametrize("path", [p for p in CACHED_PATHS if p.num_splits == 1], ids=str)
def test_attention_float8_cache_keeps_rows_of_unlike_magnitude_apart(path: Path, device):
    """Each row has a power of its own, and a row of zeros is uniform."""
    sizes = {"k_lens": (33,), "q_lens": (5,), "heads": (2, 1), "head_dims": (192, 64)}
    case = Case(
        path.function, cache_dtype=torch.float8_e4m3fn, dtype=torch.bfloat16, page_size=8, **sizes
    )
    (q, *rest), options = case.build(device)
    powers = torch.tensor([2.0**-100, 2.0**90, 0.0, 1.0, 2.0**10], device=device)
    q = q.clamp(-2, 2) * powers[:, None, None].to(q.dtype)
    query_scale = torch.where(powers > 0, 1 / powers.clamp(min=2.0**-126), 1.0)
    check(path, (q, *rest), options | {"query_scale": query_scale})
