"""The life of one switch.

::

    IDLE -> PREPARE -> QUIESCE -> EXCHANGE -> COMMIT -> RESUME -> IDLE
               |          |          |
               +----------+----------+--> ABORT -> IDLE

PREPARE (memory, capsules) leaves decoding alone.  From QUIESCE on no step
runs until RESUME: these are the states a request feels as the pause.  Until COMMIT any
rank's failure aborts the switch on all ranks, which go on in the old layout.  From COMMIT
on there is no way back; a failure then ends the engine.
"""

from __future__ import annotations

from enum import IntEnum


class SwitchState(IntEnum):
    IDLE = 0
    PREPARE = 1
    QUIESCE = 2
    EXCHANGE = 3
    COMMIT = 4
    RESUME = 5
    ABORT = 6


_NEXT: dict[SwitchState, frozenset[SwitchState]] = {
    SwitchState.IDLE: frozenset({SwitchState.PREPARE}),
    SwitchState.PREPARE: frozenset({SwitchState.QUIESCE, SwitchState.ABORT}),
    SwitchState.QUIESCE: frozenset({SwitchState.EXCHANGE, SwitchState.ABORT}),
    SwitchState.EXCHANGE: frozenset({SwitchState.COMMIT, SwitchState.ABORT}),
    SwitchState.COMMIT: frozenset({SwitchState.RESUME}),
    SwitchState.RESUME: frozenset({SwitchState.IDLE}),
    SwitchState.ABORT: frozenset({SwitchState.IDLE}),
}


def advance(current: SwitchState, to: SwitchState) -> SwitchState:
    """The one transition function.

    Raises:
        RuntimeError: the transition is not in the life cycle above.
    """
    if to not in _NEXT[current]:
        raise RuntimeError(f"switch cannot go from {current.name} to {to.name}")
    return to
