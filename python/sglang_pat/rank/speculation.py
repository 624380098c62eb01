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
from sglang_pat.speculate.acceptance import Acceptance, choose_count
from sglang_pat.speculate.drafter import Drafter

if TYPE_CHECKING:
    from sglang_pat.switch.scheduler import SwitchingScheduler

KEYS = ("spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts")
"""Keys of ``meta_info``, SGLang's names: steps of the request that checked drafts, drafts, and those that were right."""

Drafts = tuple[int, int, int]
"""Values of :data:`KEYS`."""

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

    def __init__(self, scheduler: SwitchingScheduler) -> None:
        self._scheduler = scheduler
        self.most = scheduler.adaptive.most_drafts
        self._predictor = None
        if scheduler.adaptive.speculate == "auto":
            profile = scheduler.server_args.spec.profile
            assert profile is not None, "the configuration has checked it"
            self._predictor = Predictor(profile)
        self._drafter = Drafter()
        self._acceptance = Acceptance(self.most)

    def forget(self) -> None:
        """Begin anew: the ranks of the group, or the weights, are others."""
        self._drafter.forget()
        self._acceptance = Acceptance(self.most)

    def record_ended(self, reqs: list[Req]) -> None:
        """Take in those of ``reqs`` that have ended, for their siblings."""
        for req in reqs if self.most else ():
            if host.has_ended(req):
                self._drafter.end(req.pat_family, host.get_name(req), req.origin_input_ids, host.get_output(req))

    def settle(self) -> None:
        """Before a step is chosen: process results that are to come if it may have drafts, which go on from there."""
        if self.most and loop.count_running(self._scheduler) * 2 <= MOST_ROWS:
            loop.process_pending(self._scheduler)

    def draft(self, batch: ScheduleBatch) -> list[list[int]]:
        """Drafts for each request of ``batch``, which is about to run; empty if it is a plain step."""
        if not self.most or not verify.can_verify(batch):
            return []
        reqs = batches.list_batch(batch)
        count = self._choose_count(batch, len(reqs))
        drafts = [self._draft(req, count) for req in reqs] if count else []
        if not any(drafts):
            self._acceptance.record_plain()
            return []
        return drafts

    def _choose_count(self, batch: ScheduleBatch, requests: int) -> int:
        most = min(self.most, MOST_ROWS // requests - 1)
        if self._predictor is None or most < 1:
            return max(most, 0)
        tp, tokens = self._scheduler.layouts.layout.tp, batches.count_step_tokens(batch)
        return choose_count(self._predictor, self._acceptance, tp, requests, tokens, most)

    def _draft(self, req: Req, count: int) -> list[int]:
        output = host.get_output(req)
        count = min(count, verify.count_allowed(req))
        if count < 1:
            return []
        return self._drafter.draft(req.pat_family, host.get_name(req), req.origin_input_ids, output, count)

    def record(self, checked: verify.Checked) -> None:
        """Note how many drafts of each request were right, before their tokens go out."""
        self._acceptance.record([len(drafted) for drafted in checked.drafts], checked.right)
        for req, drafted, right in zip(checked.reqs, checked.drafts, checked.right, strict=True):
            steps, proposed, correct = req.pat_drafts
            req.pat_drafts = steps + bool(drafted), proposed + len(drafted), correct + right

    def add_drafts_to_output(self, output: Any, told: list[Req]) -> None:
        """Add what was drafted to an output about the requests ``told``, if anything is."""
        if self.most:
            for key, values in zip(KEYS, zip(*(req.pat_drafts for req in told), strict=True), strict=True):
                outputs.add_info(output, key, list(values))
