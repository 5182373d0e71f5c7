"""The foreign clients: versions, drivers, and what each of them runs."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from support.clients import install_into, install_once, node

DRIVERS = Path(__file__).parent / "drivers"


class Client(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    packages: tuple[str, ...]
    """What is installed, the client itself first."""
    driver: str
    runs: dict[str, tuple[str, ...]]
    """Protocol -> what is run over it, each in an episode of its own: words for the driver."""
    program: str = ""
    """The command that npm's package brings, for clients that are programs."""

    @property
    def is_npm(self) -> bool:
        return bool(self.program) or self.driver.endswith(".mjs")

    @property
    def version(self) -> str:
        separator = "@" if self.is_npm else "=="
        return self.packages[0].rpartition(separator)[2]

    def install(self) -> Path:
        """The folder with its packages, installed on first use. Raises AssertionError with the installer's words."""
        version = f"{self.packages}{sys.version_info[:2]}"
        slug = self.driver.partition(".")[0].replace("_", "-")
        return install_once(f"client-{slug}", version, self._installer)

    def command(self, folder: Path, protocol: str, form: str) -> tuple[list[str], dict[str, str]]:
        """The command that runs the driver, and its environment."""
        script = [str(DRIVERS / self.driver), protocol, *form.split()]
        if self.program:
            return [sys.executable, *script], {"AGENT_PROGRAM": str(folder / "node_modules/.bin" / self.program)}
        if self.is_npm:
            return [node()[0], *script], {"AGENT_MODULES": str(folder)}
        quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
        return [str(folder / "env/bin/python"), "-W", "ignore", *script], quiet

    def _installer(self, folder: Path) -> list[str]:
        if self.is_npm:
            return [
                *node()[1],
                "install",
                "--silent",
                "--no-audit",
                "--no-fund",
                "--prefix",
                str(folder),
                *self.packages,
            ]
        shell = '"$0" -m venv --without-pip "$1" && shift && exec "$@"'
        env = folder / "env"
        return ["sh", "-c", shell, sys.executable, str(env), *install_into(env / "bin/python"), *self.packages]


CHAT = ("plain", "stream", "tools", "tools stream", "structured")
CLIENTS = (
    Client(
        name="OpenAI SDK, Python",
        packages=("openai==3.57.0",),
        driver="openai_sdk.py",
        runs={"chat": CHAT, "responses": ("tools", "tools stream", "structured")},
    ),
    Client(
        name="OpenAI SDK, Node",
        packages=("openai@7.57.0",),
        driver="openai_node.mjs",
        runs={"chat": ("plain", "stream", "tools", "tools stream"), "responses": ("tools", "tools stream")},
    ),
    Client(
        name="Anthropic SDK, Python",
        packages=("anthropic==2.13.0",),
        driver="anthropic_sdk.py",
        runs={"messages": CHAT},
    ),
    Client(
        name="Anthropic SDK, Node",
        packages=("@anthropic-ai/sdk@1.13.0",),
        driver="anthropic_node.mjs",
        runs={"messages": ("plain", "stream", "tools", "tools stream")},
    ),
    Client(
        name="LangChain",
        packages=("langchain-openai==1.7.4", "langchain-anthropic==1.7.10"),
        driver="langchain_agent.py",
        runs={"chat": CHAT, "responses": ("plain", "stream", "tools"), "messages": ("plain", "stream", "tools")},
    ),
    Client(
        name="LangGraph",
        packages=("langgraph==1.2.24", "langchain-openai==1.7.4"),
        driver="langgraph_agent.py",
        runs={"chat": ("tools", "tools stream"), "responses": ("tools", "tools stream")},
    ),
    Client(
        name="LiteLLM",
        packages=("litellm==1.110.2",),
        driver="litellm_agent.py",
        runs={
            "chat": ("plain", "stream", "tools", "tools stream"),
            "responses": ("plain",),
            "messages": ("plain", "stream", "tools"),
        },
    ),
    Client(
        name="Instructor",
        packages=("instructor==1.17.0",),
        driver="instructor_agent.py",
        runs={"chat": ("structured", "structured tools")},
    ),
    Client(
        name="OpenAI Agents SDK",
        packages=("openai-agents==0.24.0",),
        driver="agents_sdk.py",
        runs={"responses": ("tools", "tools stream"), "chat": ("tools", "tools stream")},
    ),
    Client(
        name="Pydantic AI",
        packages=("pydantic-ai-slim[openai,anthropic]==2.68.0",),
        driver="pydantic_ai_agent.py",
        runs=dict.fromkeys(("chat", "responses", "messages"), ("plain", "stream", "tools", "structured")),
    ),
    Client(
        name="LlamaIndex",
        packages=("llama-index-llms-openai-like==0.8.1",),
        driver="llamaindex_agent.py",
        runs={"chat": ("plain", "stream", "tools")},
    ),
    Client(
        name="smolagents",
        packages=("smolagents[openai]==1.26.0",),
        driver="smolagents_agent.py",
        runs={"chat": ("tools", "tools stream")},
    ),
    Client(
        name="DSPy",
        packages=("dspy==3.4.1",),
        driver="dspy_agent.py",
        runs={"chat": ("plain",)},
    ),
    Client(
        name="Vercel AI SDK",
        packages=("ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/anthropic@3.0.140", "zod@4"),
        driver="vercel_ai.mjs",
        runs=dict.fromkeys(("chat", "responses", "messages"), ("plain", "stream", "tools", "structured")),
    ),
    Client(
        name="Codex CLI",
        packages=("@openai/codex@0.169.0",),
        driver="codex_cli.py",
        runs={"responses": ("tools stream",)},
        program="codex",
    ),
    Client(
        name="Claude Code",
        packages=("@anthropic-ai/claude-code@2.1.331",),
        driver="claude_code.py",
        runs={"messages": ("tools stream",)},
        program="claude",
    ),
    Client(
        name="opencode",
        packages=("opencode-ai@1.18.33",),
        driver="opencode_cli.py",
        runs={"chat": ("tools stream",)},
        program="opencode",
    ),
)
