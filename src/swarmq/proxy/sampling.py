"""Which sampling parameters are in effect. Pure.

Training needs every token sampled from the policy's own distribution at the run's temperature, so what an agent asks
for beyond that is overridden and named; evaluation honours it, and takes the run's values where the agent is silent.
"""

from __future__ import annotations

from typing import Any

import msgspec

from swarmq.config import SamplingDefaults
from swarmq.messages import Mode, Sampling
from swarmq.proxy.refusals import RefusedError, too_long

Json = dict[str, Any]

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
}
"""What changes the distribution, and the values at which it does not."""


class Effective(msgspec.Struct, frozen=True, kw_only=True):
    params: Json
    """For the engine."""
    record: Sampling
    overridden: tuple[str, ...]


def effective(
    chat: Json,
    rendered: Json,
    *,
    mode: Mode,
    setting: SamplingDefaults,
    prompt_tokens: int,
    max_model_len: int,
    room_left: int | None,
) -> Effective:
    """`room_left`: tokens that the episode's budget leaves for each choice.

    Raises RefusedError where prompt and answer do not fit the model, or by the run's policy on conflicts.
    """
    room = max_model_len - prompt_tokens
    if room < 1:
        raise too_long(f"the prompt has {prompt_tokens} tokens, the model takes {max_model_len} with the answer")
    asked = chat.get("max_completion_tokens") or chat.get("max_tokens")
    params = {key: value for key, value in rendered.items() if key != "prompt_logprobs"}
    params["logprobs"] = (chat.get("top_logprobs") or 0) if chat.get("logprobs") else 0
    overridden: list[str] = []
    if mode == "train":
        overridden = _conflicts(chat, setting)
        params = {key: value for key, value in params.items() if key not in NEUTRAL}
        params["temperature"] = setting.temperature
        limit = min(asked or setting.max_tokens, setting.max_tokens, room)
        if asked and asked > setting.max_tokens:
            overridden.append("max_tokens")
        if overridden and setting.conflicts == "refuse":
            raise RefusedError(
                f"this run samples its training episodes at temperature {setting.temperature:g}, top_p 1, without penalties "
                f"and up to {setting.max_tokens} tokens: leave out {', '.join(overridden)}",
                code="sampling_conflict", param=overridden[0],
            )  # fmt: skip
    else:
        if chat.get("temperature") is None:
            params["temperature"] = setting.temperature
        limit = asked or min(setting.max_tokens, room)
        if limit > room:
            raise too_long(f"{prompt_tokens} prompt tokens and max_tokens {limit} are over the model's {max_model_len}")
    if room_left is not None and room_left < limit:
        limit = room_left
        if "max_tokens" not in overridden:
            overridden.append("max_tokens")
    params["max_tokens"] = limit
    record = Sampling(
        temperature=params["temperature"],
        top_p=params.get("top_p", 1.0),
        top_k=max(params.get("top_k", 0), 0),
        max_tokens=limit,
        seed=params.get("seed"),
    )
    return Effective(params=params, record=record, overridden=tuple(overridden))


def check_limits(chat: Json) -> None:
    """Raise RefusedError for counts that make no sense, before anything is done for them."""
    for name, low, high in (("n", 1, 128), ("max_tokens", 1, None), ("max_completion_tokens", 1, None)):
        value = chat.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < low or (high and value > high):
            bounds = f"from {low} to {high}" if high else f"of at least {low}"
            raise RefusedError(f"{name} must be a whole number {bounds}, not {value!r}", param=name)


def _conflicts(chat: Json, setting: SamplingDefaults) -> list[str]:
    wanted = chat.get("temperature")
    names = ["temperature"] if wanted is not None and wanted != setting.temperature else []
    return names + [name for name, ok in NEUTRAL.items() if chat.get(name) is not None and chat[name] not in ok]
