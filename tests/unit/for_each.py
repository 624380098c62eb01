"""One test over hundreds of cases, which would take longer to collect and to report than to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def for_each(cases: Sequence[tuple[Any, ...]]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """The decorated test runs with each of ``cases`` as its arguments; the one that fails is named."""

    def decorate(test: Callable[..., None]) -> Callable[[], None]:
        def run() -> None:
            assert cases, "no case"
            for case in cases:
                try:
                    test(*case)
                except BaseException as error:
                    error.add_note(f"{test.__name__}: {', '.join(map(str, case))}")
                    raise

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate
