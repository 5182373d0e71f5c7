"""The sampling parameters in effect. Pure.

Training needs every token sampled from the policy's own distribution at the run's temperature, so an agent's other parameters are
overridden, and named in the answer's headers. Evaluation uses the agent's parameters, and the run's where the agent gives none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from swarmq.config import SamplingDefaults
from swarmq.messages import Mode, Sampling
from swarmq.proxy.http_errors import RefusedError, too_long

Json = dict[str, Any]

_canonical = msgspec.json.Encoder(order="deterministic")
KEPT = frozenset(
    {
        *("n", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "structured_outputs"),
        *(
            "logprobs",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "output_kind",
            "skip_clone",
        ),
        *("stream_interval", "skip_reading_prefix_cache", "routed_experts_prompt_start"),
    }
)
"""Engine parameters that an agent may choose in training: where an answer ends, its grammar, and its presentation. All others
are the run's, so that no future parameter of an engine changes what is trained."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1, 1.0),
    "top_k": (0, -1),
    "min_p": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "thinking_token_budget": (),
    "seed": (),
    "watermarking": (False,),
    "repetition_detection": (),
    "extra_args": ({},),
}
"""Parameter that changes the distribution -> values at which it does not; for any other parameter these are false, 0 and empty."""
REQUEST_NAMES = {"extra_args": "vllm_xargs"}
"""Engine parameter -> its name in requests, if that differs."""
MAX_ENTRIES = {"stop": 64, "stop_token_ids": 1024, "bad_words": 1024, "logit_bias": 1024}
"""Parameter that the engine applies to every sampled token -> maximum number of its entries."""
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
MAX_TOKENS = 2**24
"""Maximum of `max_tokens` in a request. A larger value is a mistake; smaller values are cut to the available room."""
MAX_WORD = 1024
"""Maximum number of characters of an entry that is text, in the parameters of MAX_ENTRIES."""
OWN = frozenset({"temperature", "max_tokens"})
"""Parameters that are set for every training episode and reported separately."""
RECORDED = frozenset(Sampling.__struct_fields__) - {"grammar", "others"}
"""Parameters that turns record, by the engine's names."""


class Effective(msgspec.Struct, frozen=True, kw_only=True):
    params: Json
    """Parameters for the engine."""
    record: Sampling
    overridden: tuple[str, ...]
    cut_from: int = 0
    """The agent's `max_tokens`, if the run's settings allow fewer; else 0."""


def resolve_sampling(
    chat: Json,
    rendered: Json,
    *,
    mode: Mode,
    setting: SamplingDefaults,
    prompt_tokens: int,
    max_model_len: int,
    room_left: int | None,
    names: Mapping[str, str] | None = None,
    cuts: bool = False,
) -> Effective:
    """Resolve the sampling parameters of a request.

    `room_left`: tokens that the episode's budget leaves for each choice. `names`: field of `chat` -> the agent's name of it.
    `cuts`: cut a `max_tokens` beyond the model's room, in evaluation, too. Raises RefusedError if prompt and answer do not fit
    the model, or if parameters conflict and the run refuses conflicts.
    """
    names = names or {}
    room = max_model_len - prompt_tokens
    if room < 1:
        raise too_long(prompt_tokens, max_model_len)
    asked = chat.get("max_completion_tokens") or chat.get("max_tokens")
    params = {key: value for key, value in rendered.items() if key != "prompt_logprobs"}
    params["logprobs"] = (chat.get("top_logprobs") or 0) if chat.get("logprobs") else 0
    overridden: list[str] = []
    cut_from = 0
    if mode == "train":
        overridden = _conflicts(chat, params, setting)
        params = {key: value for key, value in params.items() if key in KEPT}
        params["temperature"] = setting.temperature
        longest = setting.max_tokens or room
        limit = min(asked or longest, longest, room)
        if asked and setting.max_tokens and asked > setting.max_tokens:
            overridden.append("max_tokens")
            cut_from = asked
        overridden = [names.get(name, name) for name in overridden]
        if overridden and setting.conflicts == "refuse":
            most = f" and up to {setting.max_tokens} tokens" if setting.max_tokens else ""
            raise RefusedError(
                f"this run samples its training episodes at temperature {setting.temperature:g}, top_p 1, without penalties"
                f"{most}: leave out {', '.join(overridden)}",
                code="sampling_conflict", param=overridden[0],
            )  # fmt: skip
    else:
        if chat.get("temperature") is None:
            params["temperature"] = setting.temperature
        limit = asked or min(setting.max_tokens or room, room)
        if limit > room and not cuts:
            raise too_long(prompt_tokens, max_model_len, wanted=limit)
        limit = min(limit, room)
    wanted = asked or limit
    limit = limit if room_left is None else min(limit, room_left)
    if limit < wanted and (name := names.get("max_tokens", "max_tokens")) not in overridden:
        overridden.append(name)
    params["max_tokens"] = limit
    return Effective(params=params, record=to_sampling_record(params), overridden=tuple(overridden), cut_from=cut_from)


def to_sampling_record(params: Json) -> Sampling:
    """Return the engine's parameters as a turn records them. Raises RefusedError for parameters that no engine samples by."""
    known = {name: params[name] for name in RECORDED if params.get(name) is not None}
    if isinstance(stop := known.get("stop"), str):
        known["stop"] = (stop,)
    if isinstance(bias := known.get("logit_bias"), dict):
        known["logit_bias"] = {str(token): value for token, value in bias.items()}
    if isinstance(top_k := known.get("top_k"), int):
        known["top_k"] = max(top_k, 0)
    known["grammar"] = _grammar(params.get("structured_outputs"))
    known["others"] = sorted(
        REQUEST_NAMES.get(name, name) for name in NEUTRAL.keys() - RECORDED if _changes(name, params.get(name))
    )
    try:
        record = msgspec.convert(known, Sampling)
        msgspec.msgpack.encode(record)  # whole numbers beyond 64 bits could not be recorded
        return record
    except (msgspec.ValidationError, OverflowError) as error:
        raise RefusedError(f"sampling parameters: {error}", code="invalid_value") from error


def _grammar(outputs: Json | None) -> str:
    """Return kind and digest of the grammar, by which two turns are compared."""
    kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    found = {kind: outputs[kind] for kind in kinds if outputs.get(kind) is not None} if outputs else {}
    if not found:
        return ""
    return f"{', '.join(found)} {hashlib.sha256(_canonical.encode(found)).hexdigest()[:16]}"


def check_limits(chat: Json) -> None:
    """Raise RefusedError for counts out of range, texts in place of numbers, and too many or too long entries."""
    for name, low, high in (("n", 1, 128), ("max_tokens", 1, MAX_TOKENS), ("max_completion_tokens", 1, MAX_TOKENS)):
        value = chat.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise RefusedError(f"{name} must be a whole number from {low} to {high}, not {value!r:.100}", param=name)
    for name in NUMBERS:
        if (value := chat.get(name)) is not None and type(value) not in (int, float):
            raise RefusedError(f"{name} must be a number, not {value!r:.100}", param=name)
    for name, most in MAX_ENTRIES.items():
        value = chat.get(name)
        if isinstance(value, (list, dict)) and len(value) > most:
            raise RefusedError(f"{name} may have {most} entries, not {len(value)}", param=name)
        if any(
            isinstance(text, str) and len(text) > MAX_WORD for text in (value if isinstance(value, list) else (value,))
        ):
            raise RefusedError(f"no entry of {name} may have more than {MAX_WORD} characters", param=name)


def _conflicts(chat: Json, rendered: Json, setting: SamplingDefaults) -> list[str]:
    """Return the names of the request's parameters that `setting` overrides. Parameters that the request does not name keep
    the engine's defaults."""
    wanted = chat.get("temperature")
    names = ["temperature"] if wanted is not None and wanted != setting.temperature else []
    theirs = [name for name in rendered if name not in KEPT and name not in NEUTRAL]
    asked = {name: chat.get(REQUEST_NAMES.get(name, name)) for name in (*NEUTRAL, *theirs) if name not in OWN}
    return names + [REQUEST_NAMES.get(name, name) for name, value in asked.items() if _changes(name, value)]


def _changes(name: str, value: Any) -> bool:
    return value is not None and value not in NEUTRAL.get(name, (False, 0, "", [], {}))
