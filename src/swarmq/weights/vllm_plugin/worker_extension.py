"""Extension of vLLM's workers that reports the facts by which the learner chooses how to send weights."""

from __future__ import annotations

import os
from typing import Any

from swarmq.hosts.model_files import describe_shape
from swarmq.version import __version__
from swarmq.weights.format import nccl_group
from swarmq.weights.format.conventions import RECEIVER_PORT_ENV
from swarmq.weights.format.cuda_ipc import get_gpu_uuid


class WorkerExtension:
    def swarmq_facts(self: Any) -> dict[str, Any]:
        """Return the fields of `swarmq.weights.push.engine_control.WorkerFacts` and of `swarmq.engine.client.identity.EngineIdentity`."""
        on_gpu = self.device.type == "cuda"
        return {
            "gpu": get_gpu_uuid(self.device) if on_gpu else "",
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "pid": os.getpid(),
            "nccl": nccl_group.get_nccl_version() if on_gpu else "",
            "loads": getattr(self.weight_transfer_engine, "loads", 0),
            "checksum": getattr(self.weight_transfer_engine, "checksum", None),
            "receiver_port": int(os.environ.get(RECEIVER_PORT_ENV, "0")),
            "swarmq": __version__,
            "returns_routed_experts": getattr(getattr(self.vllm_config, "aux_output_config", None), "enabled", False),
            "shape": describe_shape(self.model_config.hf_config.to_dict()),
        }
