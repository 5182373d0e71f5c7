"""Recipe and cache location of the demo's model. Loads no torch."""

from __future__ import annotations

from pathlib import Path

from swarmq.toy_model import recipe as toy_model


class DemoRecipe(toy_model.Recipe, frozen=True, kw_only=True):
    """Everything that determines the demo's warmed-up model, besides code and problems."""

    copying_share: float = 0.9
    """Initial probability that a demonstration calls the tool before its next step."""
    tool_share: float = 0.36
    """The same probability in the final mix."""


def user_cache_folder() -> Path:
    """Return the folder of the user's cache for demo models."""
    return toy_model.user_cache_folder("demo-models")


def model_folder(cache: Path, recipe: DemoRecipe) -> Path:
    """Return the folder in `cache` for the model of this recipe."""
    return cache / f"demo-model-{recipe_digest(recipe)}"


def recipe_digest(recipe: DemoRecipe) -> str:
    """Return a digest of the recipe and of the code and problems that it uses."""
    names = ("agent", "model_recipe", "problems", "warmup")
    return toy_model.digest_sources(recipe, [Path(__file__).with_name(f"{name}.py") for name in names])
