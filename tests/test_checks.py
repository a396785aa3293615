"""The checks of device values that TRITONATTN_CHECK=1 asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import CACHED, NEW, PAGED, PREFIX, VARLEN, Change, good, i32

from tritonattn import api, settings
from tritonattn.checks import check_values
from tritonattn.errors import ArgumentValueError
from tritonattn.validate import validate


def ints(*values: Any, dtype: torch.dtype = i32) -> Change:
    return lambda call, _: torch.tensor(values, dtype=dtype, device=call.q.device)


# Functions, changes to a good call, then what the message says: argument, rule, got, fix.  A good
# call has pages of 8 tokens, 6 of them, 3 a sequence, and lengths 9 and 20.
WRONG = [
    (NEW, {"cu_seqlens_q": ints(1, 2, 3)}, "cu_seqlens_q", "start at 0", "cu_seqlens_q[0] is 1"),
    (NEW, {"cu_seqlens_q": ints(0, 3, 2)}, "cu_seqlens_q", "never decrease", "[2] is 2 after 3"),
    (NEW, {"cu_seqlens_q": ints(0, 2, 4)}, "cu_seqlens_q", "before 3 (total_q", "[2] is 4"),
    ((PAGED,), {"cu_seqlens_q": ints(0, -1, 2)}, "cu_seqlens_q", "never", "[1] is -1 after 0"),
    ((VARLEN,), {"cu_seqlens_k": ints(0, 9, 7)}, "cu_seqlens_k", "never", "[2] is 7 after 9"),
    ((VARLEN,), {"cu_seqlens_k": ints(0, 8, 9)}, "cu_seqlens_k", "7 (total_k", "[1] is 8"),
    (
        (PREFIX,),
        {"context_lens": ints(9, 25)},
        "context_lens",
        "fit",
        "context_lens[1] is 25 with 3",
    ),
    ((PAGED,), {"seq_lens": ints(25, 26)}, "seq_lens", "of 8 tokens each", "seq_lens[0] is 25"),
    (
        CACHED,
        {"block_table": ints([0, 1, 2], [3, 6, 97])},
        "block_table",
        "page ids from 0 to 5",
        "block_table[1, 1] is 6",
    ),
    (
        CACHED,
        {"block_table": ints([0, -1, 2], [3, 4, 5])},
        "block_table",
        "page ids from 0 to 5",
        "block_table[0, 1] is -1",
    ),
    (
        CACHED,
        {"block_table": ints(0, 1, 2, 3, 9), "block_indptr": ints(0, 2, 5)},
        "block_table",
        "page ids from 0 to 5",
        "block_table[4] is 9",
    ),
    (
        CACHED,
        {"block_table": ints(0, 1, 2, 3), "block_indptr": ints(0, 2, 4)},
        "seq_lens",
        "must fit the pages",
        "[1] is 20 with 2 pages",
    ),
    (
        CACHED,
        {"block_table": ints(0, 1, 2, 3), "block_indptr": ints(-1, 2, 4)},
        "block_indptr",
        "from 0 or more to at most 4",
        "block_indptr[0] is -1",
    ),
    (
        CACHED,
        {"block_table": ints(0, 1, 2, 3), "block_indptr": ints(0, 3, 2)},
        "block_indptr",
        "from 0 or more to at most 4",
        "block_indptr[2] is 2 after 3",
    ),
    (
        CACHED,
        {"block_table": ints(0, 1, 2, 3), "block_indptr": ints(0, 2, 5)},
        "block_indptr",
        "from 0 or more to at most 4",
        "block_indptr[2] is 5",
    ),
    (
        CACHED,
        {name: lambda _, x: x[:0] for name in ("k_cache", "v_cache")},
        "block_table",
        "where the cache has no page",
        "block_table[0, 0] is 0",
    ),
    (NEW, {"max_seqlen_q": 1}, "max_seqlen_q", "every sequence's", "sequence 0 has 2"),
    ((VARLEN,), {"max_seqlen_k": 3}, "max_seqlen_k", "number of keys", "sequence 0 has 4"),
    ((PREFIX,), {"max_seqlen_k": 20}, "max_seqlen_k", "number of keys", "sequence 1 has 21"),
    ((PAGED,), {"max_seqlen_k": 19}, "max_seqlen_k", "number of keys", "sequence 1 has 20"),
    (
        NEW,
        {"tree_mask": ints([True], [True], [True], dtype=torch.bool)},
        "tree_mask",
        "a column for each new key",
        "1 columns and sequence 0 has 2 new keys",
    ),
]


@pytest.mark.parametrize(
    ("function", "changes", "argument", "rule", "was"),
    [(function, *rest) for functions, *rest in WRONG for function in functions],
)
def test_check_values_names_the_first_bad_entry(
    function: str,
    changes: dict[str, Any],
    argument: str,
    rule: str,
    was: str,
    device: torch.device,
) -> None:
    if argument == "seq_lens" and function == PREFIX:
        argument = "context_lens"
    call = good(function, device, **changes)
    problem = validate(call)
    with pytest.raises(ArgumentValueError) as caught:
        check_values(call, problem)
    message = str(caught.value)
    asked, _, rest = message.partition("; got ")
    assert asked.startswith(f"{function}: {argument} must ")
    assert rule in asked
    came, _, fix = rest.partition(". ")
    assert was in came
    assert fix.startswith(("Pass ", "Give "))


FINE = [
    ((VARLEN, PREFIX, PAGED), {}),
    (NEW, {"cu_seqlens_q": ints(0, 1, 2)}),  # a padding row
    (NEW, {"cu_seqlens_q": ints(0, 0, 0)}),
    ((VARLEN,), {"cu_seqlens_k": ints(0, 0, 5)}),
    ((PREFIX,), {"context_lens": ints(-9, 0), "block_table": ints([-1] * 3, [99] * 3)}),
    ((PAGED,), {"seq_lens": ints(-9, 0), "block_table": ints([-1] * 3, [99] * 3)}),
    (CACHED, {"block_table": ints([0, 1, 10**6], [3, 4, 5])}),  # 9 tokens fill two pages
    # A query at 19 or later that sees 4 tokens back, or a chunk from 16, needs the last page alone.
    (CACHED, {"block_table": ints([0, 1, 2], [-1, 99, 5]), "window_size": (3, 0)}),
    (CACHED, {"block_table": ints([0, 1, 2], [-1, 99, 5]), "chunk_size": 16}),
    ((PAGED,), {"cu_seqlens_q": ints(0, 2, 2), "block_table": ints([0, 1, 2], [-1, -1, -1])}),
    (CACHED, {"block_table": ints(9, 9, 0, 1, 2, 3, 4), "block_indptr": ints(2, 4, 7)}),
    (CACHED, {"max_seqlen_k": 21, "max_seqlen_q": 2}),
]


@pytest.mark.parametrize(
    ("function", "changes"), [(f, changes) for functions, changes in FINE for f in functions]
)
def test_check_values_passes_what_no_kernel_follows(
    function: str, changes: dict[str, Any], device: torch.device
) -> None:
    call = good(function, device, **changes)
    check_values(call, validate(call))


@pytest.mark.parametrize("function", CACHED)
@pytest.mark.parametrize(("option", "bad"), [({"window_size": (5, 0)}, 1), ({"chunk_size": 8}, 2)])
def test_check_values_starts_at_the_first_visible_page(
    function: str, option: dict[str, Any], bad: int, device: torch.device
) -> None:
    ids = [0, 1, 2]
    ids[bad] = 99
    call = good(function, device, block_table=ints([0, 1, 2], ids), **option)
    with pytest.raises(ArgumentValueError, match=rf"block_table\[1, {bad}\] is 99"):
        check_values(call, validate(call))


def test_paged_attention_checks_values_only_when_asked(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = good(PAGED, device, seq_lens=ints(9, 99))
    arguments = (call.q, call.k_cache, call.v_cache, call.block_table, call.seq_lens)
    seen: list[Any] = []
    monkeypatch.setattr("tritonattn.attend.check_values", lambda *given: seen.append(given))
    call.seq_lens[1] = 20
    monkeypatch.setattr(settings, "CHECK", False)
    api.paged_attention(*arguments)
    assert seen == []
    monkeypatch.setattr(settings, "CHECK", True)
    api.paged_attention(*arguments)
    assert len(seen) == 1
