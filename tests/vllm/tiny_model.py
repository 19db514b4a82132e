"""Make the tiny random-weight Llama that the real engine serves in tests; nothing is downloaded.

Run with the interpreter that has vLLM (it brings torch, transformers and tokenizers):
`.vllm/venv/bin/python tests/vllm/tiny_model.py .vllm/tiny-llama`. 3.4 million parameters, 14 MB.
Its answers are noise: fix lengths with `ignore_eos` and `max_tokens`. Read workers.py next.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY_TOKENS = 2048
POSITIONS_MAX = 4096
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
HERE = Path(__file__).resolve()
# Files that change as seldom as the model they shape.
CORPUS = (HERE.parents[2] / "LICENSE", HERE.with_name("requirements-vllm-cpu.txt"), HERE)


def build_tokenizer(corpus: tuple[Path, ...]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of VOCABULARY_TOKENS entries on a few text files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in corpus], trainer)
    if tokenizer.get_vocab_size() != VOCABULARY_TOKENS:
        raise ValueError(f"the corpus is too short for {VOCABULARY_TOKENS} tokens")
    bos, eos, pad = SPECIAL_TOKENS
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Draw the weights from seed 0, so that every machine serves the same model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY_TOKENS,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS_MAX,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    """Write tokenizer and weights into the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    tokenizer = build_tokenizer(CORPUS)
    tokenizer.save_pretrained(out)
    build_model(tokenizer).save_pretrained(out)


if __name__ == "__main__":
    main()
