"""Drafts on a rank (:class:`Speculation`): which decode steps check some, and how many.

All ranks of a group decide alike: by their requests, the texts taken in since the group was entered or the weights
changed, and the profile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_pat.host import batches, loop, outputs, verify
from sglang_pat.host import requests as host
from sglang_pat.host.batches import ScheduleBatch
from sglang_pat.host.requests import Req
from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import Profile
from sglang_pat.speculate.acceptance import KEYS, Acceptance, choose_count
from sglang_pat.speculate.drafter import Drafter

if TYPE_CHECKING:
    from sglang_pat.switch.scheduler import SwitchingScheduler

Drafts = tuple[int, int, int]
"""Values of ``KEYS`` (``speculate/acceptance.py``)."""

MOST_ROWS = 128
"""Most rows of a step with drafts: requests, and drafts of all of them."""


def begin(req: Req) -> None:
    """Note that ``req`` is new."""
    req.pat_drafts = (0, 0, 0)


class Speculation:
    """What a rank drafts.

    Attributes:
        most: most drafts of a request in one step; 0 for none at all.
    """

    def __init__(self, scheduler: SwitchingScheduler, profile: Profile | None) -> None:
        self._scheduler = scheduler
        self.most = scheduler.adaptive.most_drafts
        self._predictor = None
        if scheduler.adaptive.speculate == "auto":
            assert profile is not None, "the configuration has checked it"
            self._predictor = Predictor(profile)
        self._drafter, self._asked = Drafter(), 0
        self._acceptance = Acceptance(self.most)

    def forget(self) -> None:
        """Begin anew: the ranks of the group, or the weights, are others."""
        self._drafter.forget()
        self._acceptance = Acceptance(self.most)

    def record_ended(self, reqs: list[Req]) -> None:
        """Take in those of ``reqs`` that have ended, for their siblings."""
        for req in reqs if self.most else ():
            if host.has_ended(req):
                self._drafter.end(req.pat_family, host.get_name(req), host.get_prompt(req), host.get_output(req))

    def settle(self) -> None:
        """Choose how many drafts a request is to have in the next step.

        If any, results that are to come are processed first: the drafts follow them.
        """
        self._asked = self._choose_count() if self.most else 0
        if self._asked:
            loop.process_pending(self._scheduler)

    def _choose_count(self) -> int:
        requests = loop.count_running(self._scheduler)
        most = 0 if loop.has_grammar(self._scheduler) else self._fit(requests)
        if self._predictor is None or not most:
            return most
        tp, tokens = self._scheduler.layouts.layout.tp, loop.count_decoding_tokens(self._scheduler)
        count = choose_count(self._predictor, self._acceptance, tp, requests, tokens, most)
        if not count:
            self._acceptance.record_plain()
        return count

    def _fit(self, requests: int) -> int:
        """Most drafts of each of so many ``requests``, 0 for none."""
        return max(min(self.most, self._count_rows() // requests - 1), 0) if requests else 0

    def draft(self, batch: ScheduleBatch) -> list[list[int]]:
        """Drafts for each request of ``batch``, which is about to run; none at all if it is a plain step."""
        if not self._asked or not verify.can_verify(batch):
            return []
        reqs = batches.list_batch(batch)
        self._asked = min(self._asked, self._fit(len(reqs)))
        drafts = [self._draft(req, self._asked) for req in reqs]
        if not any(drafts):
            self._acceptance.record(self._asked, [0] * len(reqs))
            return []
        return drafts

    def _count_rows(self) -> int:
        """Most rows of a step: attention back ends have room for as many as may run, graphs for those captured."""
        graph = self._scheduler.layouts.get_largest_graph() or MOST_ROWS
        return min(MOST_ROWS, graph, loop.get_max_running(self._scheduler))

    def _draft(self, req: Req, count: int) -> list[int]:
        output = host.get_output(req)
        count = min(count, verify.count_allowed(req))
        if count < 1:
            return []
        return self._drafter.draft(req.pat_family, host.get_name(req), host.get_prompt(req), output, count)

    def record(self, checked: verify.Checked) -> None:
        """Note how many drafts of each request were right, before their tokens go out."""
        self._acceptance.record(self._asked, checked.right)
        if self._scheduler.is_leader:
            self._scheduler.load.record_drafts(sum(map(len, checked.drafts)), sum(checked.right))
        for req, drafted, right in zip(checked.reqs, checked.drafts, checked.right, strict=True):
            steps, proposed, correct = req.pat_drafts
            req.pat_drafts = steps + bool(drafted), proposed + len(drafted), correct + right

    def add_drafts_to_output(self, output: Any, told: list[Req]) -> None:
        """Add what was drafted to an output about the requests ``told``, if anything is."""
        if self.most:
            for key, values in zip(KEYS, zip(*(req.pat_drafts for req in told), strict=True), strict=True):
                outputs.add_info(output, key, list(values))
