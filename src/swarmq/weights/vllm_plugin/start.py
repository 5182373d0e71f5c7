"""Runs vLLM: `python -m swarmq.weights.vllm_plugin.start MODULE ARGUMENTS` does what `python -m MODULE ARGUMENTS` does, and collects no
garbage while vLLM is imported.

The imports make a million objects, nearly all of which stay. Collections during and after the imports scan them again and again: those
of Python, those that vLLM asks for while it builds an engine, and those of a forked engine core.
"""

from __future__ import annotations

import gc
import runpy
import sys
from importlib import import_module


def import_vllm() -> None:
    """Import what all of vLLM's processes need, and keep what it made out of later collections."""
    gc.disable()
    import_module("vllm.v1.engine.core")
    gc.freeze()
    gc.enable()


# a process that vLLM spawns imports its parent's main module by the second name
if __name__ in {"__main__", "__mp_main__"}:
    import_vllm()

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__")
