"""The reference profiles: the files are those that the code makes, and give back the published numbers."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_pat.predict.cost import SwitchCosts
from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import check_fits, load, save
from studies import PROFILES, modelled

pytestmark = pytest.mark.unit

NAMES = sorted(modelled.make_references())
NINE_OF_12K = np.full(9, 12288)


def load_profile(name: str):
    found = load(PROFILES / f"{name}.json")
    predictor = Predictor(found)
    return predictor, SwitchCosts(found, predictor)


def test_files_are_what_the_code_makes(tmp_path):
    assert sorted(path.name for path in PROFILES.glob("*.json")) == NAMES
    for name, made in modelled.make_references().items():
        save(made, tmp_path / name)
        assert load(PROFILES / name) == load(tmp_path / name), f"{name}: python -m studies.modelled"


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_marked_and_usable(name):
    found = load(PROFILES / name)
    assert found.kind == "modelled" and len(found.sources) > 4
    check_fits(found, found.fingerprint)
    predictor = Predictor(found)
    costs = SwitchCosts(found, predictor)
    assert predictor.degrees == found.fingerprint.degrees
    budget = found.fingerprint.kv_tokens * found.fingerprint.num_ranks // found.fingerprint.base_tp
    assert all(point.batch * point.context * point.replicas <= budget for point in found.decode)
    for tp in predictor.degrees:
        many, one = predictor.step_seconds(tp, 32, 32 * 2048), predictor.step_seconds(tp, 1, 2048)
        assert many > one > 0
        assert all(costs.estimate(tp, other, NINE_OF_12K).seconds > 0 for other in predictor.degrees if other != tp)


@pytest.mark.parametrize(
    "tp, batch, seconds", [(2, 1, 15.37e-3), (8, 1, 9.64e-3), (2, 32, 24.41e-3), (8, 128, 30.87e-3)]
)
def test_pat_figure_4(tp, batch, seconds):
    predictor, _ = load_profile("8xA40-llama3.1-8b")
    assert predictor.step_seconds(tp, batch, batch * 2048) == pytest.approx(seconds, rel=0.01)


def test_pat_section_5_4_full_prefill():
    predictor, _ = load_profile("8xA40-llama3.1-8b")
    assert predictor.prefill_uniform(8, 9, 12288) == pytest.approx(19.01, rel=0.01)


def test_pat_section_5_4_switch():
    _, costs = load_profile("8xA40-llama3.1-8b-pat-costs")
    cost = costs.estimate(2, 8, NINE_OF_12K)
    assert cost.state_seconds == pytest.approx(2.36, rel=0.01) and cost.recompute_below == 0
    assert costs.fit(2, 8).reshard == pytest.approx(1.03, rel=0.01)
    assert cost.seconds == pytest.approx(5.52, rel=0.01)


@pytest.mark.parametrize("name, from_tp, seconds", [("8xA40-llama3.1-8b", 2, 72e-3), ("8xH100-llama3.1-8b", 1, 6.3e-3)])
def test_our_exchange_of_9_requests(name, from_tp, seconds):
    """The floor: the bytes that must move, over the one-way bandwidth of the links."""
    samples = load(PROFILES / f"{name}.json").switches
    kv = [s.phases["kv"] for s in samples if (s.from_tp, s.to_tp, s.tokens) == (from_tp, 8, 9 * 12288)]
    assert kv == pytest.approx([seconds], rel=0.01)


@pytest.mark.parametrize("model, published", [(modelled.A3B, 30.53e9), (modelled.MIXTRAL, 46.70e9)])
def test_a_mixture_reads_what_its_tokens_choose(model, published):
    assert model.weight_bytes / modelled.ELEMENT == pytest.approx(published, rel=0.001)
    assert model.count_experts(1) == pytest.approx(model.chosen)
    assert model.read_bytes == pytest.approx(model.count_read_bytes(1)) and model.read_bytes < model.weight_bytes / 3
    input_embedding = modelled.ELEMENT * model.vocabulary * model.hidden
    assert model.count_read_bytes(4096) == pytest.approx(model.weight_bytes - input_embedding)
    drawn = np.random.default_rng(0).random((1000, 32, model.experts)).argsort(axis=-1)[..., : model.chosen]
    touched = np.mean([len(np.unique(step)) for step in drawn])
    assert model.count_experts(32) == pytest.approx(touched, rel=0.01)


def test_copied_kv_heads():
    """Four heads on eight ranks: no more room than on four, KV is read twice, a raise sends all, a way back nothing."""
    model, times = modelled.A3B, modelled.make_h100(modelled.A3B)
    room = modelled.count_room(modelled.H100, model, 2)
    assert room == {2: 683_264, 4: 1_366_528, 8: 1_366_528}
    kv = [times.step_seconds(tp, 64, 64 * 8192) - times.step_seconds(tp, 64, 0) for tp in (2, 4, 8)]
    assert kv == pytest.approx([kv[1] * 2, kv[1], kv[1]])
    sent = {pair: modelled.count_sent_share(model, *pair) for pair in ((2, 4), (4, 2), (4, 8), (8, 4), (2, 8), (8, 2))}
    assert sent == {(2, 4): 0.5, (4, 2): 0.5, (4, 8): 1.0, (8, 4): 0.0, (2, 8): 1.5, (8, 2): 0.5}
    # Of 8 heads none is copied: what is sent is what the other ranks of the group are to have.
    assert [modelled.count_sent_share(modelled.QWEN, *pair) for pair in ((2, 8), (8, 2), (4, 8))] == [0.75, 0.75, 0.5]


def test_pat_section_5_3_generation():
    h100, lengths = modelled.make_h100(modelled.LLAMA), modelled.make_deepscaler_lengths(24576)
    assert h100.generation_seconds(2, lengths, 4) == pytest.approx(134.3, rel=0.01)
    assert lengths.max() == 24576 and np.mean(lengths > 8192) == pytest.approx(0.1085, abs=0.005)
    qwen = modelled.make_h100(modelled.QWEN).generation_seconds(2, modelled.make_deepscaler_lengths(16384), 4)
    # Not calibrated: a check of the model.
    assert qwen == pytest.approx(133.9, rel=0.06)
