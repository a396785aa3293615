"""One kernel configuration, its validity, and its JSON form."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from ..device import Device
from ..problem import Problem


@dataclass(frozen=True)
class KernelConfig:
    """Tile sizes and launch options.  It holds no meaning: every valid one gives the same result within rounding."""

    block_m: int  # rows of a query tile: tokens x packed heads
    block_n: int  # keys of a tile
    pack: int  # query heads of one KV head in a tile
    num_warps: int
    num_stages: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> KernelConfig:
        """Read one entry; raise ValueError for anything that is not exactly a configuration's integers."""
        data = json.loads(text)
        names = [field.name for field in fields(cls)]
        if not isinstance(data, dict) or sorted(data) != sorted(names):
            raise ValueError(f"a configuration has the fields {names}; got {text}")
        if any(type(value) is not int for value in data.values()):
            raise ValueError(f"a configuration's fields are integers; got {text}")
        return cls(**data)


def whole_block(dim: int) -> int:
    """The power of two, at least 16, that covers a head dimension."""
    return max(16, 1 << (dim - 1).bit_length())


def blocks(dim: int) -> tuple[int, int]:
    """The two powers of two that cover a head dimension: 192 by (128, 64), 80 by (64, 16), 120 by (128, 0)."""
    whole = whole_block(dim)
    half = whole // 2
    if dim <= 16 or dim == whole:
        return whole, 0
    tail = max(16, 1 << (dim - half - 1).bit_length())
    return (half, tail) if half + tail < whole else (whole, 0)


def invalid(config: KernelConfig, problem: Problem, device: Device) -> str:
    """Why ``config`` cannot run ``problem`` on ``device``; "" if it can."""
    for name, low, high in (("block_m", 16, 256), ("block_n", 16, 256), ("num_warps", 1, 16)):
        value = getattr(config, name)
        if value & (value - 1) or not low <= value <= high:
            return f"{name} must be a power of two from {low} to {high}; got {value}"
    if not 1 <= config.num_stages <= 8:
        return f"num_stages must be from 1 to 8; got {config.num_stages}"
    if not 1 <= config.pack <= min(config.block_m, problem.group):
        return f"pack must be from 1 to min(block_m, heads a KV head); got {config.pack}"
    needed = shared_memory(config, problem)
    if needed > device.shared_memory:
        return f"needs {needed} bytes of shared memory; {device.title} has {device.shared_memory}"
    return ""


def shared_memory(config: KernelConfig, problem: Problem) -> int:
    """An estimate in bytes: the query tile, and the key and value tiles that are in flight."""
    itemsize = problem.dtype.itemsize
    d, dv = sum(blocks(problem.head_dim)), whole_block(problem.head_dim_v)
    stages = max(1, config.num_stages - 1) if config.num_stages > 1 else 1
    return itemsize * (config.block_m * d + stages * config.block_n * (d + dv))
