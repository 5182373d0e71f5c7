"""Lets a torchvision that was built for CUDA be imported beside a CPU torch.

Its operators do not load there, and its Python code takes two of them for declared. Nothing calls them: vLLM prepares
images with torch's own. Every process that has this folder on its PYTHONPATH declares them as soon as it has imported
torch, because torch then calls what entry points of the group `torch.backends` name (beside this file, in dist-info).
"""

from importlib.util import find_spec
from pathlib import Path

import torch


def declare() -> None:
    torchvision = find_spec("torchvision")  # where it is; not yet its import
    try:
        torch.ops.load_library(Path(torchvision.origin).with_name("_C.so"))
    except OSError:  # a CPU build's would have loaded, and cannot be declared again
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
