"""Drafts on a rank (:class:`Speculation`): which decode steps check some, and how many.

All ranks of a group decide alike: by their requests, the texts taken in since the group was entered or the weights
changed, and the profile.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_pat.host import batches, loop, outputs, verify
from sglang_pat.host import requests as host
from sglang_pat.host.batches import ScheduleBatch
from sglang_pat.host.features import Rows
from sglang_pat.host.requests import Req
from sglang_pat.messages import EndedText, SiblingTexts, StepCounts, get_most_drafts
from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import Profile
from sglang_pat.rank.draft_model import Learnt
from sglang_pat.rank.model_drafts import ModelDrafts
from sglang_pat.speculate.acceptance import GAIN, KEYS, MOST_ROWS, OF_MODEL, Acceptance, choose_counts
from sglang_pat.speculate.drafter import CONTEXT, Drafter

if TYPE_CHECKING:
    from sglang_pat.switch.scheduler import SwitchingScheduler

Drafts = tuple[int, int, int]
"""Values of ``KEYS`` (``speculate/acceptance.py``)."""


def begin(req: Req) -> None:
    """Note that ``req`` is new."""
    req.pat_drafts = (0, 0, 0)


def _get_texts(req: Req) -> tuple[int, str, Sequence[int], Sequence[int]]:
    """The family of the prompt, the request's name, its prompt and what it has generated."""
    return req.pat_family, host.get_name(req), host.get_prompt(req), host.get_output(req)


class Speculation:
    """What a rank drafts.

    Attributes:
        most: most drafts of a request in one step; 0 for none at all.
        acceptance: how often drafts were right; at a switch that of the new leader.
        chances: probability of the first, second, … draft of a request that it and those before it are right, on
            average at the last choice by the profile; empty before.
        draft_seconds: seconds of the model for one draft of each request, by the profile; 0 if that choice had none.
    """

    def __init__(self, scheduler: SwitchingScheduler, profile: Profile | None) -> None:
        self._scheduler = scheduler
        self.most = scheduler.adaptive.most_drafts
        self._predictor = Predictor(profile) if profile else None
        self._seconds = np.zeros(1)
        """Seconds of a step with 0, 1, … drafts of all requests together, at the last choice by the profile."""
        self._drafter, self.acceptance = Drafter(), Acceptance(self.most)
        self._model = ModelDrafts(scheduler) if scheduler.adaptive.draft_model else None
        self._model_seconds = 0.0
        if self._model and self._predictor:
            self._model_seconds = self._model.share * self._predictor.step_seconds(scheduler.adaptive.base.tp, 1, 1)
        self._wanted = False
        self._counts: list[int] = []
        """Number of drafts that each request was to have in the last step."""
        self._matches: list[int] = []
        """Match of each request at the last choice; empty where nothing is chosen between."""
        self.chances: list[float] = []
        self.draft_seconds = 0.0

    def forget(self) -> None:
        """Forget all requests and texts: the weights are others."""
        self._drafter.forget()
        if self._model:
            self._model.forget()

    def read_learnt(self, reqs: list[Req]) -> dict[str, Learnt]:
        """What the model has learnt of ``reqs``, by name, for ranks that are to take them over."""
        return self._model.read(reqs) if self._model else {}

    def enter_group(self, reqs: list[Req], learnt: Mapping[str, Learnt], acceptance: Acceptance) -> None:
        """Go on in another group of ranks, with its ``reqs`` that decode.

        Args:
            learnt: what the model has learnt elsewhere of those that this rank did not have, by name.
            acceptance: the leader's.
        """
        self.acceptance = acceptance
        self._drafter.forget()
        if self._model:
            self._model.enter_group(reqs, learnt)

    def record_ended(self, reqs: list[Req]) -> None:
        """Take in those of ``reqs`` that have ended, for their siblings, and tell of them: some are elsewhere."""
        scheduler = self._scheduler
        for req in reqs if self.most else ():
            if self._model and host.has_ended(req):
                self._model.end(req)
            if get_most_drafts(host.get_sampling_params(req)) == 0:
                continue
            if host.has_ended(req):
                self._drafter.end(*_get_texts(req))
            if host.is_answer_due(req) and scheduler.is_leader:
                family, name, prompt, output = _get_texts(req)
                scheduler.channel.send(
                    EndedText(
                        rank=scheduler.rank,
                        family=family,
                        name=name,
                        context=array("i", prompt[-CONTEXT:]).tobytes(),
                        output=array("i", output).tobytes(),
                        weight_updates=scheduler.layouts.weight_version,
                    )
                )

    def take_in(self, siblings: SiblingTexts) -> None:
        """Take in responses that ended elsewhere."""
        for text in siblings.texts:
            self._drafter.end(text.family, text.name, array("i", text.context), array("i", text.output))

    def settle(self) -> None:
        """Find out whether the next step is to check drafts, if it decodes.

        If so, results that are to come are processed first: the drafts follow them.
        """
        self._drafter.begin_step()
        self._wanted = any(self._choose(loop.list_running_with_last(self._scheduler))) if self.most else False
        if self._wanted:
            loop.process_pending(self._scheduler)

    def draft(self, batch: ScheduleBatch) -> list[list[int]]:
        """Drafts for each request of ``batch``, which is about to run; none at all if it is a plain step."""
        if not self.most or not verify.can_verify(batch):
            return []
        self.acceptance.pass_step()
        reqs = batches.list_batch(batch)
        self._counts = self._choose(reqs) if self._wanted else []
        drafts = self._draft(reqs) if self._counts else []
        if any(drafts):
            return drafts
        self._record_right([0] * len(reqs))
        return []

    def _draft(self, reqs: list[Req]) -> list[list[int]]:
        """Draft as many tokens for each of ``reqs`` as were chosen, by the model or from texts."""
        counts = self._counts
        by_model = [i for i, match in enumerate(self._matches) if match == OF_MODEL and counts[i]]
        drafts = [
            self._drafter.draft(*_get_texts(req), count) if count and number not in by_model else []
            for number, (req, count) in enumerate(zip(reqs, counts, strict=True))
        ]
        if self._model and by_model:
            model_drafts = self._model.draft([reqs[i] for i in by_model], max(counts[i] for i in by_model))
            for i, drafted in zip(by_model, model_drafts, strict=True):
                drafts[i] = drafted[: counts[i]]
        return drafts

    def list_rows(self, batch: ScheduleBatch) -> Rows | None:
        """Tokens of a step of ``batch``, about to run, from which the model learns."""
        return self._model.list_rows(batch) if self._model else None

    def take(self, rows: Rows | None, result: Any) -> None:
        """Keep what the model is to learn of a step that was just launched."""
        if self._model:
            self._model.take(rows, result)

    def learn(self, reqs: list[Req], result: Any) -> None:
        """Have the model learn from a step of ``reqs`` that has been processed."""
        if self._model:
            self._model.learn(reqs, result)

    def _find_matches(self, reqs: list[Req], allowed: Sequence[int]) -> list[int]:
        """The better of the two matches of each request, by what was right of late; 0 where it may have no drafts."""
        matches = [
            self._drafter.find_match(*_get_texts(req)) if count else 0 for req, count in zip(reqs, allowed, strict=True)
        ]
        if self._model:
            for i, (req, count) in enumerate(zip(reqs, allowed, strict=True)):
                if count and self._model.knows(req):
                    matches[i] = max(matches[i], OF_MODEL, key=lambda match: sum(self.acceptance.estimate(match)))
        return matches

    def _choose(self, reqs: list[Req]) -> list[int]:
        """Number of drafts that each of ``reqs`` is to have in a step."""
        most, tokens = self._count_rows() - len(reqs), loop.count_decoding_tokens(self._scheduler)
        if not reqs or most < 1 or loop.has_grammar(self._scheduler):
            return []
        allowed = [min(self.most, max(verify.count_allowed(req), 0)) for req in reqs]
        if self._predictor is None:
            self._matches = self._find_matches(reqs, allowed) if self._model else []
            return [min(count, most // len(reqs)) for count in allowed]
        most, tp = min(most, self.most * len(reqs)), self._scheduler.layouts.layout.tp
        rows = len(reqs) + np.arange(most + 1)
        self._seconds = np.asarray(self._predictor.step_seconds(tp, rows, tokens / len(reqs) * rows))
        tokens_a_second = rows / self._seconds  # if all were right
        if tokens_a_second.max() < GAIN * tokens_a_second[0]:
            return []
        self._matches = self._find_matches(reqs, allowed)
        self.draft_seconds = self._model_seconds if OF_MODEL in self._matches else 0.0
        if self.draft_seconds:
            drafts = np.ceil(np.arange(most + 1) / len(reqs))  # one after the other, each for all requests
            self._seconds = self._seconds + self.draft_seconds * drafts
        chances = [self.acceptance.estimate(match)[:count] for match, count in zip(self._matches, allowed, strict=True)]
        self.chances = [sum(sum(each[place : place + 1]) for each in chances) / len(reqs) for place in range(self.most)]
        return choose_counts(chances, self._seconds)

    def _count_rows(self) -> int:
        """Most rows of a step: attention back ends have room for as many as may run, graphs for those captured."""
        graph = self._scheduler.layouts.get_largest_graph() or MOST_ROWS
        return min(MOST_ROWS, graph, loop.get_max_running(self._scheduler))

    def record(self, checked: verify.Checked) -> None:
        """Note how many drafts of each request were right, before their tokens go out."""
        self._record_right(checked.right)
        if self._scheduler.is_leader:
            drafts, right = sum(map(len, checked.drafts)), sum(checked.right)
            saved = 0.0
            if self._predictor is not None:
                plain_steps = 1 + right / len(checked.reqs)
                saved = float(plain_steps * self._seconds[0] - self._seconds[drafts])
            self._scheduler.load.count(
                StepCounts(draft_steps=1, drafts=drafts, right_drafts=right, seconds_saved=saved)
            )
        for req, drafted, right in zip(checked.reqs, checked.drafts, checked.right, strict=True):
            steps, proposed, correct = req.pat_drafts
            req.pat_drafts = steps + bool(drafted), proposed + len(drafted), correct + right

    def _record_right(self, right: Sequence[int]) -> None:
        """Learn how many drafts of each request were right, if the profile has chosen them."""
        for match, count, correct in zip(self._matches, self._counts, right, strict=False):
            self.acceptance.record(match, count, correct)

    def add_drafts_to_output(self, output: Any, reqs: list[Req]) -> None:
        """Add what was drafted to an output about the requests ``reqs``, if anything is."""
        if self.most:
            for key, values in zip(KEYS, zip(*(req.pat_drafts for req in reqs), strict=True), strict=True):
                outputs.add_info(output, key, list(values))
