"""What each of SGLang's control requests does while ranks are lent (docs/lending.md)."""

from __future__ import annotations

import pytest
from sglang.srt.managers import io_struct as io

from sglang_pat.coordinator.process import classify
from sglang_pat.coordinator.router import Control
from sglang_pat.host.controls import CONTROLS

from .graphs import OLD

pytestmark = pytest.mark.contract

TAKES_BACK = {
    io.UpdateWeightFromDiskReqInput,
    io.UpdateWeightsFromTensorReqInput,
    io.UpdateWeightsFromDistributedReqInput,
    io.UpdateWeightsFromIPCReqInput,
    *(() if OLD else (io.BeginWeightUpdateReqInput, io.EndWeightUpdateReqInput)),
}
"""Whoever has new weights has trained."""
REFUSED = {
    io.ReleaseMemoryOccupationReqInput,
    io.ResumeMemoryOccupationReqInput,
    io.GetWeightsByNameReqInput,
    io.CheckWeightsReqInput,
    io.InitWeightsUpdateGroupReqInput,
    io.DestroyWeightsUpdateGroupReqInput,
    io.InitWeightsSendGroupForRemoteInstanceReqInput,
    io.SendWeightsToRemoteInstanceReqInput,
}
"""What is of all ranks: a trainer has the memory of some."""


def test_what_takes_ranks_back_and_what_is_refused():
    """All others go to all ranks."""
    controls = {kind: Control(obj=None, **options) for kind, (_, options) in CONTROLS.items()}
    of_all = {kind for kind, control in controls.items() if control.needs_base}
    takes_back = {kind for kind in of_all if controls[kind].takes_back}
    assert (takes_back, of_all - takes_back) == (TAKES_BACK, REFUSED)


@pytest.mark.parametrize("obj", [io.AbortReq(), io.PauseGenerationReqInput(), io.ContinueGenerationReqInput()])
def test_what_is_not_answered_goes_to_all_ranks(obj):
    (control,) = classify(obj)
    assert isinstance(control, Control) and not control.needs_base
