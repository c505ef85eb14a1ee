"""The learned alpha of alpha-entmax."""

import torch
from torch import Tensor, nn

from multimax_fairseq.functional.checks import check_whole

# The gradient by alpha is a difference of probabilities over (alpha - 1)^2: closer to 1, its
# rounding error in float32 would outgrow it.
LEAST_ALPHA = 1.01


class EntmaxAlpha(nn.Module):
    """Learned alpha of each head; `alpha()` is 1 + sigmoid(logit), (num_heads, 1, 1).

    Equivalent to: (1 + self.logit.sigmoid()).clamp(min=1.01)[:, None, None], whose clamp passes
    gradients on, so that an alpha may come back from there.

    Args:
        num_heads: how many alphas; 1 shares one among all heads.

    Parameter: `logit`, (num_heads,), drawn from the standard normal distribution.

    Raises:
        ValueError: num_heads is no whole number of at least 1.
    """

    def __init__(self, num_heads: int = 1) -> None:
        super().__init__()
        check_whole("alpha's number of heads", num_heads)
        self.logit = nn.Parameter(torch.randn(num_heads))

    def forward(self) -> Tensor:
        """Return alpha, (num_heads, 1, 1), in float32 or wider."""
        wide = self.logit.to(torch.promote_types(self.logit.dtype, torch.float32))
        alpha = 1 + wide.sigmoid()
        alpha = alpha + (alpha.clamp(min=LEAST_ALPHA) - alpha).detach()
        return alpha[:, None, None]

    def extra_repr(self) -> str:
        return f"num_heads={len(self.logit)}"
