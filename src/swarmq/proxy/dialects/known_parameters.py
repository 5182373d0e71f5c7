"""Parameters of OpenAI's dialects: those that OpenAI documents, and those that only vLLM knows. Any other parameter is a
mistake of the agent.

Anthropic's messages have no such list, because Anthropic's clients send undocumented parameters of betas.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from swarmq.proxy.http_errors import RefusedError

UNKNOWN = "unknown_parameter"
_SAMPLED = frozenset(
    {
        *(
            "frequency_penalty",
            "presence_penalty",
            "logit_bias",
            "max_tokens",
            "n",
            "seed",
            "stop",
            "temperature",
            "top_p",
        ),
        *("model", "stream", "stream_options", "user", "logprobs"),
    }
)
_ENGINE = frozenset(
    {
        *(
            "allowed_token_ids",
            "bad_words",
            "min_p",
            "min_tokens",
            "top_k",
            "repetition_penalty",
            "repetition_detection",
        ),
        *(
            "ignore_eos",
            "include_stop_str_in_output",
            "stop_token_ids",
            "length_penalty",
            "use_beam_search",
            "watermarking",
        ),
        *("structured_outputs", "thinking_token_budget", "chat_template_kwargs", "include_reasoning", "vllm_xargs"),
        *("skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens", "stream_interval"),
        *("cache_salt", "priority", "request_id", "session_id", "kv_transfer_params", "ec_transfer_params", "echo"),
        *("prompt_logprobs", "logprob_token_ids", "return_prompt_text", "return_token_ids", "return_token_offsets"),
        *("return_tokens_as_token_ids", "return_mm_kwargs", "mm_payload", "media_io_kwargs", "mm_processor_kwargs"),
        *("truncate_prompt_tokens", "truncation_side", "routed_experts_prompt_start"),
    }
)
"""Parameters of vLLM's requests. Those that the proxy does not support are refused later, with the reason."""
_ACCOUNT = frozenset(
    {
        *("metadata", "moderation", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "store"),
    }
)
CHAT = (
    _SAMPLED
    | _ENGINE
    | _ACCOUNT
    | {
        *("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "top_logprobs", "modalities"),
        *("max_completion_tokens", "reasoning_effort", "verbosity", "prediction", "audio", "web_search_options"),
        *(
            "functions",
            "function_call",
            "add_generation_prompt",
            "continue_final_message",
            "chat_template",
            "documents",
        ),
    }
)
COMPLETION = _SAMPLED | _ENGINE | {"prompt", "prompt_embeds", "best_of", "suffix", "response_format"}
RESPONSE = (
    (_SAMPLED - {"n", "max_tokens", "logprobs"})
    | _ENGINE
    | _ACCOUNT
    | {
        *(
            "access_programs",
            "background",
            "client_metadata",
            "context_management",
            "conversation",
            "image",
            "include",
            "input",
        ),
        *(
            "instructions",
            "max_output_tokens",
            "max_tool_calls",
            "parallel_tool_calls",
            "previous_response_id",
            "prompt",
        ),
        *("reasoning", "text", "tool_choice", "tools", "top_logprobs", "truncation"),
        *("enable_response_messages", "previous_input_messages"),
    }
)


def unknown(given: Iterable[str], known: frozenset[str]) -> tuple[str, ...]:
    return tuple(name for name in given if name not in known)


def refuse(name: str, known: frozenset[str]) -> RefusedError:
    meant = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.75)
    hint = f" Did you mean {meant[0]!r}?" if meant else ""
    return RefusedError(f"Unknown parameter: {name!r:.100}.{hint}", code=UNKNOWN, param=name[:100])
