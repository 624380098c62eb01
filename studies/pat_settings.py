"""PAT's own settings, replayed: 128 DeepScaleR responses on 8×A40 and 8×H100, with PAT's policy and switch costs.

A batch is handed over as a whole there, so that all policies know it to be complete.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from rich.table import Table

from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.predict.profile import load
from studies import PROFILES
from studies.compare import Machine, Workload
from studies.shapes import parse_shape

CAPS = {
    "8xA40-llama3.1-8b": (6144, 8192, 12288, 16384),
    "8xH100-llama3.1-8b": (6144, 8192, 12288, 16384, 24576),
    "8xH100-qwen3-14b": (6144, 8192, 12288, 16384),
}
PUBLISHED = {
    ("8xH100-llama3.1-8b", 24576): "134.3 → 87.9 s (-34.6%)",
    ("8xH100-qwen3-14b", 16384): "133.9 → 91.1 s (-32.0%)",
    ("8xA40-llama3.1-8b", 6144): "step 1.05×",
    ("8xA40-llama3.1-8b", 16384): "step 1.27×",
}
"""Of PAT sections 5.2 and 5.3.  For 8×A40 only the throughput of whole steps is given, for 6K to 16K 1.05 to 1.27."""


def list_settings(rounds: int) -> list[dict]:
    """One row a profile and cap: mean seconds of every policy over rounds that reach the cap (PAT reports those).

    Without prefill: PAT says that decoding takes over 90% of generation.
    """
    rows = []
    for name, caps in CAPS.items():
        if not (PROFILES / f"{name}-pat-costs.json").exists():
            continue
        theirs, ours = (_from_tp2(PROFILES / f"{name}{costs}.json") for costs in ("-pat-costs", ""))
        for cap in caps:
            rows.append({"profile": name, "cap": cap, "published": PUBLISHED.get((name, cap), "")} |
                        _seconds(theirs, ours, cap, rounds))  # fmt: skip
    return rows


def _from_tp2(path: Path) -> Machine:
    """The profile with PAT's start: TP2."""
    profile = load(path, complete=True)
    degrees = tuple(tp for tp in profile.fingerprint.degrees if tp >= 2)
    fingerprint = msgspec.structs.replace(profile.fingerprint, base_tp=2, degrees=degrees)
    return Machine(msgspec.structs.replace(profile, fingerprint=fingerprint))


def _seconds(theirs: Machine, ours: Machine, cap: int, rounds: int) -> dict[str, float]:
    workload = Workload(
        shape=parse_shape(f"lognormal:7.919,0.885,{cap}"), batch=128, rounds=50 * rounds, correlation=0.5
    )
    reached = [batch for batch in workload.make_batches() if batch.length.max() == cap][:rounds]
    times: dict[str, list[float]] = {}
    histories = {"survival, PAT's costs": LengthHistory(), "survival, our costs": LengthHistory()}
    for batch in reached:
        for costs, on in (("PAT's", theirs), ("our", ours)):
            drain = on.drain(batch)
            runs = {
                "pat": drain.run_policy(on.make_policy("pat"), LengthHistory(), complete=True),
                "survival": drain.run_policy(
                    on.make_policy("survival"), histories[f"survival, {costs} costs"], complete=True
                ),
            }
            for name, run in runs.items():
                times.setdefault(f"{name}, {costs} costs", []).append(run.seconds)
        for tp in drain.degrees:
            times.setdefault(f"static TP{tp}", []).append(drain.run_static(tp).seconds)
    return {name: float(np.mean(seconds)) for name, seconds in times.items()}


def format_table(rows: list[dict]) -> Table:
    """Seconds of generation, and gains over static TP2 and over the best static layout."""
    result = Table(
        title="PAT's settings: batch 128, DeepScaleR, base TP2; seconds of decoding (gain over TP2 / best static)"
    )
    for head in ("profile", "cap", "TP2", "TP4", "TP8", "pat, its costs", "pat, our costs", "survival, its costs",
                 "survival, our costs", "published"):  # fmt: skip
        result.add_column(head, justify="left" if head in ("profile", "published") else "right")
    for row in rows:
        statics = [row[f"static TP{tp}"] for tp in (2, 4, 8)]
        cells = [
            f"{row[key]:.1f} ({row[key] / statics[0] - 1:+.0%} / {row[key] / min(statics) - 1:+.1%})"
            for key in ("pat, PAT's costs", "pat, our costs", "survival, PAT's costs", "survival, our costs")
        ]
        result.add_row(
            row["profile"], f"{row['cap'] // 1024}K", *(f"{s:.1f}" for s in statics), *cells, row["published"]
        )
    return result
