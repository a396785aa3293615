"""Windows, chunks and alignment: faults that other attention kernels had, on every path here."""

from __future__ import annotations

import pytest
from faults import PAGED, PATHS, PREFIX, assert_sees, check_case, every_path, sees

ALL_3 = [range(3)] * 3

# What goes wrong: sequences as (queries, keys, the keys that each query sees), options.
MASKS = {
    # sglang PR 32087: decode drops the oldest key of its window
    "decode_keeps_the_oldest_key_of_its_window": (
        [(1, 6, [range(2, 6)])],
        {"window_size": (3, 0)},
    ),
    # transformers 39408: one key too many
    "window_counts_the_query_itself": (
        [(8, 8, [[0], [0, 1], *(range(i - 2, i + 1) for i in range(2, 8))])],
        {"window_size": (2, 0)},
    ),
    # vllm PR 4405: a tile that the window hides wholly gives NaN
    "window_may_hide_whole_tiles": (
        [(4, 44, [range(33 + i, 41 + i) for i in range(4)])],
        {"window_size": (7, 0), "page_size": 16},
    ),
    # sglang 39300: a window is ignored without causal
    "window_holds_on_both_sides": (
        [(8, 8, [range(max(0, i - 2), min(8, i + 3)) for i in range(8)])],
        {"window_size": (2, 2), "causal": False},
    ),
    "window_may_differ_on_its_sides": (
        [(8, 8, [range(max(0, i - 1), min(8, i + 4)) for i in range(8)])],
        {"window_size": (1, 3), "causal": False},
    ),
    "window_right_of_the_query_changes_nothing_under_causal": (
        [(4, 9, [range(4 + i, 6 + i) for i in range(4)])],
        {"window_size": (1, 3)},
    ),
    # vllm: (0, 0) is taken for "no window"
    "window_of_nothing_is_the_diagonal": (
        [(8, 8, [[i] for i in range(8)])],
        {"window_size": (0, 0), "causal": False},
    ),
    "window_of_nothing_is_the_diagonal_behind_a_context": (
        [(3, 20, [[17], [18], [19]])],
        {"window_size": (0, 0), "causal": False},
    ),
    # FlashAttention-4: (-1, 0) without causal becomes full attention
    "window_may_be_open_on_the_left": (
        [(4, 20, [range(17 + i) for i in range(4)])],
        {"window_size": (-1, 0), "causal": False},
    ),
    "window_may_be_open_on_the_right": (
        [(3, 6, [range(2 + i, 6) for i in range(3)])],
        {"window_size": (1, None), "causal": False},
    ),
    # flash-attention 895: an open side is made a number too soon
    "window_reaches_all_keys_where_queries_are_more": (
        [(5, 2, [[0, 1], [0, 1], [0, 1], [0, 1], [1]])],
        {"window_size": (0, 100), "causal": False},
    ),
    # FlashInfer 3864: several queries and a context longer than the window
    "window_moves_with_each_query": (
        [(4, 24, [range(15 + i, 21 + i) for i in range(4)])],
        {"window_size": (5, 0)},
    ),
    # transformers PR 37414, 40324: chunks counted from the query, or with the batch's padding
    "chunk_counts_from_the_sequence_start": (
        [(1, 4, [range(4)]), (1, 5, [[4]]), (1, 7, [[4, 5, 6]])],
        {"chunk_size": 4},
    ),
    # vllm 21694: the query's chunk has only begun
    "chunk_that_has_just_begun_holds_one_key": ([(1, 5, [[4]])], {"chunk_size": 4}),
    # vllm 49980, 16274: chunks as sequences of their own overflow; a chunk longer than the sequence
    "chunk_stays_one_sequence": (
        [
            (
                10,
                17,
                [
                    range(4, 8), [8], [8, 9], [8, 9, 10], range(8, 12), [12], [12, 13],
                    [12, 13, 14], range(12, 16), [16],
                ],
            )
        ],
        {"chunk_size": 4},
    ),
    "chunk_longer_than_the_sequence_is_plain_causal": (
        [(3, 20, [range(18), range(19), range(20)])],
        {"chunk_size": 8192},
    ),
    "chunk_without_causal_ends_at_its_end": (
        [(3, 9, [[4, 5, 6, 7], [4, 5, 6, 7], [8]])],
        {"chunk_size": 4, "causal": False},
    ),
    "chunk_before_the_first_key_is_empty": (
        [(5, 3, [[], [], *ALL_3])],
        {"chunk_size": 4, "causal": False},
    ),
    "chunk_and_window_both_hold": (
        [(4, 10, [[5, 6], [6, 7], [8], [8, 9]])],
        {"chunk_size": 4, "window_size": (1, 0)},
    ),
    # flash-attention 1778: more queries than keys
    "causal_leaves_rows_before_the_first_key_empty": (
        [(5, 3, [[], [], [0], [0, 1], range(3)])],
        {},
    ),
    # flash-attention PR 436: the diagonal crosses two tiles
    "causal_diagonal_may_cross_tiles": ([(10, 26, [range(17 + i) for i in range(10)])], {}),
    # pytorch 108108: aligned to the top left
    "causal_is_aligned_bottom_right": ([(2, 5, [range(4), range(5)])], {}),
    # each sequence by its own lengths
    "causal_counts_each_sequence_by_itself": (
        [(1, 3, [range(3)]), (3, 3, [[0], [0, 1], range(3)]), (2, 40, [range(39), range(40)])],
        {},
    ),
    # flash-attention PR 1025: capping after the mask lifts hidden keys from -inf to -cap
    "causal_stays_hidden_under_a_softcap": (
        [(4, 4, [[0], [0, 1], range(3), range(4)])],
        {"softcap": 1.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "name"),
    [
        pytest.param(path, name, id=f"{name}-{path}")
        for name, (sequences, _) in MASKS.items()
        for path in PATHS
        if sees(path, sequences)
    ],
)
def test_attention_sees_exactly_these_keys(path, name, device):
    sequences, options = MASKS[name]
    assert_sees(path, sequences, device, **options)


@every_path
def test_attention_reads_values_only_where_some_row_looks(path, device):
    """vllm: without causal, values were hidden from the tile's first row on, not row by row."""
    how = {
        "head_dims": (16, 16),
        "poison": "nan",
        "options": {"window_size": (7, 7), "causal": False},
    }
    check_case(path, (60,), (20,), device, heads=(4, 2), **how)


@every_path
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_measures_alibi_from_the_query(path, sinks, device):
    """vllm: measured from the context's end, a shift that only a sink or lse can show."""
    how = {"heads": (4, 2), "head_dims": (16, 16), "alibi": 2, "sinks": sinks, "poison": "nan"}
    check_case(path, (26, 3), (3, 1), device, **how)


@pytest.mark.parametrize("path", [p for p in PATHS if p.function in (PREFIX, PAGED)], ids=str)
def test_attention_keeps_masks_where_the_context_ends_inside_a_page(path, device):
    """A mask counted in pages, not tokens, is right only for whole pages."""
    for page_size in (1, 3, 16):
        assert_sees(
            path,
            [(2, 19, [range(13, 18), range(14, 19)]), (1, 7, [range(2, 7)])],
            device,
            page_size=page_size,
            window_size=(4, 0),
        )
