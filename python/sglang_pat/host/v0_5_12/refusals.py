"""Flags and variables that only this version has, and that are refused (``launch/refusals.py``)."""

from __future__ import annotations

from typing import Any

MUST_BE: dict[str, tuple[tuple[Any, ...], str, str]] = {}
"""Fields that must stay at one of some values: what to do otherwise, and why."""

NOT_AT_ALL = {
    "the switch cannot carry it over": "enable_prefill_context_parallel enable_nsa_prefill_context_parallel",
    "it is for expert parallelism, which is refused": "enable_deepep_waterfill elastic_ep_rejoin",
    "its counts are those of one group": "enable_expert_distribution_metrics",
    "it changes the base layout's model; the others would stay as they are": "torchao_config",
    "its graphs are pieces that know one layout": "enable_breakable_cuda_graph enforce_piecewise_cuda_graph",
}
"""Fields that may not be given at all, by reason."""

ENVIRONMENT = {
    "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE": "a switch fills SGLang's own tree",
    "SGLANG_ENABLE_UNIFIED_RADIX_TREE": "a switch fills SGLang's own tree",
}
"""Reasons why variables are refused, by name."""

MUST_BE_ON: dict[str, str] = {}
"""Reasons why variables must not be off, by name."""

SECOND_PORT = True
"""Whether SGLang also reserves the port 10,000 above."""
