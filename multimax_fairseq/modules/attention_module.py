"""The interface between an attention layer and the module that computes its context."""

from typing import Any

from torch import Tensor, nn

from multimax_fairseq.ops.attention import AttentionInputs
from multimax_fairseq.ops.decoding import DecodingAttention


class AttentionModule(nn.Module):
    """Base class of the modules that `MultiheadAttention` takes as its normalizer.

    A subclass defines `attention`, and `attend_by_scores` if a recurrent model uses it. The other
    methods have defaults for a module without parameters per head, fused decoding steps or values
    computed once per sentence.

    Example:
        >>> class MeanAttention(AttentionModule):
        ...     def attention(self, inputs, need_probs=False):
        ...         return inputs.value.mean(-2, keepdim=True).expand_as(inputs.query), None
    """

    def attention(
        self, inputs: AttentionInputs, need_probs: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the context of each query, and its attention probabilities.

        Args:
            need_probs: whether to return the probabilities, which the fused kernels never store.

        Returns:
            The context, (B, H, T, size of a value), in the dtype of value or of autocast; and None
            or the probabilities before dropout, (B, H, T, S), in float32 or wider.
        """
        raise NotImplementedError

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        *,
        need_probs: bool = False,
        **inputs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return `attention` of `AttentionInputs(query, key, value, mask, **inputs)`."""
        return self.attention(AttentionInputs(query, key, value, mask, **inputs), need_probs)

    def attend_by_scores(
        self,
        scores: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        dropout_p: float = 0.0,
        need_probs: bool = False,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the result of `attention` for given scores.

        Args:
            scores: (B, H, T, S), floating.
            value, mask, dropout_p, hidden: as `AttentionInputs`.
            need_probs: as `attention`.
        """
        raise NotImplementedError

    def decoding_attention(self, like: Tensor, heads: int, size: int) -> DecodingAttention | None:
        """Return the attention of decoding steps, as `ops.decoding.decoding_attention`.

        It is valid until a parameter changes. None if no kernel supports it.

        Args:
            like: a tensor of the dtype and on the device of queries.
            heads, size: of the queries.
        """
        return None

    def static_values(self, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return what decoding caches for values that stay the same for a whole sentence."""
        return value

    def keep_heads(self, heads: list[int]) -> None:
        """Keep only these heads' parameters."""
