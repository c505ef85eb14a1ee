"""Adam with a policy of its own for the scalars of the normalizers."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.optim import register_optimizer
from fairseq.optim.adam import Adam, FairseqAdam, FairseqAdamConfig

from multimax_fairseq.errors import UsageError
from multimax_fairseq.ops.checks import is_finite, is_whole


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
        if type(self._optimizer) is Adam:  # not apex's, which takes all tensors at once
            self._optimizer = AdamOfMany(self._optimizer.param_groups, **self.optimizer_config)

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


class AdamOfMany(Adam):
    """fairseq's Adam with many tensors at a time on a GPU, where its host needs longer to start
    the operations on each than the GPU for what they do."""

    # Elements that are taken at a time: what is formed beside parameters and state is a few times
    # as many numbers of float32.
    MOST = 2**24

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        if not all(map(self.is_fast, parameters)):
            return super().step(closure)
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for some in self._together(group["params"]):
                self._update(some, group)
        return loss

    def is_fast(self, parameter: torch.Tensor) -> bool:
        """Whether there is a fast way for many such parameters. On a CPU, they leave its cache."""
        grad = parameter.grad
        return parameter.is_cuda and (grad is None or not grad.is_sparse)

    def _together(self, parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Parameters that have a gradient, those that are alike together, with a step counted."""
        alike: dict[Any, list[torch.Tensor]] = {}
        sizes: Counter = Counter()
        for parameter in parameters:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            wide = torch.promote_types(parameter.dtype, torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state:  # of a checkpoint, it may be elsewhere or narrow
                    state[name] = state[name].to(parameter.device, wide)
                else:
                    state[name] = torch.zeros_like(parameter, dtype=wide)
            state["step"] = state.get("step", 0) + 1
            kind = parameter.device, parameter.dtype, parameter.grad.dtype, state["step"]
            if kind in alike and sizes[kind] + parameter.numel() > self.MOST:
                yield alike.pop(kind)
                del sizes[kind]
            alike.setdefault(kind, []).append(parameter)
            sizes[kind] += parameter.numel()
        yield from alike.values()

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        states = [self.state[p] for p in parameters]
        means, squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        grads = _as_wide_as(means, [p.grad for p in parameters])
        wide = _as_wide_as(means, parameters)
        beta1, beta2 = group["betas"]
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, grads, alpha=1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["eps"])
        step = states[0]["step"]
        rate = group["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        if group["weight_decay"] != 0:
            torch._foreach_add_(wide, wide, alpha=-group["weight_decay"] * group["lr"])
        torch._foreach_addcdiv_(wide, means, roots, value=-rate)
        if wide is not parameters:
            torch._foreach_copy_(parameters, wide)


def _as_wide_as(wide: list[torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in the dtype of the others; those themselves where it is theirs."""
    if tensors[0].dtype == wide[0].dtype:
        return tensors
    found = [torch.empty_like(t) for t in wide]
    torch._foreach_copy_(found, tensors)
    return found
