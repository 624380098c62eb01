"""An update in shared memory on a busy machine: torch's helper answers late, and is asked again."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing import reductions

from sglang_pat.cpu import shim

pytestmark = pytest.mark.contract

shim.ensure()
from sglang_pat.host.fixes import shared_memory  # noqa: E402


def late():
    return RuntimeError(f"{shared_memory.LATE}\nException raised from ...")


@pytest.mark.parametrize(
    "error, calls", [(late(), shared_memory.ATTEMPTS), (RuntimeError("no such file"), 1), (ValueError("2 items"), 1)]
)
def test_what_is_asked_again_and_how_often(error, calls):
    asked = []

    def read():
        asked.append(1)
        raise error

    with pytest.raises(type(error)):
        shared_memory.retry_late(read)()
    assert len(asked) == calls


def test_every_storage_is_opened_once(monkeypatch):
    """The helper is late at the second tensor of a list; what has been opened is not opened again."""
    from sglang.srt.utils import MultiprocessingSerializer

    monkeypatch.setattr(reductions, "rebuild_storage_filename", reductions.rebuild_storage_filename)
    shared_memory.open_with_retry()
    before = reductions.rebuild_storage_filename
    shared_memory.open_with_retry()
    assert reductions.rebuild_storage_filename is before, "once in a process"

    opened, errors = [], [None, late(), late(), None, None]
    real = torch.UntypedStorage._new_shared_filename_cpu

    def new(manager, handle, size):
        if error := errors.pop(0):
            raise error
        opened.append(handle)
        return real(manager, handle, size)

    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        tensors = [torch.full((1000,), float(i)) for i in range(3)]
        sent = MultiprocessingSerializer.serialize(tensors)
        reductions.shared_cache.clear()  # as in another process
        monkeypatch.setattr(torch.UntypedStorage, "_new_shared_filename_cpu", new)
        received = MultiprocessingSerializer.deserialize(sent)
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    assert all(torch.equal(one, other) for one, other in zip(received, tensors, strict=True))
    assert len(opened) == len(set(opened)) == 3 and not errors
