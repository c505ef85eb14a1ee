"""Adam that leaves the scalars of the normalizers out of weight decay."""

from dataclasses import dataclass

from fairseq.optim import register_optimizer
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig

from multimax_fairseq.errors import UsageError


@dataclass
class MultimaxAdamConfig(FairseqAdamConfig):
    pass


@register_optimizer("multimax_adam", dataclass=MultimaxAdamConfig)
class MultimaxAdam(FairseqAdam):
    """fairseq's Adam, options included, with two groups of parameters.

    A parameter belongs to the second, which does not decay, by its attribute `learned_scalar`;
    models/learned_scalars.py sets it.
    """

    def __init__(self, cfg, params):
        scalars = [p for p in params if getattr(p, "learned_scalar", False)]
        others = [p for p in params if not getattr(p, "learned_scalar", False)]
        if not scalars:
            raise UsageError(
                "--optimizer multimax_adam finds no learned scalars to leave out of weight decay: "
                "with --fp16 or --bf16 add --memory-efficient-fp16 or --memory-efficient-bf16, "
                "whose parameters are the model's own; for a model without any give --optimizer "
                "adam"
            )
        super().__init__(cfg, [{"params": others}, {"params": scalars, "weight_decay": 0.0}])
