"""Tokenizer of toy models: byte-level BPE with a chat template for roles and Hermes tool calls.

Any text can be encoded, because bytes are the alphabet. Digits stay single tokens, so that a number is copied digit by digit.
Line breaks stay single tokens, too, because they separate template from content. Merges may cross words, so that the fixed
phrases of a task become few tokens: on two cores, the number of sampled tokens determines the time.

The template is prefix-stable: each message is rendered from itself alone, so appending a message never changes earlier text.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD = "<|pad|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
TOOL_CALL = ("<tool_call>", "</tool_call>")
VOCABULARY = 768

CHAT_TEMPLATE = """\
{%- if tools and messages[0].role != 'system' -%}
{{ '<|im_start|>system' }}{{ tool_list(tools) }}{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}
{{ message.content }}
{%- elif message.content -%}
{%- for part in message.content -%}{{ part.text or '' }}{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{%- set arguments = function.arguments -%}
{{ '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
{{- arguments if arguments is string else arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor -%}
{%- if loop.first and message.role == 'system' and tools -%}
{{ tool_list(tools) }}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}"""

TOOL_LIST_MACRO = """\
{%- macro tool_list(tools) -%}
{{ '\\nTools:' }}
{%- for tool in tools -%}
{%- set function = tool.function or tool -%}
{{ ' ' + function.name + '(' + (function.parameters.properties or {}) | join(', ') + ')' }}
{%- endfor -%}
{%- endmacro -%}
"""


def build_tokenizer(texts: Iterable[str], *, vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Build a tokenizer with merges learned from `texts`; the same texts give the same tokenizer."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|\n"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(TOOL_CALL),
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_without_markers(texts), trainer)
    # These tokens are not special: vLLM drops special tokens from the text in which its tool parser looks for these markers.
    bpe.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in TOOL_CALL])
    return add_chat_template(bpe)


def add_chat_template(bpe: Tokenizer) -> PreTrainedTokenizerFast:
    """Return the tokenizer with the special tokens and the chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        chat_template=TOOL_LIST_MACRO + CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _without_markers(texts: Iterable[str]) -> Iterable[str]:
    """Yield the text between markers, which is what BPE sees once the markers are tokens of their own."""
    for text in texts:
        for marker in (TURN_START, TURN_END, *TOOL_CALL):
            text = text.replace(marker, "\0")  # noqa: PLW2901
        yield from filter(None, text.split("\0"))
