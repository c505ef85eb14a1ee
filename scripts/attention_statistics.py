"""Statistics of a trained model's attention, for the lines of results."""

import torch
from torch import Tensor

from multimax_fairseq.statistics.metrics import entropy


class AttentionStatistics:
    """Means over queries and heads, and the largest score."""

    def __init__(self) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64)
        self.queries = 0
        self.largest = -torch.inf

    def add(self, scores: Tensor, probs: Tensor, valid: Tensor) -> None:
        """Add attention, (..., queries, keys) each; `valid` is False for excluded entries."""
        kept = valid.any(-1)
        probs, keys = probs[kept], valid[kept]
        zeros = ((probs == 0) & keys).sum(-1) / keys.sum(-1)
        each = torch.stack([zeros, entropy(probs).nan_to_num(0.0), probs[:, 0]])
        self.sums += each.double().sum(-1).cpu()
        self.queries += len(probs)
        self.largest = max(self.largest, float(scores[valid].max()))

    def means(self) -> dict[str, float]:
        """Share of zeros among the allowed keys, entropy in nats, weight on the first key."""
        names = ("zeros", "entropy", "first_key")
        numbers = dict(zip(names, (self.sums / self.queries).tolist(), strict=True))
        return {**numbers, "largest_score": self.largest}
