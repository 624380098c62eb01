"""An update in shared memory on a busy machine: torch's helper answers late, and is asked again."""

import pytest

from sglang_pat.sglang import cpu_shim

pytestmark = pytest.mark.contract

cpu_shim.ensure()
from sglang_pat.sglang.rank import updates  # noqa: E402


def reader(*errors):
    left = list(errors)

    def read():
        if left:
            raise left.pop(0)
        return "tensors"

    return read


def late():
    return RuntimeError(f"{updates.LATE}\nException raised from ...")


def test_late_is_asked_again():
    assert updates.patiently(reader(late(), late())) == "tensors"


def test_not_for_ever():
    with pytest.raises(RuntimeError, match=updates.LATE):
        updates.patiently(reader(*[late() for _ in range(updates.ATTEMPTS)]))


@pytest.mark.parametrize("error", [RuntimeError("no such file"), ValueError("2 items for 4 ranks")])
def test_other_errors_are_told_at_once(error):
    with pytest.raises(type(error), match=str(error)):
        updates.patiently(reader(error))
