"""Statistics of a trained model's attention, for the lines of results."""

from pathlib import Path

import torch
from fairseq import checkpoint_utils
from torch import Tensor

import multimax_fairseq.models  # noqa: F401  registers the architectures
from multimax_fairseq.analysis.metrics import entropy
from multimax_fairseq.analysis.observer import Attention, AttentionListener, Observer

BATCHES, TOKENS = 4, 2048


class AttentionStatistics(AttentionListener):
    """Means over queries and heads, and the largest score."""

    def __init__(self) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64)
        self.queries = 0
        self.largest = -torch.inf

    def on_attention(self, attention: Attention) -> None:
        for part in attention.parts():
            self.add(part.scores, part.probs, part.valid)

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


@torch.no_grad()
def of_checkpoint(checkpoint: Path, data: Path) -> dict[str, float]:
    """Return the statistics of a checkpoint's attention on the first tokens of the validation set.

    The plugin of the model is already imported.
    """
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(checkpoint)], {"data": str(data)}
    )
    task.load_dataset("valid")
    batches = task.get_batch_iterator(task.dataset("valid"), max_tokens=TOKENS)
    statistics = AttentionStatistics()
    observer = Observer(model.eval(), statistics)
    for batch, _ in zip(batches.next_epoch_itr(shuffle=False), range(BATCHES), strict=False):
        observer.reset()
        model(**batch["net_input"])
    observer.stop()
    return statistics.means()
