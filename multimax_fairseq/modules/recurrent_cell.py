"""A GRU or LSTM cell with two inputs: a word, and the features of the previous step."""

import torch
from torch import Tensor, nn

from multimax_fairseq.ops.checks import check_whole

GATES = {"gru": 3, "lstm": 4}


class RecurrentCell(nn.Module):
    """One step of a GRU or LSTM over a word and the fed-back features of the previous step.

    Equivalent to: nn.GRUCell or nn.LSTMCell(input_size + fed_size, hidden_size). `words` computes
    the product with the words for all steps at once.

    Args:
        kind: "gru" or "lstm".
        input_size, fed_size, hidden_size: sizes of a word, of the fed-back features, and of the
            state.

    Raises:
        ValueError: the kind is unknown; a size is not a whole number of at least 1.
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
            # Initialise both input projections as parts of one matrix.
            joint = torch.empty(gates, input_size + fed_size)
            for weight in (joint, self.hidden_projection.weight):
                start_gates(weight, kind)
            for layer, part in zip(
                (self.word_projection, self.fed_projection),
                joint.split([input_size, fed_size], 1),
                strict=True,
            ):
                layer.weight.copy_(part)
            start_biases(self.word_projection.bias, self.hidden_projection.bias, kind)

    def project_words(self, words: Tensor) -> Tensor:
        """Return the projection of words, (..., input_size), that `forward` takes."""
        return self.word_projection(words)

    def forward(
        self, projected: Tensor, fed: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return the next state, (hidden,) or for an LSTM (hidden, cell), each (B, hidden_size).

        Args:
            projected: (B, gates * hidden_size), words after `project_words`.
            fed: (B, fed_size).
            state: the previous one.
        """
        inputs = projected + self.fed_projection(fed)
        recurrent = self.hidden_projection(state[0])
        if self.kind == "lstm":
            input_gate, forget_gate, candidate, output_gate = (inputs + recurrent).chunk(4, -1)
            cell = forget_gate.sigmoid() * state[1] + input_gate.sigmoid() * candidate.tanh()
            return output_gate.sigmoid() * cell.tanh(), cell
        size = state[0].shape[-1]
        gates = (inputs[:, : 2 * size] + recurrent[:, : 2 * size]).sigmoid()
        reset_gate, update_gate = gates.chunk(2, -1)
        candidate = (inputs[:, 2 * size :] + reset_gate * recurrent[:, 2 * size :]).tanh()
        return (candidate + update_gate * (state[0] - candidate),)


@torch.no_grad()
def start_gates(weight: Tensor, kind: str) -> None:
    """Initialise the matrix of each gate separately; they are stacked as in torch's cells."""
    for gate in weight.chunk(GATES[kind]):
        nn.init.xavier_uniform_(gate)


@torch.no_grad()
def start_biases(input_bias: Tensor, hidden_bias: Tensor, kind: str) -> None:
    """Set both biases of a cell to 0, but an LSTM's forget gate to 1 (Jozefowicz et al. 2015)."""
    for bias in (input_bias, hidden_bias):
        nn.init.zeros_(bias)
    if kind == "lstm":
        nn.init.ones_(input_bias.chunk(4)[1])
