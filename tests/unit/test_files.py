"""Files are written whole or not at all."""

from __future__ import annotations

import pytest

from sglang_pat import files

pytestmark = pytest.mark.unit


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "profile.json"
    files.write(b"before", file)
    monkeypatch.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        files.write(b"after", file)
    assert file.read_bytes() == b"before" and list(tmp_path.iterdir()) == [file]
