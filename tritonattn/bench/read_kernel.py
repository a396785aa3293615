"""Reading memory and nothing else: the ceiling of a decode."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_kernel(x_ptr, out_ptr, tiles, BLOCK: tl.constexpr):
    """Program p folds tiles p, p + programs, ... of BLOCK int32 into one number a lane."""
    offs = tl.arange(0, BLOCK)
    pid = tl.program_id(0).to(tl.int64)
    acc = tl.zeros([BLOCK], tl.int32)
    for tile in range(pid, tiles, tl.num_programs(0)):
        acc ^= tl.load(x_ptr + tile * BLOCK + offs)
    tl.store(out_ptr + pid * BLOCK + offs, acc)
