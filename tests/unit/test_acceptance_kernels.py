"""What the acceptance times on a GPU is the GPU's time, not Python's: on a stand-in for one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_pat.acceptance import kernels

pytestmark = pytest.mark.unit


class Device:
    """Does what is launched one after the other; to launch takes time of the one who does."""

    def __init__(self) -> None:
        self.host = self.done = 0.0

    def launch(self, host: float, device: float) -> None:
        self.host += host
        self.done = max(self.done, self.host) + device

    def synchronize(self) -> None:
        self.host = max(self.host, self.done)

    def event(self, enable_timing: bool) -> SimpleNamespace:
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", max(self.done, self.host))
        event.elapsed_time = lambda end: (end.at - event.at) * 1e3
        return event


def test_launching_does_not_count(monkeypatch):
    """Python needs some 80 µs to launch a kernel of Triton's, and 5 to launch a copy."""
    gpu = Device()

    def empty(size: int, dtype: object, device: str) -> SimpleNamespace:
        return SimpleNamespace(zero_=lambda: gpu.launch(5e-6, size / 3e12))

    cuda = SimpleNamespace(Event=gpu.event, synchronize=gpu.synchronize)
    monkeypatch.setattr(kernels, "torch", SimpleNamespace(cuda=cuda, empty=empty, uint8=None))
    pack, copy = kernels.seconds("cuda", lambda: gpu.launch(80e-6, 25e-6), lambda: gpu.launch(5e-6, 20e-6), repeats=3)
    assert (pack, copy) == (pytest.approx(25e-6), pytest.approx(20e-6))
