"""Responses that have ended, passed on to the replicas that generate others to the same prompt (:class:`Siblings`):
drafts come from them (``--pat-speculate``)."""

from __future__ import annotations

from sglang_pat import messages as m
from sglang_pat.coordinator.replicas import Outbox

MOST_BYTES = 16 << 20
"""Bytes of texts that are kept.  Those of the prompt that was not used for longest go first."""
TEXT_BYTES = 600
"""Bytes that a text takes besides its output."""


class Siblings:
    """Texts by the family of their prompt, and which leader knows which of them.

    They are of one version of the weights: newer ones end them.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._texts: dict[int, dict[str, m.EndedText]] = {}
        """Texts by family and name, the family used last at the end."""
        self._bytes, self._weight_updates = 0, 0
        self._known: dict[int, set[str]] = {}
        """Names of the texts that each leader has, for its group."""

    def record(self, text: m.EndedText) -> None:
        """Keep a text that a leader tells of, and has itself."""
        if text.weight_updates > self._weight_updates:
            self._texts, self._bytes, self._weight_updates = {}, 0, text.weight_updates
            self._known.clear()
        if text.weight_updates < self._weight_updates:
            return
        family = self._texts[text.family] = self._texts.pop(text.family, {})
        replaced = family.get(text.name)  # clients may use a name again
        family[text.name] = text
        self._bytes += _count_bytes(text) - (_count_bytes(replaced) if replaced else 0)
        self._known.setdefault(text.rank, set()).add(text.name)
        while self._bytes > MOST_BYTES:
            dropped = self._texts.pop(next(iter(self._texts)))
            self._bytes -= sum(map(_count_bytes, dropped.values()))
            for names in self._known.values():
                names.difference_update(dropped)

    def tell(self, report: m.LoadReport) -> None:
        """Send a leader what it does not know of the prompts that its requests have."""
        names = self._known.setdefault(report.rank, set())
        families = {request.family for request in report.requests} & self._texts.keys()
        new = [text for family in sorted(families) for name, text in self._texts[family].items() if name not in names]
        if new:
            names.update(text.name for text in new)
            self._outbox.send_to_leader(report.rank, m.SiblingTexts(texts=new))

    def forget_known(self) -> None:
        """Note that there are new groups, which know nothing."""
        self._known.clear()


def _count_bytes(text: m.EndedText) -> int:
    return TEXT_BYTES + len(text.output)
