"""Where the numbers of a training step stop being finite, in words."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multimax_fairseq.models.monitor import LOGITS_AT_ONCE, Watch, kept_scores, words_of


class Examined:
    """Mixin of a model that says where a step stops being finite: see running.not_finite."""

    def why_not_finite(self, forward: Callable[[], Any]) -> str:
        """Return where `forward`, which computes a step's losses once more, stops being finite, or
        else the gradients that the step has left."""
        examination = Examination(self)
        # What is not finite may stop a mapping; what was seen until then is the answer.
        with contextlib.suppress(Exception), torch.no_grad():
            forward()
        examination.stop()
        return examination.finding()


class Examination(Watch):
    """The scores of each place in the passes of a step, before and after the modulator."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, lambda *_: None)
        # In the order of the pass: the score of largest magnitude after the modulator, in words,
        # and itself.
        self.seen: dict[str, tuple[str, float]] = {}

    def _add(
        self,
        place: str,
        normalizer: Any,
        scores: Tensor,
        probs: Tensor,
        excluded: Tensor | None,
        padding: Tensor,
    ) -> None:
        kept = kept_scores(scores, excluded, padding)
        largest = _largest(scores[kept])
        modulator = getattr(normalizer, "modulator", None)
        if modulator is None:
            self._note(place, f"the largest score is {largest:.4g}", largest)
            return
        modulated = _largest(modulator(scores)[kept])
        words = f"the largest modulated score is {modulated:.4g}, of scores up to {largest:.4g}"
        self._note(place, words, modulated)

    def _on_output(self, decoder: Any, args: Any, kwargs: Any, output: Any) -> None:
        shown = output[0].detach()[~self.padding["decoder"]]
        is_features = kwargs.get("features_only", False)
        for rows in shown.split(max(1, LOGITS_AT_ONCE // len(decoder.dictionary))):
            largest = _largest(decoder.output_layer(rows[None]) if is_features else rows)
            self._note("output", f"the largest logit is {largest:.4g}", largest)

    def _note(self, place: str, words: str, largest: float) -> None:
        before = abs(self.seen[place][1]) if place in self.seen else -1.0
        if not abs(largest) <= before and before == before:  # NaN is larger than all others
            self.seen[place] = words, largest

    def finding(self) -> str:
        """Return in words what was seen."""
        for place, (words, largest) in self.seen.items():
            if not abs(largest) < torch.inf:
                return f"it begins in the {words_of(place)}, where {words}"
        finite = "all scores are finite"
        if self.seen:
            place = max(self.seen, key=lambda place: abs(self.seen[place][1]))
            finite += f" (in the {words_of(place)} {self.seen[place][0]})"
        wrong = [
            name
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None and not parameter.grad.isfinite().all()
        ]
        # Gradients come from the output, so that the first one that is not finite is the last.
        return finite + (f", and the gradient of '{wrong[-1]}' is not" if wrong else "")


def _largest(scores: Tensor) -> float:
    """The score of largest magnitude, NaN if there is any."""
    if not scores.numel():
        return 0.0
    low, high = (value.item() for value in scores.aminmax())
    return low if abs(low) > abs(high) else high
