"""Errors that no other test meets: of tools, of what is not installed, of what a GPU refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from calls import PAGED
from tuner import wall_timer

from tritonattn import binaries, settings, testing
from tritonattn import device as devices
from tritonattn.bench import catalogue, command, peers
from tritonattn.bench.cases import select
from tritonattn.bench.peers import cudnn, torch_sdpa, varlen, with_flashinfer
from tritonattn.case import Case
from tritonattn.cli import main
from tritonattn.commands import cache, fuzz
from tritonattn.errors import ArgumentValueError, UnsupportedError
from tritonattn.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from tritonattn.tuning import compile as compiling
from tritonattn.tuning import store, tables, trials
from tritonattn.tuning.search import GpuLostError

H200 = devices.target(90, name="NVIDIA H200", sm_count=132)


def test_bench_refuses_no_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--rounds", "0"]) == 2
    assert "--rounds must be at least 1; got 0" in capsys.readouterr().err


def test_bench_refuses_to_time_calls_that_check_values(monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "interpreting", lambda: False)
    monkeypatch.setattr(settings, "CHECK", True)
    assert main(["bench"]) == 2
    assert "TRITONATTN_CHECK=1 makes every call wait" in capsys.readouterr().err


def test_peers_refuse_what_they_have_no_way_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = select(catalogue.ALL, ["1 x 16k"])[:1]
    later = replace(case, k_lens=tuple(n + 1 for n in case.k_lens), q_lens=case.k_lens)
    with pytest.raises(peers.Unsupported, match="causal from the first key"):
        torch_sdpa.prepare(later, [], None)
    windowed = replace(case, window=8)
    both = replace(case, window=8, causal=False)
    with pytest.raises(peers.Unsupported, match="a window that is not causal"):
        with_flashinfer._check(both)
    attend = SimpleNamespace(varlen_attn=lambda q, k, v, is_causal=False: None)
    with (
        mock.patch.dict(sys.modules, {"torch.nn.attention.varlen": attend}),
        mock.patch.object(torch.nn.attention, "varlen", attend, create=True),
        pytest.raises(peers.Unsupported, match="has no way to do: window"),
    ):
        varlen.prepare(windowed, [])
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    with pytest.raises(ImportError, match="no cuDNN"):
        cudnn.load()


def test_launch_that_the_gpu_refuses_names_what_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    class Binary:
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            def run(*args: Any) -> None:
                raise triton.OutOfResources(300_000, 232_448, "shared memory")

            return run

    monkeypatch.setattr(binaries, "_find", lambda *_: Binary())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: mock.MagicMock())
    kernel = SimpleNamespace(__name__="attention_kernel")
    options = binaries.Options(8, 4)
    with pytest.raises(UnsupportedError, match="needs 300000 of shared memory with 8 warps"):
        binaries.launch(kernel, 1, (), {}, options, H200, torch.device("cuda", 0))


def test_device_without_interpreter_or_gpu_says_what_to_unset(monkeypatch) -> None:
    monkeypatch.setattr(devices, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="Unset TRITON_INTERPRET"):
        devices.describe.__wrapped__(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UnsupportedError, match=r"Move them with \.cuda"):
        devices.describe.__wrapped__(torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="got device xpu"):
        devices.describe.__wrapped__(torch.device("xpu"))


def test_cache_import_wants_a_folder_and_files_of_a_sensible_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "tables.json"
    path.write_text(json.dumps({"schema": 1, "tables": []}))
    monkeypatch.setattr(store, "user_root", lambda: None)
    with pytest.raises(ArgumentValueError, match="set TRITONATTN_CACHE_DIR"):
        cache._import(SimpleNamespace(file=path))
    path.write_bytes(b" " * (cache.MAX_BYTES + 1))
    with pytest.raises(tables.TableError, match="is larger than"):
        cache._bundle(path)
    with pytest.raises(tables.TableError, match="is larger than a table may be"):
        tables.read(path)
    with pytest.raises(ValueError, match="an entry is an object"):
        tables._entry([])


def test_record_without_a_folder_serves_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(store, "user_root", lambda: None)
    monkeypatch.setattr(store, "warn_once", lambda _, text: warned.append(text))
    monkeypatch.setattr(store, "_unsaved", {})
    key: Any = mock.Mock(family="decode")
    assert store.record(H200, {key: "entry"}) == []
    assert store._unsaved == {(H200, "decode"): {key: "entry"}}
    assert "there is no folder for the user's tables" in warned[0]


@pytest.mark.parametrize("module", ["hypothesis", "transformers"])
def test_import_names_what_is_not_installed(module: str) -> None:
    name = {"hypothesis": "strategies", "transformers": "integrations.transformers"}[module]
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"
        f"import tritonattn.{name} as found\n"
        "getattr(found, 'register', lambda: None)()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode != 0
    last = run.stderr.strip().splitlines()[-1]
    assert "is not installed" in last
    assert module in last


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda out, lse: out, "lse must be returned"),
        (lambda out, lse: (out.clone(), lse), "is not the out that was passed"),
    ],
)
def test_check_refuses_results_of_another_form(
    answer: Any, message: str, device: torch.device
) -> None:
    import tritonattn

    def paged_attention(*args: Any, **options: Any) -> Any:
        return answer(*tritonattn.paged_attention(*args, **options))

    case = Case(PAGED, (5,), (1,), heads=(1, 1), head_dims=(16, 16), options={"return_lse": True})
    args, options = case.build(device)
    q = args[0]
    with pytest.raises(AssertionError, match=message):
        testing.check(paged_attention, *args, **options, out=torch.empty_like(q))


def test_flash_attn_wants_a_start_for_each_sequence() -> None:
    q = torch.zeros(2, 1, 16)
    empty = torch.zeros(0, dtype=torch.int32)
    with pytest.raises(ArgumentValueError, match=r"batch \+ 1 entries"):
        flash_attn_varlen_func(q, q, q, empty, empty, 2, 2)
    with pytest.raises(ArgumentValueError, match=r"cu_seqlens_q must have batch \+ 1 entries"):
        flash_attn_with_kvcache(q, q[None], q[None], cu_seqlens_q=empty, max_seqlen_q=1)


def test_disassembly_that_tells_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = SimpleNamespace(path="echo")
    monkeypatch.setattr(triton.knobs, "nvidia", SimpleNamespace(cuobjdump=tool, nvdisasm=tool))
    with pytest.raises(RuntimeError, match="cuobjdump told no resources: '-res-usage"):
        compiling._disassemble(b"")


def lost(*_: Any) -> None:
    raise RuntimeError("an illegal memory access was encountered")


def test_tuning_stops_where_the_gpu_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = trials.Trials.__new__(trials.Trials)
    session.where, session.task = torch.device("cuda", 0), "a decode"
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    config: Any = "a configuration"
    broken = pytest.raises(GpuLostError, match="a decode: a configuration broke the GPU's context")
    with broken, trials.Trials._guard(session, config):
        raise ValueError("of the launch")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    with pytest.raises(ValueError, match="of the launch"), trials.Trials._guard(session, config):
        raise ValueError("of the launch")


def test_fuzz_knows_a_lost_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert fuzz._is_alive()
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    assert not fuzz._is_alive()


def test_trials_refuse_a_call_of_another_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    from tritonattn.tuning.models import PRESETS
    from tritonattn.tuning.tasks import tasks

    task = tasks(PRESETS["smollm2"])[0]
    monkeypatch.setattr(trials, "key_of", lambda _: "another")
    monkeypatch.setattr(trials, "_Small", lambda *_: None)
    monkeypatch.setattr(devices, "describe", lambda _: devices.INTERPRETER)
    monkeypatch.setattr(trials, "build", lambda *_: ([], {}))
    monkeypatch.setattr(trials, "named", lambda *_: {"q": torch.zeros(1)})
    monkeypatch.setattr(trials, "validate", lambda _: task.problem)
    with pytest.raises(RuntimeError, match="makes a call of bucket another"):
        trials.Trials(task, torch.device("cpu"), wall_timer, copies=1)
