"""Tiny random models for a stock engine on a CPU: vocabulary 1024, context 2048, the same bytes every time.

usage: PYTHONPATH=shim VENV/bin/python make_models.py OUTDIR

float32 only: in bfloat16 a continuation's numerics differ from the uninterrupted run's enough to change tokens, which
says nothing about a proxy. The tokenizer files let the server start without `--skip-tokenizer-init` too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB = 1024
SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>")
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "initializer_range": 0.05,
}
EXPERTS = {
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}


def save_tokenizer(path: Path) -> None:
    """Byte-level: the 256 bytes, the specials, and two-letter merges up to the vocabulary's size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [char for char in alphabet if char.isascii() and char.isalnum()]
    words = [*SPECIALS, *alphabet]
    merges = [(first, second) for first in letters for second in letters][: VOCAB - len(words)]
    vocabulary = {word: i for i, word in enumerate([*words, *(first + second for first, second in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(special, special=True) for special in SPECIALS])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{special[1:-1]}_token": special for special in SPECIALS},
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def save(model: PreTrainedModel, path: Path) -> None:
    """Write the model with a sharper head: an untouched one is nearly flat, and greedy choices would be near ties."""
    with torch.no_grad():
        model.lm_head.weight.mul_(20.0)
    model.generation_config = GenerationConfig(eos_token_id=1, bos_token_id=2, pad_token_id=0)
    model.to(torch.float32).save_pretrained(path, safe_serialization=True)
    save_tokenizer(path)
    print(path.name, sum(p.numel() for p in model.parameters()), "parameters")


def main(out: Path) -> None:
    for name, build in (
        ("qwen3-fp32", lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE))),
        ("qwen3moe-fp32", lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS))),
    ):
        if not (out / name / "tokenizer_config.json").exists():
            torch.manual_seed(1234)
            save(build(), out / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
