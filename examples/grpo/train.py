"""The loop: a round, GRPO's update, the weights into the engine, a checkpoint; again until every prompt was trained."""

from __future__ import annotations

import io
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec
import torch

import sglang_pat
from examples.grpo import countdown
from examples.grpo.lend import Lending, Timeline, make_profile
from examples.grpo.policy import add_gradient, copy_weights, load_policy
from examples.grpo.task import Task
from sglang_pat import files
from sglang_pat.figures import Figures
from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.records import Group, Summary
from sglang_pat.rollout.rewards import Response
from sglang_pat.rollout.rules import Rules

RULES: dict[str, dict[str, Any]] = {
    "plain": {"eta_prompts": 1.0},
    "adaptive": {"eta_prompts": 1.0},
    "tail": {},
    "unbiased": {"unbiased": True},
    "all": {},
    "partial": {"mode": "partial"},
    "drafts": {"eta_prompts": 1.0},
}
"""The ways: whether a round starts more prompts than it returns, and what becomes of the others."""
RAMP = 10
"""Steps in which the rate of learning rises: AdamW's first steps are large, whatever the gradient."""
SWITCHING = ("adaptive", "all", "drafts")
"""Ways in which the engine merges its replicas when few responses are left."""
DRAFTS = 4
"""Most drafts of a request in a step of the way ``drafts``."""
KV_TOKENS = 32768
PROFILES = Path(".cache/profiles")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Settings of a run: a checkpoint goes on only if all of them are the same.

    Attributes:
        steps: steps of the epoch; there are a few more where prompts are deferred to its end.
        prompts, responses: prompts of a step, and responses to each.
        warm_up: steps of the warm-up; ``slips``: share of wrong numbers in its examples.
        rate: rate of learning of AdamW.
        limit: most tokens of a response.
        switch_at: number of responses left at which the engine merges.
        held_out: problems that are never trained; ``every``: steps from one test on them to the next.
        model: folder of a checkpoint, and ``task`` of reasoning-gym; "": the small Llama counts down.
        lend: whether to lend a rank to the trainer while a round drains.
    """

    way: str = "plain"
    seed: int = 0
    steps: int = 60
    prompts: int = 32
    responses: int = 16
    rate: float = 3e-4
    warm_up: int = 220
    slips: float = 0.35
    limit: int = countdown.LIMIT
    switch_at: int = 32
    held_out: int = 256
    every: int = 10
    model: str = ""
    task: str = ""
    lend: bool = False

    def __post_init__(self) -> None:
        if bool(self.model) != bool(self.task):
            raise ValueError("--model and --task go together: the small Llama counts down, and nothing else does")
        if self.lend and self.way != "adaptive":
            raise ValueError(f"--lend is for --way adaptive, in which every response is trained, not for {self.way}")
        for name in ("steps", "warm_up", "limit", "held_out", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.responses < 2:
            raise ValueError(f"responses is {self.responses}, must be at least 2: GRPO compares those to one prompt")
        if not 0 < self.rate < 1:
            raise ValueError(f"rate is {self.rate}, must be more than 0 and less than 1")
        if not 0 <= self.slips <= 1:
            raise ValueError(f"slips is {self.slips}, must be 0 to 1")
        self.make_rules()

    def make_rules(self) -> Rules:
        """Rules of the rollout; raises ValueError as ``Rules`` does."""
        return Rules(num_prompts=self.prompts, num_responses=self.responses, **RULES[self.way])


class Row(msgspec.Struct, kw_only=True):
    """Figures of a step.

    Attributes:
        samples: samples trained so far, this step included; ``seconds``: likewise, of the steps without tests.
        reward: mean reward; ``lengths``: tokens of each response.
        held_out: mean reward on the held-out problems after the step; None: they were not asked.
        parts: seconds of the step by what they went into; ``degrees``: seconds of its generation by TP degree.
        trained: numbers of the prompts.
        thrown: tokens thrown away; ``waiting``: prompts that wait.
        apart: largest difference of a probability, see :func:`.policy.add_gradient`.
        timeline: the step by rank, with ``lend``.
    """

    samples: int
    seconds: float
    reward: float
    lengths: list[int]
    held_out: float | None
    parts: dict[str, float]
    degrees: dict[int, float]
    trained: list[int]
    kind: str
    thrown: int
    waiting: int
    apart: float
    timeline: Timeline | None = None


def start_engine(run: Run, model: Path) -> sglang_pat.Engine:
    """Start the engine on two ranks."""
    policy: dict[str, Any] = {"pat_policy": "off"}
    if run.way in SWITCHING:
        policy = {"pat_policy": "threshold", "pat_switch_at": run.switch_at}
    if run.lend:
        flags = ["--dtype", "float32", "--skip-tokenizer-init", "--max-total-tokens", str(KV_TOKENS)]
        path = make_profile(model, PROFILES / f"grpo-{model.name}.json", flags)
        policy = {"pat_policy": "survival", "pat_profile": str(path)}
    return sglang_pat.Engine(
        model_path=str(model), tp_size=1, dp_size=2, adaptive_tp=True, dtype="float32", skip_tokenizer_init=True,
        pat_speculate=str(DRAFTS) if run.way == "drafts" else "off",
        max_total_tokens=KV_TOKENS, random_seed=run.seed, log_level="error", **policy,
    )  # fmt: skip


class Trainer:
    """A run, from its last checkpoint or its beginning.

    Args:
        model: folder of the first policy.
        path: path of the checkpoint; ``saved``: the one that :func:`load_checkpoint` found there.
    """

    def __init__(
        self, run: Run, engine: Any, model: Path, task: Task, path: Path, saved: dict[str, Any] | None
    ) -> None:
        self.run, self.engine, self.task, self.path = run, engine, task, path
        self.policy = load_policy(model)
        ends = self.policy.generation_config.eos_token_id
        self.sampling = {
            "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": run.limit,
            "stop_token_ids": [ends] if isinstance(ends, int) else ends,
        }  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=run.rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.admitter = Admitter(run.make_rules())
        self.lending = Lending(engine, self.train, run.prompts * run.responses) if run.lend else None
        self.rows: list[Row] = []
        self.before: float | None = None
        """Mean reward on the held-out problems before the first step."""
        torch.manual_seed(run.seed)
        if saved is not None:
            self.load(saved)
        else:
            prompts = [((0, i), {"input_ids": task.make_prompt(problem)}) for i, problem in enumerate(task.problems)]
            self.admitter.feed(prompts, end_of=0)
        self.push_weights()

    @property
    def over(self) -> bool:
        return not (self.admitter.state.fresh or self.admitter.state.waiting)

    def step(self) -> Row:
        """A round and what is learnt from it, saved."""
        if self.before is None:
            self.before = self.test()
        used = Figures.from_status(self.engine.status())
        clock = Clock()
        self.optimizer.zero_grad()
        self.apart = 0.0
        groups, summary = self.generate()
        clock.end("generation")
        self.update(groups)
        clock.end("training")
        self.push_weights()
        clock.end("weight sync")
        used = Figures.from_status(self.engine.status()).subtract(used)
        samples = [sample for group in groups for sample in group.list_kept()]
        last = self.rows[-1] if self.rows else None
        row = Row(
            samples=(last.samples if last else 0) + len(samples),
            seconds=(last.seconds if last else 0.0) + sum(clock.parts.values()),
            reward=mean(float(sample.reward or 0.0) for sample in samples),
            lengths=[sample.output.tokens for sample in samples],
            held_out=None, parts=clock.parts, degrees=dict(used.seconds), trained=[group.index for group in groups],
            kind=summary.kind, thrown=summary.thrown, waiting=len(summary.ages), apart=self.apart,
            timeline=self.lending.make_timeline(clock.ends) if self.lending else None,
        )  # fmt: skip
        self.rows.append(row)
        if self.over or len(self.rows) % self.run.every == 0:
            row.held_out = self.test()
        self.save()
        return row

    def generate(self) -> tuple[list[Group], Summary]:
        """A round, its responses rewarded as they end.  With ``lend`` its first groups may be trained meanwhile."""
        events = self.engine.rollout(self.admitter, self.sampling, version=len(self.rows), reward=self.reward)
        if self.lending is None:
            *groups, summary = events
            return groups, summary
        self.lending.begin()
        for event in events:
            if isinstance(event, Summary):
                summary = event
            else:
                self.lending.take(event)
        return self.lending.groups, summary

    def reward(self, response: Response) -> float:
        """Reward of a response; raises ValueError if the verifier gave something else than a number from 0 to 1."""
        problem, tokens = self.task.problems[response.sample.index], response.output.token_ids
        if self.lending is not None:
            self.lending.ended += len(self.task.make_prompt(problem)) + len(tokens)
        return self.judge(problem, tokens)

    def judge(self, problem: str, token_ids: list[int]) -> float:
        """Reward of tokens; see :meth:`reward`."""
        value = self.task.verify(problem, self.task.decode(token_ids))
        if not isinstance(value, float | int) or not 0 <= value <= 1:
            raise ValueError(f"the verifier gave {value!r} for {problem!r}, must give a number from 0 to 1")
        return float(value)

    def train(self, groups: Sequence[Group]) -> None:
        """Add the groups' gradient to that of the step."""
        decoupled = self.admitter.rules.mode == "partial"
        self.apart = max(self.apart, add_gradient(self.policy, groups, decoupled))

    def update(self, groups: list[Group]) -> None:
        """Make one step of AdamW, with the mean gradient over the tokens of all groups."""
        if self.lending is None:
            self.train(groups)
        else:
            self.lending.finish()
        tokens = sum(len(sample.output.token_ids) for group in groups for sample in group.list_rewarded())
        for parameter in self.policy.parameters():
            parameter.grad /= tokens
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.rate * min(1.0, (len(self.rows) + 1) / RAMP)
        self.optimizer.step()

    def push_weights(self) -> None:
        done, message = self.engine.update_weights_from_tensor(copy_weights(self.policy))
        if not done:
            raise RuntimeError(message)

    def test(self) -> float:
        """Mean reward on the held-out problems, one answer each."""
        ids = [self.task.make_prompt(problem) for problem in self.task.held_out]
        answers = self.engine.generate(input_ids=ids, sampling_params=self.sampling)
        pairs = zip(self.task.held_out, answers, strict=True)
        return mean(self.judge(problem, answer["output_ids"]) for problem, answer in pairs)

    # -- the checkpoint --------------------------------------------------------------------------------

    def save(self) -> None:
        """Save all that a next process needs, whole or not at all."""
        content = io.BytesIO()
        saved = {
            "run": identify(self.run, self.task.problems), "before": self.before,
            "rows": msgspec.json.encode(self.rows), "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(), "random": torch.get_rng_state(), **self.admitter.state_dict(),
        }  # fmt: skip
        torch.save(saved, content)
        files.write(content.getvalue(), self.path)

    def load(self, saved: dict[str, Any]) -> None:
        self.admitter.load_state_dict(saved, source=str(self.path))
        self.policy.load_state_dict(saved["policy"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.rows, self.before = msgspec.json.decode(saved["rows"], type=list[Row]), saved["before"]
        torch.set_rng_state(saved["random"])


def identify(run: Run, problems: Sequence[str]) -> dict[str, Any]:
    """Settings that have to be the same where a run goes on."""
    return asdict(run) | {"problems": zlib.crc32("\n".join(problems).encode())}


def load_checkpoint(path: Path, run: Run, problems: Sequence[str]) -> dict[str, Any] | None:
    """State that :meth:`Trainer.save` wrote; None if there is none.

    Raises:
        ValueError: it is of another run, or is no checkpoint; one line.
    """
    if not path.exists():
        return None
    try:
        saved = torch.load(path, weights_only=True)
        saved_run, this_run = saved["run"], identify(run, problems)
    except Exception:  # whatever pickle finds
        raise ValueError(f"{path} is no checkpoint of this program; give another --out, or remove it") from None
    for name, value in this_run.items():
        if saved_run.get(name) != value:
            what = f"{name} is {saved_run.get(name)!r} there, {value!r} here"
            raise ValueError(f"{path} is a checkpoint of another run: {what}; give another --out, or remove it")
    return saved


class Clock:
    """Clock of a step, seconds by what they went into."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self.ends = [time.monotonic()]
        """Times of the start, and of the end of each part."""

    def end(self, part: str) -> None:
        self.ends.append(time.monotonic())
        self.parts[part] = self.ends[-1] - self.ends[-2]


def describe(rows: Sequence[Row], steps: int) -> str:
    """State of the run in one line."""
    if not rows:
        return "before the first step: the held-out problems"
    row, recent = rows[-1], rows[-10:]
    seconds = mean(sum(row.parts.values()) for row in recent)
    generation = mean(row.parts["generation"] for row in recent)
    tested = next((row.held_out for row in reversed(rows) if row.held_out is not None), None)
    held_out = "" if tested is None else f", held out {tested:.2f}"
    return (
        f"step {len(rows)} of some {steps}: reward {mean(row.reward for row in recent):.2f}{held_out}, "
        f"{median(row.lengths):.0f} to {max(row.lengths)} tokens, {seconds:.1f} s a step "
        f"({generation:.1f} s generation), {max(0, steps - len(rows)) * seconds / 60:.0f} min left"
    )
