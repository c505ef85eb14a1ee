"""Additive attention of recurrent models: a small network scores each query and key."""

from torch import Tensor, nn

from multimax_fairseq.modules.attention_module import AttentionModule
from multimax_fairseq.ops.checks import check_whole


class AdditiveAttention(nn.Module):
    """Attention with one head, whose scores are a tanh layer.

        s_ti = v^T tanh(W q_t + U k_i)    (Bahdanau et al. 2015, Section A.1.2)

    Call `keys` and `values` once per sentence; their results do not depend on the query.

    Args:
        query_size, key_size, hidden_size: sizes of a query, of a key, and of the layer.
        normalizer: its `attend_by_scores` is called for each query, `static_values` once per
            sentence.

    Raises:
        ValueError: a size is not a whole number of at least 1.
    """

    def __init__(
        self, query_size: int, key_size: int, hidden_size: int, normalizer: AttentionModule
    ) -> None:
        super().__init__()
        sizes = {"query_size": query_size, "key_size": key_size, "hidden_size": hidden_size}
        for name, size in sizes.items():
            check_whole(name, size)
        self.query_projection = nn.Linear(query_size, hidden_size, bias=False)
        self.key_projection = nn.Linear(key_size, hidden_size, bias=False)
        self.score_projection = nn.Linear(hidden_size, 1, bias=False)
        self.normalizer = normalizer
        for layer in (self.query_projection, self.key_projection, self.score_projection):
            nn.init.xavier_uniform_(layer.weight)

    def keys(self, encoded: Tensor) -> Tensor:
        """Return U k for all keys, (B, S, hidden_size), given (B, S, key_size)."""
        return self.key_projection(encoded)

    def values(self, encoded: Tensor, padding: Tensor) -> Tensor:
        """Return the values that `forward` takes.

        Args:
            encoded: (B, S, key_size).
            padding: (B, S), bool: True marks padding.

        Returns:
            (B, 1, S or more, key_size).
        """
        value = encoded[:, None]
        return self.normalizer.static_values(value, padding[:, None, None])

    def forward(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        padding: Tensor,
        need_probs: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            query: (B, T, query_size).
            keys, values: results of the methods `keys` and `values`.
            padding: (B, S), bool: True marks padding.
            need_probs: whether to return the probabilities.

        Returns:
            ((B, T, key_size), None or the probabilities, (B, T, S) in float32 or wider).
        """
        hidden = self.query_projection(query)[:, :, None] + keys[:, None]
        scores = self.score_projection(hidden.tanh_()).squeeze(-1)
        context, probs = self.normalizer.attend_by_scores(
            scores[:, None],
            values,
            padding[:, None, None],
            need_probs=need_probs,
            hidden=query[:, None],
        )
        return context[:, 0], None if probs is None else probs[:, 0]
