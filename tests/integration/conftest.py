"""The real frameworks, on a CPU.  They have an environment of their own (``make test-integration``); elsewhere these
tests are not even collected."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from sglang_pat.cpu import shim
from sglang_pat.testing import models

from .jobs import Job, OpenRlhfJob, VerlJob

shim.ensure(children=True)

collect_ignore_glob = [] if importlib.util.find_spec("verl") else ["test_*.py"]

MODELS = Path(__file__).resolve().parents[2] / ".cache" / "models"


class Runner:
    """Runs an example with given arguments, once for all tests that ask for the same."""

    def __init__(self, kind: type[Job], model: Path, folders: pytest.TempPathFactory) -> None:
        self._kind, self._model, self._folders = kind, model, folders
        self._known: dict[tuple[str, ...], Job] = {}

    def __call__(self, *args: str, fails: bool = False) -> Job:
        """``{out}`` in an argument stands for the job's folder."""
        if args not in self._known:
            self._known[args] = self._kind(self._model, self._folders.mktemp(self._kind.example), args)
        job = self._known[args]
        assert fails == (job.code != 0), f"exit code {job.code}\n{job.tail}"
        return job


@pytest.fixture(scope="session")
def flat() -> Path:
    """A small Llama whose probabilities are far from 0 and 1: rounding shows least, and responses end by chance."""
    return models.make_random("llama", MODELS / "llama-flat", heads=4, kv_heads=2, logit_std=1)


@pytest.fixture(scope="session")
def verl_job(flat, tmp_path_factory) -> Runner:
    return Runner(VerlJob, flat, tmp_path_factory)


@pytest.fixture(scope="session")
def verl_mixture_job(tmp_path_factory) -> Runner:
    """Runs jobs of a mixture of experts with three layers and two experts a token."""
    return Runner(VerlJob, models.make_random("qwen3_moe", MODELS / "qwen3_moe-flat", logit_std=1), tmp_path_factory)


@pytest.fixture(scope="session")
def verl_mixtral_job(tmp_path_factory) -> Runner:
    return Runner(VerlJob, models.make_random("mixtral", MODELS / "mixtral-flat", logit_std=1), tmp_path_factory)


@pytest.fixture(scope="session")
def openrlhf_job(flat, tmp_path_factory) -> Runner:
    return Runner(OpenRlhfJob, flat, tmp_path_factory)


@pytest.fixture(scope="session")
def openrlhf_mixture_job(tmp_path_factory) -> Runner:
    shape = dict(heads=4, kv_heads=2, logit_std=1)
    model = models.make_random("qwen3_moe", MODELS / "qwen3_moe-kv2-flat", **shape)
    return Runner(OpenRlhfJob, model, tmp_path_factory)
