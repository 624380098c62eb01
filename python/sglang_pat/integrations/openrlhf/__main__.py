"""OpenRLHF's ``train_ppo_ray`` with adaptive engines.

    python -m sglang_pat.integrations.openrlhf --actor.model_name_or_path M --vllm.num_engines 1 \\
        --vllm.tensor_parallel_size 8 … --sglang_pat.policy survival --sglang_pat.profile P [--sglang.FLAG VALUE …]

One engine owns ``--vllm.tensor_parallel_size`` GPUs.  ``--sglang_pat.*`` are our settings, ``--sglang.*`` SGLang's
server arguments by name; all others are OpenRLHF's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import runpy
import sys
from typing import Any

from sglang_pat import settings
from sglang_pat.integrations.openrlhf import facade
from sglang_pat.integrations.openrlhf.given import MODEL, WHERE, WHERE_SGLANG, GivenArguments
from sglang_pat.integrations.openrlhf.launcher import install

GPUS, RESPONSE, WHOLE = "--vllm.tensor_parallel_size", "--rollout.max_new_tokens", "--data.max_len"
DEFAULTS = {GPUS: 1, RESPONSE: None, WHOLE: 2048}
"""Defaults of OpenRLHF's own."""


def split(argv: list[str]) -> tuple[GivenArguments, list[str]]:
    """Part the command line into our arguments and OpenRLHF's.

    Raises:
        ValueError: one of our arguments lacks its value, or ``SGLANG_PAT`` has none of our settings.
    """
    arguments, others, words = GivenArguments(pat=settings.read_environment()), [], iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        prefix, dot, name = name.partition(".")
        target = {WHERE: arguments.pat, WHERE_SGLANG: arguments.sglang}.get(prefix)
        if target is None or not dot:
            others.append(word)
            continue
        if not equals:
            value = next(words, None)
        if value is None or (not equals and value.startswith("--")):
            raise ValueError(f"{word} needs a value: {word} VALUE")
        target[name] = value if target is arguments.pat else _read(value)
    return arguments, others


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _read_as_openrlhf(argv: list[str]) -> dict[str, Any]:
    """Values of OpenRLHF's arguments :data:`DEFAULTS` and :data:`MODEL`; None: not given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, default in DEFAULTS.items():
        parser.add_argument(name, type=int, default=default)
    parser.add_argument(MODEL)
    return {f"--{name}": value for name, value in vars(parser.parse_known_args(argv)[0]).items()}


def _check_lengths(response: int | None, whole: int) -> None:
    """Tokens of a response (None: what the prompt leaves), and of both together, at most.

    Raises:
        ValueError: OpenRLHF would cut each prompt down to nothing, and go on.
    """
    if response is not None and response >= whole:
        raise ValueError(
            f"{RESPONSE} is {response}, must be less than {WHOLE} ({whole}), the length of a prompt and its response: "
            f"give {WHOLE} {response + 2048}, for prompts of 2048 tokens"
        )


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    missing = ", ".join(name for name in ("ray", "openrlhf") if importlib.util.find_spec(name) is None)
    if {"-h", "--help"} & {*argv}:
        names = ", ".join(setting.name for setting in settings.SETTINGS)
        print((__doc__ or "").strip())
        print(f"Our settings (docs/flags.md says what they are): {names}.\n", flush=True)
        if missing:
            print(f"OpenRLHF's own flags are not shown: not installed here: {missing}")
            return
    try:
        arguments, others = split(argv)
        values = _read_as_openrlhf(others)
        arguments.check(values[GPUS], values[MODEL])
        _check_lengths(values[RESPONSE], values[WHOLE])
        if missing:
            raise ValueError(f"not installed here: {missing}; use the environment in which OpenRLHF runs")
    except ValueError as error:
        sys.exit(f"error: {error}")
    facade.install()
    facade.install_in_workers()
    install(arguments)
    sys.argv = ["train_ppo_ray", *others]
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")


if __name__ == "__main__":
    main()
