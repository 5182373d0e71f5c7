"""The agents of three tutorials, one for each kind of task. A worker needs nothing else to work on all of them."""

from __future__ import annotations

from examples.retrieval.agent import attempt as facts
from examples.shell_sandbox.agent import attempt as files
from examples.tool_api.agent import attempt as apps

__all__ = ["apps", "facts", "files"]
