"""Adam with a policy of its own for the scalars of the normalizers."""

from dataclasses import dataclass, field

from fairseq.optim import register_optimizer
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig

from multimax_fairseq.errors import UsageError
from multimax_fairseq.functional.checks import is_finite, is_whole


@dataclass
class MultimaxAdamConfig(FairseqAdamConfig):
    scalar_lr_scale: float = field(
        default=1.0,
        metadata={"help": "learning rate of the learned scalars, as a share of that of the rest"},
    )
    scalar_freeze_updates: int = field(
        default=0,
        metadata={"help": "updates for which the learned scalars stay as they start"},
    )


@register_optimizer("multimax_adam", dataclass=MultimaxAdamConfig)
class MultimaxAdam(FairseqAdam):
    """fairseq's Adam, options included, with two groups of parameters.

    A parameter belongs to the second, which does not decay and has `scalar_lr_scale` times the
    learning rate of the first after `scalar_freeze_updates` updates without any, by its attribute
    `learned_scalar`; models/learned_scalars.py sets it.
    """

    def __init__(self, cfg, params):
        scale = cfg.scalar_lr_scale
        if not (is_finite(scale) and scale >= 0):
            raise UsageError(
                f"--scalar-lr-scale {scale} must be a finite number of at least 0: 1 gives the "
                "scalars the learning rate of the rest, 0 keeps them as they are"
            )
        if cfg.scalar_freeze_updates != 0 and not is_whole(cfg.scalar_freeze_updates):
            raise UsageError(
                f"--scalar-freeze-updates {cfg.scalar_freeze_updates} must be a whole number of at "
                "least 0"
            )
        scalars = [p for p in params if getattr(p, "learned_scalar", False)]
        others = [p for p in params if not getattr(p, "learned_scalar", False)]
        if not scalars:
            raise UsageError(
                "--optimizer multimax_adam finds no learned scalars to treat on their own: "
                "with --fp16 or --bf16 add --memory-efficient-fp16 or --memory-efficient-bf16, "
                "whose parameters are the model's own; for a model without any give --optimizer "
                "adam"
            )
        alone = {"params": scalars, "weight_decay": 0.0, "updates": 0}  # saved with the state
        super().__init__(cfg, [{"params": others}, alone])

    def step(self, *args, **kwargs):
        """Update the parameters, the scalars by their share of the learning rate of the rest."""
        others, scalars = self.param_groups
        is_frozen = scalars["updates"] < self.cfg.scalar_freeze_updates
        scalars["lr"] = 0.0 if is_frozen else self.cfg.scalar_lr_scale * others["lr"]
        super().step(*args, **kwargs)
        scalars["updates"] += 1

    def load_state_dict(self, state_dict, optimizer_overrides=None):
        """Go on from a checkpoint; --optimizer-overrides change nothing of the policy."""
        super().load_state_dict(state_dict, optimizer_overrides)
        self.param_groups[1]["weight_decay"] = 0.0
        self.param_groups[1].setdefault("updates", 0)  # of a checkpoint of an earlier version
