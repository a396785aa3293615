"""Problem and Device to Plan: how the keys are split.  No tile sizes here."""

from __future__ import annotations

from dataclasses import dataclass

from .device import Device
from .problem import Problem

MAX_SPLITS = 256
INVARIANT_SPLIT = 2048  # keys a split in batch-invariant mode, whatever the batch
MIN_SPLIT = 256  # keys that are worth a program of their own
WAVES = 4  # programs an SM that a split call aims at


@dataclass(frozen=True)
class Plan:
    """``num_splits`` programs share the keys of a query tile.

    Each takes a part of equal size, or ``split_keys`` keys if that is not 0.
    """

    num_splits: int = 1
    split_keys: int = 0


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
    wanted = WAVES * device.sm_count // programs
    return Plan(max(1, min(wanted, problem.max_k // MIN_SPLIT, MAX_SPLITS)))
