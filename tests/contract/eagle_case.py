"""What SGLang's own EAGLE-3 head drafts, printed as JSON: a program of its own, for it joins a world of one rank."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from transformers import LlamaConfig


class CausalAttention(torch.nn.Module):
    """Attention of one request, all at once, where SGLang has its own."""

    layer_id = 0

    def forward(self, q, k, v, forward_batch):
        q, k, v = (rows.view(len(rows), -1, 8).transpose(0, 1)[None] for rows in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


def main(head: Path, model: str) -> None:
    args = ServerArgs(model_path=model, device="cpu")
    set_global_server_args_for_scheduler(args)
    with tempfile.TemporaryDirectory() as folder:
        parallel_state.init_distributed_environment(
            backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{folder}/meeting"
        )
        parallel_state.initialize_model_parallel()
    sizes = SimpleNamespace(hidden_size=64, dtype=torch.float32, spec_hidden_size=64)
    initialize_dp_attention(server_args=args, model_config=sizes)
    given = load_file(head / "given.safetensors")
    made = LlamaForCausalLMEagle3(LlamaConfig.from_pretrained(head))
    made.load_weights(load_file(head / "model.safetensors").items())
    made.model.embed_tokens.weight.data[:503] = given["embedding"]
    made.model.layers[0].self_attn.attn = CausalAttention()
    batch = SimpleNamespace(
        spec_info=SimpleNamespace(hidden_states=given["features"]),
        mm_input_embeds=None,
        forward_mode=SimpleNamespace(is_extend=lambda: False),
    )
    with torch.no_grad():
        hidden, _ = made.model(given["tokens"], torch.arange(len(given["tokens"])), batch)
        chosen = (hidden @ made.lm_head.weight[: made.config.draft_vocab_size].T).argmax(-1)
    print(json.dumps(made.hot_token_id[chosen].tolist()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
