"""One attention call on its way through the house: ``validate`` reads it, ``launch`` runs it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Scale = float | torch.Tensor | None
Window = tuple[int | None, int | None]
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class Call:
    """The arguments of one of the three functions, as given; None where a function has no such."""

    function: str
    q: torch.Tensor
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    k_cache: torch.Tensor | None = None
    v_cache: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    block_indptr: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None  # varlen_attention
    context_lens: torch.Tensor | None = None  # prefix_attention
    seq_lens: torch.Tensor | None = None  # paged_attention
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    softmax_scale: float | None = None
    causal: bool = True
    window_size: tuple[int | None, int | None] | None = None
    chunk_size: int | None = None
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    query_scale: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None
    k_scale: Scale = None
    v_scale: Scale = None
    return_lse: bool = False
    out: torch.Tensor | None = None
    num_splits: int = 0
    batch_invariant: bool = False
    # No arguments: whether an operator runs the call, in a compiled program, which with return_lse
    # brings ``lse``.
    is_operator: bool = False
    lse: torch.Tensor | None = None
