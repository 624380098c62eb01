"""The admitter: which prompts run in which round."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_pat.admission import saved
from sglang_pat.admission.admitter import Admitter, StaleOutput
from sglang_pat.admission.records import Judge, Key, Output, Return, Span
from sglang_pat.admission.rules import Rules

from .admission_reference import rounds as reference_rounds
from .admission_world import Clock, World, fixed_length
from .drawn import examples

pytestmark = pytest.mark.unit


def whole_epoch(rules: Rules, prompts: int, length=fixed_length, epoch: int = 0, useful=lambda key: True) -> World:
    world = World(rules, length)
    world.feed(epoch, range(prompts), end=True)
    clock = Clock(world, useful)
    while world.admitter.state.fresh or world.admitter.state.waiting:
        clock.round()
    return world


# -- against a reference -----------------------------------------------------------------------------------


all_rules = st.builds(
    Rules,
    mode=st.sampled_from(["strict", "reorder"]),
    num_prompts=st.integers(1, 6),
    num_responses=st.integers(1, 4),
    eta_prompts=st.sampled_from([1.0, 1.1, 1.25, 1.5, 2.0, 3.0]),
    eta_responses=st.sampled_from([1.0, 1.25, 2.0]),
    max_deferrals=st.integers(0, 4),
)


@examples(300)
@given(rules=all_rules, prompts=st.integers(1, 40), salt=st.integers(0, 1000), spread=st.integers(1, 60))
def test_rounds_are_those_of_the_reference(rules: Rules, prompts: int, salt: int, spread: int):
    def length(key: Key, number: int) -> int:
        return 1 + hash((key.index, number, salt)) % spread ** (1 + (key.index + salt) % 3)

    world = World(rules, length)
    world.feed(0, range(prompts), end=True)
    found = []
    clock = Clock(world)
    while world.admitter.state.fresh or world.admitter.state.waiting:
        before = len(world.returned)
        summary = clock.round()
        found.append((summary.kind, world.returned[before:], summary.thrown))
    assert found == reference_rounds(rules, 0, list(range(prompts)), length)


@examples(100)
@given(rules=all_rules, prompts=st.integers(1, 60), modulus=st.integers(2, 5))
def test_in_an_epoch_each_prompt_is_trained_once(rules: Rules, prompts: int, modulus: int):
    world = whole_epoch(rules, prompts)
    assert sorted(world.returned) == [Key(0, index) for index in range(prompts)]
    assert all(summary.returned == min(rules.num_prompts, left) for summary, left in zip(
        world.rounds, range(prompts, 0, -rules.num_prompts), strict=True))  # fmt: skip


# -- anything may happen -----------------------------------------------------------------------------------


class Anything(RuleBasedStateMachine):
    """Events in any order; :class:`World` checks after each that nothing is lost, doubled or too old."""

    @initialize(
        mode=st.sampled_from(["strict", "reorder", "partial"]), prompts=st.integers(1, 4), responses=st.integers(1, 3),
        eta=st.sampled_from([1.0, 1.25, 1.5, 2.5]), bound=st.integers(0, 3), filtering=st.booleans(),
    )  # fmt: skip
    def start(self, mode, prompts, responses, eta, bound, filtering):
        self.world = World(
            Rules(
                mode=mode, num_prompts=prompts, num_responses=responses, eta_prompts=eta, max_deferrals=bound,
                max_staleness=bound, filter_groups=filtering,
            )
        )  # fmt: skip
        self.next = [0, 0]

    def _idle(self) -> bool:
        return self.world.admitter.state.round is None

    @rule(count=st.integers(1, 9), end=st.booleans())
    def feed(self, count, end):
        epoch, index = self.next
        self.world.feed(epoch, range(index, index + count), end=end)
        self.next = [epoch + 1, 0] if end else [epoch, index + count]

    @precondition(_idle)
    @rule(jump=st.integers(0, 2))
    def begin(self, jump):
        self.world.version += jump * (jump > 1)
        before = saved.dumps(self.world.admitter)
        try:
            self.world.begin()
        except ValueError:
            assert saved.dumps(self.world.admitter) == before
            assert self.world.admitter.wanted > 0 or self.world.admitter.epoch is None

    @rule(picks=st.lists(st.integers(0, 1 << 16), min_size=1, max_size=6))
    def finish(self, picks):
        for pick in picks:
            if self.world.running:
                self.world.finish(list(self.world.running)[pick % len(self.world.running)])

    @rule(picks=st.lists(st.integers(0, 1 << 16), min_size=1, max_size=6), tokens=st.integers(0, 9))
    def stop(self, picks, tokens):
        for pick in picks:
            if self.world.stopping:
                self.world.stop(self.world.stopping[pick % len(self.world.stopping)], tokens)

    @rule(pick=st.integers(0, 1 << 16), tokens=st.integers(0, 9))
    def aborted_by_somebody_else(self, pick, tokens):
        if self.world.running:
            self.world.stop(list(self.world.running)[pick % len(self.world.running)], tokens)

    @rule(pick=st.integers(0, 1 << 16), keep=st.booleans())
    def judge(self, pick, keep):
        if self.world.judging:
            self.world.judge(self.world.judging[pick % len(self.world.judging)], keep)

    @rule()
    def cancel(self):
        self.world.cancel()

    @rule()
    def save_and_restore(self):
        self.world.save_and_restore()

    @invariant()
    def accounted(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        """Whatever happened, what is left can be finished."""
        if not hasattr(self, "world"):
            return
        world = self.world
        epoch, index = self.next
        world.feed(epoch, range(index, index + 1), end=True)
        for _ in range(100 * world.admitter.state.fed):  # a prompt may be started in several rounds
            if world.admitter.state.round is None:
                if not (world.admitter.state.fresh or world.admitter.state.waiting):
                    break
                world.begin()
            elif world.judging:
                world.judge(world.judging[0], True)
            elif world.running:
                world.finish(next(iter(world.running)))
        assert len(world.returned) + len(world.filtered) == world.admitter.state.fed


TestAnything = Anything.TestCase
TestAnything.settings = settings(examples(150), stateful_step_count=60)


# -- by hand -----------------------------------------------------------------------------------------------


def strict(**given) -> Rules:
    return Rules(**{"num_prompts": 4, "num_responses": 2, "eta_prompts": 1.5, "eta_responses": 1.5} | given)


def test_a_short_round_starts_more_and_keeps_the_first():
    """Prompts 1 and 4 are long; six are started with three samples each, of which two are kept."""

    def length(key: Key, number: int) -> int:
        return 100 + key.index if key.index in (1, 4) else 5 + number + key.index

    world = World(strict(), length)
    world.feed(0, range(20))
    summary = Clock(world).round()
    assert (summary.kind, world.returned) == ("short", [Key(0, 0), Key(0, 2), Key(0, 3), Key(0, 5)])
    assert len(world.launched) == 6 * 3
    assert [group.key for group in world.admitter.state.waiting] == [Key(0, 1), Key(0, 4)]
    assert summary.ages == [1, 1]
    assert sorted(summary.kept_lengths) == [5, 6, 7, 8, 8, 9, 10, 11]


def test_a_long_round_takes_the_queue_when_it_holds_a_batch():
    def length(key: Key, number: int) -> int:
        return 100 if key.index % 3 == 0 else 5

    world = World(strict(), length)
    world.feed(0, range(60))
    clock = Clock(world)
    kinds = [clock.round().kind for _ in range(4)]
    assert kinds == ["short", "short", "long", "short"]
    assert world.returned[8:12] == [Key(0, 0), Key(0, 3), Key(0, 6), Key(0, 9)]
    assert len(world.launched) == 2 * 18 + 8 + 18, "a long round starts nothing more than it needs"


def test_a_prompt_that_was_passed_over_too_often_makes_a_long_round():
    def length(key: Key, number: int) -> int:
        return 100 if key.index == 0 else 5

    world = World(strict(eta_prompts=1.25, max_deferrals=3), length)
    world.feed(0, range(60))
    clock = Clock(world)
    kinds = [clock.round().kind for _ in range(5)]
    assert kinds == ["short", "short", "short", "long", "short"]
    assert world.returned[12] != Key(0, 0)
    assert Key(0, 0) in world.returned[12:16], "the others of a batch come from the fresh ones"


def test_the_last_round_of_an_epoch_is_what_is_left():
    world = whole_epoch(strict(), 10)
    assert [summary.returned for summary in world.rounds] == [4, 4, 2]
    assert world.rounds[-1].kind == "flush"


def test_the_same_prompts_come_again_in_the_next_epoch():
    world = whole_epoch(strict(), 10)
    world.feed(1, range(10), end=True)
    clock = Clock(world)
    while world.admitter.state.fresh or world.admitter.state.waiting:
        clock.round()
    assert sorted(world.returned) == [Key(epoch, index) for epoch in (0, 1) for index in range(10)]


@pytest.mark.parametrize(
    ("keys", "said"),
    [([(0, 3), (0, 3)], "was given before"), ([(0, 4), (0, 0)], "was given before"), ([(1, 0)], "epoch 1 is over")],
)
def test_keys_that_came_before_are_refused_whole(keys, said):
    admitter = Admitter(strict())
    admitter.feed([((0, 0), None)])
    admitter.feed([], end_of=1)
    before = saved.dumps(admitter)
    with pytest.raises(ValueError, match=said):
        admitter.feed([(key, None) for key in keys])
    assert saved.dumps(admitter) == before


def test_too_few_prompts_are_said():
    admitter = Admitter(strict())
    assert admitter.wanted == 6
    with pytest.raises(ValueError, match="there are no prompts"):
        admitter.begin(0)
    admitter.feed([((0, index), None) for index in range(3)])
    assert admitter.wanted == 3
    with pytest.raises(ValueError, match="3 prompts for a round of 4: feed more, or end epoch 0"):
        admitter.begin(0)


def test_tokens_of_other_weights_are_refused():
    admitter = Admitter(strict())
    admitter.feed([((0, index), None) for index in range(6)])
    launched = [action.sample for action in admitter.begin(7)]
    with pytest.raises(StaleOutput, match=r"weights \[6\] in a round of 7"):
        admitter.finished(launched[0], Output(spans=[Span(6, 3)], finish_reason="stop"))


def test_useless_groups_are_replaced_and_never_queued():
    """DAPO: prompts with even numbers teach nothing; one of them is long as well."""

    def length(key: Key, number: int) -> int:
        return 50 if key.index == 4 else 5 + key.index

    world = World(strict(filter_groups=True, eta_prompts=1.0), length)
    world.feed(0, range(20))
    Clock(world, useful=lambda key: key.index % 2 == 1).round()
    assert len(world.returned) == 4
    assert all(key.index % 2 for key in world.returned)
    assert Key(0, 2) in world.filtered
    assert all(group.key.index % 2 or group.key.index == 4 for group in world.admitter.state.waiting)


def test_a_group_whose_verdict_is_late_is_filtered_all_the_same():
    world = World(strict(filter_groups=True, num_responses=1, eta_responses=1.0, num_prompts=1, eta_prompts=2.0))
    world.feed(0, range(4))
    world.begin()
    first, second = list(world.running)
    world.finish(first)
    world.finish(second)
    world.judge(first.key, True)
    assert not world.rounds, "the other group waits for its verdict"
    world.judge(second.key, False)
    assert world.filtered == [second.key]
    assert not world.admitter.state.waiting


@pytest.mark.parametrize(("staleness", "order"), [(4, [0, 3, 4, 1, 2]), (3, [0, 3, 1, 2, 4])])
def test_interrupted_samples_go_on_where_they_were(staleness, order):
    """Capacity for three groups of one; each round keeps the first.

    With a bound of 3 the third round must return 1 or 2: in the fourth both would have to be returned.
    """
    rules = Rules(mode="partial", num_prompts=1, num_responses=1, eta_prompts=3.0, max_staleness=staleness)
    lengths = {0: 4, 1: 10, 2: 11, 3: 3, 4: 2}
    world = World(rules, lambda key, number: lengths[key.index])
    world.feed(0, range(5), end=True)
    clock = Clock(world)
    for _ in range(5):
        clock.round()
    assert [key.index for key in world.returned] == order
    assert world.admitter.state.thrown == 0
    assert world.made == sum(lengths.values())


def test_what_is_too_old_is_started_again():
    """Weights that are updated twice between two rounds."""
    rules = Rules(mode="partial", num_prompts=1, num_responses=1, eta_prompts=2.0, max_staleness=1)
    world = World(rules, lambda key, number: 4 if key.index == 0 else 10)
    world.feed(0, range(2), end=True)
    clock = Clock(world)
    clock.round()
    world.version += 1
    clock.round()
    assert world.admitter.state.thrown == 4
    assert world.made == 4 + 4 + 10


def test_expected_long_prompts_are_grouped():
    """reorder: with a bound of 2, what was passed over twice is forced, and with it go those that look long."""

    def length(key: Key, number: int) -> int:
        return 100 if key.index in (0, 1, 2) else 5

    rules = Rules(mode="reorder", num_prompts=4, num_responses=1, eta_prompts=1.75, max_deferrals=2)
    world = World(rules, length)
    world.feed(0, range(40))
    clock = Clock(world)
    kinds = [clock.round().kind for _ in range(3)]
    assert kinds == ["short", "short", "long"]
    assert {Key(0, 0), Key(0, 1), Key(0, 2)} <= set(world.returned[8:12])


# -- rules and files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mode", "loose"), ("num_prompts", 0), ("num_responses", 0), ("eta_prompts", 0.9), ("eta_responses", 0.5),
        ("eta_prompts", float("nan")), ("max_deferrals", -1), ("max_staleness", -1),
    ],
)  # fmt: skip
def test_bad_rules_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"^{field} is "):
        strict(**{field: value})


def test_every_response_counts_in_partial():
    with pytest.raises(ValueError, match="eta_responses is 1.5, must be 1 in partial"):
        strict(mode="partial")


def test_products_are_rounded_up_once():
    rules = Rules(num_prompts=10, num_responses=8, eta_prompts=1.1, eta_responses=1.25)
    assert (rules.started_prompts, rules.started_responses) == (11, 10)


def test_a_state_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    world = World(strict())
    world.feed(0, range(8))
    world.begin()
    file = tmp_path / "state.json"
    saved.save(world.admitter, file)
    before = file.read_bytes()
    assert saved.dumps(saved.loads(file.read_bytes())) == before
    world.finish(next(iter(world.running)))
    monkeypatch.setattr(saved.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        saved.save(world.admitter, file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("mode", ["strict", "reorder", "partial"])
def test_a_round_of_a_process_that_is_gone_has_not_happened(tmp_path, mode):
    rules = Rules(mode=mode, num_prompts=2, num_responses=2, eta_prompts=2.0, max_staleness=3)
    world = World(rules)
    world.feed(0, range(12))
    clock = Clock(world)
    clock.round()
    before = [group.key for group in world.admitter.state.waiting]
    kept = sum(group.tokens for group in world.admitter.state.waiting)
    world.begin()
    world.finish(next(iter(world.running)))
    saved.save(world.admitter, tmp_path / "state.json")
    state = saved.restore(tmp_path / "state.json").state
    assert state.round is None
    waiting = {group.key for group in state.waiting}
    assert set(before) <= waiting
    assert len(state.fresh) + len(state.waiting) + 2 == 12
    assert sum(group.tokens for group in state.waiting) >= kept
    assert all(sample.state in ("new", "done") for group in state.waiting for sample in group.samples)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not the state of an admitter"), (b"{}", "not the state"), (b"\xff", "not the state"),
        (b'{"version": 99, "rules": {"num_prompts": 1, "num_responses": 1}, "state": {}}', "version 99"),
    ],
)  # fmt: skip
def test_other_files_are_refused_in_one_line(tmp_path, content, said):
    file = tmp_path / "state.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=said) as error:
        saved.restore(file)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_state_of_another_mode_is_refused(tmp_path):
    saved.save(Admitter(strict()), tmp_path / "state.json")
    with pytest.raises(ValueError, match="^mode is 'partial'"):
        saved.restore(tmp_path / "state.json", Rules(mode="partial", num_prompts=1, num_responses=1))


def test_rewards_are_in_the_summary():
    admitter = Admitter(strict(filter_groups=True, num_responses=1, eta_responses=1.0, num_prompts=1, eta_prompts=2.0))
    admitter.feed([((0, index), None) for index in range(2)], end_of=0)
    first, second = [action.sample for action in admitter.begin(0)]
    for sample in (first, second):
        admitter.finished(sample, Output(spans=[Span(0, 3)], finish_reason="stop"))
    admitter.judged(first.key, False, 0.25)
    *_, over = admitter.judged(second.key, True, 0.75)
    assert (over.summary.kept_rewards, over.summary.filtered_rewards) == ([0.75], [0.25])
    assert over.summary.drawn == 2


@pytest.mark.parametrize("verdict", [None, False])
def test_what_a_cancelled_round_has_judged_is_judged_again(verdict):
    """partial keeps complete groups; without a good verdict they are not returned."""
    rules = Rules(mode="partial", num_prompts=2, num_responses=1, eta_prompts=1.0, filter_groups=True)
    admitter = Admitter(rules)
    admitter.feed([((0, index), None) for index in range(2)], end_of=0)
    first, second = [action.sample for action in admitter.begin(0)]
    admitter.finished(first, Output(spans=[Span(0, 3)], finish_reason="stop"))
    if verdict is not None:
        admitter.judged(first.key, verdict)
    admitter.cancel()
    admitter.stopped(second, Output(spans=[Span(0, 1)]))
    actions = admitter.begin(0)
    assert [action.group.key for action in actions if isinstance(action, Judge)] == [first.key]
    assert not [action for action in actions if isinstance(action, Return)]


def test_too_many_useless_groups_are_made_up_for_from_the_queue():
    world = World(strict(filter_groups=True, eta_prompts=1.25, max_deferrals=9), lambda key, number: 5 + key.index)
    world.feed(0, range(5))
    clock = Clock(world, useful=lambda key: key.index < 5 or key.index > 7)
    clock.round()
    assert [group.key.index for group in world.admitter.state.waiting] == [4]
    world.feed(0, range(5, 9), end=True)
    summary = clock.round()
    assert (summary.kind, summary.filtered) == ("short", 3)
    assert world.returned[4:] == [Key(0, 8), Key(0, 4)]


def test_versions_do_not_go_back():
    admitter = Admitter(strict())
    admitter.feed([((0, index), None) for index in range(6)])
    for action in admitter.begin(3):
        admitter.finished(action.sample, Output(spans=[Span(3, 1)], finish_reason="stop"))
    admitter.engine_lost()
    before = saved.dumps(admitter)
    with pytest.raises(ValueError, match="version is 2, the last round's was 3"):
        admitter.begin(2)
    assert saved.dumps(admitter) == before


def test_group_size_cannot_change_under_half_done_groups():
    rules = Rules(mode="partial", num_prompts=1, num_responses=2, eta_prompts=2.0)
    world = World(rules)
    world.feed(0, range(4))
    Clock(world).round()
    data = saved.dumps(world.admitter)
    with pytest.raises(ValueError, match="^num_responses is 1"):
        saved.loads(data, Rules(mode="partial", num_prompts=1, num_responses=1))
    assert saved.loads(data, Rules(mode="partial", num_prompts=3, num_responses=2)).rules.num_prompts == 3
