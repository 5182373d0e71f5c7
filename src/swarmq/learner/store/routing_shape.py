"""Which models' routing can be replayed, how their routed experts are packed, and which recorded ones are refused. Without torch."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from swarmq.errors import SetUpError
from swarmq.messages import Rollout

REPLAYED_MODELS = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Model types of transformers whose routers choose the experts with the largest softmax of their logits, and return logits, weights and
ids."""


class RoutingShape(msgspec.Struct, frozen=True, kw_only=True):
    """Size of a token's routed experts, as vLLM returns them."""

    layers: int
    """All decoder layers, those without experts included."""
    experts_per_token: int
    experts: int

    @classmethod
    def of(cls, config: Any) -> RoutingShape:
        """Return the shape for a model with this configuration of transformers. Raises SetUpError if its routing cannot be replayed."""
        if config.model_type not in REPLAYED_MODELS:
            raise SetUpError(
                f"train.routing_replay: the routing of a model of type {config.model_type!r} cannot be replayed, only that of "
                f"{', '.join(REPLAYED_MODELS)}: set it to false"
            )
        experts = getattr(config, "num_experts", None) or config.num_local_experts
        return cls(layers=config.num_hidden_layers, experts_per_token=config.num_experts_per_tok, experts=experts)

    @property
    def id_bytes(self) -> int:
        return 1 if self.experts <= 256 else 2

    @property
    def token_bytes(self) -> int:
        return self.layers * self.experts_per_token * self.id_bytes

    def check(self, episode: Rollout) -> None:
        """Raise SetUpError for an episode with a turn whose routing cannot be replayed."""
        for turn in episode.turns:
            where = f"turn {turn.call_id} of {episode.episode_id}"
            if not turn.routed_experts:
                raise SetUpError(
                    f"train.routing_replay: {where} has no routed experts, so it was recorded without this setting. Nothing was trained "
                    "on it, and it is not lost: set train.routing_replay to false until all such episodes are trained"
                )
            size = len(turn.routed_experts)
            whole = size - size % self.id_bytes
            highest = np.frombuffer(turn.routed_experts[:whole], f"<u{self.id_bytes}").max(initial=0)
            if size != turn.num_routed * self.token_bytes or highest >= self.experts:
                raise SetUpError(
                    f"train.routing_replay: {where} has {size} bytes of routed experts, up to number {highest}, for "
                    f"{turn.num_routed} tokens; the learner's model has {self.token_bytes} bytes for each, and {self.experts} experts: "
                    "its engine serves another model"
                )
