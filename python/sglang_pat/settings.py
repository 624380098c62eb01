"""The settings of the adaptive engine (:data:`SETTINGS`), each defined once.

The flag ``--pat-switch-at``, the field ``AdaptiveServerArgs.pat_switch_at``, ``switch_at`` under verl's
``rollout.engine_kwargs.sglang_pat`` and ``switch_at=4`` in the variable ``SGLANG_PAT`` are one setting of this table.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from sglang_pat.config import (
    GPU_ORDERS,
    KV_EXCHANGES,
    KV_MODES,
    POLICIES,
    VARIABLE,
    WEIGHT_MODES,
    AdaptiveConfig,
    check_choice,
    parse_degrees,
)
from sglang_pat.layout import ParallelLayout


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        default: it says the type, too; None that of a text.
        help: for the command line and the page of flags; plain sentences, one line.
        metavar: what stands for its value in the help.
        choices: the values allowed, where they are a list.
        otherwise: what holds where the default is None.
    """

    name: str
    default: Any
    help: str
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    otherwise: str = "none"

    @property
    def value(self) -> str:
        """What follows the flag, e.g. ``auto|migrate|recompute``; nothing for a switch."""
        return "" if self.default is False else "|".join(self.choices) or self.metavar or "N"

    @property
    def shown_default(self) -> str:
        return self.otherwise if self.default is None else "off" if self.default is False else str(self.default)

    @property
    def flag(self) -> str:
        return "--pat-" + self.name.replace("_", "-")

    @property
    def field(self) -> str:
        return "pat_" + self.name

    def read(self, value: Any) -> Any:
        """``value``, given as a text or as itself, as what the field holds; raises ``ValueError``.  None, which YAML
        writes ``null``, is the default."""
        if value is None:
            return self.default
        if value is False and "off" in self.value.split("|"):  # YAML's ``off``
            return "off"
        if isinstance(self.default, bool):
            words = {"true": True, "1": True, "false": False, "0": False}
            if str(value).lower() not in words:
                raise ValueError(f"{self.name} is {value!r}, must be true or false")
            return words[str(value).lower()]
        if isinstance(self.default, int):
            try:
                return int(str(value))
            except ValueError:
                raise ValueError(f"{self.name} is {value!r}, must be a whole number") from None
        if isinstance(value, list | tuple):  # degrees, as YAML has them
            return ",".join(map(str, cast("list[Any] | tuple[Any, ...]", value)))
        if self.choices:
            check_choice(self.flag, str(value), self.choices)
        return str(value)


SETTINGS = (
    Setting(
        "candidates", None, "TP degrees to use.", "1,2,4",
        otherwise="every doubling of --tp that the model's heads allow; for threshold without a profile only the "
        "lowest and the highest of these",
    ),
    Setting("profile", None, "Profile of this deployment; python -m profiler.sweep makes it.", "FILE"),
    Setting(
        "profile_as_is", False,
        "Believe the profile: do not correct its step times by those of this run.",
    ),
    Setting(
        "calibrate", 16,
        "Before the first request decode N steps in each layout, up to four times, and correct the profile by what "
        "they take. 0: do not.",
    ),
    Setting(
        "policy", None, "Who decides. manual: only /pat/reconfigure. off: nobody.", choices=POLICIES,
        otherwise="survival with a profile, else threshold",
    ),
    Setting(
        "log", None,
        "Append each decision with its inputs (JSON lines, some 30 bytes a running request). "
        "python -m sglang_pat.replay --log FILE decides again.",
        "FILE",
    ),
    Setting("switch_at", 8, "For threshold: merge when N requests or fewer are left."),
    Setting(
        "cpu_overlap", False,
        "Overlap scheduling on a CPU, too. It gains nothing there; on CUDA it is SGLang's default.",
    ),
    Setting(
        "gpu_order", "rank",
        "Which rank runs on which GPU. neighbours: ranks that merge first run on neighbouring GPUs, for machines whose "
        "GPUs are not all connected alike.", choices=GPU_ORDERS,
    ),
    Setting(
        "weights", "resident",
        "resident: each layout's weights are views of the base shards. reshard: one copy, moved at a switch, as in the "
        "PAT paper.", choices=WEIGHT_MODES,
    ),
    Setting(
        "kv", "auto",
        "What happens to the KV of live requests. auto: for each request the cheaper by the profile; without a "
        "profile, move what fits.", choices=KV_MODES,
    ),
    Setting(
        "kv_exchange", "direct",
        "How KV travels. direct: each rank takes its slices from the others' memory (CPU; elsewhere as alltoall). "
        "alltoall: through the process group. allgather: as in the PAT paper, to compare with.", choices=KV_EXCHANGES,
    ),
    Setting(
        "speculate", "off",
        "Draft tokens from the prompt, the response and those to the same prompt, and check them in the decode step, "
        "without a change of the output. auto: up to 8 drafts a request, as many as pay by the profile and by how many "
        "were right. N: up to N; without a profile in each step, whether they pay or not.", "off|auto|N",
    ),
    Setting(
        "draft_model", None,
        "Draft by this EAGLE-3 head, too, where it is right more often; needs --pat-speculate.", "DIR",
    ),
)  # fmt: skip
"""The settings that have a flag.  The base layout is ``--tp`` and ``--dp`` there."""

BASE_TP = Setting("base_tp", 1, "TP degree of the base layout")
"""The degree of the base layout, where somebody else says how many GPUs the engine has, and calls that number its TP
degree."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--adaptive-tp`` and the flag of each setting to ``parser``, as a group of their own."""
    group = parser.add_argument_group("adaptive tensor parallelism (sglang_pat)")
    group.add_argument("--adaptive-tp", action="store_true", help="merge replicas as the batch drains")
    for setting in SETTINGS:
        kind: dict[str, Any] = {"action": "store_true"}
        if setting.default is not False:
            kind = {"type": type(setting.default or ""), "metavar": setting.value}
        text = f"{setting.help} Default: {setting.shown_default}.".replace("%", "%%")
        group.add_argument(setting.flag, default=setting.default, help=text, **kind)


_NAMED = {setting.name: setting for setting in (BASE_TP, *SETTINGS)}


def format_table() -> list[str]:
    """The settings as lines of a table in Markdown."""
    rows: list[str] = []
    for setting in SETTINGS:
        flag = f"{setting.flag} {setting.value}".rstrip().replace("|", "\\|")
        rows.append(f"| `{flag}` | {setting.shown_default} | {setting.help} |")
    return ["| flag | default | |", "| --- | --- | --- |", *rows]


def parse(text: str, where: str) -> dict[str, str]:
    """``"base_tp=1,candidates=1,2,policy=pat"`` as a mapping; a piece without ``=`` belongs to the one before.

    Raises:
        ValueError: the text begins with such a piece; ``where`` it was given is in the message.
    """
    values: dict[str, str] = {}
    name = None
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = piece.partition("=")
        if equals:
            name = key.strip()
            values[name] = value.strip()
        elif name is None:
            raise ValueError(f"{where}={text!r}: write settings as name=value, e.g. base_tp=1,policy=threshold")
        else:
            values[name] += f",{piece}"
    return values


def read_environment() -> dict[str, str]:
    """The settings of the variable ``SGLANG_PAT``; raises as :func:`parse` and :func:`parse_fields`."""
    values = parse(os.environ.get(VARIABLE, ""), VARIABLE)
    parse_fields(values, VARIABLE)  # whoever puts them together with others cannot say any more where they were given
    return values


def parse_fields(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Fields of ``AdaptiveServerArgs`` from settings by name; ``where`` they stand, for the message.

    ``base_tp`` comes back under its own name.

    Raises:
        ValueError: an unknown setting, a value of the wrong type or none of the choices; one line.
    """
    fields: dict[str, Any] = {}
    for name, value in values.items():
        setting = _NAMED.get(name)
        if setting is None:
            raise ValueError(_describe_unknown(name, where))
        try:
            fields[name if setting is BASE_TP else setting.field] = setting.read(value)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return fields


def _describe_unknown(name: str, where: str) -> str:
    """The line for a setting that there is not; it may be a word of SGLang's, which verl's users put there."""
    close = difflib.get_close_matches(name, _NAMED, 1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    theirs = where.replace("sglang_pat", "sglang") if "sglang_pat" in where else "the launcher's own arguments"
    return (
        f"{where} has no setting {name!r}{hint}; choose from {', '.join(_NAMED)}. SGLang's own are given with {theirs}"
    )


def make_configuration(
    fields: Mapping[str, Any], base: ParallelLayout, max_running: int | None = None
) -> AdaptiveConfig:
    """The configuration of an engine with these fields of ``AdaptiveServerArgs``; those that lack have their default.

    Args:
        base: layout that it starts in.
        max_running: most requests that one replica decodes at once.

    Raises:
        ValueError: as ``AdaptiveConfig``, and for candidates that are no numbers.
    """
    values = {setting.name: fields.get(setting.field, setting.default) for setting in SETTINGS}
    degrees, policy = values.pop("candidates"), values.pop("policy")
    del values["cpu_overlap"]  # it becomes an argument of SGLang's
    policy = policy or ("survival" if values["profile"] else "threshold")
    return AdaptiveConfig(base=base, degrees=parse_degrees(degrees), policy=policy, max_running=max_running, **values)


def compute_base_layout(base_tp: int, ranks: int, where: str) -> tuple[int, int]:
    """``(tp, dp)`` of the base layout of an engine of ``ranks``; raises ``ValueError`` if it does not divide them."""
    try:
        layout = ParallelLayout(1, ranks).with_tp(base_tp)
    except ValueError:
        line = f"{where}: base_tp is {base_tp}, must divide the engine's {ranks} GPUs: {format_divisors(ranks)}"
        raise ValueError(line) from None
    return layout.tp, layout.dp


def make_engine_settings(values: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The settings of one engine of several: each writes its own decision log, ``log.0.jsonl`` for ``log.jsonl``."""
    if not (log := values.get("log")):
        return dict(values)
    path = Path(str(log))
    return {**values, "log": str(path.with_name(f"{path.stem}.{number}{path.suffix}"))}


def format_divisors(count: int) -> str:
    """The numbers that divide ``count``, for a message."""
    return ", ".join(str(number) for number in range(1, count + 1) if count % number == 0)
