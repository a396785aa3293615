"""Continuous batching in plain torch around tritonattn, for the weights of a ``LlamaForCausalLM``.

Requests of different lengths join and leave while others run. Keys and values live in pages of one
pool; what all prompts begin with is computed once, and its pages are read by all of them. One
forward pass serves prompts and decoding alike: tritonattn is told where each sequence's keys are,
and the rest is the usual Llama. ``generate.py`` runs it on a real model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.nn.functional as F

from tritonattn import (
    copy_blocks,
    paged_attention,
    prefix_attention,
    varlen_attention,
    write_kv_cache,
)


@dataclass(eq=False)
class Request:
    name: str
    prompt: list[int]
    max_new_tokens: int
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0  # how many tokens have their keys and values in the pages

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class PagePool:
    """Every layer's keys and values in pages, the free ones listed, the users of each counted."""

    def __init__(self, model, num_pages: int, page_size: int):
        config = model.config
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        shape = (num_pages, page_size, config.num_key_value_heads, head_dim)
        # Not zeroed: memory that no visible key owns is never used.
        self.k, self.v = (
            [torch.empty(shape, dtype=model.dtype, device=model.device) for _ in model.model.layers]
            for _ in range(2)
        )
        self.page_size = page_size
        self.free = list(range(num_pages))
        self.users = [0] * num_pages

    def allocate(self, count: int) -> list[int]:
        if count > len(self.free):
            raise RuntimeError(f"the pool is full: {count} pages wanted, {len(self.free)} free")
        return self.share([self.free.pop() for _ in range(count)])

    def share(self, pages: list[int]) -> list[int]:
        for page in pages:
            self.users[page] += 1
        return pages

    def release(self, pages: list[int]) -> None:
        for page in pages:
            self.users[page] -= 1
            if self.users[page] == 0:
                self.free.append(page)


class Engine:
    """Greedy decoding of many requests at once with the weights of a ``LlamaForCausalLM``.

    ``prefix`` is what prompts have in common; its whole pages are computed once. With
    ``share_prefix`` all requests read those pages, without it each has its own copy of them.
    """

    def __init__(self, model, num_pages: int, *, page_size: int = 16, max_running: int = 8,
                 prefix: Sequence[int] = (), share_prefix: bool = True):  # fmt: skip
        self.model, self.device = model, model.device
        self.pool = PagePool(model, num_pages, page_size)
        self.max_running, self.share_prefix = max_running, share_prefix
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.logits: torch.Tensor | None = None  # of the last step, a row for each request in it
        stop = model.generation_config.eos_token_id
        self.stop_tokens = {stop} if isinstance(stop, int) else set(stop or ())

        pages = self.pool.allocate(len(prefix) // page_size)
        self.prefix = Request("prefix", list(prefix[: len(pages) * page_size]), 0, pages=pages)
        if pages:
            self.forward([self.prefix])

    def pages_for(self, request: Request) -> int:
        return math.ceil((len(request.prompt) + request.max_new_tokens) / self.pool.page_size)

    def add(self, request: Request) -> None:
        """Queue a request; it joins the others as soon as there is room for it."""
        most = len(self.pool.users) - len(self.prefix.pages)
        if self.pages_for(request) > most:
            raise ValueError(
                f"request {request.name} needs {self.pages_for(request)} pages of a pool that has "
                f"{most}; make the pool larger or the request shorter"
            )
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Let waiting requests in, first come first served, while there are pages to their end."""
        admitted = []
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            start, prompt = self.prefix.prompt, request.prompt
            starts_so = 0 < len(start) < len(prompt) and prompt[: len(start)] == start
            shared = self.prefix.pages if starts_so and self.share_prefix else []
            wanted = self.pages_for(request) - len(shared)
            if wanted > len(self.pool.free):
                break
            request.pages = self.pool.share(shared) + self.pool.allocate(wanted)
            request.cached = len(start) if starts_so else 0
            if starts_so and not shared:
                copies = list(zip(self.prefix.pages, request.pages, strict=False))
                copy_blocks([*self.pool.k, *self.pool.v], self.tensor(copies, torch.int64))
            self.running.append(self.waiting.popleft())
            admitted.append(request)
        return admitted

    def step(self) -> list[Request]:
        """One forward pass over the requests that can join now, or else over all that run.

        Each of them gets one more token. Returns them; an empty list says that all is done.
        """
        batch = self.admit() or list(self.running)
        if batch:
            self.logits = self.forward(batch)
            for request, token in zip(batch, self.logits.argmax(-1).tolist(), strict=True):
                request.output.append(token)
                if token in self.stop_tokens or len(request.output) >= request.max_new_tokens:
                    self.running.remove(request)
                    self.pool.release(request.pages)
        return batch

    def tensor(self, values: Sequence, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    @torch.inference_mode()
    def forward(self, batch: list[Request]) -> torch.Tensor:
        """Run all tokens of the batch that are not cached yet; the logits after each one's last."""
        spans = [(r, r.cached, len(r.tokens)) for r in batch]
        tokens = [t for r, start, end in spans for t in r.tokens[start:end]]
        positions = [p for _, start, end in spans for p in range(start, end)]
        size, most = self.pool.page_size, max(len(r.pages) for r in batch)
        slots = [r.pages[p // size] * size + p % size for r, *span in spans for p in range(*span)]

        slot_mapping = self.tensor(slots, torch.int64)  # where each new token's k and v go
        block_table = self.tensor([r.pages + [0] * (most - len(r.pages)) for r in batch])
        cu_seqlens = self.tensor([0, *accumulate(end - start for _, start, end in spans)])
        context_lens = self.tensor([start for _, start, _ in spans])
        seq_lens = self.tensor([end for *_, end in spans])
        bounds = {
            "max_seqlen_q": max(end - start for _, start, end in spans),
            "max_seqlen_k": max(end for *_, end in spans),
        }
        llama = self.model.model
        angles = torch.outer(self.tensor(positions).float(), llama.rotary_emb.inv_freq.float())
        angles = torch.cat([angles, angles], dim=-1)[:, None]  # [tokens, 1, head_dim]
        scaling = getattr(llama.rotary_emb, "attention_scaling", 1.0)
        cos, sin = ((f(angles) * scaling).to(self.model.dtype) for f in (torch.cos, torch.sin))
        hidden = llama.embed_tokens(self.tensor(tokens))  # [tokens, hidden_size]

        for layer, k_cache, v_cache in zip(llama.layers, self.pool.k, self.pool.v, strict=True):
            attention, mlp, head_dim = layer.self_attn, layer.mlp, k_cache.shape[-1]
            x = rms_norm(hidden, layer.input_layernorm)
            q, k, v = (
                project(x).unflatten(-1, (-1, head_dim))  # [tokens, heads, head_dim]
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            write_kv_cache(k, v, k_cache, v_cache, slot_mapping)
            if all(r.output for r in batch):  # decoding: one query each, all keys in pages
                x = paged_attention(q, k_cache, v_cache, block_table, seq_lens, **bounds)
            elif any(r.cached for r in batch):  # prompts after the shared prefix, which is in pages
                x = prefix_attention(
                    q, k, v, k_cache, v_cache, block_table, cu_seqlens, context_lens, **bounds
                )
            else:  # prompts with nothing before them
                x = varlen_attention(q, k, v, cu_seqlens, cu_seqlens, **bounds)
            hidden = hidden + attention.o_proj(x.flatten(-2))
            x = rms_norm(hidden, layer.post_attention_layernorm)
            hidden = hidden + mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))

        for request, _, end in spans:
            request.cached = end
        return self.model.lm_head(rms_norm(hidden[cu_seqlens[1:] - 1], llama.norm)).float()


def rms_norm(x: torch.Tensor, norm: torch.nn.Module) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * wide.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of [tokens, heads, head_dim], the two halves of a head paired."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
