"""What the package knows of a GPU; the only file that asks one anything."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import settings
from .errors import UnsupportedError

# Shared memory one block may take, in bytes, by Triton's name of the architecture.
SHARED_MEMORY = {
    75: 65_536, 80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448, 100: 232_448,
    103: 232_448, 110: 232_448, 120: 101_376, 121: 101_376,
    "gfx90a": 65_536, "gfx942": 65_536, "gfx950": 163_840,
    "gfx1100": 65_536, "gfx1101": 65_536, "gfx1200": 65_536, "gfx1201": 65_536,
}  # fmt: skip


@dataclass(frozen=True)
class Device:
    """A GPU as planning and tuning see it.

    ``arch`` is Triton's: 90 for sm_90, "gfx942"; "cpu" for the interpreter.
    """

    backend: str  # "cuda", "hip" or "interpreter"
    arch: int | str
    name: str
    sm_count: int
    shared_memory: int
    warp_size: int

    @property
    def is_interpreter(self) -> bool:
        return self.backend == "interpreter"

    @property
    def has_bf16(self) -> bool:
        return not (self.backend == "cuda" and isinstance(self.arch, int) and self.arch < 80)

    @property
    def has_native_e4m3(self) -> bool:
        """Whether Triton converts float8 e4m3fn by an instruction, not by integer arithmetic."""
        return self.backend == "cuda" and isinstance(self.arch, int) and self.arch >= 89

    @property
    def launches_early(self) -> bool:
        """Whether a kernel may be launched while the one before it ends."""
        return self.backend == "cuda" and isinstance(self.arch, int) and self.arch >= 90

    @property
    def title(self) -> str:
        """How a message names it: ``NVIDIA H200 (sm_90)``."""
        arch = f"sm_{self.arch}" if self.backend == "cuda" else self.arch
        return f"{self.name} ({arch})"


# What every call on a GPU asks.  torch.cuda's own functions first make sure that CUDA has started,
# as it has where a tensor is on a GPU; the last is what programs compiled by torch allocate with.
_ask = torch._C
current: Callable[[], int] = getattr(_ask, "_cuda_getDevice", torch.cuda.current_device)
stream_of: Callable[[int], int] = getattr(
    _ask, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
is_capturing: Callable[[], bool] = getattr(
    _ask, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
empty: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor] = getattr(
    _ask._dynamo.guards if torch.version.cuda else None,
    "_empty_strided_cuda",
    lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda"),
)

INTERPRETER = Device("interpreter", "cpu", "Triton interpreter", 1, 1 << 30, 1)
# Of a tensor without memory, for which a program is compiled elsewhere: nothing is held against it.
ABSENT = Device("cuda", "unknown", "a GPU that is not in this machine", 1, 1 << 30, 32)


def target(arch: int | str, *, name: str = "", sm_count: int = 108) -> Device:
    """A device described by its architecture alone, for compiling and explaining without one."""
    shared = SHARED_MEMORY[arch]
    if isinstance(arch, int):
        return Device("cuda", arch, name or "CUDA GPU", sm_count, shared, 32)
    return Device("hip", arch, name or "AMD GPU", sm_count, shared, _warp_size(arch))


def _warp_size(arch: str) -> int:
    return 64 if arch.startswith("gfx9") else 32


@functools.cache
def interpreting() -> bool:
    """Whether Triton's interpreter runs kernels: TRITON_INTERPRET says so, or there is no GPU."""
    if settings.INTERPRET is not None:
        return settings.INTERPRET
    return not torch.cuda.is_available()


@functools.cache
def describe(device: torch.device) -> Device:
    """The Device a tensor lives on."""
    if device.type == "cpu":
        if interpreting():
            return INTERPRETER
        if not torch.cuda.is_available():
            raise UnsupportedError(
                "tritonattn: tensors are on the CPU, no GPU was found, and TRITON_INTERPRET=0 "
                "forbids Triton's interpreter; got device cpu. Unset TRITON_INTERPRET."
            )
        raise UnsupportedError(
            "tritonattn: tensors are on the CPU, and this machine has a GPU to run on; got device "
            "cpu. Move them with .cuda(), or set TRITON_INTERPRET=1 before the program starts to "
            "run on the CPU through Triton's interpreter."
        )
    if interpreting():
        return INTERPRETER
    if device.type != "cuda":
        raise UnsupportedError(
            "tritonattn: tensors must be on a CUDA or ROCm GPU, or on the CPU where there is none; "
            f"got device {device}. Move them with .cuda()."
        )
    if (device.index or 0) >= torch.cuda.device_count():
        return ABSENT
    facts = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        arch: int | str = facts.gcnArchName.split(":")[0]
        backend, warp = "hip", _warp_size(str(arch))
    else:
        arch, backend, warp = facts.major * 10 + facts.minor, "cuda", 32
    shared = getattr(facts, "shared_memory_per_block_optin", 0) or SHARED_MEMORY.get(arch, 65_536)
    return Device(backend, arch, facts.name, facts.multi_processor_count, shared, warp)


def l2_bytes(device: torch.device) -> int:
    """The size of a GPU's L2 cache, 64 MiB where torch does not tell; 0 for the CPU."""
    if device.type != "cuda":
        return 0
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 << 20
