"""Statistics of trained models, for the lines of results."""

import argparse
import copy
import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from attention_statistics import AttentionStatistics
from fairseq import checkpoint_utils, utils
from torch import Tensor, nn

from multimax_fairseq.models.learned_scalars import symbols
from multimax_fairseq.models.quantize import quantize
from multimax_fairseq.statistics import metrics
from multimax_fairseq.statistics.observer import Attention, AttentionListener, Observer

# Statistics use this many validation batches of at most TOKENS tokens.
BATCHES, TOKENS = 4, 2048
BINS = 15
SAMPLED = 2**20  # scores from which quantiles are estimated


@torch.no_grad()
def language_model_statistics(checkpoint: Path, data: Path, plugin: str) -> dict[str, Any]:
    """Return statistics of a checkpoint on validation text.

    Returns:
        attention: the means of `AttentionStatistics` over all layers.
        layers: those of each layer, with sparsity, multi-modality, the slope of the modulator at
            the 5 % and 95 % quantiles of the scores, the patch similarity of the layer's output,
            and the kurtosis of the attention's input.
        calibration_error: the expected calibration error.
        int8: {"loss": cross-entropy in nats, "quantized_loss": the same with int8 linear layers}.
    """
    utils.import_user_module(argparse.Namespace(user_dir=plugin))
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(checkpoint)], {"data": str(data)}
    )
    task.load_dataset("valid")
    iterator = task.get_batch_iterator(task.dataset("valid"), max_tokens=TOKENS)
    batches = list(itertools.islice(iterator.next_epoch_itr(shuffle=False), BATCHES))
    model.eval()
    layers = Layers(model)
    calibration = Calibration()
    for batch in batches:
        layers.observer.reset()
        calibration.add(*predictions(model, batch))
    layers.stop()
    smaller = copy.deepcopy(model)
    quantize([smaller])
    loss, quantized = (cross_entropy(each, batches) for each in (model, smaller))
    return {
        "attention": layers.attention.means(),
        "layers": layers.rows(),
        "calibration_error": calibration.error(),
        "int8": {"loss": loss, "quantized_loss": quantized},
    }


def learned_values(checkpoint: Path) -> dict[str, dict[str, list[float]]]:
    """Return {parameter: {symbol: values}} of what the mappings of a checkpoint have learned."""
    state = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))["model"]
    found = {name: symbols(name, value) for name, value in state.items()}
    return {name: {s: x.tolist() for s, x in each.items()} for name, each in found.items() if each}


def with_softmax(checkpoint: Path, part: str, out: Path) -> None:
    """Write a checkpoint whose MultiMax attention in a part of the model is softmax.

    Args:
        part: "encoder" or "decoder".
    """
    # torch.load, because fairseq's loader changes the settings.
    state = torch.load(checkpoint, map_location="cpu", weights_only=False)
    for name, value in state["model"].items():
        if name.startswith(f"{part}.layers.") and ".self_attn.normalizer.modulator." in name:
            value.zero_()  # coefficients of 0 are softmax
    torch.save(state, out)


def predictions(model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities, (N, V), and the targets, (N,), of all words of a batch."""
    output = model(**batch["net_input"])
    log_probs = model.get_normalized_probs(output, log_probs=True)
    kept = batch["target"] != model.decoder.dictionary.pad()
    return log_probs[kept], batch["target"][kept]


def cross_entropy(model: Any, batches: list[dict[str, Any]]) -> float:
    """Return the mean cross-entropy of all words, in nats."""
    total, count = 0.0, 0
    for batch in batches:
        log_probs, target = predictions(model, batch)
        total -= float(log_probs.gather(-1, target[:, None]).double().sum())
        count += len(target)
    return total / count


class Calibration:
    """The expected calibration error (Guo et al. 2017), with 15 bins of equal width."""

    def __init__(self) -> None:
        self.sums = torch.zeros(2, BINS, dtype=torch.float64)  # of confidences, of correct words
        self.count = 0

    def add(self, log_probs: Tensor, target: Tensor) -> None:
        top, words = log_probs.max(-1)
        bins = (top.exp() * BINS).long().clamp(max=BINS - 1)
        for sums, values in zip(self.sums, (top.exp(), words == target), strict=True):
            sums.index_add_(0, bins, values.double())
        self.count += len(target)

    def error(self) -> float:
        """Return the mean over words of |confidence - accuracy| of their bins."""
        return float((self.sums[0] - self.sums[1]).abs().sum() / self.count)


class Layers(AttentionListener):
    """Statistics of each layer of a decoder."""

    def __init__(self, model: Any) -> None:
        self.attention = AttentionStatistics()
        self.of_layer: dict[int, AttentionStatistics] = defaultdict(AttentionStatistics)
        # {layer: {name: [sum, count]}}
        self.totals: dict[int, dict[str, list[float]]] = defaultdict(
            lambda: defaultdict(lambda: [0.0, 0])
        )
        self.observer = Observer(model, self)
        self.hooks = []
        for number, layer in enumerate(model.decoder.layers):
            self.hooks += [
                layer.register_forward_hook(
                    lambda module, _, out, n=number: self._on_output(n, out[0])
                ),
                layer.self_attn.register_forward_pre_hook(
                    lambda module, args, kwargs, n=number: self._on_input(n, *args, **kwargs),
                    with_kwargs=True,
                ),
            ]

    def stop(self) -> None:
        self.observer.stop()
        for hook in self.hooks:
            hook.remove()

    def rows(self) -> list[dict[str, float]]:
        """Return one dictionary for each layer."""
        return [
            {
                **self.of_layer[layer].means(),
                **{name: total / count for name, (total, count) in self.totals[layer].items()},
            }
            for layer in sorted(self.of_layer)
        ]

    def _add(self, layer: int, name: str, values: Tensor) -> None:
        values = values[values.isfinite()].double()
        entry = self.totals[layer][name]
        entry[0] += float(values.sum())
        entry[1] += values.numel()

    def _on_output(self, layer: int, features: Tensor) -> None:
        self._add(layer, "patch_similarity", metrics.patch_similarity(features.transpose(0, 1)))

    def _on_input(self, layer: int, query: Tensor, *_: Any, **__: Any) -> None:
        self._add(layer, "kurtosis", kurtosis(query))

    def on_attention(self, attention: Attention) -> None:
        for part in attention.parts():
            self.attention.add(part.scores, part.probs, part.valid)
            self.of_layer[part.layer].add(part.scores, part.probs, part.valid)
            kept = part.valid.any(-1)
            found = metrics.of_queries(part.scores, part.probs, ~part.valid)
            for name in ("sparsity", "multi_modality"):
                self._add(part.layer, name, found[name][kept])
            if part.modulator is not None and hasattr(part.modulator, "low_coefficient"):
                self._add_slopes(part.layer, part.modulator, part.scores[part.valid])

    def _add_slopes(self, layer: int, modulator: nn.Module, scores: Tensor) -> None:
        sample = scores[:: max(1, scores.numel() // SAMPLED)]
        ends = sample.quantile(scores.new_tensor([0.05, 0.95]))
        heads = max(p.shape[0] if p.dim() > 1 else 1 for p in modulator.parameters())
        slopes = metrics.modulator_slope(ends.expand(heads, 1, 2), modulator)
        self._add(layer, "slope_at_5_percent", slopes[..., 0])
        self._add(layer, "slope_at_95_percent", slopes[..., 1])


def kurtosis(values: Tensor) -> Tensor:
    """Return the kurtosis of all values, (1,): 3 for a normal distribution."""
    centred = values.double() - values.double().mean()
    return (centred**4).mean().reshape(1) / centred.square().mean() ** 2
