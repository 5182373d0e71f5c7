"""Give FlashAttention 4 the longest row's length as a number: transformers 5.9 passes a tensor, which it refuses.

Imported before a model computes: by verl through `model.external_lib`, by the probe and by TRL's process.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import modeling_flash_attention_utils as transformers_flash

process = transformers_flash._process_flash_attention_kwargs  # noqa: SLF001 - there is no other place


@functools.wraps(process)
def process_with_numbers(*arguments: Any, **options: Any) -> dict[str, Any]:
    kwargs: dict[str, Any] = process(*arguments, **options)
    lengths = {name: int(kwargs[name]) for name in ("max_seqlen_q", "max_seqlen_k") if kwargs.get(name) is not None}
    return kwargs | lengths


transformers_flash._process_flash_attention_kwargs = process_with_numbers  # noqa: SLF001
