"""All tests: inputs drawn at random are the same in every run, workers share files, and tables at the end.

``HYPOTHESIS_PROFILE=search`` draws others (``make soak`` does): what it finds is written down as an ``@example``.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings

# What a shell puts in the background (`make test &`) is deaf to Ctrl-C, and so would be the servers of the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.pop("SGLANG_PAT", None)  # settings of whoever runs the tests are none of theirs

# A collection goes through all that torch and others import: a quarter of the time of the unit tests.
gc.set_threshold(50_000, 20, 20)

any_machine = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", any_machine, derandomize=True)
settings.register_profile("search", any_machine)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

_seconds: Counter[str] = Counter()
_starts: Counter[str] = Counter()
"""Time spent and engines started, by test file."""
_told: list[str] = []
"""What tests have to say beside pass or fail."""


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop of tests that are coroutines."""
    return "asyncio"


@pytest.fixture(scope="session")
def prefork():
    """Forks programs that import SGLang, which takes each 10 s of CPU time otherwise; None with CUDA."""
    from sglang_pat.cpu import shim
    from sglang_pat.testing.prefork import Prefork

    found = Prefork() if shim.is_needed() else None
    yield found
    if found is not None:
        found.stop()


@pytest.hookimpl(tryfirst=True)  # before that of the workers, and after that of tests/engine
def pytest_collection_modifyitems(items):
    """A worker takes whole files, so that what their fixtures make is made once."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))


def pytest_collection_finish(session):
    """Groups are suffixes of test ids.  Where pytest and pytest-xdist do not know them, servers are started twice."""
    gc.freeze()  # what was imported stays
    for logger in logging.Logger.manager.loggerDict.values():
        logger.propagate = True  # or pytest gives each of torch's a handler of its own, six times a test
    grouped = getattr(session.config.option, "loadgroup", False)
    if grouped and session.items and "@" not in session.items[0].nodeid:
        raise pytest.UsageError(f"pytest {pytest.__version__} and pytest-xdist: tests of a group are not kept together")


def pytest_unconfigure():
    gc.unfreeze()  # or Triton's bindings say that they leak


def pytest_runtest_logreport(report):
    """What a test says travels in its report, so that workers need nothing else."""
    name = report.nodeid.partition("::")[0]
    _seconds[name] += report.duration
    if report.when == "teardown":
        for kind, value in report.user_properties:
            if kind == "told":
                _told.append(f"{name}: {value}")
            elif kind == "engine start":
                _starts[name] += 1


def pytest_terminal_summary(terminalreporter):
    terminalreporter.section("minutes, and engines started, by file")
    for name, seconds in _seconds.most_common(20):
        terminalreporter.line(f"{seconds / 60:6.2f} {_starts[name]:4d}  {name}")
    terminalreporter.line(f"{sum(_seconds.values()) / 60:6.2f} {sum(_starts.values()):4d}  in all")
    if _told:
        terminalreporter.section("told by tests")
        for line in _told:
            terminalreporter.line(line)
