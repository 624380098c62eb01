"""An engine for the admitter that ends samples when it is told to; after each event all must be accounted for."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from sglang_pat.rollout import state
from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.records import (
    Abort,
    Action,
    Judge,
    Launch,
    NeedPrompts,
    Output,
    PromptKey,
    ReturnGroup,
    RoundOver,
    SampleId,
    Span,
    Summary,
)  # fmt: skip
from sglang_pat.rollout.rules import Rules


def dumps(admitter: Admitter) -> bytes:
    """All that it knows."""
    return admitter.state_dict()["admitter"]


def loads(data: bytes, rules: Rules | None = None) -> Admitter:
    """The admitter in another process, where a round that was under way has not happened."""
    found = Admitter(rules or state.load_admitter(data, "it")[0])
    found.load_state_dict({"admitter": data}, "it")
    return found


def fixed_length(key: PromptKey, number: int) -> int:
    """The length of a response, always the same; short mostly."""
    value = (key.epoch * 7919 + key.index * 104729 + number * 1299709) % 97
    return 1 + (value % 11 if value % 5 else 3 * value)


AGAIN = 1000
"""Added to the number of a response for each attempt before this one."""


class World:
    """Runs what the admitter starts.

    Attributes:
        running: tokens that each sample had when it was started; ``stopping``: those of them to be aborted.
        bound: ``max_deferrals``, the largest that there was.
        judging: groups that wait for a verdict.
        asked: prompts that the round has asked for and did not get.
        returned: groups of rounds that are over, in order; ``batch``: of the present one.
        filtered: keys of rounds that are over; ``useless``: of the present one, with their tokens.
        made: tokens generated in all; ``kept``: returned, ``wasted``: filtered.
    """

    def __init__(self, rules: Rules, length: Callable[[PromptKey, int], int] = fixed_length) -> None:
        self.admitter = Admitter(rules)
        self.length = length
        self.running: dict[SampleId, int] = {}
        self.stopping: list[SampleId] = []
        self.judging: list[PromptKey] = []
        self.asked = 0
        self.useful: set[PromptKey] = set()
        self.returned: list[PromptKey] = []
        self.batch: list[PromptKey] = []
        self.filtered: list[PromptKey] = []
        self.useless: dict[PromptKey, int] = {}
        self.rounds: list[Summary] = []
        self.version = 0
        self.made = 0
        self.kept = 0
        self.kept_in_batch = 0
        self.wasted = 0
        self.launched: list[SampleId] = []
        self.bound = rules.max_deferrals

    def of(self, sample: SampleId) -> int:
        """Tokens of a response: another attempt that does not go on is another draw."""
        attempt = 1 if self.admitter.rules.mode == "partial" else sample.attempt
        return self.length(sample.key, sample.number + AGAIN * (attempt - 1))

    # -- what may happen -------------------------------------------------------------------------------

    def feed(self, epoch: int, indices, end: bool = False) -> None:
        prompts = [((epoch, i), f"prompt {i}") for i in indices]
        self.asked = 0 if end else max(0, self.asked - len(prompts))
        self._do(self.admitter.feed(prompts, end_of=epoch if end else None))

    def end_prompts(self) -> None:
        self.asked = 0
        self._do(self.admitter.end_prompts())

    def begin(self) -> None:
        self.version += 1
        self._before = self.made, list(self.launched), set(self.useful)
        self._do(self.admitter.begin(self.version))

    def finish(self, sample: SampleId) -> None:
        """A sample ends, perhaps while its abort is on the way."""
        had = self.running.pop(sample)
        if sample in self.stopping:
            self.stopping.remove(sample)
        self._do(self.admitter.record_finished(sample, self._output(self.of(sample) - had, "stop")))

    def stop(self, sample: SampleId, tokens: int) -> None:
        """A sample's abort is confirmed after it made so many more tokens (at most all but one)."""
        had = self.running.pop(sample)
        if sample in self.stopping:
            self.stopping.remove(sample)
        most = self.of(sample) - had - 1
        self._do(self.admitter.record_stopped(sample, self._output(min(tokens, most), "")))

    def judge(self, key: PromptKey, keep: bool) -> None:
        self._note_verdict(key, keep)
        self._do(self.admitter.record_verdict(key, keep))

    def judge_all(self, verdicts: dict[PromptKey, bool]) -> None:
        for key, keep in verdicts.items():
            self._note_verdict(key, keep)
        self._do(self.admitter.record_verdicts(verdicts.items()))

    def _note_verdict(self, key: PromptKey, keep: bool) -> None:
        self.judging.remove(key)
        self.useful.discard(key)
        if keep:
            self.useful.add(key)
        else:
            group = next(group for group in self.admitter.state.round.groups if group.key == key)
            self.useless[key] = group.tokens

    def cancel(self) -> None:
        self._do(self.admitter.cancel())

    def save_and_restore(self) -> None:
        """Go on in another process, where a round that was under way has not happened."""
        data, under_way = dumps(self.admitter), self.admitter.state.round is not None
        self.admitter = loads(data)
        assert dumps(self.admitter) == data
        if under_way:
            self.running, self.stopping = {}, []
            self.made = self._before[0]
            self._undo()

    def _undo(self) -> None:
        """The round has not happened."""
        _, self.launched, self.useful = self._before
        self._forget()

    def _forget(self) -> None:
        self.batch, self.kept_in_batch, self.useless, self.judging, self.asked = [], 0, {}, [], 0

    def change(self, **rules) -> None:
        """Other rules from now on, between two rounds."""
        new = msgspec.structs.replace(self.admitter.rules, **rules)
        self.admitter = loads(dumps(self.admitter), new)
        self.bound = max(self.bound, new.max_deferrals)

    def _output(self, tokens: int, reason: str) -> Output:
        self.made += tokens
        return Output(spans=[Span(self.version, tokens)] if tokens else [], finish_reason=reason)

    # -- what the admitter wants -----------------------------------------------------------------------

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Launch(sample, prompt, prefix):
                    assert sample not in self.launched, "an attempt is made once"
                    assert prompt == f"prompt {sample.index}"
                    had = prefix.tokens if prefix else 0
                    assert had < self.of(sample)
                    assert not (had and self.admitter.rules.mode != "partial")
                    self.launched.append(sample)
                    self.running[sample] = had
                case Abort(sample):
                    assert sample in self.running
                    assert sample not in self.stopping
                    self.stopping.append(sample)
                case Judge(group):
                    self.judging.append(group.key)
                case NeedPrompts(prompts):
                    assert self.admitter.state.round.epoch not in self.admitter.state.ended
                    self.asked += prompts
                case ReturnGroup(group):
                    self._returned(group)
                case RoundOver(summary):
                    assert not self.running
                    if summary.cancelled:
                        self._undo()
                    else:
                        assert summary.returned == len(self.batch)
                        assert summary.filtered == len(self.useless)
                        self.returned += self.batch
                        self.kept += self.kept_in_batch
                        self.filtered += self.useless
                        self.wasted += sum(self.useless.values())
                    if self.admitter.rules.mode != "partial":
                        self.useful -= {g.key for g in (*self.admitter.state.fresh, *self.admitter.state.waiting)}
                    self._forget()
                    self.rounds.append(summary)
        self.check()

    def _returned(self, group) -> None:
        rules = self.admitter.rules
        assert group.key not in (*self.returned, *self.batch, *self.filtered)
        assert not rules.filter_groups or group.key in self.useful
        assert len(group.list_kept()) == rules.num_responses == len({sample.number for sample in group.list_kept()})
        for sample in group.list_kept():
            output = sample.output
            assert output.finish_reason == "stop"
            assert output.tokens == self.of(group.get_sample_id(sample))
            least = self.version - (rules.max_staleness if rules.mode == "partial" else 0)
            assert all(least <= span.version <= self.version for span in output.spans)
        assert group.deferrals <= self.bound
        self.batch.append(group.key)
        self.kept_in_batch += sum(sample.output.tokens for sample in group.list_kept())

    def check(self) -> None:
        """Drawn = returned + filtered + deferred + running; every prompt in one place; every token somewhere."""
        state = self.admitter.state
        inside = [] if state.round is None else state.round.groups
        left = [] if state.round is None else [*state.round.taken, *state.round.filtered]
        assert state.drawn == state.returned + state.filtered + len(state.waiting) + len(inside)
        places = [(group.epoch, group.index) for group in (*state.fresh, *state.waiting, *inside, *left)]
        assert len(places) == len(set(places))
        assert not {*self.returned, *self.filtered}.intersection(places)
        assert len(places) + len(self.returned) + len(self.filtered) == state.fed
        alive = {(epoch, index, number) for epoch, index, number, _ in self.running}
        assert alive == {(g.epoch, g.index, s.number) for g in (*inside, *left) for s in g.samples if s.alive}
        assert all(group.deferrals <= self.bound for group in state.waiting)
        held = sum(group.tokens for group in (*state.waiting, *inside, *left))
        thrown = state.thrown + (state.round.thrown if state.round else 0)
        assert self.made == self.kept + self.wasted + held + thrown
        if state.round is None:
            assert not self.running


class Clock:
    """Runs a :class:`World` by time: a token a step for every sample, however many; ends in the order of time."""

    def __init__(
        self,
        world: World,
        useful: Callable[[PromptKey], bool] = lambda key: True,
        more: Callable[[int], None] | None = None,
    ) -> None:
        self.world = world
        self.useful = useful
        self.more = more or (lambda prompts: world.end_prompts())

    def round(self) -> Summary:
        """One round; aborts are confirmed and verdicts given at once."""
        world, now, began, ends = self.world, 0, {}, {}
        number = len(world.rounds)
        world.begin()
        while len(world.rounds) == number:
            for sample, had in world.running.items():
                if sample not in began:
                    began[sample], ends[sample] = now, now + world.of(sample) - had
            if world.judging:
                key = world.judging[0]
                world.judge(key, self.useful(key))
            elif world.asked:
                self.more(world.asked)
            elif world.stopping:
                sample = world.stopping[0]
                world.stop(sample, now - began[sample])
            else:
                sample = min(world.running, key=ends.__getitem__)
                now = ends[sample]
                world.finish(sample)
        return world.rounds[-1]


def strict(**given) -> Rules:
    return Rules(**{"num_prompts": 4, "num_responses": 2, "eta_prompts": 1.5, "eta_responses": 1.5} | given)


def whole_epoch(rules: Rules, prompts: int, length=fixed_length, epoch: int = 0, useful=lambda key: True) -> World:
    world = World(rules, length)
    world.feed(epoch, range(prompts), end=True)
    clock = Clock(world, useful)
    while world.admitter.state.fresh or world.admitter.state.waiting:
        clock.round()
    return world
