"""Toy models: small Qwen3-architecture models, made from nothing and warmed up by demonstrations on CPU cores in minutes.

A toy model knows the format of a task and its possible strategies; which strategy pays is left to reinforcement learning. The demo
and the tutorials under `examples/` train such models. `python -m swarmq.toy_model MODULE FOLDER` makes one from a tutorial's module
of demonstrations. `recipe` and `demonstrations` load no torch, so programs that only look for a cached model stay light.
"""

from swarmq.toy_model.demonstrations import Lessons, load_lessons
from swarmq.toy_model.recipe import Architecture, Recipe, WarmupProgress

__all__ = ["Architecture", "Lessons", "Recipe", "WarmupProgress", "load_lessons"]
