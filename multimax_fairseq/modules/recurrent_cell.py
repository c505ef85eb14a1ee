"""A GRU or LSTM cell with two inputs: a word, known in advance, and a context that is fed back."""

import torch
from torch import Tensor, nn

from multimax_fairseq.ops.checks import check_whole

GATES = {"gru": 3, "lstm": 4}


class RecurrentCell(nn.Module):
    """One step of a GRU or LSTM over the concatenation of a word and a fed-back context.

    Equivalent to: nn.GRUCell or nn.LSTMCell(input_size + fed_size, hidden_size). `words` computes
    the product with the words for all steps at once.

    Args:
        kind: "gru" or "lstm".
        input_size, fed_size, hidden_size: sizes of a word, of the fed-back context, and of the
            state.

    Raises:
        ValueError: an unknown kind; a size that is no whole number of at least 1.
    """

    def __init__(self, kind: str, input_size: int, fed_size: int, hidden_size: int) -> None:
        super().__init__()
        if kind not in GATES:
            raise ValueError(f"unknown kind {kind!r}: choose one of {', '.join(GATES)}")
        sizes = {"input_size": input_size, "fed_size": fed_size, "hidden_size": hidden_size}
        for name, size in sizes.items():
            check_whole(name, size)
        self.kind = kind
        gates = GATES[kind] * hidden_size
        self.word_projection = nn.Linear(input_size, gates)
        self.fed_projection = nn.Linear(fed_size, gates, bias=False)
        self.hidden_projection = nn.Linear(hidden_size, gates)
        with torch.no_grad():
            # Both are initialised as parts of one matrix.
            whole = torch.empty(gates, input_size + fed_size)
            for weight in (whole, self.hidden_projection.weight):
                start_gates(weight, kind)
            for layer, part in zip(
                (self.word_projection, self.fed_projection),
                whole.split([input_size, fed_size], 1),
                strict=True,
            ):
                layer.weight.copy_(part)
            start_biases(self.word_projection.bias, self.hidden_projection.bias, kind)

    def words(self, words: Tensor) -> Tensor:
        """Return the projection of words, (..., input_size), that `forward` takes."""
        return self.word_projection(words)

    def forward(self, words: Tensor, fed: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the next state, (hidden,) or for an LSTM (hidden, cell), each (B, hidden_size).

        Args:
            words: (B, gates * hidden_size), of `words`.
            fed: (B, fed_size).
            state: the previous one.
        """
        given = words + self.fed_projection(fed)
        kept = self.hidden_projection(state[0])
        if self.kind == "lstm":
            enter, forget, new, leave = (given + kept).chunk(4, -1)
            cell = forget.sigmoid() * state[1] + enter.sigmoid() * new.tanh()
            return leave.sigmoid() * cell.tanh(), cell
        size = state[0].shape[-1]
        reset, update = (given[:, : 2 * size] + kept[:, : 2 * size]).sigmoid().chunk(2, -1)
        new = (given[:, 2 * size :] + reset * kept[:, 2 * size :]).tanh()
        return (new + update * (state[0] - new),)


@torch.no_grad()
def start_gates(weight: Tensor, kind: str) -> None:
    """Initialise each gate's matrix on its own; they are stacked as in torch's cells."""
    for gate in weight.chunk(GATES[kind]):
        nn.init.xavier_uniform_(gate)


@torch.no_grad()
def start_biases(input_bias: Tensor, hidden_bias: Tensor, kind: str) -> None:
    """Set both biases of a cell to 0, but an LSTM's forget gate to 1 (Jozefowicz et al. 2015)."""
    for bias in (input_bias, hidden_bias):
        nn.init.zeros_(bias)
    if kind == "lstm":
        nn.init.ones_(input_bias.chunk(4)[1])
