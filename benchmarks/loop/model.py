"""A model of random weights that chats: its tokenizer spells every id, and reads what it spelled in about as many tokens.

An agent gets text and sends it back. A vocabulary whose random words fell apart when they are read again would make
prompts many times longer than what was sampled, and the benchmark one of tokenizers.
"""

from __future__ import annotations

import itertools
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.timelines.run import SHAPES
from swarmq.toy_model.tokenizer import PAD, TURN_END, TURN_START, add_chat_template

LETTERS = string.ascii_letters + ".,"
"""Of which all words are made: every pair is a token, and as many triples as there is room for."""


def make_model(folder: Path, shape: str, device: str) -> None:
    """Weights in the type that vLLM serves there, tokenizer and chat template."""
    import torch  # noqa: PLC0415 - only this function needs it
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415

    tokenizer = make_tokenizer(SHAPES[shape]["vocab_size"])
    config = Qwen3Config(
        **SHAPES[shape],
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16 if device == "cuda" else torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()  # which is the engine's and the learner's


def make_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Of exactly `size` tokens."""
    special = [PAD, TURN_START, TURN_END]
    known = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = itertools.product(LETTERS, LETTERS)
    triples = (("".join(pair), letter) for pair in itertools.product(LETTERS, LETTERS) for letter in LETTERS)
    merges = list(itertools.islice(itertools.chain(pairs, triples), size - len(known)))
    vocabulary = {word: number for number, word in enumerate([*known, *map("".join, merges)])}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    return add_chat_template(bpe)
