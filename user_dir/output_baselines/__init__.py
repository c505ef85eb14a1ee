"""Baselines for MultiMax in the output layer.

A learned piecewise-linear function of the logits and a learned soft-cap are mappings. A mixture of
softmaxes has architectures.

    fairseq-train DATA --user-dir user_dir/output_baselines --arch transformer_lm_multimax \
        --output-normalizer piecewise_linear ...
    fairseq-train DATA --user-dir user_dir/output_baselines --arch transformer_lm_mixture \
        --output-normalizer softmax ...
"""

import math

import torch
import torch.nn.functional as F
from fairseq.models import register_model, register_model_architecture
from torch import nn

from multimax_fairseq import NORMALIZERS, Mapping, register
from multimax_fairseq.mappings.masking import at_least_float32
from multimax_fairseq.models.transformer_lm_multimax import (
    MultimaxLanguageModel,
    language_model_config,
)
from multimax_fairseq.models.transformer_multimax import (
    MultimaxTransformerModel,
    multimax_iwslt_de_en,
)


class PiecewiseLinear(nn.Module):
    """Learned increasing piecewise-linear function of the logits (Ganea et al. 2019).

    Segments of equal width cover -bound to bound; the first and the last continue outside. A slope
    is the softplus of a parameter, and 1 at the start, where the function is the identity.

    Args:
        segments: their number.
        bound: above 0.
    """

    def __init__(self, segments=128, bound=20.0):
        super().__init__()
        self.bound, self.width = bound, 2 * bound / segments
        self.raw_slope = nn.Parameter(torch.full((segments,), math.log(math.e - 1)))

    def forward(self, x):
        x = at_least_float32(x)
        slopes = F.softplus(self.raw_slope.to(x.dtype))
        rises = self.width * slopes
        levels = rises.cumsum(0) - rises - self.bound  # where each segment begins
        with torch.no_grad():
            position = ((x + self.bound) / self.width).nan_to_num()  # NaN stays in the result
            segment = position.floor().clamp_(0, len(slopes) - 1).long()
        begin = segment * self.width - self.bound
        return torch.addcmul(levels[segment], slopes[segment], x - begin)


class LearnedSoftCap(nn.Module):
    """Soft-cap c tanh(x / c) of the logits with a learned c, 50 at the start."""

    def __init__(self):
        super().__init__()
        self.log_cap = nn.Parameter(torch.tensor(math.log(50.0)))

    def forward(self, x):
        x = at_least_float32(x)
        cap = self.log_cap.to(x.dtype).exp()
        return cap * (x / cap).tanh()


def register_output(name, label, module):
    """Register softmax of logits that `module()` transforms."""

    def build(num_heads):
        return {"modulator": module()}

    function = NORMALIZERS["softmax"].function
    mapping = Mapping(name, label, function, build=build, modulated=True, output_options=())
    register(mapping)


register_output("piecewise_linear", "piecewise-linear logits", PiecewiseLinear)
register_output("learned_softcap", "learned soft-cap", LearnedSoftCap)


class MixtureOfSoftmaxes(nn.Linear):
    """An output projection that returns log-probabilities of a mixture (Yang et al. 2018).

        p = sum_k pi_k(h) softmax(W tanh(U_k h)),  pi(h) = softmax(V h)

    Softmax does not change log-probabilities, so the model can use them as logits.

    Args:
        projection: the layer W that it replaces and whose weight it shares.
        components: number of softmaxes.
    """

    def __init__(self, projection, components=2):
        size, classes = projection.in_features, projection.out_features
        super().__init__(size, classes, bias=projection.bias is not None)
        self.weight, self.bias = projection.weight, projection.bias
        self.components = components
        self.latent = nn.Linear(size, components * size)
        self.gate = nn.Linear(size, components, bias=False)

    def forward(self, features):
        hidden = self.latent(features).tanh().unflatten(-1, (self.components, -1))  # (..., K, C)
        log_probs = super().forward(hidden).log_softmax(-1)  # (..., K, V)
        shares = self.gate(features).log_softmax(-1)
        return (shares[..., None] + log_probs).logsumexp(-2)


class WithMixture:
    """Mixin of a model: its output layer becomes a mixture of softmaxes."""

    @classmethod
    def build_model(cls, args, task):
        model = super().build_model(args, task)
        decoder = model.decoder
        decoder.output_projection = MixtureOfSoftmaxes(decoder.output_projection)
        return model


@register_model("transformer_lm_mixture", dataclass=language_model_config())
class MixtureLanguageModel(WithMixture, MultimaxLanguageModel):
    pass


@register_model("transformer_mixture")
class MixtureTransformerModel(WithMixture, MultimaxTransformerModel):
    pass


register_model_architecture("transformer_mixture", "transformer_iwslt_de_en_mixture")(
    multimax_iwslt_de_en
)
