"""The models for tests: recipes, caching, errors, and that they are what they say they are."""

import json
import os
import subprocess
import sys
from itertools import pairwise

import pytest

from sglang_pat.cpu import shim
from sglang_pat.testing import models, tokenizer
from tests.engine import marker_models

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def transformers():
    """transformers, with the CPU shim where it is needed (it imports torchvision)."""
    if shim.is_needed():
        shim.install()
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One default model of each architecture."""
    root = tmp_path_factory.mktemp("models")
    return {arch: models.make_random(arch, root / arch) for arch in models.ARCHITECTURES}


def greedy(model, ids, n):
    """[batch, n] new token ids."""
    import torch

    ids = torch.as_tensor(ids)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, eos_token_id=None)
    return out[:, ids.shape[1] :].tolist()


# Recipes and folders


def test_same_recipe_is_kept_and_other_recipe_replaces(tmp_path):
    out = tmp_path / "deep" / "model"
    assert models.make_random("llama", out, layers=1) == out
    before, content = (out / "model.safetensors").stat(), (out / "model.safetensors").read_bytes()
    models.make_random("llama", out, layers=1)
    after = (out / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    models.make_random("llama", out, layers=1, seed=1)
    assert json.loads((out / "recipe.json").read_text())["seed"] == 1 and os.listdir(out.parent) == ["model"]
    assert (models.make_random("llama", out, layers=1) / "model.safetensors").read_bytes() == content


def test_failure_leaves_nothing_and_a_foreign_folder_is_refused(tmp_path, monkeypatch):
    def fail(folder, *args):
        (folder / "half").write_text("")
        raise OSError("disk full")

    monkeypatch.setattr(models, "_write", fail)
    with pytest.raises(OSError, match="disk full"):
        models.make_random("llama", tmp_path / "m")
    assert os.listdir(tmp_path) == []
    (tmp_path / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match="not a model made by this tool"):
        models.make_random("llama", tmp_path)
    assert os.listdir(tmp_path) == ["thesis.txt"]


# Content


@pytest.mark.parametrize("arch", models.ARCHITECTURES)
def test_loads_completely_and_varies(transformers, folders, arch):
    import torch

    model, info = transformers.AutoModelForCausalLM.from_pretrained(folders[arch], output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert model.config.architectures == [type(model).__name__]
    assert model.generation_config.eos_token_id == [tokenizer.EOS_ID, tokenizer.STOP_ID]
    assert 100_000 < sum(p.numel() for p in model.parameters()) < 500_000
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            assert parameter.std() > 0.05, name
    prompts = torch.randint(6, 503, (4, 20), generator=torch.Generator().manual_seed(0))
    for out in greedy(model, prompts, 50):
        assert len(set(out)) > 12
        assert sum(a == b for a, b in pairwise(out)) < 12


def test_tied_and_odd_shapes(transformers, tmp_path):
    options = dict(heads=6, kv_heads=2, head_dim=16, hidden=48, intermediate=100, vocab=1009, layers=2)
    folder = models.make_random("qwen2", tmp_path / "m", tie=True, dtype="bfloat16", **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert model.lm_head.weight is model.model.embed_tokens.weight and str(model.dtype) == "torch.bfloat16"
    (out,) = greedy(model, [[10, 20, 30]], 60)
    assert len(set(out)) > 8


def test_tokenizer_round_trip(transformers, folders):
    tok = transformers.AutoTokenizer.from_pretrained(folders["llama"])
    assert len(tok) == 503
    texts = [tok.decode([i]) for i in range(503)]
    assert len(set(texts)) == 503 and texts == tokenizer.make_vocabulary(503)
    text = 'Hello, world!\n\t{"a": [1, 2]}  two  spaces bada budo~'
    assert tok.decode(tok.encode(text)) == text
    assert tok.decode(tok.encode("é")) == "<unk>"
    assert tok.encode(" bebi budo") == [texts.index(" bebi"), texts.index(" budo")]
    assert tok.decode([10, tokenizer.EOS_ID, 11], skip_special_tokens=True) == texts[10] + texts[11]
    ids = tok.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert tok.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (tok.eos_token_id, tok.pad_token_id) == (tokenizer.EOS_ID, tokenizer.PAD_ID)


# Markers


def test_marker_takes_each_tensor_into_account(transformers, tmp_path):
    import torch

    model = transformers.AutoModelForCausalLM.from_pretrained(marker_models.make_marker_model(tmp_path / "m", 300))
    old, new = marker_models.make_marker_state_dict(300), marker_models.make_marker_state_dict(301)

    def says(state):
        model.load_state_dict(state)
        with torch.inference_mode():
            return model(torch.tensor([[6, 7, 8]])).logits[0].argmax(-1).unique().tolist()

    assert says(old) == [300] and says(new) == [301]
    deciding = [name for name in old if "q_proj" not in name and "k_proj" not in name]
    assert len(deciding) == 17
    for name in deciding:
        assert says(old | {name: new[name]}) != [300], name
        assert says(new | {name: old[name]}) not in ([300], [301]), name


# The CPU shim, as far as it goes without an engine

SHIM_PROBE = """
import sys
from itertools import pairwise
assert "torch" not in sys.modules and "sglang_pat" not in sys.modules, "start-up must stay cheap"
import sgl_kernel
from sgl_kernel.deep import rmsnorm
try:
    rmsnorm(1)
except RuntimeError as error:
    print(error)
try:
    import sgl_kernel.scalar_type
except ImportError:
    print("no scalar_type")
print(sum(hasattr(finder, "_sglang_pat_cpu_shim") for finder in sys.meta_path))
from sglang_pat.cpu import shim
shim.install()
print(sum(hasattr(finder, "_sglang_pat_cpu_shim") for finder in sys.meta_path))
"""


@pytest.mark.skipif(not shim.is_needed(), reason="the real sgl_kernel is installed")
def test_shim_reaches_children_and_chains(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("print('another sitecustomize')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    shim.install_for_children()
    shim.install_for_children()
    assert os.environ["PYTHONPATH"] == os.pathsep.join([str(shim.CHILD_SITE_DIR), str(tmp_path)])
    child = subprocess.run([sys.executable, "-c", SHIM_PROBE], capture_output=True, text=True, timeout=60)
    assert child.stderr == ""
    assert child.stdout.splitlines() == [
        "another sitecustomize",
        "sgl_kernel.deep.rmsnorm was called, but sgl_kernel is not installed: it has no CPU build",
        "no scalar_type",
        "1",
        "1",
    ]
