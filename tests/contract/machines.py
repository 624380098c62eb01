"""Machines with GPUs as SGLang would see them; no test of its own."""

from __future__ import annotations

import sys
from typing import Any

from sglang.srt import server_args
from sglang.srt.utils import common

from sglang_pat.host import adapter

YES = "is_cuda is_hopper_with_cuda_12_3 is_sm90_supported is_flashinfer_available is_triton_kernels_available"
NO = "is_cpu is_hip is_npu is_xpu is_sm100_supported is_sm120_supported is_blackwell_supported cpu_has_amx_support"


def pretend(monkeypatch, **answers: Any) -> None:
    """Have SGLang's arguments be resolved as on a machine whose probes (SGLang's functions, by name) answer so.

    What SGLang has imported elsewhere keeps this machine's answers.
    """
    if adapter.FOLDER != "v0_5_12":
        from sglang.srt import runtime_context

        facts = runtime_context._PLATFORM_PROBES | runtime_context._PLATFORM_VALUES
        known = {fact: answers[probe] for fact, probe in facts.items() if probe in answers}
        overrides = object.__getattribute__(runtime_context.get_platform(), "_overrides")
        for fact, answer in known.items():
            monkeypatch.setitem(overrides, fact, answer)
    for place, module in list(sys.modules.items()):
        deciding = module is server_args or place.startswith("sglang.srt.arg_groups")
        for name, answer in answers.items():
            # What a function imports as it runs is in ``common``, to which other modules must not turn for a kind.
            if hasattr(module, name) and (deciding or (module is common and name.startswith("get_"))):
                monkeypatch.setattr(module, name, lambda *_, answer=answer, **__: answer)


def pretend_h100s(monkeypatch, megabytes: int = 81559) -> None:
    """Have SGLang see H100s, or GPUs as new with other memory."""
    answers = dict.fromkeys(YES.split(), True) | dict.fromkeys(NO.split(), False)
    answers |= {"get_device": "cuda", "get_device_sm": 90, "get_device_name": "NVIDIA H100 80GB HBM3"}
    pretend(monkeypatch, **answers, get_device_memory_capacity=megabytes)
