"""The registry of mappings. An entry holds everything about one mapping."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Option:
    """An option of a mapping: a keyword of `Normalizer`, a flag, and a key in a YAML file.

    Attributes:
        name: the keyword.
        default: the default value; None if there is none.
        kind: int, float or bool; or a tuple of words to choose from.
        requirement: describes the valid values: "a finite number above 0".
        is_valid: returns whether a value is valid.
        help: one line for --help.
        remark: added to the error for an invalid value: "1 is softmax".
        setting: its name in a model's settings, which is also the flag: multimax_order is
            --multimax-order. The default is the mapping's name, an underscore and the option's
            name.
    """

    name: str
    default: Any
    kind: type | tuple[str, ...]
    requirement: str
    is_valid: Callable[[Any], bool]
    help: str
    remark: str = ""
    setting: str = ""

    def accepts(self, value: Any) -> bool:
        """Return whether a value of any type is valid."""
        try:
            return bool(self.is_valid(value))
        except TypeError:  # "abc" > 0
            return False

    def check(self, value: Any, label: str = "") -> None:
        """Raise ValueError for an invalid value; `label` replaces the option's name."""
        if not self.accepts(value):
            raise ValueError(f"{label or self.name} must be {self.requirement}, got {value!r}")


def chosen_from(words: tuple[str, ...]) -> dict[str, Any]:
    """Return kind, requirement and is_valid of an option with these words to choose from."""
    return {
        "kind": words,
        "requirement": f"one of {', '.join(words)}",
        "is_valid": words.__contains__,
    }


def yes_or_no() -> dict[str, Any]:
    """Return kind, requirement and is_valid of an option that is true or false."""
    # Not bool(value): a YAML file may contain the text "false", which is true in Python.
    return {
        "kind": bool,
        "requirement": "true or false",
        "is_valid": lambda value: isinstance(value, bool),
    }


def heads_option(default: str, help: str, **more: Any) -> Option:
    """Return the option that lets the heads of a layer share parameters, or not."""
    return Option("heads", default, help=help, **chosen_from(("shared", "separate")), **more)


# Value of `Mapping.heads`: each head has its own parameters.
SEPARATE_HEADS = "separate"


def _options_as_arguments(num_heads: int | None, **options: Any) -> dict[str, Any]:
    return options


@dataclass(frozen=True)
class Mapping:
    """A mapping from scores to probabilities.

    Attributes:
        name: its key in `NORMALIZERS`, and the value of --attention-normalizer.
        label: its name in figures.
        function: function(scores, dim, mask, **arguments) returns probabilities, as `softmax`.
        options: options of `Normalizer`, which become flags.
        heads: the option that lets heads share parameters; SEPARATE_HEADS if each head has its own;
            None if nothing is learned per head.
        build: build(num_heads, **options) returns the function's arguments by name. `num_heads` is
            None if heads share. A module among the arguments becomes a submodule of the normalizer
            with that name; the normalizer calls it, without arguments, to get the argument. A
            module named `modulator` is passed as it is: it is a function of the scores. Parameters
            have the heads in their first dimension, or no dimension. By default the options are the
            arguments.
        hidden: `build` takes `hidden_size` too, and the modules are called with the hidden states
            of the queries, (B, 1, T, hidden_size).
        training: the function takes the argument `training`, whether the model trains.
        sums_to_one: whether each row sums to 1, unless it is fully masked or has a sink.
        modulated: the mapping is softmax of `modulator(scores)`, or of the scores if `build`
            returns no modulator. Such a mapping can be an output layer trained with cross-entropy.
        kernel: kernel(**arguments of the function) returns the keyword arguments of
            `fused_attention`, or None if no fused kernel supports them; None if none supports the
            mapping.
        output_options: options in the output layer; None if the mapping cannot be one.
        output_loss: output_loss(logits (N, V), targets (N,), **arguments) returns losses (N,). The
            arguments are those of `build` that are not modules. It trains an output layer that is
            not `modulated`.
    """

    name: str
    label: str
    function: Callable[..., Tensor]
    options: tuple[Option, ...] = ()
    heads: Option | str | None = None
    build: Callable[..., dict[str, Any]] = _options_as_arguments
    hidden: bool = False
    training: bool = False
    sums_to_one: bool = True
    modulated: bool = False
    kernel: Callable[..., dict[str, Any] | None] | None = None
    output_options: tuple[Option, ...] | None = None
    output_loss: Callable[..., Tensor] | None = None

    def __call__(self, *args: Any, **arguments: Any) -> Tensor:
        """Return function(*args, **arguments)."""
        return self.function(*args, **arguments)

    def for_kernel(self, /, **arguments: Any) -> dict[str, Any] | None:
        """Return the arguments of `fused_attention`; None if no kernel supports these arguments.

        If an argument is unknown to `kernel`, or a required one is missing or None, `function`
        accepts it or raises a TypeError.
        """
        if self.kernel is None:
            return None
        for name in arguments:
            if name not in self.kernel_parameters:
                return None
        for name, is_required in self.kernel_parameters.items():
            if is_required and arguments.get(name) is None:
                return None
        return self.kernel(**arguments)

    @functools.cached_property
    def kernel_parameters(self) -> dict[str, bool]:
        """{parameter of `kernel`: whether it is required}"""
        if self.kernel is None:
            return {}
        parameters = inspect.signature(self.kernel).parameters.values()
        return {parameter.name: parameter.default is parameter.empty for parameter in parameters}

    @functools.cached_property
    def parameters(self) -> frozenset[str]:
        """The names of the function's parameters besides scores, dim and mask."""
        _scores, *others = inspect.signature(self.function).parameters
        if not {"dim", "mask"} <= {*others}:
            raise ValueError(
                f"the function of the mapping {self.name!r} must have the parameters dim and mask"
            )
        return frozenset(others) - {"dim", "mask"}

    @property
    def attention_options(self) -> tuple[Option, ...]:
        """The options in attention: `options`, and `heads` if it is an option."""
        return (*self.options, *((self.heads,) if isinstance(self.heads, Option) else ()))

    def setting_of(self, option: Option) -> str:
        """Return the name of an option in a model's settings."""
        return option.setting or f"{self.name}_{option.name}"

    def complete(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the value of each option, given or default.

        Raises:
            TypeError: an option that no mapping has.
            ValueError: a wrong value; an option of another mapping with a value that is not its
                default.
        """
        own = {option.name: given.get(option.name, option.default) for option in self.options}
        for name in given.keys() - own.keys():
            others = [o for m in NORMALIZERS.values() for o in m.options if o.name == name]
            if not others:
                raise TypeError(f"no mapping has an option {name!r}: {self._offer()}")
            if all(given[name] != option.default for option in others):
                raise ValueError(
                    f"the mapping {self.name!r} does not take {name}={given[name]!r}: leave it "
                    f"out; {self._offer()}"
                )
        for option in self.options:
            option.check(own[option.name])
        return own

    def _offer(self) -> str:
        names = ", ".join(option.name for option in self.options)
        return f"the options of {self.name!r} are {names or 'none'}"


NORMALIZERS: dict[str, Mapping] = {}

# Arguments of scaled_dot_product_attention and normalize.
RESERVED_PARAMETERS = frozenset(
    "query key value normalizer attn_mask is_causal dropout_p scale backend name".split()
)
# Arguments of Normalizer, attach and replace_softmax.
RESERVED_OPTIONS = frozenset(
    "name num_heads hidden_size model normalizer inputs where per_head freeze".split()
)

# Called after a mapping is registered.
listeners: list[Callable[[], None]] = []


def register(mapping: Mapping) -> None:
    """Add a mapping to `NORMALIZERS`, from which it gets its flags and labels.

    Raises:
        ValueError: a name or setting that is taken or cannot be a flag; a parameter of the function
            or an option with a reserved name; an output layer without a loss; wrong heads.
    """
    taken = {s for known in NORMALIZERS.values() for s in (known.name, *settings_of(known))}
    for name in (mapping.name, *settings_of(mapping)):
        if not name.isidentifier() or name in taken:
            why = "is taken" if name in taken else "cannot be a flag"
            raise ValueError(f"the mapping's name or setting {name!r} {why}: choose another")
    options = {option.name for option in mapping.options}
    for kind, names in (
        ("parameter", RESERVED_PARAMETERS.intersection(mapping.parameters)),
        ("option", RESERVED_OPTIONS & options),
    ):
        if names:
            raise ValueError(
                f"the mapping {mapping.name!r} has the {kind} {min(names)!r}, which is an argument "
                "of the package's own functions: rename it"
            )
    if mapping.output_options is not None and not (mapping.modulated or mapping.output_loss):
        raise ValueError(
            f"the mapping {mapping.name!r} has output_options, but no loss: set output_loss, or "
            "remove output_options"
        )
    if isinstance(mapping.heads, str) and mapping.heads != SEPARATE_HEADS:
        raise ValueError(
            f"the heads of the mapping {mapping.name!r} must be an Option, SEPARATE_HEADS or None, "
            f"got {mapping.heads!r}"
        )
    for option in mapping.options:
        if option.default is not None:
            option.check(option.default, f"the default of {mapping.name}'s option {option.name!r}")
    # torch.compile can read these two properties, but not compute them.
    required = {name for name, is_required in mapping.kernel_parameters.items() if is_required}
    if unknown := required - mapping.parameters:
        raise ValueError(
            f"the kernel of {mapping.name!r} has the parameter {min(unknown)!r}, which its "
            "function lacks: use the same names"
        )
    NORMALIZERS[mapping.name] = mapping
    for listener in listeners:
        listener()


def settings_of(mapping: Mapping) -> dict[str, Option]:
    """Return the options of a mapping by their names in a model's settings."""
    options = (*mapping.attention_options, *(mapping.output_options or ()))
    return {mapping.setting_of(option): option for option in options}


def mapping_named(name: str) -> Mapping:
    """Return a named mapping; ValueError names the known ones."""
    if not isinstance(name, str) or name not in NORMALIZERS:
        raise ValueError(f"unknown mapping {name!r}: choose one of {', '.join(NORMALIZERS)}")
    return NORMALIZERS[name]


def normalize(
    name: str, scores: Tensor, dim: int = -1, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Return the probabilities of a named mapping.

    Equivalent to: NORMALIZERS[name](scores, dim=dim, mask=mask, **options)

    Args:
        name: a key of `NORMALIZERS`.
        scores, dim, mask: as `multimax`.
        options: further arguments of the mapping's function: `temperature` (softmax), `cap`,
            `shift` and `width` (softcap), `modulator`, `sink` and `outer_scale` (multimax), `k`
            (topk), `alpha` (alpha_entmax), `training` (evsoftmax, adaptive_temperature), `sink`
            (sink), `length_scale` (ssmax), `beta` and `gamma` (asentmax), `bias` (sigmoid).

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        ValueError: an unknown name; as the mapping.
        TypeError: an option that the mapping does not take, or lacks.
    """
    return mapping_named(name).function(scores, dim=dim, mask=mask, **options)
