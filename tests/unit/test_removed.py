"""What is gone is refused in one line that names what to use instead."""

from __future__ import annotations

import pytest

from sglang_pat import config, removed, settings

pytestmark = pytest.mark.unit


@pytest.fixture
def rows(monkeypatch):
    """Rows of settings and values that were never there."""
    monkeypatch.setitem(removed.SETTINGS, "old_thing", "use --pat-policy")
    monkeypatch.setitem(removed.VALUES, ("policy", "oracle"), "choose survival")


@pytest.mark.parametrize("word", ["--pat-old-thing", "--pat-old-thing=3", "pat_old_thing"])
def test_a_flag_and_a_field(rows, word):
    removed.refuse_flags(["--tp", "1", "pat_policy"])
    with pytest.raises(ValueError, match=f"^{word.partition('=')[0]} is gone: use --pat-policy$"):
        removed.refuse_flags(["--tp", "1", word])


def test_a_setting_and_a_value(rows):
    with pytest.raises(ValueError, match="^here: old_thing is gone: use --pat-policy$"):
        settings.parse_fields({"old_thing": 1}, "here")
    with pytest.raises(ValueError, match="--pat-policy oracle is gone: choose survival$"):
        settings.parse_fields({"policy": "oracle"}, "here")


def test_no_row_is_in_use_and_each_is_one_line():
    used = {setting.name: setting.choices for setting in (settings.BASE_TP, *settings.SETTINGS)}
    assert not used.keys() & removed.SETTINGS.keys()
    for name, value in removed.VALUES:
        assert name in used and value not in used[name] and value not in config.POLICIES
    assert all(len(name.split()) == 2 for name in removed.ROUTES)
    for table in (removed.SETTINGS, removed.VALUES, removed.ROUTES, removed.METHODS, removed.FIELDS):
        for text in table.values():
            assert text and "\n" not in text and not text.endswith(".")
