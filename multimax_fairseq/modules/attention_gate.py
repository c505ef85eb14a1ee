"""A learned gate on the context of attention."""

from torch import Tensor, nn

from multimax_fairseq.modules.attention_module import AttentionModule
from multimax_fairseq.ops.attention import AttentionInputs
from multimax_fairseq.ops.checks import check_whole
from multimax_fairseq.ops.decoding import DecodingAttention, KVCache


class GatedAttention(AttentionModule):
    """Attention whose context is gated by the hidden state of the query.

        context * sigmoid(W h)                                  (Qiu et al. 2025, elementwise gates)

    Args:
        attention: an `AttentionModule` with the same number of heads.
        hidden_size: size of h.
        num_heads, head_size: of the context.

    Parameter: `gate.weight`, W, (num_heads * head_size, hidden_size). It starts at 0: all gates are
        0.5.

    Raises:
        ValueError: a size is not a whole number of at least 1.
    """

    def __init__(
        self, attention: AttentionModule, hidden_size: int, num_heads: int, head_size: int
    ) -> None:
        super().__init__()
        check_whole("hidden_size", hidden_size)
        check_whole("num_heads", num_heads)
        check_whole("head_size", head_size)
        self.normalizer = attention  # the name in checkpoints and for `normalizer_chain`
        self.num_heads, self.head_size = num_heads, head_size
        self.gate = nn.Linear(hidden_size, num_heads * head_size, bias=False)
        nn.init.zeros_(self.gate.weight)

    def attention(
        self, inputs: AttentionInputs, need_probs: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gated context of each query, and the probabilities before the gate.

        Args, Returns: as `AttentionModule.attention`.

        Raises:
            ValueError: hidden is None, or an error of the attention.
        """
        context, probs = self.normalizer.attention(inputs, need_probs)
        return self._gated(context, inputs.hidden), probs

    def decoding_attention(self, like: Tensor, heads: int, size: int) -> DecodingAttention | None:
        attend = self.normalizer.decoding_attention(like, heads, size)
        if attend is None:
            return None

        def gated(query: Tensor, cache: KVCache, scale: float, hidden: Tensor | None) -> Tensor:
            context = attend(query, cache, scale, hidden)
            return self._gated(context[:, :, None], hidden)[:, :, 0]

        return gated

    def attend_by_scores(
        self,
        scores: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        dropout_p: float = 0.0,
        need_probs: bool = False,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        context, probs = self.normalizer.attend_by_scores(
            scores, value, mask, dropout_p, need_probs, hidden
        )
        return self._gated(context, hidden), probs

    def _gated(self, context: Tensor, hidden: Tensor | None) -> Tensor:
        if hidden is None:
            raise ValueError("a gate reads the hidden states of queries: pass them as hidden")
        gate = self.gate(hidden).sigmoid().unflatten(-1, (self.num_heads, self.head_size))
        return context * gate.squeeze(1).transpose(1, 2).to(context.dtype)

    def static_values(self, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.normalizer.static_values(value, mask)

    def keep_heads(self, heads: list[int]) -> None:
        self.normalizer.keep_heads(heads)
        rows = self.gate.weight.data.unflatten(0, (self.num_heads, self.head_size))[heads]
        self.gate.weight.data = rows.flatten(0, 1)
        self.num_heads = len(heads)
