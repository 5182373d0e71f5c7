"""Copies of a model's small files (configuration, tokenizer), and their folders on ranks whose host lacks the model. Does not import
torch."""

from __future__ import annotations

import shutil
from pathlib import Path

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
    "*.model",
    "*processor_config.json",
)
_copies: dict[str, str] = {}
"""Model folder or name, as rank 0 knows it -> folder with the copy."""


def register_copy(source: str, folder: str) -> None:
    _copies[source] = folder


def find_files(source: str) -> str:
    """Return the folder or name from which this process loads configuration and tokenizer of the model `source`: the copy if there is
    one, else `source`."""
    return _copies.get(source, source)


def copy_tokenizer(model: str, folder: Path) -> None:
    """Copy the files of tokenizer and image processor into `folder`: byte by byte if `model` is a folder, else as transformers saves them."""
    if Path(model).is_dir():
        for pattern in TOKENIZER_FILES:
            for file in Path(model).glob(pattern):
                shutil.copyfile(file, folder / file.name)
        return
    from transformers import AutoTokenizer  # noqa: PLC0415  (seldom needed and slow to import)

    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
