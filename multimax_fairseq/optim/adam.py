"""Adam with separate settings for the scalars of the mappings."""

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
        metadata={"help": "learning rate of the learned scalars, relative to that of the rest"},
    )
    scalar_freeze_updates: int = field(
        default=0,
        metadata={"help": "number of first updates in which the learned scalars stay fixed"},
    )


@register_optimizer("multimax_adam", dataclass=MultimaxAdamConfig)
class MultimaxAdam(FairseqAdam):
    """fairseq's Adam, with all of its options, and a second parameter group for learned scalars.

    The second group has no weight decay. Its learning rate is 0 for `scalar_freeze_updates`
    updates, then `scalar_lr_scale` times that of the first group. It holds the parameters with the
    attribute `learned_scalar`, which `models.learned_scalars.prepare_scalars` sets.
    """

    def __init__(self, cfg, params):
        scale = cfg.scalar_lr_scale
        if not (is_finite(scale) and scale >= 0):
            raise UsageError(
                f"--scalar-lr-scale {scale} must be a finite number of at least 0: 1 gives the "
                "scalars the learning rate of the rest, 0 keeps them fixed"
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
                "--optimizer multimax_adam finds no learned scalars: with --fp16 or --bf16 add "
                "--memory-efficient-fp16 or --memory-efficient-bf16, which keep the model's own "
                "parameters; for a model without learned scalars use --optimizer adam"
            )
        own = {"params": scalars, "weight_decay": 0.0, "updates": 0}  # a checkpoint holds "updates"
        super().__init__(cfg, [{"params": others}, own])
        if type(self._optimizer) is Adam:  # apex's Adam already updates many tensors at once
            self._optimizer = ForeachAdam(self._optimizer.param_groups, **self.optimizer_config)

    def step(self, *args, **kwargs):
        """Update the parameters."""
        others, scalars = self.param_groups
        is_frozen = scalars["updates"] < self.cfg.scalar_freeze_updates
        scalars["lr"] = 0.0 if is_frozen else self.cfg.scalar_lr_scale * others["lr"]
        super().step(*args, **kwargs)
        scalars["updates"] += 1

    def load_state_dict(self, state_dict, optimizer_overrides=None):
        """Load a checkpoint's state; --optimizer-overrides keep the scalars' weight decay of 0."""
        super().load_state_dict(state_dict, optimizer_overrides)
        self.param_groups[1]["weight_decay"] = 0.0
        self.param_groups[1].setdefault("updates", 0)  # missing in older checkpoints


class ForeachAdam(Adam):
    """fairseq's Adam that updates many tensors per operation on a GPU.

    With one operation per tensor the CPU needs longer to launch the kernels than the GPU to run
    them. On a CPU fairseq's loop is faster, because a single tensor stays in the cache.
    """

    # Elements per group. The update needs a few float32 buffers of this size.
    MAX_ELEMENTS = 2**24

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        if not all(map(self.is_fast, parameters)):
            return super().step(closure)
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for batch in self._batches(group["params"]):
                self._update(batch, group)
        return loss

    def is_fast(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter can be updated together with others."""
        grad = parameter.grad
        return parameter.is_cuda and (grad is None or not grad.is_sparse)

    def _batches(self, parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Advance the step of each parameter with a gradient; yield lists of them.

        The parameters of a list agree in device, dtypes and step.
        """
        batches: dict[Any, list[torch.Tensor]] = {}
        sizes: Counter = Counter()
        for parameter in parameters:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            wide = torch.promote_types(parameter.dtype, torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state:  # after loading, it may be on another device, or narrower
                    state[name] = state[name].to(parameter.device, wide)
                else:
                    state[name] = torch.zeros_like(parameter, dtype=wide)
            state["step"] = state.get("step", 0) + 1
            kind = parameter.device, parameter.dtype, parameter.grad.dtype, state["step"]
            if kind in batches and sizes[kind] + parameter.numel() > self.MAX_ELEMENTS:
                yield batches.pop(kind)
                del sizes[kind]
            batches.setdefault(kind, []).append(parameter)
            sizes[kind] += parameter.numel()
        yield from batches.values()

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
    """Return the tensors in the dtype of `wide`, without a copy if they have it."""
    if tensors[0].dtype == wide[0].dtype:
        return tensors
    converted = [torch.empty_like(t) for t in wide]
    torch._foreach_copy_(converted, tensors)
    return converted
