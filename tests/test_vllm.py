"""The vLLM backend meets vLLM's interface, and says why it refuses what it does not do."""

from __future__ import annotations

import importlib
import inspect
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from vllm_stand_in import loaded

from tritonattn import UnsupportedError
from tritonattn.integrations import vllm_plugin


@pytest.fixture(scope="module")
def backend():
    with loaded() as module:
        yield module


@pytest.fixture
def registry(backend):
    module = importlib.import_module("vllm.v1.attention.backends.registry")
    module.AttentionBackendEnum.CUSTOM.clear_override()
    yield module
    module.AttentionBackendEnum.CUSTOM.clear_override()


CLASSES = ("TritonAttnBackend", "TritonAttnImpl", "TritonAttnMetadataBuilder")


@pytest.mark.parametrize("name", CLASSES)
def test_vllm_backend_has_every_abstract_method(backend, name):
    cls = getattr(backend, name)
    assert inspect.isclass(cls.__mro__[1])
    assert cls.__abstractmethods__ == frozenset()
    assert any(getattr(base, "__abstractmethods__", ()) for base in cls.__mro__[1:])


@pytest.mark.parametrize("name", CLASSES)
def test_vllm_backend_takes_what_vllm_passes(backend, name):
    cls = getattr(backend, name)
    compared = 0
    for method in {*vars(cls)} - {"__module__", "__doc__"}:
        ours, theirs = getattr(cls, method), getattr(cls.__mro__[1], method, None)
        if not inspect.isroutine(ours) or not inspect.isroutine(theirs):
            continue
        wanted, has = (list(inspect.signature(f).parameters.values()) for f in (theirs, ours))
        assert [p.name for p in has[: len(wanted)]] == [p.name for p in wanted], method
        assert all(p.default is not p.empty for p in has[len(wanted) :]), method
        compared += 1
    assert compared >= 2


def test_vllm_plugin_makes_the_backend_custom_however_often_it_is_called(backend, registry):
    for _ in range(2):
        vllm_plugin.register()
        custom = registry.AttentionBackendEnum.CUSTOM
        assert custom.get_class() is backend.TritonAttnBackend
    # vLLM looks the enum's member up by the backend's name.
    assert registry.AttentionBackendEnum[custom.get_class().get_name()] is custom


def test_vllm_plugin_leaves_another_plugins_backend_alone_and_says_so(registry, caplog):
    custom = registry.AttentionBackendEnum.CUSTOM
    registry.register_backend(custom, "their.module.Backend")
    with caplog.at_level(logging.WARNING):
        vllm_plugin.register()
    assert custom.get_path() == "their.module.Backend"
    assert "already their.module.Backend" in caplog.text
    assert "VLLM_PLUGINS=tritonattn" in caplog.text


def test_vllm_plugin_imports_no_kernel_and_no_vllm():
    code = (
        "import sys, tritonattn.integrations.vllm_plugin\n"
        "assert not {'triton', 'vllm'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_vllm_backend_declares_graphs_for_every_batch(backend):
    support = backend.TritonAttnMetadataBuilder.get_cudagraph_support(None, None)
    assert support.name == "ALWAYS"
    assert not backend.TritonAttnBackend.forward_includes_kv_cache_update


def test_vllm_backend_gives_older_versions_the_shape_and_the_users_layout(backend, monkeypatch):
    cls = backend.TritonAttnBackend
    shape = cls.get_kv_cache_shape(7, 16, 2, 64)
    assert shape == (7, 2, 16, 128)
    layers = ("L", *"BHNC")
    for layout, order in (("NHD", "BNHC"), ("HND", "BHNC")):
        utils = SimpleNamespace(get_kv_cache_layout=lambda name=layout: name)
        monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.utils", utils)
        assert "".join("BHNC"[i] for i in cls.get_kv_cache_stride_order()) == order
        stride_order = cls.get_kv_cache_stride_order(include_num_layers_dimension=True)
        expected = "BLNHC" if layout == "NHD" else "BHLNC"
        assert "".join(layers[i] for i in stride_order) == expected


FINE = {
    "head_size": 80, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16,
    "use_mla": False, "has_sink": True, "use_sparse": False, "use_mm_prefix": False,
    "use_per_head_quant_scales": True, "attn_type": "decoder", "has_sliding_window": True,
    "use_non_causal": True, "use_batch_invariant": True,
    "device_capability": SimpleNamespace(major=9, minor=0),
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"head_size": 1},
        {"head_size": 512, "block_size": 1},
        {"dtype": torch.float32},
        {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8_e5m2", "block_size": 48},
        {"attn_type": "encoder_only"},
        {"dtype": torch.float16, "device_capability": SimpleNamespace(major=7, minor=5)},
    ],
)
def test_vllm_backend_accepts(backend, change):
    assert backend.TritonAttnBackend.validate_configuration(**FINE | change) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_dcp": True}, "DCP not supported"),
        ({"use_mm_prefix": True}, "not supported"),
        ({"head_size": 513}, "head_size not supported"),
        ({"dtype": torch.float64}, "dtype not supported"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype not supported"),
        ({"attn_type": "encoder_decoder"}, "attention type encoder_decoder not supported"),
        ({"kv_cache_dtype": "float16"}, "a cache of float16 needs a model of it"),
        (
            {"dtype": torch.float16, "device_capability": SimpleNamespace(major=7, minor=0)},
            "compute capability",
        ),
        ({"device_capability": SimpleNamespace(major=7, minor=5)}, "bfloat16 needs a GPU of"),
    ],
)
def test_vllm_backend_refuses_with_the_reason(backend, change, reason):
    validate = backend.TritonAttnBackend.validate_configuration
    if not set(change) <= set(inspect.signature(validate).parameters):
        pytest.skip("this vLLM asks for it elsewhere")
    reasons = validate(**FINE | change)
    assert len(reasons) == 1
    assert reason in reasons[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attn_type": "encoder_decoder"}, "attn_type must be decoder, encoder or encoder_only"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype must be one of auto, float16, "),
    ],
)
def test_vllm_layer_refuses_with_the_reason(backend, change, words):
    with pytest.raises(UnsupportedError, match=words):
        backend.TritonAttnImpl(4, 32, 0.2, **change)


@pytest.mark.parametrize("name", ["output_scale", "output_block_scale"])
def test_vllm_layer_refuses_to_quantise_its_output(backend, name):
    layer = backend.TritonAttnImpl(4, 32, 0.2)
    x = torch.zeros(1, 4, 32)
    with pytest.raises(UnsupportedError, match=f"forward: {name} must be None"):
        layer.forward(None, x, x, x, x, None, x, **{name: torch.ones(1)})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("causal", torch.ones(2, dtype=torch.bool)),
        ("mm_req_doc_ranges", {0: [(0, 3)]}),
        ("rswa_prefix_lens", torch.ones(2)),
        ("encoder_seq_lens", torch.ones(2)),
        ("dcp_local_seq_lens", torch.ones(2)),
    ],
)
def test_vllm_metadata_builder_refuses_with_the_reason(backend, name, value):
    common = importlib.import_module("vllm.v1.attention.backend").CommonAttentionMetadata
    fields = {"num_reqs": 2, "num_actual_tokens": 2, "max_query_len": 1, "max_seq_len": 4}
    tensors = ("query_start_loc", "query_start_loc_cpu", "seq_lens", "block_table_tensor")
    batch = common(**fields, **dict.fromkeys((*tensors, "slot_mapping"), torch.ones(2)))
    spec = SimpleNamespace(block_size=16)
    builder = backend.TritonAttnMetadataBuilder(spec, ["0"], None, torch.device("cpu"))
    builder.build(0, batch)
    setattr(batch, name, value)
    with pytest.raises(UnsupportedError, match=f"{name} must be .* Choose another backend"):
        builder.build(0, batch)
