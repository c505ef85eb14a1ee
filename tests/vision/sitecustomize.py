"""Lets torchvision be imported beside another build of torch than its own.

Its C++ operators do not load then. They are for detection, so these declarations are never called.
"""

import sys
from pathlib import Path

import torch

try:
    torch.ops.load_library(next(Path(sys.prefix, "vision", "torchvision").glob("_C*")))
except OSError:
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
