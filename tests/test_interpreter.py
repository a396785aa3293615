"""Importing the package, and running without a GPU: each in a process of its own."""

from __future__ import annotations

import pytest
from faults import FUNCTIONS, PAGED, run_script

from tritonattn.interpreter import broken
from tritonattn.testing import Case, check

needs_interpreter = pytest.mark.skipif(bool(broken()), reason=broken())

NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "TRITON_INTERPRET": None}
NOTICE = "tritonattn: no GPU found"


def run_small(function):
    """What the scripts below run: two splits, a sink, two sequences."""
    options = {"num_splits": 2, "return_lse": True}
    check(Case(function, (9, 20), (2, 1), (2, 1), (16, 16), sinks=True, options=options))


def test_import_asks_no_device_and_imports_no_triton():
    """vllm PR 2517: the GPU was asked at import, which fails where there is none."""
    run_script(
        """
        import sys, torch

        def refuse(*args, **kwargs):
            raise AssertionError("the GPU was asked")

        names = "is_available device_count current_device get_device_properties init _lazy_init"
        names += " get_device_capability get_device_name"
        for name in names.split():
            setattr(torch.cuda, name, refuse)
        before = {name for name in sys.modules if name.split(".")[0] == "triton"}
        import tritonattn
        assert set(tritonattn.__all__) <= set(dir(tritonattn))
        assert tritonattn.alibi_slopes(6).log2().tolist() == [-2, -4, -6, -8, -1, -3]
        assert tritonattn.attention_temperature(torch.tensor([0])).tolist() == [1.0]
        assert before == {name for name in sys.modules if name.split(".")[0] == "triton"}
        print("OK")
        """,
        TRITON_INTERPRET=None,
    )


@needs_interpreter
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("quiet", [False, True])
def test_attention_runs_without_a_gpu_where_triton_was_imported_first(function, quiet):
    """Triton's own library is decorated for the compiler by then: transformers does so to users.

    One notice says that it is slow, unless it is silenced.
    """
    done = run_script(
        """
        import sys
        import triton
        import triton.language.extra.libdevice
        from test_interpreter import run_small

        run_small(sys.argv[1])
        run_small(sys.argv[1])
        print("OK")
        """,
        function,
        **NO_GPU | {"TRITONATTN_QUIET": "1" if quiet else None},
    )
    assert done.stderr.count(NOTICE) == (0 if quiet else 1)


@needs_interpreter
def test_attention_runs_where_triton_was_told_to_interpret():
    done = run_script(
        """
        import sys
        import tritonattn
        from test_interpreter import run_small

        run_small(sys.argv[1])
        import triton
        import triton.language as tl

        @triton.jit
        def kernel(x, N: tl.constexpr):
            tl.store(x + tl.arange(0, N), tl.sum(tl.load(x + tl.arange(0, N)), 0))

        import torch
        x = torch.ones(4)
        kernel[(1,)](x, 4)
        assert x.tolist() == [4.0] * 4
        print("OK")
        """,
        PAGED,
        **NO_GPU | {"TRITON_INTERPRET": "1"},
    )
    assert done.stderr.count(NOTICE) == 0


def test_attention_is_refused_where_neither_gpu_nor_interpreter_may_be_used():
    """No silent fallback: TRITON_INTERPRET=0 forbids what a machine without a GPU would use."""
    run_script(
        """
        from test_interpreter import run_small
        from tritonattn import UnsupportedError

        try:
            run_small("paged_attention")
        except UnsupportedError as error:
            assert "Unset TRITON_INTERPRET" in str(error)
            print("OK")
        """,
        **NO_GPU | {"TRITON_INTERPRET": "0"},
    )


@needs_interpreter
def test_attention_does_not_change_how_a_later_kernel_of_the_user_runs():
    """Kernels that are decorated after ours are interpreted too: there is no GPU to run them."""
    run_script(
        """
        import torch, triton
        import triton.language as tl
        from test_interpreter import run_small

        run_small("varlen_attention")

        @triton.jit
        def kernel(x, y, N: tl.constexpr):
            offs = tl.arange(0, N)
            total = tl.sum(tl.load(x + offs), 0) + tl.max(tl.load(x + offs), 0)
            tl.store(y, total + tl.cdiv(N, 2))

        x, y = torch.arange(4.0), torch.zeros(1)
        kernel[(1,)](x, y, 4)
        assert y.item() == 6 + 3 + 2
        print("OK")
        """,
        **NO_GPU,
    )


@needs_interpreter
def test_interpreted_launch_patches_the_language_once_and_restores_it():
    """Each call of one kernel function by another did so, for most of the time that a call took."""
    run_script(
        """
        import triton.language as tl
        from triton.runtime import interpreter
        from test_interpreter import run_small

        run_small("paged_attention")
        assert tl.core.is_builtin(tl.load) and tl.core.is_builtin(tl.tensor.__add__)
        patch, launch = interpreter._patch_builtin, interpreter.GridExecutor.__call__
        patched, launched = [], []

        def counted_patch(package, *args):
            patched.append(package)
            patch(package, *args)

        def counted_launch(*args, **options):
            launched.append(1)
            launch(*args, **options)

        interpreter._patch_builtin = counted_patch
        interpreter.GridExecutor.__call__ = counted_launch
        run_small("paged_attention")
        assert patched.count(tl) == len(launched) > 0
        print("OK")
        """,
        **NO_GPU,
    )
