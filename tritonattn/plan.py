"""Problem and Device to Plan: which kernel, and how the keys are split.  No tile sizes here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from .device import Device
from .problem import Problem

PORTABLE, HOPPER = KERNELS = ("portable", "hopper")

MAX_SPLITS = 256
INVARIANT_SPLIT = 2048  # keys a split in batch-invariant mode, whatever the batch
INTERPRETED = 8  # as many times that, and the interpreter shares keys out too
MIN_SPLIT = 256  # keys that are worth a program of their own
FEW = 2  # programs an SM that keep it busy
RESIDENT = 6  # programs of few queries an SM, if as many fit, that run at the same time
PIECES = 12  # of equal size an SM into which a batch's keys are cut, so that gaps are filled
NO_LIMIT = 1 << 30  # tokens
FEW_ROWS = 64  # (query, head) rows of one KV head that wait for memory rather than for products
SHORT = 64  # mean queries a sequence up to which lengths may differ much: decodes and a chunk

MOST_DIMS = 256  # of a head, in Hopper's kernel
# Of these few are padding there: it computes with 64, 128 or 256.
HOPPER_DIMS = (64, 96, 112, 120, 128, 192, 224, 256)
LONG = 2048  # mean queries a sequence from which tiles of the beginning and the end differ much
HOPPER_QUERIES = 96  # mean queries a sequence that fill its tiles of 128 well enough


@dataclass(frozen=True)
class Plan:
    """The kernel, and how the keys that a tile of queries sees are cut (``kernels.splits``).

    ``cut`` "": not at all.  "parts": into at most ``num_splits``, of ``split_keys`` keys or, where
    that is 0, equal ones.  "shares": what is longer than the ``programs``th share of the whole
    batch and than ``least_keys`` keys; sequences all of one length into as many parts as let
    ``residents`` programs run at the same time.
    """

    cut: str = ""
    num_splits: int = 1
    split_keys: int = 0
    programs: int = 0
    residents: int = 0
    least_keys: int = 0
    kernel: str = PORTABLE  # one of KERNELS
    why: str = field(default="", compare=False)  # the kernel for Hopper was not chosen


@dataclass(frozen=True)
class Kind:
    """Sequences of a batch that one launch is for, by their number of queries.

    ``problem`` is what plans and configurations are chosen for.
    """

    problem: Problem
    least_q: int = 0
    most_q: int = NO_LIMIT


def kinds(problem: Problem, device: Device) -> tuple[Kind, ...]:
    """All sequences as one kind; or decodes and chunks of prompts, which may stand in one batch and
    want kernels that differ in all things, as one each."""
    few = max(1, FEW_ROWS // problem.group)
    batch, total_q, max_q = problem.batch, problem.total_q, problem.max_q
    are_long = total_q > (batch - 1) * max_q + few  # not one of them can be short
    if not problem.has_cache or max_q <= few or are_long:
        return (Kind(problem),)
    short = replace(problem, max_q=1, total_q=batch)
    if problem.batch_invariant or _split(short, device).cut != "shares":
        return (Kind(problem),)
    if not _is_countable(problem, batch * FEW_ROWS):
        return (Kind(problem),)
    # How many and how long these are is known by bounds alone.
    rest = max(total_q - batch, few + 1)
    mean = max(total_q // batch, max_q // 2)
    long = replace(problem, total_q=rest, batch=max(1, rest // mean))
    return Kind(short, 0, few), Kind(long, few + 1)


def plan(problem: Problem, device: Device, kernel: str = "") -> Plan:
    """``kernel``: the one that a configuration is for; "": the library's choice."""
    if kernel == HOPPER:
        return Plan(kernel=HOPPER)
    split = _split(problem, device)
    if kernel == PORTABLE:
        return split
    why = why_not_hopper(problem, device) or _why_not_worth_it(problem, split)
    return replace(split, why=why) if why else Plan(kernel=HOPPER)


def why_not_hopper(problem: Problem, device: Device) -> str:
    """Why Hopper's kernel cannot run ``problem``; "" if it can."""
    page = problem.page_size
    refusals = {
        f"it is for sm_90, not for {device.title}": (device.backend, device.arch) != ("cuda", 90),
        "it takes float16 and bfloat16": problem.dtype not in (torch.float16, torch.bfloat16),
        "the cache is in another dtype than the queries": problem.cache_dtype
        not in (None, problem.dtype),
        f"it takes heads of at most {MOST_DIMS} dims": max(problem.head_dim, problem.head_dim_v)
        > MOST_DIMS,
        "every sequence has one query": problem.is_decode,
        "it knows no tree masks": problem.mask.has_tree,
        "it knows neither k_scale nor v_scale": problem.has_scales,
        "softmax_scale is not above 0": not problem.is_positive,
        f"num_splits is {problem.num_splits}": problem.num_splits > 1,
        f"pages hold {page} tokens, and no power of two from 8 up": problem.has_cache
        and (page < 8 or page & (page - 1) != 0),
        "TMA cannot copy from queries, keys or values with such strides or addresses": (
            not problem.has_boxes
        ),
    }
    return next((reason for reason, applies in refusals.items() if applies), "")


def _why_not_worth_it(problem: Problem, split: Plan) -> str:
    """Why the portable kernel is the better one, as far as is known before any measurement."""
    for dim in (problem.head_dim, problem.head_dim_v):
        if dim not in HOPPER_DIMS:
            return f"it would pad heads of {dim} dims"
    if problem.batch_invariant:
        # A sequence's bits must not depend on the batch, and how the buffers' size, by which it
        # would be cut, is rounded may.
        if problem.has_cache and problem.num_splits != 1:
            return f"batch_invariant cuts cached keys into parts of {INVARIANT_SPLIT}"
        return ""
    mean = min(problem.max_q, problem.total_q // max(1, problem.batch))
    if mean < HOPPER_QUERIES:
        return f"sequences have {mean} queries in the mean, fewer than {HOPPER_QUERIES}"
    return "so few queries leave the GPU idle unless keys are split" if split.cut else ""


def _split(problem: Problem, device: Device) -> Plan:
    if problem.num_splits:
        return _parts(problem.num_splits)
    if problem.batch_invariant:
        # A fixed size, so that where a sequence is cut depends on nothing but its own length.
        if problem.function == "varlen_attention":
            return Plan()
        return _parts(-(-problem.capacity_k // INVARIANT_SPLIT), INVARIANT_SPLIT)
    tiles = problem.total_q
    if problem.max_q > 1:
        tiles = max(problem.batch, -(-problem.total_q * problem.group // 64))
    programs = max(1, tiles * problem.num_kv_heads)
    sms = device.sm_count
    busy = FEW * sms
    if device.backend == "hip":
        # Parts of one tile would meet in caches that its chiplets keep apart.
        return _parts(min(busy // programs, problem.max_k // MIN_SPLIT, MAX_SPLITS))
    if device.is_interpreter and problem.max_k < INTERPRETED * MIN_SPLIT:
        return Plan()  # programs run one after another, and each works its share out anew
    # Few tiles; or many, of which one may see many more keys than the others.
    is_short = 2 * programs <= busy or problem.total_q <= SHORT * problem.batch
    if is_short and _is_countable(problem, problem.total_q * problem.group):
        return Plan("shares", 1, 0, PIECES * sms, RESIDENT * sms, MIN_SPLIT)
    return Plan()


def _is_countable(problem: Problem, rows: int) -> bool:
    """Whether as many tiles as (query, head) rows, over key tiles of 16, are counted in int32."""
    return rows * problem.num_kv_heads * (problem.max_k // 16 + 2) < 1 << 31


def turning_points(problem: Problem, device: Device, batch: int) -> list[int]:
    """Numbers of queries in all, of ``batch`` sequences, past which a plan or a configuration may
    be another one."""
    few = FEW * device.sm_count // (2 * problem.num_kv_heads) * 64 // problem.group
    return [few, SHORT * batch, HOPPER_QUERIES * batch - 1, LONG * batch - 1]


def _parts(num_splits: int, split_keys: int = 0) -> Plan:
    return Plan("parts", num_splits, split_keys) if num_splits > 1 else Plan()
