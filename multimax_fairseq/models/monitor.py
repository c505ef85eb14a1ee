"""What attention and output layer do while a model trains, through fairseq's own logging.

The figures of a pass are formed beside it, from what it has computed: nothing that is trained, and
no random number, depends on whether somebody looks. Their names are `monitor/PLACE/FIGURE`, PLACE
being `encoder.N`, `decoder.N` or `cross.N`, layers counted from 0, or `output`. An attention has

    its learned scalars in the papers' symbols, with .HEAD behind them where each head has its own
    entropy, sparsity, multi_modality: the mean over the heads of that over the queries; sparsity
        and multi-modality by the query's mean score as epsilon and 1 / the number of its keys as
        the reference
    mass: what a query's probabilities sum to, where that need not be 1
    zeros: the share of probabilities that are exactly 0
    past_turning_point: the share of scores at which the modulator falls; of `Modulator` alone
    largest_score: after the modulator, if there is one

and the output layer its learned scalars, its entropy, and in `top1` and `top10` the probability of
the likeliest word and of the ten likeliest. What is undefined or not finite is left out. All are of
the batch that the first worker has, the first one of an update; `monitor/updates` says which.
"""

import contextlib
import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.logging import metrics as logged
from fairseq.modules import MultiheadAttention as SoftmaxMultiheadAttention
from torch import Tensor, nn

from multimax_fairseq.analysis import metrics
from multimax_fairseq.compat import MONITOR
from multimax_fairseq.mappings.multimax import Modulator
from multimax_fairseq.mappings.softmax import softmax
from multimax_fairseq.mappings.table import mapping_named
from multimax_fairseq.models.config import flag
from multimax_fairseq.models.learned_scalars import symbols
from multimax_fairseq.modules import AdditiveAttention, Normalizer, attending
from multimax_fairseq.modules.multihead_attention import MultiheadAttention
from multimax_fairseq.ops.attention import attention_scores

logger = logging.getLogger(__name__)

# A few tens of MB, whatever the batch, the lengths and the vocabulary.
SCORES_AT_ONCE, LOGITS_AT_ONCE = 1 << 22, 1 << 24
LAST = 1000  # in fairseq's lines, of which its own figures come first
ATTENTIONS = {
    "encoder": "self-attention of encoder layer",
    "decoder": "self-attention of decoder layer",
    "cross": "cross-attention of decoder layer",
}


class Monitored:
    """Mixin of a model: every so many updates the figures of a batch are logged, where
    `--monitor-interval` asks for it."""

    monitor: "Monitor | None" = None

    def set_num_updates(self, num_updates):
        """Take in how many updates are done; fairseq tells it before each batch."""
        super().set_num_updates(num_updates)
        if self.monitor is not None:
            self.monitor.before_batch(self, num_updates + 1)


class Monitor:
    """Watches the first batch of every so many updates."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.seen = 0  # the last update that was watched
        self.told = self.warned = False
        self.watched: Watch | None = None

    def before_batch(self, model: Any, update: int) -> None:
        """Watch the pass that follows, if it is the first one of an update whose turn it is."""
        if self.watched is not None:  # whose pass ended in an error
            self.watched.stop()
            self.watched = None
        if update % self.interval or update == self.seen or not _is_logged():
            return
        self.seen = update
        self.watched = Watch(model, functools.partial(self._log, update))

    def _log(self, update: int, figures: dict[str, float], falling: dict[str, str]) -> None:
        self.watched = None
        for name, value in {"updates": float(update), **figures}.items():
            if math.isfinite(value):
                # Weight 0: what is shown is the last value.
                logged.log_scalar(MONITOR + name, value, weight=0, priority=LAST)
        if not self.told:
            self.told = True
            logger.info(
                f"update {update}: --monitor-interval's figures are in JSON lines (--log-format "
                "json), TensorBoard and the like, and not in lines of text"
            )
        shares = {place: figures[f"{place}/past_turning_point"] for place in falling}
        shares = {place: share for place, share in shares.items() if share > 0}
        if self.warned or not shares:
            return
        place = max(shares, key=lambda place: shares[place])
        self.warned = True
        logger.warning(
            f"update {update}: the modulator in the {words_of(place)} falls at "
            f"{100 * shares[place]:.2g}% of this batch's scores, where the lower of two scores "
            f"gets the greater weight{falling[place]}"
        )


def kept_scores(scores: Tensor, excluded: Tensor | None, padding: Tensor) -> Tensor:
    """Which scores, (B, H, T, S), are of a query that is no padding (B, T) and not excluded."""
    kept = ~padding[:, None, :, None]
    if excluded is not None:
        kept = kept & ~excluded
    return kept.expand(scores.shape)


def words_of(place: str) -> str:
    """What a place is called in a sentence."""
    kind, _, layer = place.partition(".")
    return f"{ATTENTIONS[kind]} {int(layer) + 1}" if layer else "output layer"


def set_monitor(model: Any, args: Any) -> None:
    """Give a model the monitor that the flags ask for."""
    if args.monitor_interval is not None:
        model.monitor = Monitor(args.monitor_interval)


def _is_logged() -> bool:
    """Whether this is a training step of fairseq's, whose figures somebody may see: a model is told
    its updates too when a checkpoint is loaded, and only the first worker writes lines."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_rank() > 0:
        return False
    training = logged.get_meters("train")
    return any(meters is training for meters in logged.get_active_aggregators())


class Watch:
    """One forward pass of a model, from hooks that are gone when it ends.

    Args:
        model: whose next pass it is.
        finish: called at its end with the figures, and with {place: remedy} of the modulators that
            could fall.
    """

    def __init__(
        self, model: Any, finish: Callable[[dict[str, float], dict[str, str]], None]
    ) -> None:
        self.model, self.finish = model, finish
        self.hooks = contextlib.ExitStack()
        self.padding: dict[str, Tensor] = {}
        # Where layers share a module, its calls come in the order of the layers.
        self.places: dict[nn.Module, list[str]] = {}
        self.calls: dict[nn.Module, int] = {}
        self.queries: dict[nn.Module, int] = {}  # that the call has shown so far
        self.rows: slice | None = None  # of the batch, while a part of it is shown
        self.sums: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        self.largest: dict[str, Tensor] = {}
        self.learned: dict[str, dict[str, Tensor]] = {}
        self.falling: dict[str, str] = {}
        self.output: dict[str, Tensor] = {}
        for place, module in _attentions(model):
            if module not in self.places:
                self._watch(module)
            self.places.setdefault(module, []).append(place)
        if hasattr(model, "encoder"):
            self._hook(model.encoder.register_forward_pre_hook(self._on_source))
        self._hook(model.decoder.register_forward_pre_hook(self._on_target))
        self._hook(model.decoder.register_forward_hook(self._on_output, with_kwargs=True))

    def _hook(self, handle: Any) -> None:
        self.hooks.callback(handle.remove)

    def _watch(self, module: nn.Module) -> None:
        self.calls[module] = self.queries[module] = 0
        if isinstance(module, Normalizer):
            self._hook(module.register_forward_hook(self._on_scores, with_kwargs=True))
            module.__dict__["attend"] = functools.partial(self._attend, module, module.attend)
            self.hooks.callback(module.__dict__.pop, "attend")
        else:
            self._hook(module.register_forward_hook(self._on_softmax, with_kwargs=True))

    def stop(self) -> None:
        """Leave the model as it was."""
        self.hooks.close()

    # --- what the pass shows ---

    def _on_source(self, encoder: Any, args: Any) -> None:
        self.padding["encoder"] = args[0] == encoder.dictionary.pad()

    def _on_target(self, decoder: Any, args: Any) -> None:
        self.padding["decoder"] = self.padding["cross"] = args[0] == decoder.dictionary.pad()

    def _attend(self, module: Any, attend: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Attend as the module does, and show scores that a kernel has kept to itself."""
        before = self.calls[module], self.queries[module]
        output = attend(*args, **kwargs)
        if before == (self.calls[module], self.queries[module]):
            self._form_scores(module, inspect.signature(attend).bind(*args, **kwargs).arguments)
        return output

    @torch.no_grad()
    def _form_scores(self, module: Any, given: dict[str, Any]) -> None:
        query, key, mask = given["query"], given["key"], given.get("mask")
        given = {**given, "dropout_p": 0.0, "need_probs": True}
        attend = type(module).attend
        with torch.autocast(query.device.type, enabled=False):
            for rows in _parts(query, key):
                self.rows = rows
                given["query"], given["key"] = _wide(query[rows]), _wide(key[rows])
                given["value"] = given["key"][..., :1]
                given["mask"] = _of_rows(mask, rows)
                attend(module, **given)
        self.rows = None
        self._advance(module, query.shape[2])

    @torch.no_grad()
    def _on_scores(self, module: Any, args: Any, kwargs: Any, probs: Tensor) -> None:
        scores, _, mask, *_ = args
        if module.training and mapping_named(module.name).training:
            # In training some probabilities are not the 0 that they otherwise are.
            with _evaluated(module):
                probs = module.forward(*args, **kwargs)
        self._show(module, scores, probs, mask, module)

    @torch.no_grad()
    def _on_softmax(self, module: Any, args: Any, kwargs: Any, _: Any) -> None:
        """The same of fairseq's own attention, which shows nothing but its inputs."""
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        key = given["query"] if module.self_attention else given["key"]
        query, key = (
            F.linear(x, projection.weight, projection.bias)
            .unflatten(-1, (module.num_heads, -1))
            .permute(1, 2, 0, 3)
            for x, projection in ((given["query"], module.q_proj), (key, module.k_proj))
        )
        mask, padding = given.get("attn_mask"), given.get("key_padding_mask")
        if mask is not None and not mask.is_floating_point():
            mask = mask.bool()
        if padding is not None:
            padding = padding.bool()[:, None, None]
            mask = padding if mask is None else padding | _excluded(mask)
        with torch.autocast(query.device.type, enabled=False):
            for rows in _parts(query, key):
                self.rows, part = rows, _of_rows(mask, rows)
                scores = attention_scores(_wide(query[rows]), _wide(key[rows]), module.scaling)
                self._show(module, scores, softmax(scores, -1, part), part)
        self.rows = None
        self._advance(module, query.shape[2])

    # --- the figures ---

    def _show(
        self,
        module: nn.Module,
        scores: Tensor,
        probs: Tensor,
        mask: Tensor | None,
        normalizer: Any = None,
    ) -> None:
        places, shown = self.places[module], self.queries[module]
        place = places[self.calls[module] % len(places)]
        padding = self.padding[place.partition(".")[0]][:, shown : shown + scores.shape[-2]]
        if normalizer is not None and place not in self.learned:
            self.learned[place] = _parameters(normalizer)
        excluded = None if mask is None else _excluded(mask)
        if self.rows is not None:
            self._add(place, normalizer, scores, probs, excluded, padding[self.rows])
        else:
            for rows in _parts(scores, scores.mT):
                part = _wide(scores[rows]), _wide(probs[rows]), _of_rows(excluded, rows)
                self._add(place, normalizer, *part, padding[rows])
            self._advance(module, scores.shape[-2])
        if isinstance(getattr(normalizer, "modulator", None), Modulator):
            self.falling[place] = _remedy(normalizer.name)

    def _advance(self, module: nn.Module, queries: int) -> None:
        """Count queries that were shown: a recurrent decoder asks one after the other."""
        place = self.places[module][self.calls[module] % len(self.places[module])]
        self.queries[module] += queries
        if self.queries[module] >= self.padding[place.partition(".")[0]].shape[1]:
            self.queries[module] = 0
            self.calls[module] += 1

    def _add(
        self,
        place: str,
        normalizer: Any,
        scores: Tensor,
        probs: Tensor,
        excluded: Tensor | None,
        padding: Tensor,
    ) -> None:
        found = metrics.of_queries(scores, probs, excluded)
        found["zeros"] = 1 - found.pop("density")
        if getattr(normalizer, "sums_to_one", True):
            del found["mass"]
        modulator = getattr(normalizer, "modulator", None)
        for name, values in found.items():
            defined = ~(values.isnan() | padding[:, None])
            self._sum(place, name, values.double().masked_fill(~defined, 0.0), defined)
        kept = kept_scores(scores, excluded, padding)
        if isinstance(modulator, Modulator):
            falls = metrics.past_turning_point(scores, modulator)
            self._sum(place, "past_turning_point", falls & kept, kept)
        if modulator is not None:
            scores = modulator(scores)
        largest = scores.masked_fill(~kept, -torch.inf).amax()
        before = self.largest.get(place)
        self.largest[place] = largest if before is None else torch.maximum(before, largest)

    def _sum(self, place: str, name: str, values: Tensor, counted: Tensor) -> None:
        """Add to the sum and the number of a figure's values, 0 where not counted, of each head."""
        others = [dim for dim in range(values.dim()) if dim != 1]
        total, count = values.sum(others), counted.sum(others)
        if (place, name) in self.sums:
            before = self.sums[place, name]
            total, count = total + before[0], count + before[1]
        self.sums[place, name] = total, count

    # --- the end of the pass ---

    @torch.no_grad()
    def _on_output(self, decoder: Any, args: Any, kwargs: Any, output: Any) -> None:
        self.stop()
        kept = ~self.padding["decoder"]
        shown = output[0].detach()[kept]
        words = len(decoder.dictionary)
        is_logits = not kwargs.get("features_only", False)
        sums = dict.fromkeys(("entropy", "top1", "top10"), shown.new_zeros((), dtype=torch.float64))
        with torch.autocast(shown.device.type, enabled=False):
            for rows in shown.split(max(1, LOGITS_AT_ONCE // words)):
                probs = _wide(_probs(decoder, rows[None], is_logits))
                best = probs.topk(min(10, words)).values.double()
                sums["entropy"] = sums["entropy"] + metrics.entropy(probs).double().sum()
                sums["top1"] = sums["top1"] + best[..., 0].sum()
                sums["top10"] = sums["top10"] + best.sum()
        self.output = {name: total / len(shown) for name, total in sums.items()}
        for module in (decoder.output_modulator, decoder.output_normalizer):
            if module is not None:
                self.learned["output"] = _parameters(module)
        self.finish(self._figures(), self.falling)

    def _figures(self) -> dict[str, float]:
        found = {
            f"{place}/{name}": (total / count).mean()
            for (place, name), (total, count) in self.sums.items()
        }
        found |= {f"{place}/largest_score": value for place, value in self.largest.items()}
        found |= {f"output/{name}": value for name, value in self.output.items()}
        parameters = [
            (place, name, value)
            for place, learned in self.learned.items()
            for name, value in learned.items()
        ]
        # One transfer from the device.
        parts = [*found.values(), *(value for *_, value in parameters)]
        numbers = torch.cat([part.double().flatten() for part in parts]).cpu()
        figures = dict(zip(found, numbers.tolist(), strict=False))
        rest = numbers[len(found) :].split([value.numel() for *_, value in parameters])
        for (place, name, value), part in zip(parameters, rest, strict=True):
            for symbol, heads in symbols(f"normalizer.{name}", part.view(value.shape)).items():
                for head, number in enumerate(heads.tolist()):
                    figures[f"{place}/{symbol}" + (f".{head}" if len(heads) > 1 else "")] = number
        return figures


def _attentions(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the place of each attention, and what shows its scores: a normalizer, or a layer of
    fairseq's own."""
    recurrent = getattr(model.decoder, "attention", None)
    if isinstance(recurrent, AdditiveAttention):
        yield from _normalizer("cross.0", recurrent.normalizer)
    for side in ("encoder", "decoder"):
        layers = getattr(getattr(model, side, None), "layers", ())
        for number in range(len(layers)):  # to iterate under LayerDrop would draw random numbers
            for name, place in (("self_attn", side), ("encoder_attn", "cross")):
                attention = getattr(layers[number], name, None)
                if isinstance(attention, MultiheadAttention):
                    yield from _normalizer(f"{place}.{number}", attention.normalizer)
                elif type(attention) is SoftmaxMultiheadAttention:
                    yield f"{place}.{number}", attention


def _normalizer(place: str, module: Any) -> Iterator[tuple[str, nn.Module]]:
    yield from ((place, part) for part in attending(module) if isinstance(part, Normalizer))


def _remedy(name: str) -> str:
    """What to give against modulators that fall, if this mapping has something."""
    mapping = mapping_named(name)
    settings = [mapping.setting_of(o) for o in mapping.options if o.name == "monotone"]
    return "".join(f"; {flag(setting)} keeps modulators from falling" for setting in settings)


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    """Copies of what a module has learned: outside of it, FSDP may keep nothing but a shard."""
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def _probs(decoder: Any, shown: Tensor, is_logits: bool) -> Tensor:
    """The probabilities of words, of features or of logits."""
    adaptive = getattr(decoder, "adaptive_softmax", None)
    with _evaluated(adaptive):  # it has a dropout of its own
        output = shown if is_logits or adaptive is not None else decoder.output_layer(shown)
        if decoder.output_normalizer is not None:
            return decoder.output_normalizer(_wide(output))
        return decoder.get_normalized_probs((output, None), log_probs=False)


@contextlib.contextmanager
def _evaluated(module: nn.Module | None) -> Iterator[None]:
    if module is None:
        yield
        return
    before = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(before)


def _parts(query: Tensor, key: Tensor) -> list[slice]:
    """Rows of a batch, (B, H, T, any size) and (B, H, S, any size), few enough for memory."""
    batch, heads, queries, _ = query.shape
    size = max(1, SCORES_AT_ONCE // max(1, heads * queries * key.shape[2]))
    return [slice(first, first + size) for first in range(0, batch, size)]


def _of_rows(mask: Tensor | None, rows: slice) -> Tensor | None:
    """The part of a mask that is of these rows of the batch, if they have their own."""
    return mask[rows] if mask is not None and mask.dim() == 4 and mask.shape[0] > 1 else mask


def _excluded(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask == -torch.inf


def _wide(x: Tensor) -> Tensor:
    """In float32 or wider, without gradient."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))
