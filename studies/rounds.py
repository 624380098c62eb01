"""Rounds of the admitter on a simulated engine: step times of a profile, response lengths drawn in advance.

The admitter is the real one (``sglang_pat.rollout``); only time and tokens are made up.  Replicas run independently,
a sample goes to the one with the fewest; what does not fit its batch waits.  Prefill is left out, as in
:mod:`studies.simulate`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import mean

import numpy as np

from sglang_pat.policies.lending import STRIDE, LendingPolicy, Move, Training
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.snapshot import Load, Policy, Snapshot
from sglang_pat.predict.cost import SwitchCosts
from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import Fingerprint
from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.records import (
    Abort,
    Action,
    Group,
    Judge,
    Launch,
    NeedPrompts,
    Output,
    ReturnGroup,
    RoundOver,
    SampleId,
    Span,
    Summary,
)
from sglang_pat.rollout.rules import Rules
from studies.shapes import Shape
from studies.training import ASK_SECONDS as LENDING_SECONDS
from studies.training import SimulatedTrainer

ASK_SECONDS = 0.25
"""Time between two questions to a policy."""


@dataclass(frozen=True, kw_only=True)
class Engines:
    """What the rounds run on.

    Attributes:
        predictor, costs, fingerprint: of a profile of one node.
        nodes: so many of them.
        tp: degree of all replicas at the start of a round.
        policy: who changes it within a round, on each node by itself; None: nobody.
        lending: who lends half of a node's ranks to the trainer, if there is a policy; None: nobody.
        seconds_per_token: of training on all ranks of a node; ``setup``: seconds before the first token is trained on
            lent ones.
        reward_seconds: of the reward of a sample, called when it ends; None: it takes no time.
    """

    predictor: Predictor
    costs: SwitchCosts
    fingerprint: Fingerprint
    nodes: int
    tp: int
    policy: Policy | None = None
    lending: LendingPolicy | None = None
    seconds_per_token: float = 0.0
    setup: float = 0.0
    reward_seconds: Callable[[SampleId], float] | None = None


RESERVE, RETRACTED_FOR = 512, 20
"""KV tokens for each running sample that must be free when one comes in; steps for which there is room after samples
were put back.  About SGLang's: its reserve is a share of the limit that follows what was put back."""


class Replica:
    """Samples that decode together.

    Args:
        seconds: of a step, by requests and their tokens.
        most: samples at once; ``room``: KV tokens.  The others wait.

    Attributes:
        clock: seconds at which its state holds.
    """

    def __init__(self, seconds: Callable[[int, float], float], most: int, clock: float, room: float = np.inf) -> None:
        self._seconds, self._most, self._room = seconds, most, room
        self.clock = clock
        self.ids: list[SampleId] = []
        self.context: np.ndarray = np.zeros(0, dtype=np.int64)
        self.left: np.ndarray = np.zeros(0, dtype=np.int64)
        self.waiting: deque[tuple[SampleId, int, int]] = deque()
        self._next: float | None = None

    def __len__(self) -> int:
        return len(self.ids) + len(self.waiting)

    def add(self, sample: SampleId, context: int, left: int, now: float) -> None:
        self.advance(now)
        self.waiting.append((sample, context, left))
        self._fill()

    def _fill(self) -> None:
        if not self.ids:
            self._next = None
        count = min(len(self.waiting), self._most - len(self.ids))
        if self._room < np.inf:
            held = self.context.sum() + np.cumsum([context for _, context, _ in islice(self.waiting, max(count, 0))])
            needed = held + RESERVE * np.arange(len(self.ids) + 1, len(self.ids) + len(held) + 1)
            count = max(int(np.searchsorted(needed, self._room, side="right")), count > 0 and not self.ids)
        if count > 0:
            new = [self.waiting.popleft() for _ in range(count)]
            self.ids += [sample for sample, _, _ in new]
            self.context = np.append(self.context, [context for _, context, _ in new])
            self.left = np.append(self.left, [left for _, _, left in new])
        self._next = None

    @property
    def due(self) -> float:
        """Seconds at which the next sample ends, or there is no room for another step; infinity if none runs."""
        if self._next is None:
            self._next = np.inf
            if self.ids:
                steps = self._count_steps()
                middle = float(self.context.sum()) + len(self.ids) * steps / 2
                self._next = self.clock + steps * self._seconds(len(self.ids), middle)
        return self._next

    def _count_steps(self) -> int:
        """Number of steps until a sample ends or the room is full; one sample alone has room."""
        steps = int(self.left.min())
        if len(self.ids) == 1 or self._room == np.inf:
            return steps
        return min(steps, max(int((self._room - self.context.sum()) // len(self.ids)), 0))

    def advance(self, now: float) -> None:
        """Decode until ``now``, at most until :attr:`due`; a step under way goes on."""
        if not self.ids:
            self.clock = max(self.clock, now)
            return
        steps, due = self._count_steps(), self.due
        if not steps:  # what has ended is still to be taken out; its time may be a rounding error ahead
            return
        done = steps if now >= due else int(steps * (now - self.clock) / (due - self.clock))
        if done > 0:
            self.clock += (due - self.clock) * done / steps
            self.context, self.left = self.context + done, self.left - done
            self._next = None

    def pop_finished(self) -> SampleId | None:
        """Take out a sample that has no tokens left."""
        over = np.flatnonzero(self.left <= 0)
        return self._take(int(over[0])) if len(over) else None

    def retract(self) -> list[int]:
        """Put samples back, shortest first, until there is room for some steps; returns their contexts."""
        contexts: list[int] = []
        while len(self.ids) > 1 and self.context.sum() + RETRACTED_FOR * len(self.ids) > self._room:
            place = int(np.argmin(self.context))
            contexts.append(int(self.context[place]))
            entry = self.ids[place], contexts[-1], int(self.left[place])
            self._take(place)
            self.waiting.append(entry)
        return contexts

    def remove(self, sample: SampleId, now: float) -> int:
        """Take a sample out; returns its context."""
        self.advance(now)
        if sample in self.ids:
            place = self.ids.index(sample)
            context = int(self.context[place])
            self._take(place)
            return context
        entry = next(entry for entry in self.waiting if entry[0] == sample)
        self.waiting.remove(entry)
        return entry[1]

    def _take(self, place: int) -> SampleId:
        sample = self.ids.pop(place)
        self.context, self.left = np.delete(self.context, place), np.delete(self.left, place)
        self._fill()
        return sample


@dataclass(frozen=True)
class SimulatedRound:
    """Seconds of a round, its summary, the groups that it returned, number of switches.

    Attributes:
        rewards: of the samples returned, seconds since the start at which they ended, and seconds of their rewards.
        hidden: seconds of training, on all ranks, that were done in it; ``lent``: seconds in which ranks were lent.
            Means over nodes.
        after: seconds after it, if gradients are accumulated, in which the trainer waits for rewards, and trains.  Of
            the node that is the last to be done.
    """

    seconds: float
    summary: Summary
    groups: list[Group]
    switches: int
    rewards: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    hidden: float = 0.0
    lent: float = 0.0
    after: tuple[float, float] = (0.0, 0.0)


class Simulation:
    """A training job: rounds one after the other.

    Args:
        rules: of the admitter.
        shape, correlation: of the response lengths; those to one prompt are correlated (Gaussian copula).
        prompt_tokens: of each prompt.
        prompts: of an epoch; None: without end.
    """

    def __init__(
        self, engines: Engines, rules: Rules, shape: Shape, correlation: float, seed: int, prompt_tokens: int = 256,
        prompts: int | None = None,
    ) -> None:  # fmt: skip
        self.engines, self.rules, self.prompt_tokens = engines, rules, prompt_tokens
        self.admitter = Admitter(rules)
        self._shape, self._correlation = shape, correlation
        self._seed, self._prompts = seed, np.inf if prompts is None else prompts
        self._lengths: dict[tuple[int, int, int], int] = {}
        self._histories = [LengthHistory() for _ in range(engines.nodes)]
        self._fed = 0
        self.now = 0.0

    def _feed_prompts(self) -> None:
        prompts, left = self.admitter.wanted, self._prompts - self._fed
        end = 0 if prompts >= left else None
        count = int(min(prompts, left))
        self.admitter.feed([((0, self._fed + place), None) for place in range(count)], end_of=end)
        self._fed += count

    def run_round(self, version: int) -> SimulatedRound:
        """One round; the next one begins at once."""
        self._feed_prompts()
        begun = self._begun = self.now
        self._switched, self._version = 0, version
        self._returned: list[Group] = []
        self._rewards = dict[SampleId, tuple[float, float]]()
        self._known_at, self._kept = list[float](), set[SampleId]()
        self._nodes = [_Node(self.engines.tp, history, self.now + ASK_SECONDS) for history in self._histories]
        for node in self._nodes:
            node.replicas = self._make(node)
        self._where: dict[SampleId, tuple[_Node, Replica]] = {}
        self._had: dict[SampleId, int] = {}
        self._since: dict[SampleId, float] = {}
        self._over: RoundOver | None = None
        self._do(self.admitter.begin(version))
        while self._over is None:
            replica = min((one for node in self._nodes for one in node.replicas), key=lambda replica: replica.due)
            policy, node = self.engines.policy, min(self._nodes, key=lambda node: node.ask_at)
            if policy is not None and node.ask_at < replica.due:
                self.now = max(self.now, node.ask_at)
                self._ask_policy(node, policy)
                if self.engines.lending is not None:
                    self._ask_lending(node, self.engines.lending)
                node.ask_at = max(node.resumes, self.now + ASK_SECONDS)
                continue
            self.now = max(self.now, replica.due)
            replica.advance(self.now)
            # One at a time: the first may be what completes the batch, and the others are aborted then.
            sample = replica.pop_finished()
            assert sample is not None, "it was advanced to the end of one"
            node, _ = self._where.pop(sample)
            length = self._sample_length(sample)
            reward = self.engines.reward_seconds
            self._rewards[sample] = self.now, reward(sample) if reward is not None else 0.0
            self._learn(node, sample, length, length < self._shape.limit)
            self._do(
                self.admitter.record_finished(sample, self._make_output(sample, length - self._had[sample], "stop"))
            )
        seconds = self.now - begun
        return SimulatedRound(
            seconds=seconds,
            summary=self.admitter.record_round_time(self._over.summary, seconds),
            groups=self._returned,
            switches=self._switched,
            rewards=[(end - begun, took) for group in self._returned for end, took in self._list_rewards(group)],
            hidden=mean(node.loan.trainer.count_done_seconds(self.now) for node in self._nodes),
            lent=mean(node.loan.count_lent_seconds(self.now) for node in self._nodes),
            after=max((node.loan.trainer.finish(self.now) for node in self._nodes), key=sum),
        )

    def _list_rewards(self, group: Group) -> list[tuple[float, float]]:
        """Seconds at which samples ended, and seconds of their rewards."""
        return [self._rewards[group.get_sample_id(sample)] for sample in group.list_kept()]

    def count_training_tokens(self, group: Group) -> int:
        return sum(self.prompt_tokens + sample.output.tokens for sample in group.list_kept())

    def run_epoch(self) -> list[SimulatedRound]:
        """Run all rounds of ``prompts``."""
        rounds: list[SimulatedRound] = []
        while self._fed < self._prompts or self.admitter.epoch is not None:
            rounds.append(self.run_round(len(rounds)))
        return rounds

    def _sample_length(self, sample: SampleId) -> int:
        """Tokens of a response; one that is started again, not resumed, is another draw for the same prompt."""
        attempt = 0 if self.rules.mode == "partial" else sample.attempt
        key = sample.index, sample.number, attempt
        if key not in self._lengths:
            drawn = sample._replace(attempt=attempt)
            self._lengths[key] = self._shape.sample_length(self._seed, drawn, self._correlation)
        return self._lengths[key]

    def _learn(self, node: _Node, sample: SampleId, length: int, finished: bool) -> None:
        if self.engines.policy is not None:
            node.history.observe(length, sample.index, finished, self._had[sample])

    def _make_output(self, sample: SampleId, tokens: int, reason: str) -> Output:
        spans = [Span(self._version, tokens)] if tokens else []
        return Output(spans=spans, finish_reason=reason, seconds=self.now - self._since.pop(sample))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Launch(sample, _, prefix):
                    self._had[sample] = prefix.tokens if prefix else 0
                    left = self._sample_length(sample) - self._had[sample]
                    node, replica = min(
                        ((node, one) for node in self._nodes for one in node.replicas), key=lambda place: len(place[1])
                    )
                    self._where[sample], self._since[sample] = (node, replica), self.now
                    replica.add(sample, self.prompt_tokens + self._had[sample], left, self.now)
                    node.peak = max(node.peak, sum(map(len, node.replicas)))
                case Abort(sample):
                    node, replica = self._where.pop(sample)
                    context = replica.remove(sample, self.now)
                    tokens = context - self.prompt_tokens - self._had[sample]
                    self._learn(node, sample, context - self.prompt_tokens, finished=False)
                    self._do(self.admitter.record_stopped(sample, self._make_output(sample, tokens, "")))
                case Judge(group):
                    self._do(self.admitter.record_verdict(group.key, True))
                case ReturnGroup(group):
                    self._returned.append(group)
                    known_at = max(end + took for end, took in self._list_rewards(group))
                    self._known_at.append(known_at)
                    self._kept.update(map(group.get_sample_id, group.list_kept()))
                    trainer = min((node.loan.trainer for node in self._nodes), key=lambda trainer: trainer.taken)
                    trainer.add(self.engines.seconds_per_token * self.count_training_tokens(group), known_at)
                case NeedPrompts():
                    pass  # prompts come between rounds only
                case RoundOver():
                    self._over = action

    # -- adaptive tp, on each node by itself -----------------------------------------------------------

    def _make(self, node: _Node) -> list[Replica]:
        engines, tp = self.engines, node.tp

        def seconds(batch: int, tokens: float) -> float:
            return engines.predictor.step_seconds(tp, batch, tokens)

        clock = max(self.now, node.resumes)
        return [Replica(seconds, engines.fingerprint.max_running, clock) for _ in range(self._count_ranks(node) // tp)]

    def _count_ranks(self, node: _Node) -> int:
        """Number of ranks of a node that work."""
        ranks = self.engines.fingerprint.num_ranks
        return ranks // STRIDE if node.loan.lent else ranks

    def _make_snapshot(self, node: _Node) -> Snapshot | None:
        """What a policy sees of a node now; None if samples wait there, or none run."""
        engines, ranks = self.engines, self._count_ranks(node)
        for replica in node.replicas:
            replica.advance(self.now)
        samples = [(sample, context, place) for place, replica in enumerate(node.replicas)
                   for sample, context in zip(replica.ids, replica.context, strict=True)]  # fmt: skip
        if any(replica.waiting for replica in node.replicas) or not samples:
            return None
        prompt = np.full(len(samples), self.prompt_tokens)
        output = np.array([context for _, context, _ in samples]) - prompt
        load = Load(
            prompt=prompt, output=output, limit=np.full(len(samples), self._shape.limit),
            family=np.array([sample.index for sample, _, _ in samples]), replica=np.array([r for *_, r in samples]),
        )  # fmt: skip
        degrees = tuple(tp for tp in engines.fingerprint.degrees if ranks % tp == 0)
        return Snapshot(
            now=self.now, tp=node.tp, degrees=degrees, num_ranks=ranks, requests=len(samples), peak=node.peak,
            last_arrival=0.0, last_switch=node.last_switch, complete=True, load=load,
        )  # fmt: skip

    def _ask_policy(self, node: _Node, policy: Policy) -> None:
        snapshot = self._make_snapshot(node)
        if snapshot is None:
            return
        degree = policy(snapshot, node.history).tp
        if degree == node.tp:
            return
        lengths = snapshot.load.prompt + snapshot.load.output
        self._switched += 1
        self._rebuild(node, degree, self.engines.costs.estimate(node.tp, degree, lengths).seconds)

    def _rebuild(self, node: _Node, tp: int, pause: float) -> None:
        """Let all that runs on a node go on in this degree after a pause, on the ranks that work now."""
        node.resumes = node.last_switch = max(self.now, node.resumes) + pause
        old, node.tp = node.replicas, tp
        node.replicas = self._make(node)
        for replica in old:
            for sample, context, left in zip(replica.ids, replica.context, replica.left, strict=True):
                target = min(node.replicas, key=len)
                self._where[sample] = node, target
                target.add(sample, int(context), int(left), self.now)

    # -- lending ---------------------------------------------------------------------------------------

    def _ask_lending(self, node: _Node, lending: LendingPolicy) -> None:
        """Lend, or take back, if it is time to ask and the policy says so."""
        loan, engines = node.loan, self.engines
        if loan.lent and not loan.closing:
            loan.trainer.advance(self.now)
        snapshot = self._make_snapshot(node)
        if snapshot is None:
            return
        held = snapshot.load.prompt + snapshot.load.output
        if loan.closing:
            if loan.trainer.free <= self.now:
                loan.lent, loan.closing, loan.returned = False, False, True
                self._rebuild(node, node.tp, engines.costs.estimate_lending(node.tp, held).seconds)
                loan.seconds = node.resumes - loan.since
                loan.trainer.take_back()
            return
        if loan.trainer.is_training(self.now):
            return
        training = self._describe_training(node, len(held))
        before, loan.complete = loan.complete, training.complete
        if self.now - loan.asked < LENDING_SECONDS if loan.lent else loan.complete == before:
            return
        loan.asked = self.now
        fingerprint = engines.fingerprint
        room = {tp: fingerprint.kv_tokens * tp // fingerprint.base_tp for tp in fingerprint.degrees}
        decision = lending(replace(snapshot, room=room), node.history, training)
        if decision.move is Move.TAKE_BACK:
            loan.closing = True
        elif decision.move is Move.LEND:
            loan.lent = True
            self._rebuild(node, decision.tp, engines.costs.estimate_lending(node.tp, held).seconds)
            loan.since = node.resumes
            loan.trainer.lend(node.resumes, engines.setup)

    def _describe_training(self, node: _Node, running: int) -> Training:
        """What the client knows of this step: a node's share of it."""
        engines, rules, trainer, nodes = self.engines, self.rules, node.loan.trainer, len(self._nodes)
        complete_samples = sum(moment <= self.now for moment in self._known_at)
        pending = [sample for sample in self._rewards if sample not in self._kept]
        samples = rules.num_prompts * rules.num_responses
        needed = samples - len(self._kept) - len(pending)
        return Training(
            samples=samples // nodes,
            complete=complete_samples * rules.num_responses // nodes,
            ready=round(trainer.get_ready_seconds(self.now) / max(engines.seconds_per_token, 1e-12)),
            pending=sum(self.prompt_tokens + self._sample_length(sample) for sample in pending) // nodes,
            seconds_per_token=engines.seconds_per_token,
            setup=engines.setup,
            spare=max(running - max(needed // nodes, 1), 0),
            returned=node.loan.returned,
            elapsed=self.now - self._begun,
            **trainer.describe(self.now, engines.seconds_per_token),
        )


@dataclass
class _Loan:
    """Loan of a node's ranks in a round: whether they are lent, since when, and how long; samples that were complete
    when the policy was asked."""

    trainer: SimulatedTrainer = field(default_factory=SimulatedTrainer)
    lent: bool = False
    closing: bool = False
    returned: bool = False
    since: float = 0.0
    seconds: float = 0.0
    asked: float = float("-inf")
    complete: int = 0

    def count_lent_seconds(self, now: float) -> float:
        return self.seconds + (max(now - self.since, 0.0) if self.lent else 0.0)


@dataclass
class _Node:
    """A node in a round.

    Attributes:
        tp: degree of its replicas.
        history: of the lengths of its responses, kept from round to round.
        ask_at: seconds at which its policy is asked next; ``resumes``: at which its last pause ends.
        peak: most samples at once.
    """

    tp: int
    history: LengthHistory
    ask_at: float
    replicas: list[Replica] = field(default_factory=list[Replica])
    loan: _Loan = field(default_factory=_Loan)
    resumes: float = float("-inf")
    last_switch: float = float("-inf")
    peak: int = 0
