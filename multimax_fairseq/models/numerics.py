"""Finds the layer in which a training step first computes a non-finite number."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multimax_fairseq.models.monitor import LOGITS_AT_ONCE, words_of
from multimax_fairseq.statistics.observer import Attention, AttentionListener, Observer


class Examined:
    """Mixin of a model that names the layer of a NaN: see compat.running.non_finite_updates."""

    def why_not_finite(self, forward: Callable[[], Any]) -> str:
        """Return where `forward`, which repeats a step's losses, first becomes non-finite.

        If all scores are finite, name a gradient that is not.
        """
        scores = LargestScores()
        observer = Observer(self, scores)
        # A mapping may raise an error for non-finite scores; the earlier scores are recorded.
        with contextlib.suppress(Exception), torch.no_grad():
            forward()
        observer.stop()
        return scores.finding(self)


class LargestScores(AttentionListener):
    """The score of largest magnitude in each layer, after a modulator."""

    def __init__(self) -> None:
        # In the order of the forward pass: the score in words, and the score.
        self.seen: dict[str, tuple[str, float]] = {}

    def on_attention(self, attention: Attention) -> None:
        layer = f"{attention.kind}.{attention.layer}"
        for part in attention.parts():
            valid = part.valid
            largest = _largest(part.scores[valid])
            if part.modulator is None:
                self._note(layer, f"the largest score is {largest:.4g}", largest)
                continue
            modulated = _largest(part.modulator(part.scores)[valid])
            words = f"the largest modulated score is {modulated:.4g}, of scores up to {largest:.4g}"
            self._note(layer, words, modulated)

    def on_output(self, decoder: Any, output: Tensor, is_logits: bool) -> None:
        for rows in output.split(max(1, LOGITS_AT_ONCE // len(decoder.dictionary))):
            largest = _largest(rows if is_logits else decoder.output_layer(rows[None]))
            self._note("output", f"the largest logit is {largest:.4g}", largest)

    def _note(self, layer: str, words: str, largest: float) -> None:
        before = abs(self.seen[layer][1]) if layer in self.seen else -1.0
        if not abs(largest) <= before and before == before:  # NaN counts as the largest
            self.seen[layer] = words, largest

    def finding(self, model: Any) -> str:
        """Return the first non-finite score or gradient in words."""
        for layer, (words, largest) in self.seen.items():
            if not abs(largest) < torch.inf:
                return f"it begins in the {words_of(layer)}, where {words}"
        finite = "all scores are finite"
        if self.seen:
            layer = max(self.seen, key=lambda layer: abs(self.seen[layer][1]))
            finite += f" (in the {words_of(layer)} {self.seen[layer][0]})"
        wrong = [
            name
            for name, parameter in model.named_parameters()
            if parameter.grad is not None and not parameter.grad.isfinite().all()
        ]
        # Backward starts at the output, so the last parameter is the first to fail.
        return finite + (f", and the gradient of '{wrong[-1]}' is not" if wrong else "")


def _largest(scores: Tensor) -> float:
    """Return the score of largest magnitude; NaN if any score is NaN."""
    if not scores.numel():
        return 0.0
    low, high = (value.item() for value in scores.aminmax())
    return low if abs(low) > abs(high) else high
