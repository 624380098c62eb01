"""The admitter: a state machine without sockets, tasks or clock.

    feed → begin → Launch … → record_finished → ReturnGroup … → Abort … → record_stopped … → RoundOver → begin …

Every method returns what is to be done (``records.Action``), in order.  What it is told may come in any order and any
number at once; what it does depends on that order only.  Its whole state is one :class:`~.state.State`.

At any time each prompt that was ever started is returned, filtered, waiting or in the round: nothing is lost, nothing
comes twice.  A prompt is passed over in at most ``max_deferrals`` rounds: see
:meth:`.deadlines.Deadlines.count_due_groups`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sglang_pat.rollout.active_round import ActiveRound, end_round, open_round
from sglang_pat.rollout.deadlines import Deadlines
from sglang_pat.rollout.estimates import with_cost
from sglang_pat.rollout.launch_order import BY_NAME
from sglang_pat.rollout.records import Action, Output, PromptKey, RoundOver, SampleId, Summary
from sglang_pat.rollout.rules import Rules
from sglang_pat.rollout.state import State, check_rules, dump_admitter, load_admitter


class Admitter:
    """Decides which prompts run in which round.

    Attributes:
        rules: what is wanted.
        state: everything else.
        before: the state without the round that is under way, or was last, and with what was fed during it.
    """

    def __init__(self, rules: Rules, state: State | None = None) -> None:
        self.rules = rules
        self.state = self.before = state or State()
        self._mode = BY_NAME[rules.mode](rules)
        self._deadlines = Deadlines(rules)
        self._active: ActiveRound | None = None
        """The round; None between two."""

    # -- prompts ---------------------------------------------------------------------------------------

    def feed(self, prompts: Iterable[tuple[Sequence[int], Any]], end_of: int | None = None) -> list[Action]:
        """Add prompts, each with a key that never came before; ``end_of``: no others of this epoch come after them.

        A round that is under way may start them at once.

        Raises:
            ValueError: a key that was there already or whose epoch is over; then none of them is taken.
        """
        prompts = list(prompts)
        self.state.feed(prompts, end_of)
        if self._active is None:
            return []
        self.before.feed(prompts, end_of)
        return self._add_end_of_round(self._active.add_prompts(len(prompts)))

    def end_prompts(self) -> list[Action]:
        """Nobody feeds the prompts that the round asked for: it ends with those that it has."""
        return self._add_end_of_round(self._active.end_prompts()) if self._active else []

    # -- its state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, bytes]:
        """All that it knows, for a checkpoint: ``{"admitter": JSON}``.

        A round that is under way will not have happened, when it is loaded.
        """
        return {"admitter": dump_admitter(self.rules, self.before if self._active else self.state)}

    def load_state_dict(self, state: Mapping[str, Any], source: str = "saved admitter") -> None:
        """Go on where :meth:`state_dict` was taken, in this process or another, under the rules of this admitter.

        Args:
            state: what it gave; other keys are left alone.
            source: where it comes from, for the message.

        Raises:
            ValueError: one line: no such state, of another version, or one that does not go with the rules.
            RuntimeError: a round is under way.
        """
        if self._active is not None:
            raise RuntimeError(f"round {self._active.round.number} is not over")
        rules, saved = load_admitter(state["admitter"], source)
        check_rules(rules, self.rules, saved, source)
        self.state = saved

    def make_snapshot(self) -> State:
        """The state as it is now, to :meth:`restore` it.

        Raises:
            RuntimeError: a round is under way.
        """
        return self.state.copy()

    def restore(self, state: State) -> None:
        """Go on from a :meth:`make_snapshot`; only between two rounds."""
        assert self._active is None, "a round is under way"
        self.state = state.copy()

    @property
    def epoch(self) -> int | None:
        """The epoch that prompts are drawn from: it is over before the next one begins.  None without prompts."""
        return self.state.epoch

    @property
    def wanted(self) -> int:
        """Prompts to :meth:`feed` before the next round, so that it can be a whole one; 0 at the end of an epoch."""
        epoch = self.epoch
        if self.state.round is not None or (epoch is not None and epoch in self.state.ended):
            return 0
        most = self.rules.max_deferrals
        owed = self._deadlines.count_due_groups([most - group.deferrals for group in self.state.waiting])
        return max(0, self._mode.count_needed(self.state, owed) - self.state.count_fresh(epoch))

    # -- a round ---------------------------------------------------------------------------------------

    def begin(self, version: int) -> list[Action]:
        """Start a round with the weights ``version``.

        Raises:
            ValueError: there are no prompts, or too few of an epoch that has not ended; nothing changes.
            RuntimeError: a round is under way.
        """
        before = self.state.copy()
        actions = open_round(self.rules, self.state, self._mode, self._deadlines, version)
        self.before = before
        self._active = ActiveRound(self.rules, self.state, self._mode, self._deadlines)
        return self._add_end_of_round(actions + self._active.get_more_actions())

    def record_finished(self, sample: SampleId, output: Output) -> list[Action]:
        """A sample has ended by itself; ``output`` is what came after its prefix."""
        return self._add_end_of_round(self._active.record_finished(sample, output)) if self._active else []

    def record_stopped(self, sample: SampleId, output: Output) -> list[Action]:
        """A sample is out of the engine before its end; ``output`` is what came after its prefix.

        One that nobody wanted to stop is started again.
        """
        return self._add_end_of_round(self._active.record_stopped(sample, output)) if self._active else []

    def record_verdict(self, key: Sequence[int], keep: bool) -> list[Action]:
        """The verdict on a group of :class:`~.records.Judge`: a useless one leaves for good."""
        return self.record_verdicts([(key, keep)])

    def record_verdicts(self, verdicts: Iterable[tuple[Sequence[int], bool]]) -> list[Action]:
        """Record several verdicts that were found together: a batch that they fill waits for none of them, so that no
        useless group is left over, and nothing is started in place of one."""
        return self._add_end_of_round(self._active.record_verdicts(verdicts)) if self._active else []

    def record_reward(self, sample: SampleId, reward: float) -> list[Action]:
        """The reward of a response that has ended: kept with it as long as it is."""
        if self._active is not None:
            self._active.record_reward(sample, reward)
        return []

    def list_chosen(self, key: PromptKey) -> list[int] | None:
        """Numbers of the responses that a prompt of the round has, and may be returned with; None: the round has no
        such prompt."""
        return self._active.list_chosen(key) if self._active else None

    def cancel(self) -> list[Action]:
        """Give the round up: when it is over it will not have happened, but for the tokens that it cost."""
        return self._add_end_of_round(self._active.cancel()) if self._active else []

    def record_round_time(self, summary: Summary, seconds: float) -> Summary:
        """A round is over, and took so long: its summary with what it cost (``estimates.py``).  Called once a round."""
        return with_cost(self.rules, self.state.cost, self.state.bias, self.state.keep_rate, summary, seconds)

    def _add_end_of_round(self, actions: list[Action]) -> list[Action]:
        """Actions that a round wants done; its end is among them if that was it."""
        ended = self._active
        if ended is None or not ended.over:
            return actions
        self._active = None
        if ended.round.cancelled:
            self.state = self.before
        return [*actions, RoundOver(end_round(self.rules, self.state, ended.round, ended.kept))]
