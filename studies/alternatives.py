"""Ways that policies could have gone, against the ones that they go (simulated).

    python -m studies.alternatives [--quick] [--json FILE]

- Steps left: how many token steps a batch still takes, as ``survival`` expects it, against what it then takes.  Beside
  it two other ways to reckon with a request's siblings: not at all, and by a gamma frailty, the usual choice.
- ``pat`` that counts how requests are spread over the replicas now, for staying.

The same seeds give the same figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sglang_pat.policies import pat
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.outlook import grid, look_ahead
from sglang_pat.policies.snapshot import Load, Snapshot
from sglang_pat.predict.correction import Corrected
from sglang_pat.predict.profile import load
from sglang_pat.replay.compare import Machine, Workload, compare, regrets
from sglang_pat.replay.shapes import parse_shape
from sglang_pat.replay.simulate import Batch
from sglang_pat.tools.commands import Parser, run
from studies import PROFILES

SHAPE = "deepscaler"
CORRELATIONS = (0.0, 0.5, 0.8)
BATCH, GROUP, LEARN = 128, 8, 8
"""Requests, responses to one prompt, and rounds that are seen before one that counts."""
LEFT = (64, 16, 4, 1)
"""Requests that are left when the question is asked."""
WAYS = ("survival", "no siblings", "gamma frailty")


def expected(load: Load, history: LengthHistory, rho: float) -> dict[str, float]:
    """Token steps until no request is left, by the way of reckoning."""
    found = {"survival": _sum(load, history), "gamma frailty": _gamma(load, history, rho)}
    with patch.object(history, "correlation", 0.0):
        found["no siblings"] = _sum(load, history)
    return found


def _sum(load: Load, history: LengthHistory) -> float:
    outlook = look_ahead(load, history)
    return 0.0 if outlook is None else float(outlook.width @ outlook.any_alive)


def _gamma(load: Load, history: LengthHistory, rho: float) -> float:
    """Hazards of a family have a common factor, gamma distributed; given the true likeness.

    With the variance θ of the factor, and as the marginal curve S is known, the hazard without the factor sums up to
    (S^-θ - 1) / θ.  Given d ends and the sum B of these over the
    family, the factor has the shape 1/θ + d and the rate 1/θ + B.
    """
    tau = 2 / np.pi * np.arcsin(rho)  # Kendall's, of a Gaussian copula; of this model it is θ / (θ + 2)
    theta = max(2 * tau / (1 - tau), 1e-6)
    curve = history.curve(int(load.limit.max()), load.output)

    def summed(tokens: np.ndarray) -> np.ndarray:
        return np.expm1(-theta * np.log(np.maximum(curve.survival(tokens), 1e-300))) / theta

    families, index = np.unique(load.family, return_inverse=True)
    ended = [np.array([n for n, _ in history._families.get(int(name), ())], dtype=float) for name in families]
    shape = 1 / theta + np.array([len(lengths) for lengths in ended])
    now = summed(load.output.astype(float))
    rate = 1 / theta + np.array([summed(lengths).sum() for lengths in ended]) + np.bincount(index, now)
    left = load.limit - load.output
    ends = grid(int(left.max()))
    ahead = (ends[:-1] + ends[1:]) / 2
    more = summed(load.output[:, None] + ahead) - now[:, None]
    alive = np.exp(-shape[index, None] * np.log1p(more / rate[index, None]))
    alive = np.where(ahead < left[:, None], alive, 0.0)
    any_alive = 1 - np.exp(np.log1p(-np.minimum(alive, 1 - 1e-15)).sum(axis=0))
    return float(np.diff(ends) @ any_alive)


def moments(batch: Batch, history: LengthHistory) -> Iterator[tuple[int, Load, int]]:
    """Requests left, the batch then, and the steps that it takes from there; ``history`` hears of each end."""
    order, before = np.argsort(batch.length, kind="stable"), 0
    for left in LEFT:
        ended = len(order) - left
        _hear(history, batch, order[before:ended])
        before = ended
        running, present = order[ended:], int(batch.length[order[ended - 1]])
        if batch.length[running].min() > present:
            output = np.full(left, present)
            yield left, Load(
                prompt=batch.prompt[running], output=output, limit=np.full(left, batch.limit),
                family=batch.family[running], replica=np.zeros(left, dtype=np.int64),
            ), int(batch.length.max()) - present  # fmt: skip
    _hear(history, batch, order[before:])


def _hear(history: LengthHistory, batch: Batch, requests: np.ndarray) -> None:
    for request in requests:
        length = int(batch.length[request])
        history.observe(length, int(batch.family[request]), finished=length < batch.limit)


def steps_left(rho: float, rounds: int) -> list[dict]:
    """Mean steps in truth and as expected, one row a number of requests left."""
    history = LengthHistory()
    workload = Workload(shape=parse_shape(SHAPE), batch=BATCH, rounds=LEARN + rounds, correlation=rho, group=GROUP)
    rows: dict[int, list[dict[str, float]]] = {left: [] for left in LEFT}
    for number, batch in enumerate(track(workload.batches(), f"steps left, ρ = {rho:g}", total=LEARN + rounds)):
        for left, batch_now, truth in moments(batch, history):
            if number >= LEARN:
                rows[left].append({"truth": truth} | expected(batch_now, history, rho))
    return [
        {"rho": rho, "left": left} | {name: float(np.mean([row[name] for row in found])) for name in found[0]}
        for left, found in rows.items()
    ]


def uneven(snapshot: Snapshot, predictor, costs):
    """Algorithm 1, but staying counts the fullest replica as it is now."""
    totals, switch = EVEN(snapshot, predictor, costs)
    now, lengths = snapshot.load, snapshot.load.prompt + snapshot.load.output
    requests = np.bincount(now.replica)
    fullest = int(requests.argmax())
    step = Corrected(predictor, snapshot.factors).step_seconds(
        snapshot.tp, int(requests[fullest]), float(lengths[now.replica == fullest].sum()), int((requests > 0).sum())
    )
    return totals | {snapshot.tp: max(int((now.limit - now.output).max()), 0) * step}, switch


EVEN = pat.algorithm_1


def imbalance(rounds: int) -> list[dict]:
    """Most switches in a batch, and mean regret, with and without the true imbalance; one row a batch size."""
    machine = Machine(load(PROFILES / "8xA40-llama3.1-8b.json", complete=True))
    rows = []
    for batch in track((64, 256), "pat"):
        row: dict[str, float] = {"batch": batch}
        workload = Workload(shape=parse_shape(SHAPE), batch=batch, rounds=rounds, correlation=0.5)
        for name, algorithm in (("even", EVEN), ("uneven", uneven)):
            with patch.object(pat, "algorithm_1", algorithm):
                runs = compare(machine, workload, ["pat"])
            row |= {
                f"{name}_switches": max(len(found.switches) for found in runs["pat"]),
                f"{name}_regret": float(regrets(runs, "pat").mean()),
            }
        rows.append(row)
    return rows


def table_of_steps(rows: list[dict]) -> Table:
    result = Table(title=f"Steps left: {SHAPE}, {BATCH} requests, {GROUP} a prompt; expected / true")
    for head in ("ρ", "requests left", "steps left", *WAYS):
        result.add_column(head, justify="right")
    for row in rows:
        ratios = (f"{row[way] / row['truth']:.2f}" for way in WAYS)
        result.add_row(f"{row['rho']:g}", str(row["left"]), f"{row['truth']:,.0f}", *ratios)
    return result


def table_of_imbalance(rows: list[dict]) -> Table:
    result = Table(title="pat on 8×A40: replicas counted as even, and as they are")
    for head in ("batch", "most switches in a batch", "as they are", "mean regret", "as they are"):
        result.add_column(head, justify="right")
    for row in rows:
        result.add_row(
            str(row["batch"]), str(row["even_switches"]), str(row["uneven_switches"]), f"{row['even_regret']:.2%}",
            f"{row['uneven_regret']:.2%}",
        )  # fmt: skip
    return result


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to it")
    args = parser.parse_args(argv)
    steps = [row for rho in CORRELATIONS for row in steps_left(rho, 40 if args.quick else 400)]
    pats = imbalance(4 if args.quick else 16)
    console = Console()
    console.print(table_of_steps(steps))
    console.print(table_of_imbalance(pats))
    if args.json:
        args.json.write_text(json.dumps({"steps_left": steps, "imbalance": pats}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run("studies.alternatives", main))
