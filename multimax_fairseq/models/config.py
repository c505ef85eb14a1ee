"""The flags, for argparse and hydra alike, and their checks."""

import argparse
import difflib
from dataclasses import dataclass, field, fields
from typing import Any, Optional

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from omegaconf import DictConfig, OmegaConf

from multimax_fairseq.compat import UsageError
from multimax_fairseq.functional import NORMALIZERS
from multimax_fairseq.functional.backend import requested
from multimax_fairseq.modules import Normalizer
from multimax_fairseq.modules.modulator import ORDERS, TERMS

PLACES = ("encoder", "decoder", "cross")
SPARSE_OUTPUTS = ("sparsemax", "entmax15", "alpha_entmax")
OUTPUTS = ("softmax", "multimax", *SPARSE_OUTPUTS)


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
            "keep softmax"
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
        metadata={"help": "keep the modulators from turning downwards with rising scores"},
    )
    scalar_gradient_scale: Optional[float] = field(  # noqa: UP045
        default=None,
        metadata={
            "help": "factor on the gradients of all learned scalars, and 1/sqrt(vocabulary) more "
            "on the output layer's, so that clipping does not slow the model for them"
        },
    )


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


def check(args: Any) -> None:
    """Raise UsageError, in one sentence, for settings that cannot work together."""
    for name, choices in (
        ("attention_normalizer", tuple(NORMALIZERS)),
        ("output_normalizer", OUTPUTS),
        ("multimax_order", ORDERS),
        ("multimax_terms", TERMS),
        ("multimax_heads", ("shared", "separate")),
        ("entmax_heads", ("separate", "shared")),
    ):
        value = getattr(args, name)
        if value not in choices:
            raise UsageError(
                f"{flag(name)} {value} is not known: choose one of {', '.join(map(str, choices))}"
            )
    try:
        requested()
    except ValueError as error:
        raise UsageError(str(error)) from None
    used = set(places(args).values())
    if "topk" in used and not (args.topk or 0) > 0:
        raise UsageError(
            f"the attention normalizer topk needs --topk K with a K of at least 1, got {args.topk}"
        )
    if not args.softmax_temperature > 0:
        raise UsageError(
            f"--softmax-temperature {args.softmax_temperature} must be above 0: 1 is softmax"
        )
    if args.entmax_alpha is not None and not args.entmax_alpha >= 1:
        raise UsageError(
            f"--entmax-alpha {args.entmax_alpha} must be at least 1: 1 is softmax, 2 sparsemax"
        )
    if not args.output_entmax_alpha > 1:
        raise UsageError(
            f"--output-entmax-alpha {args.output_entmax_alpha} must be above 1: for 1, softmax, "
            "give --output-normalizer softmax"
        )
    if args.scalar_gradient_scale is not None and not args.scalar_gradient_scale > 0:
        raise UsageError(
            f"--scalar-gradient-scale {args.scalar_gradient_scale} must be above 0: 1 scales the "
            "output layer's alone"
        )
    if not args.multimax_init_std >= 0:
        raise UsageError(
            f"--multimax-init-std {args.multimax_init_std} must not be negative: give 0 or more"
        )
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


def check_keys(args: DictConfig, known: set[str]) -> None:
    """Raise UsageError for a key that nothing would read, which is a slip of the pen."""
    for key in args:
        if key not in known and not str(key).startswith("_") and key != "arch":
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f": did you mean {near[0]!r}?" if near else ": leave it out"
            raise UsageError(f"the model has no setting {key!r}{hint}")


def places(args: Any) -> dict[str, str]:
    """Return the normalizer of each attention."""
    chosen = dict.fromkeys(PLACES, "softmax")
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
    with torch.random.fork_rng(devices=[]):
        return Normalizer(
            name,
            num_heads if separate == "separate" else None,
            order=args.multimax_order,
            terms=args.multimax_terms,
            init_std=args.multimax_init_std,
            monotone=args.multimax_monotone,
            temperature=args.softmax_temperature,
            learn_temperature=args.learn_temperature,
            k=args.topk,
            alpha=args.entmax_alpha,
        )


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
