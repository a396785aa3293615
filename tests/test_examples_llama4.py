"""examples/llama4_attention.py: its layers against plain torch, and against transformers' own."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tritonattn.testing import assert_close, normal

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
layers = importlib.import_module("llama4_layer")
program = importlib.import_module("llama4_attention")

SHOWN = (
    "RoPE layer, interleaved, with QK norm, chunks of 7",
    "RoPE layer, neox, without QK norm, chunks of 7",
    "chunks of 1:",
    "chunks of 5:",
    "chunks of 8192:",
    "NoPE layer, full attention at a temperature",
    "NoPE layer in bfloat16, temperature in float32",
    "6 ranks, 2 on 1 each, each KV head on 3 ranks",
    "with other lengths",
    "no call above read",
)


def test_llama4_attention_shows_every_capability(device, capsys):
    assert program.main(["--device", str(device)]) == 0
    said = capsys.readouterr().out
    assert "FAILED" not in said
    assert [what for what in SHOWN if what not in said] == []
    assert ("a CUDA graph replayed" in said) == (device.type == "cuda")


HOT = replace(layers.Config(attention_chunk_size=5), **program.TEMPERATURE)
ONE_SEQUENCE = {
    "varlen_attention": (("prefill", (14,)),),
    "prefix_attention": (("prefill", (4,)), ("chunk", (8,))),
    "paged_attention": (("prefill", (12,)), ("decode", (1,))),
}


@pytest.mark.parametrize("function", ONE_SEQUENCE)
@pytest.mark.parametrize(("use_rope", "option"), [(True, "chunk_size"), (False, "query_scale")])
def test_llama4_check_sees_a_dropped_option(function, use_rope, option, device, monkeypatch):
    real = getattr(layers, function)

    def without(*args, **options):
        del options[option]
        return real(*args, **options)

    how = {"schedule": ONE_SEQUENCE[function]}
    program.check(HOT, use_rope, device, **how)
    monkeypatch.setattr(layers, function, without)
    with pytest.raises(AssertionError, match="off by"):
        program.check(HOT, use_rope, device, **how)


@pytest.mark.parametrize("wrong", ["rotate", "rms_norm"])
def test_llama4_check_sees_a_dropped_rotation_or_norm(wrong, device, monkeypatch):
    monkeypatch.setattr(layers, wrong, lambda x, *_: x)
    with pytest.raises(AssertionError, match="off by"):
        program.check(HOT, True, device, schedule=program.SHORT)


def test_llama4_attention_main_fails_where_a_result_is_wrong(device, monkeypatch, capsys):
    monkeypatch.setattr(layers, "rotate", lambda x, *_: x)
    shows = (program.show_bfloat16, program.show_nope_layers)
    monkeypatch.setattr(program, "SHOWS", shows)
    assert program.main(["--device", str(device)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("FAILED show_bfloat16: out[")
    assert "NoPE layer" in said  # the others run all the same


@pytest.mark.parametrize(
    "read", [lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: bool(x[0])]
)
def test_no_host_reads_refuses_what_reads_a_value(read):
    with program.NoHostReads(), pytest.raises(AssertionError, match="reads values on the host"):
        read(torch.ones(3))


def test_llama4_layer_refuses_heads_that_do_not_divide():
    config = layers.Config()  # 10 heads on 2
    weights = program.make_weights(config, torch.float32, "cpu")
    for world in (3, 4, 5):
        with pytest.raises(ValueError, match=f"10 heads on 2 do not divide among {world} ranks"):
            layers.Llama4Attention(config, True, weights, 0, world)


def test_llama4_layer_slices_cover_every_weight_and_copy_kv_heads():
    config = layers.Config(num_attention_heads=12, num_key_value_heads=4)
    weights = program.make_weights(config, torch.float32, "cpu")
    for world in (2, 4, 12):
        ranks = [layers.Llama4Attention(config, True, weights, r, world) for r in range(world)]
        assert torch.equal(torch.cat([r.q for r in ranks]), weights["q"])
        assert torch.equal(torch.cat([r.o for r in ranks], dim=1), weights["o"])
        copies = max(1, world // 4)
        assert torch.equal(torch.cat([r.k for r in ranks[::copies]]), weights["k"])
        for i, rank in enumerate(ranks):
            assert torch.equal(rank.v, ranks[i - i % copies].v)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_llama4_layer_equals_that_of_transformers(qk_norm, device):
    """Masks, rotary embedding, norm and temperature are transformers' own: a whole model's."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = replace(HOT, use_qk_norm=qk_norm)
    torch.manual_seed(0)
    model = transformers.Llama4TextModel(
        transformers.Llama4TextConfig(
            vocab_size=8, hidden_size=config.hidden_size, intermediate_size=32,
            intermediate_size_mlp=32, num_hidden_layers=2, no_rope_layers=[1, 0], moe_layers=[],
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads, head_dim=config.head_dim,
            attention_chunk_size=config.attention_chunk_size, use_qk_norm=qk_norm,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            floor_scale=int(config.floor_scale), attn_scale=config.attn_scale,
            rms_norm_eps=config.rms_norm_eps, pad_token_id=None, bos_token_id=None,
            eos_token_id=None, attn_implementation="eager",
        )
    ).to(device).eval()  # fmt: skip
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def remember(module, args, kwargs, output):
        seen.append((kwargs["hidden_states"][0], output[0][0]))

    weights = []
    for layer in model.layers:
        attention = layer.self_attn
        weights.append({n: getattr(attention, f"{n}_proj").weight for n in "qkvo"})
        for weight in weights[-1].values():
            weight.data.mul_(10)
        attention.register_forward_hook(remember, with_kwargs=True)
    schedule = (("prefill", (9,)), ("chunk", (6,)), ("decode", (1,)))
    with torch.inference_mode():
        model(inputs_embeds=normal(
            1, 16, config.hidden_size, dtype=torch.float32, device=device,
            generator=torch.Generator().manual_seed(1),
        ))  # fmt: skip
        assert len(seen) == 2
        for use_rope, w, (hidden, theirs) in zip((True, False), weights, seen, strict=True):
            rank = layers.Llama4Attention(config, use_rope, w)
            ours = program.serve([rank], [hidden], schedule)
            oracle, fair = (
                program.plain(config, use_rope, w, hidden, dtype)
                for dtype in (torch.float64, torch.float32)
            )
            for result in (theirs, ours):
                assert_close(result, oracle, fair, dtype=torch.float32)
