"""The flags, for argparse and hydra alike, and their checks."""

import argparse
import difflib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Optional

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import ARCH_CONFIG_REGISTRY
from omegaconf import DictConfig, OmegaConf

from multimax_fairseq.compat import UsageError, building_from_checkpoint
from multimax_fairseq.functional import NORMALIZERS
from multimax_fairseq.functional.backend import requested
from multimax_fairseq.modules import Normalizer
from multimax_fairseq.modules.arguments import is_finite, is_whole
from multimax_fairseq.modules.modulator import ORDERS, TERMS
from multimax_fairseq.modules.normalizer import OPTIONS

logger = logging.getLogger(__name__)

PLACES = ("encoder", "decoder", "cross")
SPARSE_OUTPUTS = ("sparsemax", "entmax15", "alpha_entmax")
OUTPUTS = ("softmax", "multimax", *SPARSE_OUTPUTS)
# The setting that stands for each option of a `Normalizer`.
SETTING_OF = {
    "order": "multimax_order",
    "terms": "multimax_terms",
    "init_std": "multimax_init_std",
    "monotone": "multimax_monotone",
    "temperature": "softmax_temperature",
    "learn_temperature": "learn_temperature",
    "k": "topk",
    "alpha": "entmax_alpha",
}


@dataclass
class NormalizerConfig(FairseqDataclass):
    attention_normalizer: ChoiceEnum(list(NORMALIZERS)) = field(  # type: ignore[valid-type]
        default="multimax", metadata={"help": "mapping from attention scores to probabilities"}
    )
    attention_normalizer_at: str = field(
        default=",".join(PLACES),
        metadata={
            "help": "comma-separated attentions that get it: encoder and decoder self-attention, "
            "cross-attention; one with a normalizer of its own as cross=sparsemax; the others "
            "keep softmax, and for softmax in all give --attention-normalizer softmax"
        },
    )
    # fairseq's parser cannot read `int | None`.
    topk: Optional[int] = field(  # noqa: UP045
        default=None, metadata={"help": "how many scores the normalizer topk keeps"}
    )
    softmax_temperature: float = field(
        default=1.0, metadata={"help": "temperature of softmax attention, or its start"}
    )
    learn_temperature: bool = field(
        default=False, metadata={"help": "learn the temperature of softmax, one a layer"}
    )
    entmax_alpha: Optional[float] = field(  # noqa: UP045
        default=None, metadata={"help": "fixed alpha of alpha_entmax; by default it is learned"}
    )
    entmax_heads: ChoiceEnum(["separate", "shared"]) = field(  # type: ignore[valid-type]
        default="separate", metadata={"help": "a learned alpha for each head, or one a layer"}
    )
    output_normalizer: ChoiceEnum(list(OUTPUTS)) = field(  # type: ignore[valid-type]
        default="multimax",
        metadata={
            "help": "mapping from logits to word probabilities; the sparse ones train with "
            "--criterion entmax_loss"
        },
    )
    output_entmax_alpha: float = field(
        default=1.5, metadata={"help": "alpha of the output normalizer alpha_entmax"}
    )
    multimax_order: int = field(
        default=2, metadata={"help": "polynomial order of the modulators: 1 or 2"}
    )
    multimax_terms: ChoiceEnum(list(TERMS)) = field(  # type: ignore[valid-type]
        default="both", metadata={"help": "modulate low scores, high scores, or both"}
    )
    multimax_heads: ChoiceEnum(["shared", "separate"]) = field(  # type: ignore[valid-type]
        default="shared", metadata={"help": "one modulator a layer, or one a head"}
    )
    multimax_init_std: float = field(
        default=0.02,
        metadata={"help": "standard deviation of the modulators at the start; 0 is softmax"},
    )
    multimax_monotone: bool = field(
        default=False,
        metadata={"help": "keep the modulators from turning: slope one below, level above"},
    )
    scalar_gradient_scale: Optional[float] = field(  # noqa: UP045
        default=None,
        metadata={
            "help": "factor on the gradients of all learned scalars, and 1/sqrt(vocabulary) more "
            "on the output layer's, so that clipping does not slow the model for them"
        },
    )


DEFAULTS = NormalizerConfig()
SETTINGS = [setting for setting in fields(NormalizerConfig) if not setting.name.startswith("_")]


def as_namespace(args: Any) -> argparse.Namespace:
    """Return a model's settings as the flat namespace that fairseq's Transformers read."""
    if isinstance(args, DictConfig):
        return argparse.Namespace(**OmegaConf.to_container(args, resolve=True, enum_to_str=True))
    return args


def set_defaults(args: Any, **defaults: Any) -> None:
    """Fill in the settings that are missing: first the given ones, then those of the dataclass."""
    for setting in SETTINGS:
        defaults.setdefault(setting.name, setting.default)
    for name, value in defaults.items():
        setattr(args, name, getattr(args, name, value))


def check(args: Any, attentions: Sequence[str] = PLACES) -> None:
    """Raise UsageError, in one sentence, for settings that cannot work together.

    A setting that does nothing is refused too, but in a checkpoint's model: earlier versions let
    it pass, and their checkpoints are to load, so that it is logged as a warning there.

    Args:
        attentions: those of `PLACES` that the model has.
    """
    for name, choices in (
        ("attention_normalizer", tuple(NORMALIZERS)),
        ("output_normalizer", OUTPUTS),
        ("multimax_order", ORDERS),
        ("multimax_terms", TERMS),
        ("multimax_heads", ("shared", "separate")),
        ("entmax_heads", ("separate", "shared")),
    ):
        value = getattr(args, name)
        # A YAML file may say 2.0 or true, which Python takes for equal to 2 and 1.
        if value not in choices or isinstance(value, (bool, float)):
            raise UsageError(
                f"{flag(name)} {value} is not known: choose one of {', '.join(map(str, choices))}"
            )
    try:
        requested()
    except ValueError as error:
        raise UsageError(str(error)) from None
    idle = _idle(args, attentions)
    _refuse_idle(args, idle, attentions)
    if "topk" not in idle and not is_whole(args.topk):
        raise UsageError(
            "the attention normalizer topk needs --topk K with a whole K of at least 1, got "
            f"{args.topk}"
        )
    temperature, std = args.softmax_temperature, args.multimax_init_std
    alpha, output_alpha = args.entmax_alpha, args.output_entmax_alpha
    scale = args.scalar_gradient_scale
    for name, works, must in (
        (
            "softmax_temperature",
            is_finite(temperature) and temperature > 0,
            "a finite number above 0: 1 is softmax",
        ),
        (
            "entmax_alpha",
            alpha is None or is_finite(alpha) and alpha >= 1,
            "a finite number of at least 1: 1 is softmax, 2 sparsemax",
        ),
        (
            "output_entmax_alpha",
            is_finite(output_alpha) and output_alpha > 1,
            "a finite number above 1: for 1, softmax, give --output-normalizer softmax",
        ),
        (
            "scalar_gradient_scale",
            scale is None or is_finite(scale) and scale > 0,
            "a finite number above 0: 1 scales the output layer's alone",
        ),
        (
            "multimax_init_std",
            is_finite(std) and std >= 0,
            "a finite number, 0 or more: 0 is softmax",
        ),
        # A YAML file may give text here, and any text is true to Python.
        ("learn_temperature", isinstance(args.learn_temperature, bool), "true or false"),
        ("multimax_monotone", isinstance(args.multimax_monotone, bool), "true or false"),
    ):
        if name not in idle and not works:
            raise UsageError(f"{_shown(args, name)} must be {must}")
    if args.output_normalizer != "softmax" and getattr(args, "adaptive_softmax_cutoff", None):
        raise UsageError(
            f"--output-normalizer {args.output_normalizer} cannot act inside the adaptive softmax "
            "of --adaptive-softmax-cutoff: add --output-normalizer softmax or leave the cutoff out"
        )
    for side in ("encoder", "decoder"):
        width = getattr(args, f"{side}_embed_dim", None)
        heads = getattr(args, f"{side}_attention_heads", None)
        if width is not None and heads is not None and (heads < 1 or width % heads):
            raise UsageError(
                f"--{side}-attention-heads {heads} does not divide --{side}-embed-dim {width}: "
                "choose a number of heads that does"
            )


def _refuse_idle(args: Any, idle: dict[str, tuple[str, str]], attentions: Sequence[str]) -> None:
    """Refuse the settings that somebody gave and that do nothing; of a checkpoint, name them."""
    usual = _usual(args)

    def given(name: str) -> bool:
        # argparse does not tell a default that was typed from one that was not.
        return getattr(args, name) not in (getattr(usual, name), getattr(DEFAULTS, name))

    wrong = []
    named, chosen = _named(args), places(args)
    unused = args.attention_normalizer not in [chosen[place] for place in attentions]
    # Where all that are named have a normalizer of their own, nobody meant the default to act.
    if unused and (given("attention_normalizer") or not named.keys() & set(attentions)):
        fact = (
            f"{_shown(args, 'attention_normalizer')} acts nowhere, as --attention-normalizer-at "
            f"{args.attention_normalizer_at!r} gives it to none of {', '.join(attentions)}"
        )
        wrong.append((fact, "name one of these there, or give --attention-normalizer softmax"))
    for name, (owner, remedy) in idle.items():
        if given(name):
            fact = f"{_shown(args, name)} belongs to {owner}, which this model does not have"
            wrong.append((fact, f"leave it out, or give {remedy}"))
    for fact, remedy in wrong:
        if not building_from_checkpoint():
            raise UsageError(f"{fact}: {remedy}")
        logger.warning("one of the checkpoint's settings does nothing: %s", fact)


def _idle(args: Any, attentions: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return (what it belongs to, how to get that) for each setting that does nothing here."""
    chosen = places(args)
    used, output = {chosen[place] for place in attentions}, args.output_normalizer
    learned_alpha = "alpha_entmax" in used and args.entmax_alpha is None
    learned_temperature = "softmax" in used and args.learn_temperature
    found = {}
    for mapping, options in OPTIONS.items():
        # Of the output layer's mappings, only multimax reads these settings.
        acts, owner = mapping in used, f"{mapping} attention"
        if mapping == "multimax":
            acts, owner = acts or output == "multimax", f"{owner} or output layer"
        if not acts:
            for option in options:
                found[SETTING_OF[option]] = (owner, f"--attention-normalizer {mapping}")
    for name, acts, owner, remedy in (
        (
            "multimax_heads",
            "multimax" in used,  # the output layer has no heads
            "multimax attention",
            "--attention-normalizer multimax",
        ),
        (
            "entmax_heads",
            learned_alpha,
            "alpha_entmax attention whose alpha is learned",
            "--attention-normalizer alpha_entmax without --entmax-alpha",
        ),
        (
            "output_entmax_alpha",
            output == "alpha_entmax",
            "an alpha_entmax output layer",
            "--output-normalizer alpha_entmax",
        ),
        (
            "scalar_gradient_scale",
            "multimax" in (*used, output) or learned_alpha or learned_temperature,
            "learned scalars",
            "a normalizer that learns some, such as --attention-normalizer multimax",
        ),
    ):
        if not acts:
            found[name] = (owner, remedy)
    return found


def _usual(args: Any) -> argparse.Namespace:
    """Return the settings as they are where nobody gives any: what an architecture of a user's own
    sets is no mistake of whoever trains it."""
    names = {setting.name for setting in SETTINGS}
    usual = argparse.Namespace(**{k: v for k, v in vars(args).items() if k not in names})
    name = getattr(args, "_name", None) or getattr(args, "arch", None)
    if name in ARCH_CONFIG_REGISTRY:
        ARCH_CONFIG_REGISTRY[name](usual)
    set_defaults(usual)
    return usual


def check_keys(args: DictConfig, known: set[str]) -> None:
    """Raise UsageError for a key that nothing would read, which is a slip of the pen."""
    for key in args:
        if key not in known and not str(key).startswith("_") and key != "arch":
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f": did you mean {near[0]!r}?" if near else ": leave it out"
            raise UsageError(f"the model has no setting {key!r}{hint}")


def places(args: Any) -> dict[str, str]:
    """Return the normalizer of each attention."""
    return {**dict.fromkeys(PLACES, "softmax"), **_named(args)}


def _named(args: Any) -> dict[str, str]:
    """Return the normalizer of each attention that --attention-normalizer-at names."""
    chosen: dict[str, str] = {}
    if not isinstance(args.attention_normalizer_at, str):  # a YAML file's list
        raise UsageError(
            f"--attention-normalizer-at {args.attention_normalizer_at} must be one text: write the "
            "attentions with commas between them, as encoder,cross"
        )
    for part in args.attention_normalizer_at.split(","):
        place, _, own = (word.strip() for word in part.partition("="))
        if not part.strip():
            continue
        for word, known in ((place, PLACES), (own or "softmax", tuple(NORMALIZERS))):
            if word not in known:
                raise UsageError(
                    f"--attention-normalizer-at {args.attention_normalizer_at} has the unknown "
                    f"{word!r}: choose from {', '.join(known)}"
                )
        chosen[place] = own or args.attention_normalizer
    return chosen


def build_normalizer(args: Any, name: str, num_heads: int | None = None) -> Normalizer:
    """Return the normalizer that the flags ask for; num_heads None has no heads to tell apart.

    Drawn from a fork of the random generator, so that all other parameters, and dropout after
    them, are those of the stock model.
    """
    separate = args.multimax_heads if name == "multimax" else args.entmax_heads
    options = {option: getattr(args, SETTING_OF[option]) for option in OPTIONS[name]}
    with torch.random.fork_rng(devices=[]):
        return Normalizer(name, num_heads if separate == "separate" else None, **options)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _shown(args: Any, name: str) -> str:
    """Return a setting as it is written on the command line."""
    value = getattr(args, name)
    return flag(name) if value is True else f"{flag(name)} {value}"
