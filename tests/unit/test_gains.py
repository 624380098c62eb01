"""Where adaptive TP pays (``studies.gains``): tables of the pages are what is stored, and that is what is computed."""

from __future__ import annotations

import csv

import pytest

from sglang_pat.predict.profile import check_fits
from sglang_pat.tools.commands import UsageError
from studies import gains, modelled, pat_settings
from studies.modelled import A3B, A40, H100, L40S, LLAMA, QWEN_32B

pytestmark = [pytest.mark.unit, pytest.mark.long]


def test_tables_of_the_pages_are_those_that_are_stored():
    found = gains.read_stored()
    assert list(found) == [(machine, model) for machine in gains.MACHINES for model in gains.MODELS]
    readme = gains.format_markdown((*gains.HEADS, *gains.format_sizes(found)), gains.list_rows(found))
    text = gains.README.read_text()
    assert f"<!-- gains:begin -->\n{readme}<!-- gains:end -->" in text
    assert f"gains:text:begin -->\n{gains.format_message(gains.list_stored())}<!-- gains:text:end" in text
    assert gains.format_csv(gains.DETAIL_HEADS, gains.list_details(found)) == gains.DETAILS.read_text()
    bases = gains.list_bases(gains.list_stored())
    assert gains.format_csv(gains.BASES_HEADS, bases) == gains.BASES.read_text()
    assert gains.format_csv(gains.COMPARED_HEADS, gains.list_compared(found)) == gains.COMPARED.read_text()


@pytest.mark.parametrize("adaptive", [False, True])
def test_what_is_stored_is_what_is_computed(adaptive):
    """Run ``python -m studies.gains --store`` if this fails."""
    task = gains.GainTask("8×A40, PCIe", "Llama-3.1-8B", 2, adaptive, 128, 1, gains.LENGTHS, 0)
    done = gains.study(task)
    (stored,) = (
        each for each in gains.list_stored()
        if (each.machine, each.model, each.tp, each.adaptive, each.size) == (task.machine, task.model, 2, adaptive, 128)
    )  # fmt: skip
    assert done.seconds == pytest.approx(stored.seconds[:1], abs=2e-3)


def test_a_static_layout_has_the_memory_of_its_own_degree():
    """Adaptive TP has that of its base, in every degree."""
    alone, shared = gains.count_room(A40, QWEN_32B, 8)[8], gains.count_room(A40, QWEN_32B, 2)[8]
    assert alone > 2 * shared > 0
    assert gains.list_degrees(A40, QWEN_32B, gains.parse_shape(gains.LENGTHS)) == [2, 4, 8]
    assert gains.list_degrees(H100, LLAMA, gains.parse_shape(gains.LENGTHS)) == [1, 2, 4, 8]
    room = gains.count_room(H100, A3B, 2)
    assert room[8] == room[4], "four KV heads are copied in tp8"


def test_times_of_other_models_keep_what_is_the_machines():
    llama, mixture = modelled.make_times(A40, LLAMA), modelled.make_times(A40, A3B)
    assert llama == modelled.fit_a40_llama() and modelled.make_times(H100, LLAMA) == modelled.make_h100(LLAMA)
    assert (mixture.read_rate, mixture.layer_seconds) == (llama.read_rate, llama.layer_seconds)
    faster = modelled.make_times(L40S, LLAMA)
    assert faster.read_rate / llama.read_rate == pytest.approx(864 / 696)
    assert (faster.reduce_rate, faster.hop_seconds) == (llama.reduce_rate, llama.hop_seconds), "the same PCIe"


@pytest.mark.parametrize("machine", [A40, L40S, H100])
def test_a_profile_of_each_node_is_one_that_policies_take(machine):
    profile = gains.make_node(machine, LLAMA, 2).profile
    check_fits(profile, profile.fingerprint)
    assert profile.kind == "modelled"


@pytest.mark.parametrize("argv", [["--rounds", "0"], ["--store", "--quick"], ["--lengths", "nothing", "--quick"]])
def test_bad_arguments_get_one_line(argv):
    with pytest.raises(UsageError) as told:
        gains.main(argv)
    assert "\n" not in str(told.value) and argv[0] in str(told.value)


def test_pats_own_metric():
    """PAT sections 5.2 and 5.3: tokens of a step, and seconds that are not generation."""
    llama, qwen = pat_settings.REPORTED.values()
    assert llama.tokens == pytest.approx(442_199, abs=1) and llama.rest == pytest.approx(37.9, abs=0.1)
    assert qwen.tokens == pytest.approx(340_732, abs=1) and qwen.rest == pytest.approx(57.5, abs=0.1)
    fits = pat_settings.fit_layer_seconds()
    assert fits == {"PAT's shares": pytest.approx(67.9e-6, abs=1e-7), "PAT's tokens": pytest.approx(70.6e-6, abs=1e-7)}
    with (gains.ROOT / "studies/pat_settings.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    settings = [
        (f"{name}, {cap // 1024}K", lengths, f"{reported.tokens:,.0f}", f"{reported.rest:.1f}")
        for (name, cap), reported in pat_settings.REPORTED.items() for lengths in ("PAT's shares", "PAT's tokens")
    ]  # fmt: skip
    assert [(row["setting"], row["lengths"], row["PAT's"], row["rest, s"]) for row in rows] == settings
