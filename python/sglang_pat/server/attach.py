"""The adaptive engine wherever somebody else launches SGLang: RL frameworks, ``python -m sglang.launch_server``.

:func:`attach` points SGLang's launch code at ours, in this process.  From then on server arguments with ``tp_size``
GPUs become those of an adaptive engine on as many ranks, and whoever holds them sees one engine of that many GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_pat import settings
from sglang_pat.figures import enable_job_log

_where, _settings = "", None


def attach(values: Mapping[str, Any], where: str) -> None:
    """Launch adaptive engines with these settings from now on; again: with these instead.

    Raises:
        SGLangMismatch: another SGLang.
        ValueError: as :func:`sglang_pat.settings.parse_fields`; ``where`` they were given is in the message.
    """
    global _where, _settings
    from sglang_pat.launch.contract import check_sglang

    check_sglang()
    fields = settings.parse_fields(values, where)
    enable_job_log()
    if not is_attached():
        from sglang_pat.host.attach import patch_launcher
        from sglang_pat.server.engine import AdaptiveEngine
        from sglang_pat.server.http import add_routes
        from sglang_pat.server.tokenizer import AdaptiveTokenizerManager

        patch_launcher(_make_arguments, AdaptiveEngine, AdaptiveTokenizerManager, add_routes)
    _where, _settings = where, fields


def is_attached() -> bool:
    """Whether this process launches adaptive engines."""
    return _settings is not None


def _make_arguments(fields: dict[str, Any]) -> Any:
    """Prepared arguments of an adaptive engine on as many ranks as these fields of stock arguments have GPUs.

    Raises:
        ValueError: as :func:`~sglang_pat.host.arguments.prepare_start`.
    """
    from sglang_pat.host.arguments import make_arguments, prepare_start

    assert _settings is not None, "attached"
    tp, dp, own = fields["tp_size"], fields["dp_size"], dict(_settings)
    base = own.pop(settings.BASE_TP.name, tp if dp > 1 else settings.BASE_TP.default)
    fields["tp_size"], fields["dp_size"] = settings.compute_base_layout(base, tp * dp, _where)
    return prepare_start(make_arguments(**fields, adaptive_tp=True, pat_in_a_job=True, **own))
