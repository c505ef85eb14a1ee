"""Logs statistics of attention and output layer while a model trains (`--monitor-interval`).

The names in the log are `monitor/LAYER/FIGURE`. LAYER is `encoder.N`, `decoder.N` or `cross.N`,
where N counts layers from 0, or `output`. An attention has

    its learned scalars in the paper's symbols; with .HEAD where each head has its own
    entropy, sparsity, multi_modality: mean over queries, then heads; epsilon is the query's mean
        score, and the reference is 1 / the number of its keys
    mass: sum of a query's probabilities, if it need not be 1
    zeros: share of probabilities that are exactly 0
    past_turning_point: share of scores at which the modulator falls; only with `Modulator`
    largest_score: after the modulator, if there is one

The output layer has its learned scalars, its entropy, and in `top1` and `top10` the probability of
the most probable word and of the ten most probable. Undefined and non-finite values are left out.
All values come from the first batch of an update, on the first worker; `monitor/updates` is the
update.
"""

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from fairseq.logging import metrics as logged
from torch import Tensor, nn

from multimax_fairseq.compat import MONITOR
from multimax_fairseq.mappings.multimax import Modulator
from multimax_fairseq.mappings.registry import mapping_named
from multimax_fairseq.models.config import flag
from multimax_fairseq.models.learned_scalars import symbols
from multimax_fairseq.statistics import metrics
from multimax_fairseq.statistics.observer import (
    Attention,
    AttentionListener,
    Observer,
    evaluated,
    wide,
)

logger = logging.getLogger(__name__)

LOGITS_AT_ONCE = 1 << 24  # bounds the memory of the output's probabilities
LAST = 1000  # priority in fairseq's log lines, behind fairseq's own values
ATTENTIONS = {
    "encoder": "self-attention of encoder layer",
    "decoder": "self-attention of decoder layer",
    "cross": "cross-attention of decoder layer",
}


class Monitored:
    """Mixin of a model: logs statistics of a batch every `--monitor-interval` updates."""

    monitor: "Monitor | None" = None

    def set_num_updates(self, num_updates):
        """Receive the number of updates, which fairseq sets before each batch."""
        super().set_num_updates(num_updates)
        if self.monitor is not None:
            self.monitor.before_batch(self, num_updates + 1)


class Monitor:
    """Logs statistics of the first batch in every `interval`-th update."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.last_update = 0
        self.has_explained = self.has_warned = False
        self.observer: Observer | None = None

    def before_batch(self, model: Any, update: int) -> None:
        """Observe the next forward pass, if it is the first one of an update to log."""
        if self.observer is not None:  # still there if its pass raised an error
            self.observer.stop()
            self.observer = None
        if update % self.interval or update == self.last_update or not _is_logged():
            return
        self.last_update = update
        statistics = Statistics(functools.partial(self._log, update))
        self.observer = Observer(model, statistics, once=True)

    def _log(self, update: int, figures: dict[str, float], falling: dict[str, str]) -> None:
        self.observer = None
        for name, value in {"updates": float(update), **figures}.items():
            if math.isfinite(value):
                # With weight 0, fairseq logs the last value, not a mean.
                logged.log_scalar(MONITOR + name, value, weight=0, priority=LAST)
        if not self.has_explained:
            self.has_explained = True
            logger.info(
                f"update {update}: --monitor-interval logs to JSON lines (--log-format json), "
                "TensorBoard and the like, but not to lines of text"
            )
        shares = {layer: figures[f"{layer}/past_turning_point"] for layer in falling}
        shares = {layer: share for layer, share in shares.items() if share > 0}
        if self.has_warned or not shares:
            return
        layer = max(shares, key=lambda layer: shares[layer])
        self.has_warned = True
        logger.warning(
            f"update {update}: the modulator in the {words_of(layer)} falls at "
            f"{100 * shares[layer]:.2g}% of this batch's scores, where the lower of two scores "
            f"gets the greater weight{falling[layer]}"
        )


def words_of(layer: str) -> str:
    """Return a layer in words, for a message."""
    kind, _, number = layer.partition(".")
    return f"{ATTENTIONS[kind]} {int(number) + 1}" if number else "output layer"


def set_monitor(model: Any, args: Any) -> None:
    """Set the model's monitor, if the flags ask for one."""
    if args.monitor_interval is not None:
        model.monitor = Monitor(args.monitor_interval)


def _is_logged() -> bool:
    """Return whether fairseq logs this step: only in training, and only on the first worker.

    Loading a checkpoint sets the number of updates too.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_rank() > 0:
        return False
    training = logged.get_meters("train")
    return any(meters is training for meters in logged.get_active_aggregators())


class Statistics(AttentionListener):
    """The statistics of one forward pass.

    Args:
        finish: called at the end of the pass with {name: value}, and with {layer: remedy} of the
            modulators that can fall.
    """

    def __init__(self, finish: Callable[[dict[str, float], dict[str, str]], None]) -> None:
        self.finish = finish
        self.sums: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        self.largest: dict[str, Tensor] = {}
        self.learned: dict[str, dict[str, Tensor]] = {}
        self.falling: dict[str, str] = {}

    def on_attention(self, attention: Attention) -> None:
        layer, normalizer = f"{attention.kind}.{attention.layer}", attention.normalizer
        if normalizer is not None and layer not in self.learned:
            self.learned[layer] = _parameters(normalizer)
        if normalizer is not None and isinstance(attention.modulator, Modulator):
            self.falling[layer] = _remedy(normalizer.name)
        for part in attention.parts():
            self._add(layer, part)

    def _add(self, layer: str, part: Attention) -> None:
        statistics = metrics.of_queries(part.scores, part.probs, part.excluded)
        statistics["zeros"] = 1 - statistics.pop("density")
        if getattr(part.normalizer, "sums_to_one", True):
            del statistics["mass"]
        for name, values in statistics.items():
            defined = ~(values.isnan() | part.padding[:, None])
            self._sum(layer, name, values.double().masked_fill(~defined, 0.0), defined)
        scores, valid, modulator = part.scores, part.valid, part.modulator
        if isinstance(modulator, Modulator):
            falls = metrics.past_turning_point(scores, modulator)
            self._sum(layer, "past_turning_point", falls & valid, valid)
        if modulator is not None:
            scores = modulator(scores)
        largest = scores.masked_fill(~valid, -torch.inf).amax()
        before = self.largest.get(layer)
        self.largest[layer] = largest if before is None else torch.maximum(before, largest)

    def _sum(self, layer: str, name: str, values: Tensor, counted: Tensor) -> None:
        """Add values, which are 0 where not counted, to the sum and count of each head."""
        others = [dim for dim in range(values.dim()) if dim != 1]
        total, count = values.sum(others), counted.sum(others)
        if (layer, name) in self.sums:
            before = self.sums[layer, name]
            total, count = total + before[0], count + before[1]
        self.sums[layer, name] = total, count

    def on_output(self, decoder: Any, output: Tensor, is_logits: bool) -> None:
        words = len(decoder.dictionary)
        zero = output.new_zeros((), dtype=torch.float64)
        sums = dict.fromkeys(("entropy", "top1", "top10"), zero)
        with torch.autocast(output.device.type, enabled=False):
            for rows in output.split(max(1, LOGITS_AT_ONCE // words)):
                probs = wide(_probs(decoder, rows[None], is_logits))
                best = probs.topk(min(10, words)).values.double()
                sums["entropy"] = sums["entropy"] + metrics.entropy(probs).double().sum()
                sums["top1"] = sums["top1"] + best[..., 0].sum()
                sums["top10"] = sums["top10"] + best.sum()
        for module in (decoder.output_modulator, decoder.output_normalizer):
            if module is not None:
                self.learned["output"] = _parameters(module)
        means = {name: total / len(output) for name, total in sums.items()}
        self.finish(self._figures(means), self.falling)

    def _figures(self, output: dict[str, Tensor]) -> dict[str, float]:
        statistics = {
            f"{layer}/{name}": (total / count).mean()
            for (layer, name), (total, count) in self.sums.items()
        }
        statistics |= {f"{layer}/largest_score": value for layer, value in self.largest.items()}
        statistics |= {f"output/{name}": value for name, value in output.items()}
        parameters = [
            (layer, name, value)
            for layer, learned in self.learned.items()
            for name, value in learned.items()
        ]
        # One transfer from the device.
        parts = [*statistics.values(), *(value for *_, value in parameters)]
        numbers = torch.cat([part.double().flatten() for part in parts]).cpu()
        figures = dict(zip(statistics, numbers.tolist(), strict=False))
        rest = numbers[len(statistics) :].split([value.numel() for *_, value in parameters])
        for (layer, name, value), part in zip(parameters, rest, strict=True):
            for symbol, heads in symbols(f"normalizer.{name}", part.view(value.shape)).items():
                for head, number in enumerate(heads.tolist()):
                    figures[f"{layer}/{symbol}" + (f".{head}" if len(heads) > 1 else "")] = number
        return figures


def _remedy(name: str) -> str:
    """Name the flag that keeps this mapping's modulators from falling, if there is one."""
    mapping = mapping_named(name)
    settings = [mapping.setting_of(o) for o in mapping.options if o.name == "monotone"]
    return "".join(f"; {flag(setting)} keeps modulators from falling" for setting in settings)


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    """Copy a module's parameters: after its forward, FSDP may keep only a shard of them."""
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def _probs(decoder: Any, output: Tensor, is_logits: bool) -> Tensor:
    """Return the probabilities of words for features or logits."""
    adaptive = getattr(decoder, "adaptive_softmax", None)
    with evaluated(adaptive):  # the adaptive softmax has its own dropout
        if not is_logits and adaptive is None:
            output = decoder.output_layer(output)
        if decoder.output_normalizer is not None:
            return decoder.output_normalizer(wide(output))
        return decoder.get_normalized_probs((output, None), log_probs=False)
