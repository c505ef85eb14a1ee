"""Inspects programs recorded by torch.compile or torch.export, and calls at run time."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from multimax_fairseq.ops import build

CAPABILITY = torch.backends.cpu.get_cpu_capability()
NEEDS_KERNELS = pytest.mark.skipif(
    CAPABILITY not in build.MARCH,
    reason=f"no CPU kernels for {CAPABILITY}: the operators are not used",
)

QUERIES, KEYS = 37, 41  # sizes that no other dimension has


class Recorder(TorchDispatchMode):
    """Records the names of called operators, and float32 tensors of the size of the scores."""

    def __init__(self):
        super().__init__()
        self.names, self.wide = set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        if func.namespace == "multimax_fairseq":
            self.names.add(func._opname)
        for output in outputs if isinstance(outputs, (tuple, list)) else [outputs]:
            if isinstance(output, torch.Tensor) and is_wide(output):
                self.wide.append((str(func), tuple(output.shape)))
        return outputs


def is_wide(tensor):
    """Whether a float32 tensor has an entry for each query and key, or each token and class."""
    big = tensor.dim() > 1 and {*tensor.shape[-2:]} <= {QUERIES, KEYS}
    return big and tensor.dtype == torch.float32 and not is_future_mask(tensor)


def is_future_mask(tensor):
    """fairseq's decoder creates one mask for all of its heads; the kernels do not read it."""
    return tensor.shape == (QUERIES, QUERIES)


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def ours(graph):
    """Return the names of this package's operators in a graph."""
    targets = (str(node.target) for node in graph.nodes)
    return {t.split(".")[1] for t in targets if t.startswith("multimax_fairseq.")}
