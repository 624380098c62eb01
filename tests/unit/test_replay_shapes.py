"""Simulated rounds: shapes of lengths."""

from __future__ import annotations

import numpy as np
import pytest

from studies.shapes import parse_shape

pytestmark = pytest.mark.unit


def test_reported_shapes():
    shares = (np.arange(100_000) + 0.5) / 100_000
    deep = parse_shape("deepscaler").quantile(shares)
    assert (deep > 8192).mean() == pytest.approx(0.1085, abs=0.002)
    assert (deep > 16384).mean() == pytest.approx(0.0218, abs=0.001)
    roll = parse_shape("rollpacker").quantile(shares)
    assert 755 <= np.quantile(roll, 0.75) <= 1100 and 512 <= np.median(roll) <= 655
    assert (roll == 16384).mean() == pytest.approx(0.01, abs=1e-3) and (np.diff(roll) >= 0).all()
    sft = parse_shape("sft").quantile(shares)
    assert np.median(sft) == pytest.approx(680, rel=0.01) and sft.mean() == pytest.approx(2806, rel=0.15)
    assert (parse_shape("partial-rollout").quantile(shares) < 80_000).mean() == pytest.approx(0.97, abs=0.01)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8, 1.0])
def test_correlation_within_groups(correlation):
    lengths = parse_shape("deepscaler").draw(8 * 3000, correlation, 8, np.random.default_rng(0)).reshape(-1, 8)
    ranks = lengths[:, :2].argsort(axis=0).argsort(axis=0)
    found = np.corrcoef(ranks.T)[0, 1]
    assert found == pytest.approx(6 / np.pi * np.arcsin(correlation / 2), abs=0.04)


@pytest.mark.parametrize("text", ["5\n7\n\n9\n", "[9, 5, 7]"])
def test_files_of_lengths(tmp_path, text):
    path = tmp_path / "lengths"
    path.write_text(text)
    shape = parse_shape(str(path))
    assert shape.samples.tolist() == [5, 7, 9] and shape.limit == 9
    assert set(shape.draw(100, 0.0, 8, np.random.default_rng(0)).tolist()) == {5, 7, 9}
    assert parse_shape(str(path), limit=6).draw(100, 0.0, 8, np.random.default_rng(0)).max() == 6


@pytest.mark.parametrize(
    "text", ["lognormal:1,2", "lognormal:1,-1,5", "body-atom:1,1,9,1", "/none", "[]", "5 x", "[-1]"]
)
def test_bad_shapes_and_files(tmp_path, text):
    if text in ("[]", "5 x", "[-1]"):
        (tmp_path / "lengths").write_text(text)
        text = str(tmp_path / "lengths")
    with pytest.raises(ValueError, match="--lengths") as caught:
        parse_shape(text)
    assert "\n" not in str(caught.value)
