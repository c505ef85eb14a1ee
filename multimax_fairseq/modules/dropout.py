"""fairseq's dropout layer with this package's kernel."""

import torch.nn.functional as F
from fairseq.modules import FairseqDropout
from torch import Tensor

from multimax_fairseq.ops.dropout import dropout


class Dropout(FairseqDropout):
    def forward(self, x: Tensor, inplace: bool = False) -> Tensor:
        """Drop entries of x in training, and under --retain-dropout."""
        if self.p > 0 and (self.training or self.apply_during_inference):
            return F.dropout(x, self.p, inplace=True) if inplace else dropout(x, self.p)
        return x
