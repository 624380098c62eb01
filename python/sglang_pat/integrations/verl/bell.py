"""The bell between the trainer and its ranks, which tells whether a chunk that is being trained is to end early.

Ray imports this module in the actor's process, so it imports nothing of verl: verl imports its plug-ins, which may
import the module that would be waiting for it.
"""


class Bell:
    """An actor that trainers' ranks ask between two passes whether they are to stop."""

    def __init__(self) -> None:
        self._rung = False

    async def set(self, rung: bool) -> None:
        self._rung = rung

    async def is_rung(self) -> bool:
        return self._rung
