"""Classification of documents, by a density over their length (Martins et al. 2020, Table 1).

    python user_dir/continuous_documents.py

`DocumentClassifier` has the paper's three attentions over the states of a BiLSTM, here with learned
embeddings. Such states contain the class at every position, so any density would classify well. In
this test the values are word embeddings, and the encoder sees two marks but no class: the words
between the marks are of the document's class, and as many elsewhere are of another one.
A model that ignores the marks is right in half of the documents at most. This file does not import
fairseq. scripts/imdb.sh trains the same classifier on IMDB reviews, with the paper's settings.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from multimax_fairseq import continuous_softmax, continuous_sparsemax, normalize
from multimax_fairseq.continuous.value_function import positions, ridge_regression

DENSITIES = {"softmax": continuous_softmax, "sparsemax": continuous_sparsemax}
ATTENTIONS = ("discrete", "continuous", "combined")
WIDTHS, MIN_VARIANCE = (0.1, 0.5), 1e-6
RIDGE = 0.01  # our choice, that of the authors' deep-spin/quati
# The words of the documents that are drawn: each class has five of its own.
PAD, OPEN, CLOSE, FILLER, CLASS_WORD, CLASSES = 0, 1, 2, 3, 20, 4
WORDS = CLASS_WORD + 5 * CLASSES


class DocumentClassifier(nn.Module):
    """Logits of (B, S) words, 0 behind the end, with the mean and the variance of the attention.

    attention: "discrete", by an additive scorer; "continuous", by a density that a CNN over the
        states predicts; "combined", the sum of the context of softmax and that of a density whose
        parameters are the mean and the variance of the positions under softmax.
    density: "softmax" or "sparsemax", also of the discrete attention alone.
    seen: None: the values are the states. A number: the values are the embeddings, and the encoder
        reads every word from this index on as one word.
    """

    def __init__(
        self,
        words,
        classes,
        attention="combined",
        density="sparsemax",
        num_bases=64,
        seen=None,
        size=300,
        hidden=128,
    ):
        super().__init__()
        for name, value, known in (
            ("attention", attention, ATTENTIONS),
            ("density", density, tuple(DENSITIES)),
        ):
            if value not in known:
                raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(known)}")
        if num_bases < 1 or num_bases % len(WIDTHS):
            raise ValueError(f"num_bases must be even, half of each width, got {num_bases}")
        self.attention, self.density, self.seen = attention, density, seen
        self.embedding = nn.Embedding(words, size, padding_idx=PAD)
        self.encoder = nn.LSTM(size, hidden, batch_first=True, bidirectional=True)
        if attention == "continuous":
            self.convolution = nn.Conv1d(2 * hidden, hidden, 3, padding=1)
            self.moments = nn.Linear(hidden, 2)
        else:
            last = nn.Linear(hidden, 1, bias=False)
            self.score = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.Tanh(), last)
        self.classifier = nn.Linear(2 * hidden if seen is None else size, classes)
        centers = torch.linspace(0, 1, num_bases // len(WIDTHS)).repeat(len(WIDTHS))
        widths = torch.tensor(WIDTHS).repeat_interleave(num_bases // len(WIDTHS))
        self.register_buffer("centers", centers, persistent=False)
        self.register_buffer("widths", widths, persistent=False)

    def forward(self, words):
        tokens = words != PAD
        wrong = ~tokens[:, 0] | (tokens[:, 1:] & ~tokens[:, :-1]).any(-1)
        if wrong.any():
            raise ValueError(
                f"a document must have a word, and its padding, {PAD}, behind all words, got "
                f"{words[wrong][0].tolist()}"
            )
        values = self.embedding(words)
        read = values if self.seen is None else self.embedding(words.clamp(max=self.seen))
        lengths = tokens.sum(-1).cpu()
        packed = pack_padded_sequence(read, lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(
            self.encoder(packed)[0], batch_first=True, total_length=words.shape[1]
        )
        values = states if self.seen is None else values
        if self.attention == "continuous":
            # States are 0 behind the end, as beyond a document that is alone.
            features = self.convolution(states.mT).masked_fill(~tokens[:, None], -torch.inf)
            mean, variance = self.moments(features.amax(-1)).double().unbind(-1)
            probs, mean, variance = 0, mean.sigmoid(), F.softplus(variance)
        else:
            discrete = self.density if self.attention == "discrete" else "softmax"
            probs = normalize(discrete, self.score(states).squeeze(-1), mask=~tokens).double()
            time = positions(tokens)
            mean = (probs * time).sum(-1)
            variance = (probs * (time - mean[:, None]) ** 2).sum(-1)
        variance = variance.clamp(min=MIN_VARIANCE)
        if self.attention != "discrete":
            # The expectation of the regression through the values is itself a sum of values.
            weights = DENSITIES[self.density](mean, variance, self.centers, self.widths)
            regression = ridge_regression(tokens, self.centers, self.widths, RIDGE)
            probs = probs + (regression @ weights[..., None]).squeeze(-1)
        context = (probs.to(values.dtype)[:, None] @ values).squeeze(1)
        return self.classifier(context), mean, variance


def draw(count, generator):
    """Return documents, (count, S), their classes, and the times of their marks, (count, 2)."""

    def several(low, high, number):
        return torch.randint(low, high, (number,), generator=generator)

    def filler(number):
        return several(FILLER, CLASS_WORD, number)

    documents, classes, marks = [], [], []
    for _ in range(count):
        pair = torch.randperm(CLASSES, generator=generator)[:2]
        length, marked = several(4, 9, 1).item(), several(0, 2, 1).item()
        parts = []
        for number, kind in enumerate(pair):
            said = CLASS_WORD + kind + CLASSES * several(0, 5, length)
            # The other interval is alike but for the marks.
            ends = torch.tensor([OPEN, CLOSE]) if number == marked else filler(2)
            parts += [filler(several(0, 9, 1).item()), ends[:1], said, ends[1:]]
        document = torch.cat([*parts, filler(several(0, 9, 1).item())])
        ends = ((document == OPEN) | (document == CLOSE)).nonzero().squeeze(-1)
        documents.append(document)
        classes.append(pair[marked])
        marks.append((ends + 1).double() / len(document))
    return pad_sequence(documents, True, PAD), torch.stack(classes), torch.stack(marks)


def train(attention, density, steps=150, seed=1, seen=FILLER):
    """Return a small classifier, trained on documents that are drawn anew for each step."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = DocumentClassifier(WORDS, CLASSES, attention, density, 32, seen, size=32, hidden=32)
    # A random classifier makes the density wide, and a wide density learns no location. So the
    # classifier starts at zero, and the density narrow.
    nn.init.zeros_(model.classifier.weight)
    if attention == "continuous":
        nn.init.constant_(model.moments.bias[1], -4.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        documents, classes, _ = draw(32, generator)
        loss = F.cross_entropy(model(documents)[0], classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@torch.no_grad()
def evaluate(model, count=200, seed=2):
    """Return the accuracy, whether means lie between the marks, and the densities' mass there."""
    documents, classes, marks = draw(count, torch.Generator().manual_seed(seed))
    logits, mean, variance = model(documents)
    first, last = marks.unbind(-1)
    # The expectation of a basis as narrow as this is the density itself.
    time = torch.linspace(0, 1, 1001).double()
    heights = DENSITIES[model.density](mean, variance, time, torch.full_like(time, 0.001))
    between = (time >= first[:, None]) & (time <= last[:, None])
    accuracy = (logits.argmax(-1) == classes).double().mean().item()
    return accuracy, (mean >= first) & (mean <= last), (heights * between).sum(-1) / 1000


def main():
    for attention in ("continuous", "combined"):
        for density in DENSITIES:
            accuracy, found, mass = evaluate(train(attention, density))
            print(
                f"{attention} {density}: accuracy {accuracy:.2f}, the density's mean between the "
                f"marks in {found.double().mean():.0%} of documents, as is {mass.mean():.0%} of it"
            )


if __name__ == "__main__":
    main()
