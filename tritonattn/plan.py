"""Problem and Device to Plan: how the keys are split.  No tile sizes here."""

from __future__ import annotations

from dataclasses import dataclass

from .device import Device
from .problem import Problem

MAX_SPLITS = 256
INVARIANT_SPLIT = 2048  # keys a split in batch-invariant mode, whatever the batch
MIN_SPLIT = 512  # keys that are worth a program of their own
BUSY = 2  # programs an SM that share a batch's keys evenly
CROWD = 32  # programs an SM, most of them leaving at once, that a grid has room for
SCRATCH = 1 << 24  # float32 numbers of partial results
SHORT = 64  # mean queries a sequence up to which lengths may differ much: decodes and a chunk


@dataclass(frozen=True)
class Plan:
    """How the keys that a tile of queries sees are cut into at most ``num_splits`` parts.

    In parts of ``split_keys`` keys, or else so that all parts of the batch, of at least
    ``least_keys``, keep ``programs`` programs evenly busy, which the device works out from its
    lengths; or else, where these are 0, in ``num_splits`` equal ones.
    """

    num_splits: int = 1
    split_keys: int = 0
    programs: int = 0
    least_keys: int = 0


def plan(problem: Problem, device: Device) -> Plan:
    if problem.num_splits:
        return Plan(problem.num_splits)
    if problem.batch_invariant:
        # A fixed size, so that where a sequence is cut depends on nothing but its own length.
        if problem.function == "varlen_attention":
            return Plan(1)
        return Plan(max(1, -(-problem.capacity_k // INVARIANT_SPLIT)), INVARIANT_SPLIT)
    programs = max(1, problem.total_q * problem.num_kv_heads)
    if problem.max_q > 1:
        tiles = max(problem.batch, -(-problem.total_q * problem.group // 64))
        programs = tiles * problem.num_kv_heads
    busy = BUSY * device.sm_count
    room = busy
    if problem.has_cache and problem.total_q <= SHORT * problem.batch:
        # However many sequences there are, one may be much longer than the others.
        numbers = problem.total_q * problem.num_kv_heads * problem.group * problem.head_dim_v
        room = min(CROWD * device.sm_count, programs * (SCRATCH // max(1, numbers)))
    most = min(room // programs, problem.max_k // MIN_SPLIT, MAX_SPLITS)
    return Plan(most, programs=busy, least_keys=MIN_SPLIT) if most > 1 else Plan()
