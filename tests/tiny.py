"""Tiny random targets and tokenizers for the tests: 1–8 layers, hidden 64, vocabulary 128, fp32, weights std 0.2 so that outputs vary."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3", "olmo2", "gpt_neox", "mixtral", "qwen3_moe"]


@functools.lru_cache
def tokenizer(vocab_size: int = 128, template: str | None = CHATML):
    """A character-level tokenizer (byte-free) with ChatML markers as special tokens: 0 unk, 1 <|im_start|>, 2 <|im_end|> (eos), 3 pad, 4 \\n …"""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    chars = ["\n"] + [chr(c) for c in range(32, 127)]
    vocab = {t: i for i, t in enumerate(["<unk>", "<|im_start|>", "<|im_end|>", "<pad>"] + chars)}
    for i in range(len(vocab), vocab_size):
        vocab[f"<extra{i}>"] = i
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    tok = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<|im_end|>", pad_token="<pad>",
                                  additional_special_tokens=["<|im_start|>"])
    if template:
        tok.chat_template = template
    return tok


def config(family: str = "llama", **changes):
    """A transformers config of a tiny model of this family; keyword arguments override fields."""
    from transformers import AutoConfig

    base = dict(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=3, tie_word_embeddings=False, initializer_range=0.2,
    )
    if family in ("qwen3", "gemma3_text", "qwen3_moe"):
        base["head_dim"] = 16
    if family == "gemma3_text":
        base |= dict(sliding_window=12, layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
                     query_pre_attn_scalar=16)
    if family == "mistral":
        base["sliding_window"] = None
    if family in ("mixtral",):
        base |= dict(num_local_experts=4, num_experts_per_tok=2)
    if family in ("qwen3_moe",):
        base |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, decoder_sparse_step=1)
    if family == "gpt_neox":
        base.pop("num_key_value_heads")
    return AutoConfig.for_model(family, **(base | changes))


def model(family: str = "llama", seed: int = 0, **changes):
    """A random causal LM. std 0.2 on every matrix; norms near 1 with noise, biases random, so that no parameter is a no-op."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = AutoModelForCausalLM.from_config(config(family, **changes), dtype=torch.float32)
        with torch.no_grad():
            for name, p in net.named_parameters():
                if p.dim() >= 2:
                    p.normal_(0, 0.2)
                elif "norm" in name and name.endswith("weight"):
                    p.add_(torch.randn_like(p) * 0.1)
                else:
                    p.normal_(0, 0.1)
    return net.eval()


def save(path: Path, family: str = "llama", seed: int = 0, template: str | None = CHATML, **changes) -> Path:
    """Write a tiny target as a Hugging Face folder that `Target.load(str(path))` takes; returns the folder."""
    path = Path(path)
    model(family, seed, **changes).save_pretrained(path)
    tokenizer(changes.get("vocab_size", 128), template).save_pretrained(path)
    if template is None:
        cfg = json.loads((path / "tokenizer_config.json").read_text())
        cfg.pop("chat_template", None)
        (path / "tokenizer_config.json").write_text(json.dumps(cfg))
    return path


class StopAt:
    """In place of train.run.Stopper: stop after so many steps."""

    reason, exit_code = "the test", 143

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, done: int) -> bool:
        return done == self.steps
