"""What each of SGLang's control requests does while ranks are lent (docs/lending.md)."""

from __future__ import annotations

import pytest
from sglang.srt.managers import io_struct as io

from sglang_pat.coordinator.process import classify
from sglang_pat.coordinator.router import Control
from sglang_pat.host.controls import CONTROLS

from .graphs import OLD

pytestmark = pytest.mark.contract

TO_ALL, TAKES_BACK, REFUSED = "goes to all ranks", "takes ranks back", "is refused"

WHILE_LENT = {
    # Whoever has new weights has trained.
    io.UpdateWeightFromDiskReqInput: TAKES_BACK,
    io.UpdateWeightsFromTensorReqInput: TAKES_BACK,
    io.UpdateWeightsFromDistributedReqInput: TAKES_BACK,
    io.UpdateWeightsFromIPCReqInput: TAKES_BACK,
    # Of all ranks, some of whose memory a trainer has.
    io.ReleaseMemoryOccupationReqInput: REFUSED,
    io.ResumeMemoryOccupationReqInput: REFUSED,
    io.GetWeightsByNameReqInput: REFUSED,
    io.CheckWeightsReqInput: REFUSED,
    io.InitWeightsUpdateGroupReqInput: REFUSED,
    io.DestroyWeightsUpdateGroupReqInput: REFUSED,
    io.InitWeightsSendGroupForRemoteInstanceReqInput: REFUSED,
    io.SendWeightsToRemoteInstanceReqInput: REFUSED,
    # What a rank has to know when it comes back.
    io.FlushCacheReqInput: TO_ALL,
    io.ClearHiCacheReqInput: TO_ALL,
    io.AttachHiCacheStorageReqInput: TO_ALL,
    io.DetachHiCacheStorageReqInput: TO_ALL,
    io.AddExternalCorpusReqInput: TO_ALL,
    io.RemoveExternalCorpusReqInput: TO_ALL,
    io.ListExternalCorporaReqInput: TO_ALL,
    io.LoadLoRAAdapterReqInput: TO_ALL,
    io.LoadLoRAAdapterFromTensorsReqInput: TO_ALL,
    io.UnloadLoRAAdapterReqInput: TO_ALL,
    io.ExpertDistributionReq: TO_ALL,
    io.ProfileReq: TO_ALL,
    io.GetInternalStateReq: TO_ALL,
    io.SetInternalStateReq: TO_ALL,
    io.SlowDownReqInput: TO_ALL,
    io.DumperControlReqInput: TO_ALL,
    io.OpenSessionReqInput: TO_ALL,
    io.RpcReqInput: TO_ALL,
}
if OLD:
    WHILE_LENT[io.GetLoadsReqInput] = TO_ALL
else:
    WHILE_LENT |= {
        io.BeginWeightUpdateReqInput: TAKES_BACK,
        io.EndWeightUpdateReqInput: TAKES_BACK,
        io.UpdateWeightVersionReqInput: TO_ALL,
        io.GetHiCacheL3LayoutReq: TO_ALL,
        io.PdRoleSwitchReqInput: TO_ALL,
        io.ScaleElasticEPReqInput: TO_ALL,
    }


def test_each_control_request_is_decided():
    assert set(WHILE_LENT) == set(CONTROLS), "say here what it does while ranks are lent"


@pytest.mark.parametrize("kind", WHILE_LENT, ids=lambda kind: kind.__name__)
def test_it_does_that(kind):
    _, options = CONTROLS[kind]
    control = Control(obj=None, **options)
    found = (TAKES_BACK if control.takes_back else REFUSED) if control.needs_base else TO_ALL
    assert found == WHILE_LENT[kind]


@pytest.mark.parametrize("obj", [io.AbortReq(), io.PauseGenerationReqInput(), io.ContinueGenerationReqInput()])
def test_what_is_not_answered_goes_to_all_ranks(obj):
    (control,) = classify(obj)
    assert isinstance(control, Control) and not control.needs_base
