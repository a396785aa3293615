"""What is asked, without tensors.

Frozen and hashable; made by ``validate``, read by planning, tuning and launching.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch

FP8_FORMATS = {
    torch.float8_e4m3fn: "e4m3fn",
    torch.float8_e5m2: "e5m2",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2fnuz: "e5m2fnuz",
}


@dataclass(frozen=True)
class MaskSpec:
    """Which rules decide what a query sees.

    The windows' and chunks' sizes are run-time values, kept by ``Call``.
    """

    causal: bool = True
    has_left: bool = False  # a limit on the keys before a query's own position
    has_right: bool = False  # a limit after it: causal (0), or a window's right side
    has_chunk: bool = False
    has_tree: bool = False


@dataclass(frozen=True)
class Problem:
    """One attention call as planning and tuning see it.

    What stands before ``batch`` changes the generated code.  The sizes from there on are capacities
    that the host knows: they choose between valid configurations and never change a result.
    """

    function: str  # "varlen_attention", "prefix_attention" or "paged_attention"
    dtype: torch.dtype
    out_dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    num_kv_heads: int
    group: int  # query heads a KV head
    mask: MaskSpec = field(default_factory=MaskSpec)
    cache_dtype: torch.dtype | None = None  # None: no cache is read
    page_size: int = 0
    has_softcap: bool = False
    has_alibi: bool = False
    has_sinks: bool = False
    has_query_scale: bool = False
    is_decode: bool = False  # one query a sequence, as no cu_seqlens_q says otherwise
    is_latent: bool = False  # cached values are the keys' first dims, in the same memory
    has_scales: bool = False  # k_scale or v_scale, other than 1
    is_positive: bool = True  # softmax_scale
    rows_aligned: bool = True  # strides that keep every row on 16 bytes, if its tensor starts there
    has_boxes: bool = True  # TMA can copy boxes of queries, keys and values, if they start there
    types: tuple[object, ...] = ()  # dtypes of the table and of the options' tensors; None: absent
    batch_invariant: bool = False
    num_splits: int = 0  # 0: the library's choice
    batch: int = 1
    total_q: int = 1
    max_q: int = 1  # bound on a sequence's queries
    capacity_k: int = 1  # the most keys that the buffers can hold for one sequence
    max_k: int = 1  # bound on a sequence's keys: the capacity, or less if the caller says so

    def __hash__(self) -> int:  # a call looks itself up several times: computed once
        known = self.__dict__.get("_hash")
        if known is None:
            known = hash(tuple(getattr(self, f.name) for f in fields(self)))
            object.__setattr__(self, "_hash", known)
        return known

    @property
    def has_cache(self) -> bool:
        return self.cache_dtype is not None

    @property
    def has_new(self) -> bool:
        """Whether keys come from packed ``k`` and ``v``."""
        return self.function != "paged_attention"

    @property
    def cache_format(self) -> str:
        """The float8 format of the cache, "" for a cache in the queries' own dtype."""
        return FP8_FORMATS.get(self.cache_dtype, "") if self.cache_dtype is not None else ""
