"""Environment variables and files that lead coding agents to an episode.

Every command gets all of them, so that a wrapper script may start any of these agents. The files lie in a home folder of the
episode's own, in which no earlier attempt and no user has left settings, logins or memories.

    OpenAI's and Anthropic's libraries   OPENAI_BASE_URL, OPENAI_API_KEY; ANTHROPIC_BASE_URL (without /v1), ANTHROPIC_API_KEY
    Claude Code                          the same, and the names of its models
    Codex CLI                            $CODEX_HOME/config.toml: a model provider
    opencode                             $OPENCODE_CONFIG: a provider
    aider                                OPENAI_API_BASE, AIDER_MODEL, a file of model metadata
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import tomli_w

KEY_VARIABLE = "SWARMQ_EPISODE_KEY"
EPISODE_VARIABLE = "SWARMQ_EPISODE"
"""Environment variable that marks all processes that a command has started, so that those in other sessions are found, too."""
HOMES = {
    "HOME": "",
    "XDG_CONFIG_HOME": ".config",
    "XDG_DATA_HOME": ".local/share",
    "XDG_CACHE_HOME": ".cache",
    "XDG_STATE_HOME": ".local/state",
}
"""Environment variable that names a folder -> its value, relative to the attempt's home."""
SECRETS = ("SWARMQ_",)
"""Prefixes of variables that commands never see: an invite would let an agent end its own episodes."""
ELSEWHERE = frozenset(
    {
        "ANTHROPIC_AUTH_TOKEN",
        "ANTHROPIC_CUSTOM_HEADERS",
        "CLAUDE_CODE_OAUTH_TOKEN",
        "CLAUDE_CODE_USE_BEDROCK",
        "CLAUDE_CODE_USE_FOUNDRY",
        "CLAUDE_CODE_USE_VERTEX",
        "OPENAI_ORG_ID",
        "OPENAI_ORGANIZATION",
        "OPENAI_PROJECT",
    }
)
"""Variables that are kept from commands, because they would lead an agent to another server, or log it in."""
ANSWER_SHARE = 4
"""Divisor of the context length that gives the maximum length of an answer, for agents that must be told one."""
COMPACT_SHARE = 0.8
"""Share of the context at which agents summarise their conversation."""
INSTALL_HINTS = {
    "claude": "npm install -g @anthropic-ai/claude-code",
    "codex": "npm install -g @openai/codex",
    "opencode": "npm install -g opencode-ai",
    "aider": "pip install aider-chat (in an environment of its own)",
}


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Address, key and model for an agent's model calls."""

    base_url: str
    """URL of the relay; ends in `/v1`."""
    api_key: str
    model: str
    context: int
    """Maximum number of tokens of prompt and answer together."""


def build_environment(
    endpoint: Endpoint, home: Path, inherited: Mapping[str, str], *, episode_id: str, keep_home: bool
) -> dict[str, str]:
    """Return the environment of a command. `keep_home`: HOME stays the user's, with the agents' logins and settings."""
    kept = {name: value for name, value in inherited.items() if not name.startswith(SECRETS) and name not in ELSEWHERE}
    return (
        kept | variables(endpoint, home, keep_home=keep_home) | _bypass_proxies(kept) | {EPISODE_VARIABLE: episode_id}
    )


def variables(endpoint: Endpoint, home: Path, *, keep_home: bool = False) -> dict[str, str]:
    """Return the variables that this module sets, apart from those of the user."""
    model, anthropic_url = endpoint.model, endpoint.base_url.removesuffix("/v1")
    return {
        **({} if keep_home else {name: str(home / path) for name, path in HOMES.items()}),
        KEY_VARIABLE: endpoint.api_key,
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_BASE": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": anthropic_url,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "ANTHROPIC_MODEL": model,
        "ANTHROPIC_SMALL_FAST_MODEL": model,
        **{f"ANTHROPIC_DEFAULT_{size}_MODEL": model for size in ("HAIKU", "OPUS", "SONNET")},
        "CLAUDE_CODE_SUBAGENT_MODEL": model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(endpoint.context),
        "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": str(int(COMPACT_SHARE * 100)),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.context // ANSWER_SHARE),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CODEX_HOME": str(home / ".codex"),
        "OPENCODE_CONFIG": str(home / "opencode.json"),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "AIDER_MODEL": f"openai/{model}",
        "AIDER_WEAK_MODEL": f"openai/{model}",
        "AIDER_MODEL_METADATA_FILE": str(home / "aider-models.json"),
        "AIDER_ANALYTICS_DISABLE": "true",
        "AIDER_CHECK_UPDATE": "false",
        "AIDER_SHOW_MODEL_WARNINGS": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "GIT_AUTHOR_NAME": "agent",
        "GIT_AUTHOR_EMAIL": "agent@localhost",
        "GIT_COMMITTER_NAME": "agent",
        "GIT_COMMITTER_EMAIL": "agent@localhost",
    }


def write_files(endpoint: Endpoint, home: Path) -> None:
    """Write the configuration files of the agents that read no variables."""
    compact_at, answer = int(endpoint.context * COMPACT_SHARE), endpoint.context // ANSWER_SHARE
    provider = {"name": "swarmq", "base_url": endpoint.base_url, "env_key": KEY_VARIABLE, "wire_api": "responses"}
    codex = {
        "model": endpoint.model,
        "model_provider": "swarmq",
        "model_context_window": endpoint.context,
        "model_auto_compact_token_limit": compact_at,
        "check_for_update_on_startup": False,
        "model_providers": {"swarmq": provider},
    }
    opencode = {
        "model": f"swarmq/{endpoint.model}",
        "small_model": f"swarmq/{endpoint.model}",
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
        "provider": {
            "swarmq": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": endpoint.base_url, "apiKey": endpoint.api_key},
                "models": {endpoint.model: {"limit": {"context": endpoint.context, "output": answer}}},
            }
        },
    }
    aider = {
        f"openai/{endpoint.model}": {
            "max_tokens": answer,
            "max_input_tokens": endpoint.context - answer,
            "max_output_tokens": answer,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
            "litellm_provider": "openai",
            "mode": "chat",
        }
    }
    (home / ".codex").mkdir(parents=True, exist_ok=True)
    (home / ".codex/config.toml").write_text(tomli_w.dumps(codex))
    (home / "opencode.json").write_text(json.dumps(opencode))
    (home / "aider-models.json").write_text(json.dumps(aider))


def _bypass_proxies(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return NO_PROXY with this machine in it: the relay listens on it."""
    names = inherited.get("NO_PROXY") or inherited.get("no_proxy") or ""
    value = ",".join(dict.fromkeys([*filter(None, names.split(",")), "127.0.0.1", "localhost"]))
    return {"NO_PROXY": value, "no_proxy": value}
