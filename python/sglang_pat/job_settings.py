"""The settings that a job of somebody else's has for its engines, checked when the job starts.

An engine checks its own settings when it starts.  In an RL framework that is late: models have been loaded by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_pat import settings
from sglang_pat.config import AdaptiveConfig
from sglang_pat.coordinator import schedule
from sglang_pat.layout import ParallelLayout
from sglang_pat.messages import ScheduleEntry
from sglang_pat.predict import profile as profiles
from sglang_pat.predict.profile import Profile


def check(given: Mapping[str, Any], ranks: int, where: str) -> None:
    """Refuse what an engine of ``ranks`` would refuse, as far as that can be said without its model.

    Files are looked at on this machine.

    Args:
        given: settings by name, of one engine.
        where: they were given, for the message.

    Raises:
        ValueError: an unknown setting, a wrong value, degrees that do not fit, a file that cannot be used; one line.
    """
    found = settings.fields(given, where)
    base = found.pop(settings.BASE_TP.name, settings.BASE_TP.default)
    layout = ParallelLayout(*settings.base_layout(base, ranks, where))
    try:
        read_files(settings.configuration(found, layout))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def read_files(config: AdaptiveConfig) -> Profile | None:
    """The profile, if one is given.

    Raises:
        ValueError: it cannot be read or is none; the schedule is none for these layouts; the log cannot be written.
    """
    first_schedule(config)
    profile = None if config.profile is None else profiles.load(config.profile, complete=True)
    if config.log is not None:
        try:
            open(config.log, "ab").close()
        except OSError as error:
            raise ValueError(f"--pat-log {config.log}: {error.strerror}; give a file that can be written") from None
    return profile


def first_schedule(config: AdaptiveConfig) -> list[ScheduleEntry] | None:
    """The entries of ``--pat-schedule``, or none with ``--pat-log``, which counts requests as a schedule does.

    Raises:
        ValueError: one line; there are none to be had from the file.
    """
    if config.schedule is None:
        return None if config.log is None else []
    entries = schedule.read(config.schedule)
    try:
        schedule.check_degrees(entries, config.layouts)
    except ValueError as error:
        raise ValueError(f"--pat-schedule {config.schedule}: {error}") from None
    return entries
