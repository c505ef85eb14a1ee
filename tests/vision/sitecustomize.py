"""Make torchvision importable with a build of PyTorch that it was not compiled for.

Its C++ operators then fail to load. timm does not call them, but the import needs declarations.
"""

import sys
from pathlib import Path

import torch

try:
    torch.ops.load_library(next(Path(sys.prefix, "vision", "torchvision").glob("_C*")))
except OSError:
    # A global: the declarations vanish with this object.
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
