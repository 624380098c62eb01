"""The rows of routing replay that a thread copies while steps write beside it."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest
import torch

from sglang_pat.rank.routed_rows import Table

pytestmark = pytest.mark.unit


def make_table(slots: int) -> Table:
    return Table(torch.zeros(slots, 2, dtype=torch.uint8))


def test_a_row_that_was_written_since_stays():
    source = torch.arange(20, dtype=torch.uint8).view(10, 2)
    table = make_table(10)
    work: Future = Future()
    old, new = np.array([9, 8, 7]), np.array([1, 3, 5])
    table.await_rows(np.array([0, 1, 3, 5]), lambda: work)
    table[torch.tensor([3, 6])] = torch.tensor([[50, 51], [52, 53]], dtype=torch.uint8)
    table.copy(source, old, new)
    work.set_result(None)
    assert table[torch.tensor([1, 3, 5, 6, 2])].tolist() == [[18, 19], [50, 51], [14, 15], [52, 53], [0, 0]]


def test_what_an_earlier_switch_awaited_is_forgotten():
    source = torch.ones(4, 2, dtype=torch.uint8)
    table = make_table(4)
    for slot in (1, 2):
        work: Future = Future()
        work.set_result(None)
        table.await_rows(np.array([slot]), lambda done=work: done)
        table.wait()
    table.copy(source, np.array([0, 0]), np.array([1, 2]))
    assert table[torch.arange(4)][:, 0].tolist() == [0, 0, 1, 0]


def test_what_copying_raises_is_raised_by_who_reads():
    table = make_table(4)
    work: Future = Future()
    work.set_exception(OSError("no memory"))
    table.await_rows(np.array([1]), lambda: work)
    with pytest.raises(OSError, match="no memory"):
        table[torch.tensor([1])]


def test_reading_waits():
    """A read before the copy has ended would not return: the future says who asked."""

    class Asked(Future):
        def result(self, timeout=None):
            table.copy(torch.full((4, 2), 7, dtype=torch.uint8), np.array([0]), np.array([2]))

    table = make_table(4)
    table.await_rows(np.array([2]), Asked)
    assert table[torch.tensor([2])].tolist() == [[7, 7]]
