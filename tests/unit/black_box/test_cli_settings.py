import json
import tomllib
from pathlib import Path

from swarmq.black_box.cli_settings import EPISODE_VARIABLE, Endpoint, build_environment, write_files

ENDPOINT = Endpoint(base_url="http://127.0.0.1:9/v1", api_key="k", model="main", context=40_000)


def environment(tmp_path, *, keep_home=False, **inherited):
    return build_environment(ENDPOINT, tmp_path, inherited, episode_id="e1", keep_home=keep_home)


def test_every_agent_is_led_to_the_episode(tmp_path):
    set_to = environment(tmp_path)
    assert set_to["OPENAI_BASE_URL"] == set_to["OPENAI_API_BASE"] == "http://127.0.0.1:9/v1"
    assert set_to["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9"
    assert set_to["OPENAI_API_KEY"] == set_to["ANTHROPIC_API_KEY"] == "k"
    assert set_to["ANTHROPIC_MODEL"] == set_to["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "main"
    assert set_to["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "40000"
    assert set_to[EPISODE_VARIABLE] == "e1"


def test_what_would_lead_it_elsewhere_is_taken_away(tmp_path):
    stray = {"SWARMQ_INVITE": "secret", "CLAUDE_CODE_USE_BEDROCK": "1", "ANTHROPIC_AUTH_TOKEN": "mine", "LANG": "C"}
    set_to = environment(tmp_path, OPENAI_API_KEY="mine", **stray)
    assert {"SWARMQ_INVITE", "CLAUDE_CODE_USE_BEDROCK", "ANTHROPIC_AUTH_TOKEN"}.isdisjoint(set_to)
    assert "mine" not in set_to.values()
    assert set_to["LANG"] == "C"


def test_calls_to_this_machine_bypass_proxies(tmp_path):
    set_to = environment(tmp_path, HTTPS_PROXY="http://proxy", NO_PROXY="internal,localhost")
    assert set_to["NO_PROXY"] == set_to["no_proxy"] == "internal,localhost,127.0.0.1"


def test_the_home_is_new_unless_it_is_to_be_kept(tmp_path):
    assert environment(tmp_path, HOME="/home/me")["HOME"] == str(tmp_path)
    kept = environment(tmp_path, HOME="/home/me", keep_home=True)
    assert kept["HOME"] == "/home/me"
    assert kept["CODEX_HOME"] == str(tmp_path / ".codex")


def test_files_are_written_for_agents_that_read_no_variables(tmp_path):
    set_to = environment(tmp_path)
    write_files(ENDPOINT, tmp_path)
    codex = tomllib.loads((tmp_path / ".codex/config.toml").read_text())
    provider = codex["model_providers"][codex["model_provider"]]
    assert provider["base_url"] == ENDPOINT.base_url
    assert set_to[provider["env_key"]] == "k"
    assert codex["model_auto_compact_token_limit"] < codex["model_context_window"] == 40_000
    opencode = json.loads(Path(set_to["OPENCODE_CONFIG"]).read_text())["provider"]["swarmq"]
    assert opencode["options"] == {"baseURL": ENDPOINT.base_url, "apiKey": "k"}
    assert opencode["models"]["main"]["limit"] == {"context": 40_000, "output": 10_000}
    aider = json.loads(Path(set_to["AIDER_MODEL_METADATA_FILE"]).read_text())
    assert aider[set_to["AIDER_MODEL"]]["max_input_tokens"] == 30_000
