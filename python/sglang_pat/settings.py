"""The settings of the adaptive engine, each defined once.

The flag ``--pat-switch-at``, the field ``AdaptiveServerArgs.pat_switch_at``, ``switch_at`` under verl's
``rollout.engine_kwargs.sglang_pat`` and ``switch_at=4`` in the variable ``SGLANG_PAT`` are one setting of this table.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_pat.config import GPU_ORDERS, KV_EXCHANGES, KV_MODES, POLICIES, WEIGHT_MODES
from sglang_pat.layout import ParallelLayout
from sglang_pat.plugin import VARIABLE


@dataclass(frozen=True)
class Setting:
    """One setting; ``default`` says its type, None that of a text."""

    name: str
    default: Any
    help: str
    metavar: str | None = None

    @property
    def flag(self) -> str:
        return "--pat-" + self.name.replace("_", "-")

    @property
    def field(self) -> str:
        return "pat_" + self.name

    def read(self, value: Any) -> Any:
        """``value``, given as a text or as itself, as what the field holds; raises ``ValueError``."""
        if isinstance(self.default, bool):
            words = {"true": True, "1": True, "false": False, "0": False}
            if str(value).lower() not in words:
                raise ValueError("true or false")
            return words[str(value).lower()]
        if isinstance(self.default, int):
            try:
                return int(str(value))
            except ValueError:
                raise ValueError("a whole number") from None
        if isinstance(value, list | tuple):  # degrees, as YAML has them
            return ",".join(map(str, value))
        return None if value is None else str(value)


SETTINGS = (
    Setting("candidates", None, "TP degrees to use, e.g. 1,2,4 (default: doublings of the base degree)"),
    Setting("profile", None, "profile of this deployment (python -m profiler.sweep)", "FILE"),
    Setting(
        "policy", None, f"who decides: {', '.join(POLICIES)} (default: survival with a profile, else threshold)"
    ),
    Setting("log", None, "append each decision with its inputs (JSON lines)", "FILE"),
    Setting("rollout_dir", None, "keep what waits between rounds of /pat/rollout here", "DIR"),
    Setting(
        "schedule", None, "schedule policy: switches at given steps to begin with (JSON lines, or a decision log)",
        "FILE",
    ),
    Setting("switch_at", 8, "threshold policy: merge at this many running requests"),
    Setting("cpu_overlap", False, "overlap scheduling on a CPU too, as on CUDA by default"),
    Setting("gpu_order", "rank", f"which rank runs on which GPU: {', '.join(GPU_ORDERS)}"),
    Setting("weights", "resident", f"weight handling: {', '.join(WEIGHT_MODES)}"),
    Setting("kv", "auto", f"KV of live requests: {', '.join(KV_MODES)}"),
    Setting(
        "kv_exchange", "direct", f"how KV is migrated: {', '.join(KV_EXCHANGES)} (the last is PAT's way, to compare)"
    ),
)  # fmt: skip
"""What has a flag.  The base layout is ``--tp`` and ``--dp`` there."""

BASE_TP = Setting("base_tp", 1, "TP degree of the base layout")
"""Only where somebody else says how many GPUs the engine has, and calls that number its TP degree."""

_NAMED = {setting.name: setting for setting in (BASE_TP, *SETTINGS)}


def parse(text: str, where: str) -> dict[str, str]:
    """``"base_tp=1,candidates=1,2,policy=pat"`` as a mapping; a piece without ``=`` belongs to the one before.

    Args:
        text: the settings, separated by commas.
        where: they were given, for the message.

    Raises:
        ValueError: the text begins with such a piece.
    """
    given: dict[str, str] = {}
    name = None
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = piece.partition("=")
        if equals:
            name = key.strip()
            given[name] = value.strip()
        elif name is None:
            raise ValueError(f"{where}={text!r}: write settings as name=value, e.g. base_tp=1,policy=threshold")
        else:
            given[name] += f",{piece}"
    return given


def of_environment() -> dict[str, str]:
    """The settings of the variable ``SGLANG_PAT``; raises as :func:`parse`."""
    return parse(os.environ.get(VARIABLE, ""), VARIABLE)


def fields(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Fields of ``AdaptiveServerArgs`` from settings by name; ``where`` they were given, for the message.

    ``base_tp`` comes back under its own name.

    Raises:
        ValueError: an unknown setting, or a value of the wrong type; one line.
    """
    found = {}
    for name, value in given.items():
        setting = _NAMED.get(name)
        if setting is None:
            raise ValueError(f"{where} has no setting {name!r}; choose from {', '.join(_NAMED)}")
        try:
            found[name if setting is BASE_TP else setting.field] = setting.read(value)
        except ValueError as error:
            raise ValueError(f"{where}: {name} is {value!r}, must be {error}") from None
    return found


def base_layout(base_tp: int, ranks: int, where: str) -> tuple[int, int]:
    """``(tp, dp)`` of the base layout of an engine of ``ranks``; raises ``ValueError`` if it does not divide them."""
    try:
        layout = ParallelLayout(1, ranks).with_tp(base_tp)
    except ValueError:
        line = f"{where}: base_tp is {base_tp}, must divide the engine's {ranks} GPUs: {divisors(ranks)}"
        raise ValueError(line) from None
    return layout.tp, layout.dp


def of_engine(given: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The settings of one engine of several: each writes its own decision log, ``log.0.jsonl`` for ``log.jsonl``."""
    if not (log := given.get("log")):
        return dict(given)
    path = Path(log)
    return {**given, "log": str(path.with_name(f"{path.stem}.{number}{path.suffix}"))}


def divisors(count: int) -> str:
    """For a message: the numbers that divide ``count``."""
    return ", ".join(str(number) for number in range(1, count + 1) if count % number == 0)
