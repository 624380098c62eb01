"""Our arguments among OpenRLHF's; nothing of OpenRLHF is needed."""

from __future__ import annotations

import pytest

from sglang_pat.integrations.openrlhf.__main__ import main, split


def test_ours_are_taken_out():
    given, rest = split(
        [
            "--vllm.num_engines", "1", "--sglang_pat.policy", "pat", "--train.colocate_all", "--sglang.device=cpu",
            "--sglang.max_total_tokens", "4096", "--sglang.enable_memory_saver", "False", "--sglang_pat.switch_at=-1",
        ]
    )  # fmt: skip
    assert given.pat == {"policy": "pat", "switch_at": "-1"}
    assert given.sglang == {"device": "cpu", "max_total_tokens": 4096, "enable_memory_saver": False}
    assert rest == ["--vllm.num_engines", "1", "--train.colocate_all"]


@pytest.mark.parametrize("argv", [["--sglang_pat.policy"], ["--sglang_pat.policy", "--train.colocate_all"]])
def test_a_value_that_lacks(argv):
    with pytest.raises(ValueError, match="^--sglang_pat.policy needs a value: --sglang_pat.policy VALUE$"):
        split(argv)


def test_a_wrong_setting_ends_it_before_anything_starts():
    with pytest.raises(SystemExit, match="^error: --sglang_pat has no setting 'polcy'; choose from"):
        main(["--sglang_pat.polcy", "pat"])


def test_degrees_that_do_not_fit_the_gpus():
    given, _ = split(["--sglang_pat.base_tp", "3"])
    with pytest.raises(ValueError, match="^--sglang_pat: base_tp is 3, must divide the engine's 8 GPUs: 1, 2, 4, 8$"):
        given.check(gpus=8)
