"""A way that ``pat`` could have gone, against the one that it goes (simulated): it counts how requests are spread over
the replicas now, for staying.

    python -m studies.alternatives [--quick] [--json FILE]

The same seeds give the same figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sglang_pat.policies import pat
from sglang_pat.policies.snapshot import Snapshot
from sglang_pat.predict.correction import Corrected
from sglang_pat.predict.profile import load
from sglang_pat.replay.compare import Machine, Workload, compare, regrets
from sglang_pat.replay.shapes import parse_shape
from sglang_pat.tools.commands import Parser, run
from studies import PROFILES

SHAPE = "deepscaler"


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
    pats = imbalance(4 if args.quick else 16)
    Console().print(table_of_imbalance(pats))
    if args.json:
        args.json.write_text(json.dumps({"imbalance": pats}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run("studies.alternatives", main))
