"""Settings, values, routes and methods that are gone, each with what to use instead.

Add a row to the table of its kind.  The text ends the one line that refuses it, so it begins in the middle of a
sentence and has no full stop::

    SETTINGS = {"rollout_dir": "a job's state goes into the trainer's checkpoint (docs/rollouts.md)"}

Whoever gives it then reads ``--pat-rollout-dir is gone: a job's state goes into …``.  Nothing else has to be written:
the command line, ``Engine(pat_…)``, ``SGLANG_PAT``, ``engine_kwargs.sglang_pat``, the HTTP server and ``Engine`` look
their names up here, and ``tests/unit/test_removed.py`` holds for each row that it is no name in use any more.
"""

from __future__ import annotations

from collections.abc import Iterable

SETTINGS: dict[str, str] = {
    "rollout_dir": "put admitter.state_dict() into the trainer's checkpoint (docs/rollouts.md)",
    "schedule": "POST the entries as a JSON list to /pat/schedule",
}
"""By a setting's name, as in ``sglang_pat/settings.py`` (``rollout_dir`` for ``--pat-rollout-dir``)."""

VALUES: dict[tuple[str, str], str] = {}
"""By the name of a setting that has choices, and the choice that is gone: ``("policy", "schedule")``."""

_CLIENT = "use sglang_pat.rollout.client.RolloutClient(url) (docs/rollouts.md)"

ROUTES: dict[str, str] = {
    "POST /pat/rollout": _CLIENT,
    "POST /pat/rollout/verdict": f"{_CLIENT}, with judge=",
    "POST /pat/rollout/prompts": f"{_CLIENT}, with more=",
    "POST /pat/rollout/turn": f"{_CLIENT}, with environment=",
    "DELETE /pat/rollout/{job}": "prompts that wait are in the trainer's admitter",
}
"""By method and path of the HTTP server, as FastAPI writes it: ``"DELETE /pat/rollout/{job}"``; answered with 410."""

_SCHEDULE = "a server takes a schedule by POST /pat/schedule; a program calls reconfigure(tp)"

METHODS: dict[str, str] = {
    "set_schedule": _SCHEDULE,
    "schedule": _SCHEDULE,
    "async_set_schedule": _SCHEDULE,
    "async_schedule": _SCHEDULE,
}
"""By name, of ``Engine``."""

_COMPARE = "python -m studies.compare simulates rounds, from the top of the repository"

FIELDS: dict[tuple[str, str], str] = {
    ("round", "tp"): "the policy chooses the degree in which a round starts, from KV room and retractions",
    ("profiler.sweep", "--temperature"): "leave it out, a sweep samples at temperature 1",
    ("sglang_pat.replay", "--lengths"): _COMPARE,
    ("sglang_pat.replay", "--policies"): _COMPARE,
    ("sglang_pat.replay", "--out"): f"{_COMPARE}, and prints a table",
    ("sglang_pat.replay", "--measured"): "--log with --profile FILE decides on another profile",
    ("schedule", "wait"): "this answers when the schedule is over; GET /pat/status has the switches so far",
}
"""By what has it, and the name of the field that is gone: of a body, of a query, of the method of ``Engine`` that takes
the same, or of a command."""


def refuse_settings(names: Iterable[str], where: str) -> None:
    """Raise ``ValueError`` for a setting that is gone; ``where`` they were given is in the message."""
    for name in names:
        if name in SETTINGS:
            raise ValueError(f"{where}: {name} is gone: {SETTINGS[name]}")


def refuse_flags(words: Iterable[str]) -> None:
    """The same for the words of a command line, or for the names of ``Engine``'s arguments."""
    flags = {"--pat-" + name.replace("_", "-"): name for name in SETTINGS}
    fields = {"pat_" + name: name for name in SETTINGS}
    for word in words:
        given = word.partition("=")[0]
        if (name := flags.get(given) or fields.get(given)) is not None:
            raise ValueError(f"{given} is gone: {SETTINGS[name]}")


def refuse_value(flag: str, value: str) -> None:
    """Raise ``ValueError`` for a choice of ``flag`` that is gone."""
    if (instead := VALUES.get((flag.removeprefix("--pat-").replace("-", "_"), value))) is not None:
        raise ValueError(f"{flag} {value} is gone: {instead}")


def refuse_fields(whose: str, names: Iterable[str]) -> None:
    """Raise ``ValueError`` for a field of ``whose`` that is gone; of a command also as ``--flag=value``."""
    for name in (word.partition("=")[0] for word in names):
        if (instead := FIELDS.get((whose, name))) is not None:
            raise ValueError(f"{whose}: {name} is gone: {instead}")
