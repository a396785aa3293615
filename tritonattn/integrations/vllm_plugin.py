"""The entry point of group ``vllm.general_plugins``, which vLLM calls in each of its processes.

It imports nothing of tritonattn's kernels: a vLLM that does not ask for the backend pays nothing.
"""

from __future__ import annotations

import logging

BACKEND = "tritonattn.integrations.vllm.TritonAttnBackend"


def register() -> None:
    """Make the backend what ``vllm serve MODEL --attention-backend CUSTOM`` runs.

    CUSTOM is the name that vLLM keeps for backends from outside.  It may be taken once: where
    another plugin has taken it, this one leaves it alone and logs how to choose.  May be called
    any number of times.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        logging.getLogger(__name__).warning(
            "vLLM's attention backend CUSTOM is already %s, so %s was not registered; "
            "VLLM_PLUGINS=tritonattn makes vLLM load this plugin alone.",
            custom.get_path(),
            BACKEND,
        )
        return
    register_backend(custom, BACKEND)
