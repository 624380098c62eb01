"""Every attribute of SGLang's scheduler, worker and runner, in each layout, is what ``attributes.txt`` says it is.

Four ranks write down what SGLang keeps in them, at start and after every switch, without requests and with them.  The
values are compared between layouts, between the ranks of a group, and with stock engines of the same degree.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_pat.checks import attributes

from .conftest import SCHEDULERS, long
from .streams import body, through

RANKS = 4
DEGREES = (2,)
"""Degrees of the stock engines.  SGLang pads models with fewer KV heads than ranks on a CPU; ours does not."""
STOCK = dict(
    dtype="float32", random_seed=1, device="cpu", attention_backend="torch_native",
    sampling_backend="pytorch", grammar_backend="llguidance", disable_overlap_schedule=True, disable_cuda_graph=True,
    sleep_on_idle=True, max_running_requests=4, scheduler_recv_interval=3, enable_priority_scheduling=True,
    schedule_low_priority_values_first=True, priority_scheduling_preemption_threshold=4,
    default_priority_value=2,
)  # fmt: skip
"""The arguments of the adaptive server, for SGLang."""

AGREED = ("fixed", "group")
"""Kinds whose values are the same on all ranks of a group after a switch."""

WORK = [body(i, 80) for i in range(16)]


@dataclass(frozen=True)
class Census:
    rank: int
    epoch: int
    tp: int
    tp_rank: int
    values: dict[str, str]
    identities: dict[str, int]


def read(folder: Path) -> list[Census]:
    return [Census(**json.loads(path.read_text())) for path in sorted(folder.glob("census-*.json"))]


@pytest.fixture(scope="module")
def stock(servers, llama, tmp_path_factory) -> dict[tuple[int, int], Census]:
    """``(tp, tp rank) -> census`` of engines that SGLang built at that degree."""
    found = {}
    for tp in DEGREES:
        folder = tmp_path_factory.mktemp(f"stock{tp}")
        # The same bytes hold more tokens where each rank has fewer heads; the padding slot is one of them there.
        pool = {"max_total_tokens": (16384 + 1) * tp - 1}
        done = servers.run("tests.engine.stock_census", str(llama), str(tp), str(folder), json.dumps(STOCK | pool))
        assert done.returncode == 0, done.stderr[-3000:]
        found.update(((tp, census.tp_rank), census) for census in read(folder))
    assert len(found) == sum(DEGREES)
    return found


@pytest.fixture
def visited(checked_with, census_folders) -> Callable[[str], list[Census]]:
    """All censuses of an adaptive server: layouts up and down, idle and in the middle of requests."""

    def censuses(kind: str) -> list[Census]:
        folder = census_folders[kind]
        if len(read(folder)) < 10 * RANKS:
            server = checked_with(kind)
            for tp in (2, 4, 2, 1):
                server.reconfigure(tp)
            through(server, WORK, {8: 2, 16: 4, 24: 1, 32: 4})
            for tp in (2, 1):
                server.reconfigure(tp)
        return read(folder)

    return censuses


@pytest.fixture(params=[long("plain"), "overlap"])
def visits(request, visited) -> list[Census]:
    return visited(request.param)


def kind(path: str) -> str:
    line = attributes.find_line(path)
    return line.kind if line else "unknown"


def list_paths(censuses: list[Census], *kinds: str) -> list[str]:
    return sorted({path for census in censuses for path in census.values if kind(path) in kinds})


def list_unknown(census: Census) -> list[str]:
    return [path for path in census.values if "." in path and attributes.find_line(path) is None]


def test_every_attribute_is_classified(visits, stock):
    """A new SGLang version fails here, by name: say in ``attributes.txt`` what the attribute is."""
    unknown = {path for census in (*visits, *stock.values()) for path in list_unknown(census)}
    assert not unknown, f"attributes that attributes.txt does not know: {sorted(unknown)}"


@pytest.mark.long
def test_the_table_has_no_line_too_many(visited, stock):
    found = [census for kind in SCHEDULERS for census in visited(kind)]
    used = {attributes.find_line(path) for census in (*found, *stock.values()) for path in census.values}
    assert not [line.pattern for line in attributes.read_table() if line not in used]


def test_fixed_ones_never_change(visits):
    values = {path: {c.values[path] for c in visits if path in c.values} for path in list_paths(visits, "fixed")}
    assert not {path: found for path, found in values.items() if len(found) > 1}


def test_ranks_of_a_group_agree(visits):
    groups = defaultdict(list)
    for census in visits:
        groups[census.epoch, census.rank % (RANKS // census.tp)].append(census)
    for (epoch, group), members in groups.items():
        assert len(members) == members[0].tp
        for path in list_paths(members, *AGREED):
            values = [member.values.get(path) for member in members]
            assert len(set(values)) == 1, f"{path} after switch {epoch} in group {group}: {values}"


def test_each_layout_has_objects_of_its_own(visits):
    for path in list_paths(visits, "own"):
        owners = defaultdict(set)
        for census in visits:
            if census.values[path] != "None":
                owners[census.rank, census.identities[path]].add(census.tp)
        shared = {owner: degrees for owner, degrees in owners.items() if len(degrees) > 1}
        assert not shared, f"{path} is shared by layouts: {shared}"


def test_a_layout_is_what_a_stock_engine_of_its_degree_is(visits, stock):
    """The second time and after requests as well."""
    wrong = {}
    for census in visits:
        built = stock.get((census.tp, census.tp_rank))
        for path in list_paths([census], "layout"):
            if attributes.find_line(path).reason == "ours" or built is None:
                continue
            if census.values[path] != built.values.get(path):
                wrong[path, census.tp, census.tp_rank] = census.values[path], built.values.get(path)
    assert not wrong
