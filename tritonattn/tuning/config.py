"""One kernel configuration, its validity, and its JSON form."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass, fields

import torch

from ..device import SHARED_MEMORY, Device
from ..plan import HOPPER, KERNELS, PORTABLE, why_not_hopper
from ..problem import Problem

# "boxes": packed keys and values are copied by TMA instead of through pointers.  A form of Hopper's
# kernel is a set of switches, which kernels/hopper/spec.py explains.
FORMS = ("textbook", "boxes")
HOPPER_SWITCHES = ("turns", "lanes", "mid", "drawn")
HOPPER_FORMS = tuple(
    "+".join(names) or "plain"
    for count in range(len(HOPPER_SWITCHES) + 1)
    for names in itertools.combinations(HOPPER_SWITCHES, count)
)
FORMS_OF = {PORTABLE: FORMS, HOPPER: HOPPER_FORMS}


@dataclass(frozen=True)
class KernelConfig:
    """Tile sizes and launch options.

    It holds no meaning: every valid one gives the same result within rounding.
    """

    block_m: int  # rows of a query tile: tokens x packed heads
    block_n: int  # keys of a tile
    pack: int  # query heads of one KV head in a tile
    num_warps: int
    num_stages: int
    form: str = "textbook"  # one of its kernel's
    kernel: str = PORTABLE  # one of KERNELS

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> KernelConfig:
        """Read one entry; raise ValueError for anything but a configuration's fields.

        One without a form or a kernel is from before there were several.
        """
        data = json.loads(text)
        kinds = {field.name: int if field.type == "int" else str for field in fields(cls)}
        if isinstance(data, dict):
            data = {"form": cls.form, "kernel": cls.kernel} | data
        if not isinstance(data, dict) or sorted(data) != sorted(kinds):
            raise ValueError(f"a configuration has the fields {[*kinds]}; got {text}")
        if any(type(data[name]) is not kind for name, kind in kinds.items()):
            raise ValueError(
                f"a configuration's fields are integers, a form's name and a kernel's; got {text}"
            )
        return cls(**data)


def whole_block(dim: int) -> int:
    """The power of two, at least 16, that covers a head's dims."""
    return max(16, 1 << (dim - 1).bit_length())


def blocks(dim: int, dtype: torch.dtype, device: Device) -> tuple[int, ...]:
    """The powers of two that cover a head's dims: 192 by 128 and 64, 80 by 64 and 16, 120 by 128.

    float32 by many small ones, as a long sum's rounding grows with its length and a GPU sums one
    product after the other.  The interpreter sums in float64.
    """
    if dtype == torch.float32 and not device.is_interpreter:
        width = 16 if dim <= 128 else 32
        return (width,) * -(-dim // width)
    whole = whole_block(dim)
    half = whole // 2
    if dim <= 16 or dim == whole:
        return (whole,)
    tail = max(16, 1 << (dim - half - 1).bit_length())
    return (half, tail) if half + tail < whole else (whole,)


def invalid(config: KernelConfig, problem: Problem, device: Device) -> str:
    """Why ``config`` cannot run ``problem`` on ``device``; "" if it can."""
    if reason := out_of_range(config):
        return reason
    if config.kernel == HOPPER:
        return why_not_hopper(problem, device) or unfit_for_hopper(config, problem, device)
    if not 1 <= config.pack <= min(config.block_m, problem.group):
        return f"pack must be from 1 to min(block_m, heads a KV head); got {config.pack}"
    if config.form == "boxes" and (reason := why_no_boxes(problem, device)):
        return reason
    if config.block_m >= 64 and (reason := _miscompiled(config, problem, device)):
        return reason
    width = config.block_n + whole_block(problem.head_dim_v)
    sums = config.block_m * width // (32 * config.num_warps)
    # AMD's GPUs have 512 registers.
    if device.backend == "cuda" and not has_tensor_memory(device) and sums > 255:
        return f"needs {sums} registers a thread for sums alone, of 255"
    return _too_large(config, problem, device)


def _too_large(config: KernelConfig, problem: Problem, device: Device) -> str:
    needed = shared_memory(config, problem, device)
    if needed > device.shared_memory:
        return f"needs {needed} bytes of shared memory; {device.title} has {device.shared_memory}"
    return ""


def unfit_for_hopper(config: KernelConfig, problem: Problem, device: Device) -> str:
    """Why its kernel cannot be of these sizes, for a problem that it can run."""
    fixed = {"block_m": 128, "pack": 1, "num_warps": 4}
    for name, value in fixed.items():
        if getattr(config, name) != value:
            return f"{name} must be {value} for Hopper's kernel; got {getattr(config, name)}"
    if config.num_stages < 2:
        return f"num_stages must be at least 2 for Hopper's kernel; got {config.num_stages}"
    # Of a consumer's 240 registers the sums, the scores and the probabilities take these.
    sums, scores = hopper_blocks(problem)[1] // 2, config.block_n // 2
    if config.block_n < 64 or sums + scores + scores // 2 > 192:
        return f"block_n {config.block_n} is not for values of {problem.head_dim_v} dims"
    return _too_large(config, problem, device)


def out_of_range(config: KernelConfig) -> str:
    """What is wrong with ``config`` whatever it is to run; "" if nothing is."""
    for name, low, high in (("block_m", 16, 256), ("block_n", 16, 256), ("num_warps", 1, 16)):
        value = getattr(config, name)
        if value & (value - 1) or not low <= value <= high:
            return f"{name} must be a power of two from {low} to {high}; got {value}"
    if not 1 <= config.num_stages <= 8:
        return f"num_stages must be from 1 to 8; got {config.num_stages}"
    if config.pack < 1:
        return f"pack must be at least 1; got {config.pack}"
    if config.kernel not in KERNELS:
        return f"kernel must be one of {', '.join(KERNELS)}; got {config.kernel!r}"
    forms = FORMS_OF[config.kernel]
    if config.form not in forms:
        return f"form must be one of {', '.join(forms)}; got {config.form!r}"
    return ""


def shared_memory(config: KernelConfig, problem: Problem, device: Device) -> int:
    """What the compiled kernel takes at most, in bytes: an upper bound, close for 16-bit keys.

    The query tile, the key and value tiles that are in flight, and the probabilities on their way
    from one product to the other.
    """
    if device.is_interpreter:
        return 0
    if config.kernel == HOPPER:
        return _shared_by_hopper(config, problem, hopper_q_slots(config, problem))
    itemsize = problem.dtype.itemsize
    m, n, stages = config.block_m, config.block_n, config.num_stages
    d, dv = sum(blocks(problem.head_dim, problem.dtype, device)), whole_block(problem.head_dim_v)
    queries, keys, probabilities = m * d * itemsize, n * (d + dv) * itemsize, m * n * itemsize
    if device.backend == "hip":
        # Queries pass through on their way to registers; one stage holds K and V in turn.
        if stages == 1:
            if device.warp_size == 32 and itemsize == 4:
                queries *= 2  # by blocks of dims, of which two are on their way
            return max(queries, n * max(d, dv) * itemsize, probabilities)
        if device.arch == "gfx950":  # copies past the registers, to rows that are padded
            return max(queries, stages * keys * 33 // 32 + probabilities)
        if has_few_rows(config, problem):
            probabilities *= 2  # triton 3.8 lays out as much again
        return max(queries, (stages - 1) * keys + probabilities)

    if not has_tensor_cores(device):  # operands widened to float32, and no copies in flight
        return 4 * (m * d + n * max(d, dv) + m * n) + 1024
    tree = 4 * m * n if problem.mask.has_tree else 0
    # Copies in flight: wgmma still reads a tile while the next ones arrive.  Behind a look-up of
    # page ids in the same loop, which is a stage of its own, half as many.
    if has_warpgroup_mma(device) and itemsize == 2 and m >= 64 and config.num_warps >= 4:
        packed, paged = stages, max(2, (stages + 1) // 2)
        probabilities = 0
        if problem.has_cache and has_tensor_memory(device):
            probabilities = 1024  # of triton 3.6 alone: page ids pass through shared memory too
    else:
        packed, paged = max(1, stages - 1), max(1, (stages - 1) // 2)
        if has_few_rows(config, problem):
            paged = packed
            queries *= 2 if problem.cache_format and problem.has_new else 1  # in both formats
    dims = paged * (d + dv)
    is_kept = packed == stages and has_tensor_memory(device)  # by triton 3.6, until they are values
    if reads_values_as_keys(problem, device) and not is_kept:
        dims = max(paged * d, 2 * dv)  # fewer keys than a tile pass through once more
    if problem.cache_format and not problem.has_new and packed < stages:
        # Bytes until they are multiplied; values may pass through once more as 16-bit numbers.
        flight = n * dims
        if not (problem.rows_aligned and converts_pairs(config, problem, device)):
            flight += n * max(d, dv) * itemsize
        return queries + flight + probabilities + tree + 1024
    flight = packed * keys if problem.has_new else n * dims * itemsize
    if problem.has_new and problem.has_cache:
        flight = max(packed, paged) * keys
    return queries + flight + probabilities + tree + 1024


def has_few_rows(config: KernelConfig, problem: Problem) -> bool:
    """Whether a tile waits for cached keys rather than for products: one loop goes over them."""
    return problem.has_cache and config.block_m <= 32 and not problem.mask.has_tree


def converts_pairs(config: KernelConfig, problem: Problem, device: Device) -> bool:
    """Whether float8 keys and values, if rows are aligned, go from bytes in shared memory to
    operands in registers, pair by pair."""
    return (
        problem.cache_format in ("e4m3fn", "e5m2")
        and device.has_native_e4m3
        and not problem.has_new
        and config.block_m <= 32
        and problem.dtype.itemsize == 2
        and problem.head_dim % 2 == problem.head_dim_v % 2 == 0
        # Products are of 16 dims at least, and of half a block here.
        and min(*blocks(problem.head_dim, problem.dtype, device), problem.head_dim_v) > 16
    )


def reads_values_as_keys(problem: Problem, device: Device) -> bool:
    """Whether latent keys are loaded once, as their first block covers just the values' dims."""
    return (
        problem.is_latent
        and problem.dtype.itemsize == 2
        and blocks(problem.head_dim, problem.dtype, device)[0] == whole_block(problem.head_dim_v)
    )


def has_tensor_cores(device: Device) -> bool:
    """Whether Triton multiplies 16-bit numbers on tensor cores; it leaves those of sm_75 alone."""
    return device.backend != "cuda" or not isinstance(device.arch, int) or device.arch >= 80


def has_tensor_memory(device: Device) -> bool:
    """Whether products' sums are kept in a memory of their own: Blackwell's data-centre GPUs."""
    return device.backend == "cuda" and device.arch in (100, 103, 110)


def has_warpgroup_mma(device: Device) -> bool:
    """Whether matrix products read shared memory and leave registers to their sums."""
    return device.backend == "cuda" and isinstance(device.arch, int) and 90 <= device.arch < 120


def _miscompiled(config: KernelConfig, problem: Problem, device: Device) -> str:
    """Why warpgroups' products of this tile come out wrong; "" if they do not.

    Of a head's dims in two blocks the second product is added to the first.  With Triton 3.6.0 its
    queries' address was wrong on an H200 where two warpgroups shared 64 rows and keys came from
    registers (heads of 96): reads past the end of shared memory.  Neither is done here.
    """
    is_split = (
        problem.dtype.itemsize == 2 and len(blocks(problem.head_dim, problem.dtype, device)) > 1
    )
    if not is_split or not has_warpgroup_mma(device):
        return ""
    dims = f"heads of {problem.head_dim} dims, which take two products"
    if config.block_m < 16 * config.num_warps:
        return f"{config.num_warps} warps need {16 * config.num_warps} rows for {dims}"
    return "" if problem.rows_aligned else f"rows off 16 bytes take tiles of 32 rows for {dims}"


def why_no_boxes(problem: Problem, device: Device) -> str:
    """Why packed keys and values cannot be copied as boxes; "" if they can."""
    # Other TMA, of sm_120, feeds products that take operands from registers: longer loops.
    is_fed = has_warpgroup_mma(device) or device.is_interpreter
    refusals = {
        f"{device.title} has no matrix products of what TMA copies": not is_fed,
        "there are no packed keys": not problem.has_new,
        "boxes are for 16-bit numbers": problem.dtype.itemsize != 2,
        f"a head's {problem.head_dim} dims take two boxes": len(
            blocks(problem.head_dim, problem.dtype, device)
        )
        > 1,
        "TMA cannot copy from tensors with such strides or addresses": not problem.has_boxes,
    }
    return next((reason for reason, applies in refusals.items() if applies), "")


# Hopper's kernel


def hopper_blocks(problem: Problem) -> tuple[int, int]:
    """What covers the dims of a key and of a value: strips of 64, and a power of two of them."""
    return -(-problem.head_dim // 64) * 64, max(64, whole_block(problem.head_dim_v))


def hopper_q_slots(config: KernelConfig, problem: Problem) -> int:
    """Query tiles in shared memory: the next one's beside the one at work, if there is room."""
    return 2 if _shared_by_hopper(config, problem, 2) <= SHARED_MEMORY[90] else 1


def _shared_by_hopper(config: KernelConfig, problem: Problem, slots: int) -> int:
    """Tiles, a barrier or two for each, the ring of announced tiles and what becomes of their rows,
    and what Triton takes itself for exchanges among threads and between the program's roles."""
    d, dv = hopper_blocks(problem)
    stages = config.num_stages
    tiles = 2 * (slots * config.block_m * d + stages * config.block_n * (d + dv))
    barriers = 8 * (3 * 4 + 3 * slots + 4 * stages)
    announced = 4 * 4 * (32 + config.block_m)
    return tiles + barriers + announced + 4096 + 128
