"""What a lent rank does with its memory; the saver loses what it releases, as on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.contract


class Saver:
    """SGLang's adapter of the memory saver; ``log``: what it was asked."""

    def __init__(self, lost: dict[str, list[torch.Tensor]], enabled: bool) -> None:
        self._lost, self.enabled = lost, enabled
        self.log: list[str] = []

    def pause(self, tag: str) -> None:
        self.log.append(f"pause {tag}")
        for tensor in self._lost[tag]:
            tensor.data.fill_(-1)

    def resume(self, tag: str) -> None:
        self.log.append(f"resume {tag}")


def make(device: str = "cpu", enabled: bool = True) -> tuple[Any, Any, Saver]:
    """The memory of a rank, its model, and the saver."""
    from sglang_pat.host.kv import KvBuffers
    from sglang_pat.rank.lent_memory import LentMemory

    model = torch.nn.Linear(3, 5)
    model.register_buffer("positions", torch.arange(4))
    buffers = KvBuffers(k=[torch.zeros(8, 2, 4)], v=[torch.zeros(8, 2, 4)])
    saver = Saver({"weights": [*model.parameters(), *model.buffers()], "kv_cache": buffers.k}, enabled)
    layouts = SimpleNamespace(base=SimpleNamespace(model=model, kv=buffers), device=device)
    return LentMemory(SimpleNamespace(memory_saver_adapter=saver, layouts=layouts)), model, saver


BYTES = 4 * (15 + 5) + 8 * 4 + 2 * 4 * 64
"""The size of weights, the buffer of integers, K and V."""


def test_weights_come_back_and_nothing_is_done_twice():
    memory, model, saver = make()
    want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    places = [tensor.data_ptr() for tensor in model.state_dict().values()]
    memory.resume()
    assert saver.log == [], "it was not released"
    assert (memory.release(), memory.release()) == (BYTES, 0)
    assert all((tensor == -1).all() for tensor in model.state_dict().values())
    memory.resume()
    memory.resume()
    assert saver.log == ["pause weights", "pause kv_cache", "resume weights", "resume kv_cache"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, want[name]), name
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == places, "graphs read them there"


def test_without_a_memory_saver_nothing_is_released():
    memory, _, saver = make(enabled=False)
    assert memory.release() == 0
    memory.resume()
    assert saver.log == []


def test_memory_that_the_trainer_still_has_is_not_taken(monkeypatch):
    """The memory saver would end the process."""
    from sglang_pat.rank import lent_memory

    monkeypatch.setattr(lent_memory, "synchronize", lambda device: None)
    memory, model, saver = make(device="cuda")
    want = model.weight.clone()
    memory.release()
    free = BYTES - 1
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 10**9))
    with pytest.raises(RuntimeError, match="let the trainer give its memory back first") as refused:
        memory.resume()
    assert "\n" not in str(refused.value) and not any(line.startswith("resume") for line in saver.log)
    free = BYTES
    memory.resume()
    assert torch.equal(model.weight, want)
