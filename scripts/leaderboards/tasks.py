"""Synthetic tasks that one attention layer can solve, and their models.

Each task draws its batches from a generator, so a seed fixes the data. All models attend with four
heads of 16 through `Normalizer.attend`. A mapping that draws initial parameters also changes the
other initial weights of a seed.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from attention_statistics import AttentionStatistics
from torch import Generator, Tensor, nn

from multimax_fairseq import Normalizer
from multimax_fairseq.ops.attention import attention_scores
from multimax_fairseq.ops.masks import causal_mask

SIZE, HEADS = 64, 4
CLASSES = 16  # of values, and of items
SYMBOLS, FEATURES = 64, 32
VOCABULARY = 1024  # half of the tokens are keys, half are values


class Attention(nn.Module):
    """Multi-head attention of queries (B, T, C) to items (B, S, C); returns (B, T, C)."""

    def __init__(self, normalizer: Normalizer, is_causal: bool = False) -> None:
        super().__init__()
        self.normalizer, self.is_causal = normalizer, is_causal
        self.query, self.key, self.value, self.out = (nn.Linear(SIZE, SIZE) for _ in range(4))
        self.statistics: AttentionStatistics | None = None

    def forward(self, x: Tensor, items: Tensor) -> Tensor:
        query, key, value = (
            project(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)  # (B, H, length, D)
            for project, y in ((self.query, x), (self.key, items), (self.value, items))
        )
        arguments = {"is_causal": self.is_causal, "hidden": x[:, None]}
        if self.statistics is not None:  # the tested context stays that of the fused kernel
            _, probs = self.normalizer.attend(query, key, value, need_probs=True, **arguments)
            scores = attention_scores(query, key)
            valid = torch.ones_like(scores, dtype=torch.bool)
            if self.is_causal:
                valid = ~causal_mask(None, *scores.shape[-2:], scores.device).expand_as(scores)
            self.statistics.add(scores, probs, valid)
        context, _ = self.normalizer.attend(query, key, value, **arguments)
        return self.out(context.transpose(1, 2).flatten(2))


def perceptron(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 2 * SIZE), nn.GELU(), nn.Linear(2 * SIZE, outputs))


# --- one query for each set of items -------------------------------------------------------------


class Retrieval(nn.Module):
    """One query attends to items; returns log-probabilities, (B, CLASSES)."""

    def __init__(self, normalizer: Normalizer, query_features: int, features: int) -> None:
        super().__init__()
        self.embed_query, self.embed = nn.Linear(query_features, SIZE), nn.Linear(features, SIZE)
        self.attention = Attention(normalizer)
        self.classify = perceptron(SIZE, CLASSES)

    def forward(self, query: Tensor, items: Tensor) -> Tensor:
        context = self.attention(self.embed_query(query)[:, None], self.embed(items))
        return self.classify(context[:, 0]).log_softmax(-1)


def multi_key(batch: int, length: int, draw: Generator) -> tuple[Tensor, ...]:
    """Queries (B, F), items (B, S, F + CLASSES), and the distributions of values to predict.

    1 to 8 of the items have the query's symbol. The target is the mean of their values.
    """
    features = torch.randn(SYMBOLS, FEATURES, generator=Generator().manual_seed(0)) / 2
    wanted = torch.randint(SYMBOLS, (batch, 1), generator=draw)
    others = torch.randint(1, SYMBOLS, (batch, length), generator=draw)
    is_relevant = relevant(batch, length, 1, 8, draw)
    symbols = torch.where(is_relevant, wanted, (wanted + others) % SYMBOLS)
    values, target = averaged(is_relevant, draw)
    return features[wanted[:, 0]], torch.cat([features[symbols], values], -1), target


def noisy_copies(
    counts: Callable[[int], tuple[int, int]],
    noise: float,
    batch: int,
    length: int,
    draw: Generator,
    classes: int = CLASSES,
) -> tuple[Tensor, ...]:
    """As `multi_key`, but a relevant key is the query plus noise, and other keys are random.

    Args:
        counts: the smallest and the largest number of relevant keys at this length.
        noise: the standard deviation of the noise, relative to that of queries and keys.
        classes: the number of classes among the values of relevant items.
    """
    query = torch.randn(batch, FEATURES, generator=draw) / 2
    is_relevant = relevant(batch, length, *counts(length), draw)[..., None]
    keys = torch.randn(batch, length, FEATURES, generator=draw) / 2
    keys = torch.where(is_relevant, query[:, None] + noise * keys, keys)
    values, target = averaged(is_relevant[..., 0], draw, classes)
    return query, torch.cat([keys, values], -1), target


def relevant(batch: int, length: int, fewest: int, most: int, draw: Generator) -> Tensor:
    """Choose random relevant items, (B, S) bool, a random number of them for each query."""
    count = torch.randint(fewest, most + 1, (batch, 1), generator=draw)
    return torch.rand(batch, length, generator=draw).argsort(-1) < count


def averaged(is_relevant: Tensor, draw: Generator, classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    """Return random values, (B, S, CLASSES) one-hot, and the mean over the relevant items.

    The values of a query's relevant items come from `classes` neighbouring classes.
    """
    drawn = torch.randint(CLASSES, is_relevant.shape, generator=draw)
    if classes < CLASSES:
        first = torch.randint(CLASSES, (len(drawn), 1), generator=draw)
        drawn = torch.where(is_relevant, (first + drawn % classes) % CLASSES, drawn)
    values = F.one_hot(drawn, CLASSES).float()
    weights = is_relevant[..., None]
    return values, (values * weights).sum(1) / weights.sum(1)


def maximum(batch: int, length: int, draw: Generator) -> tuple[Tensor, ...]:
    """Constant queries (B, 1), items (B, S, 1 + CLASSES), and one-hot targets.

    An item has a number between 0 and 1 and a class. The target is the class of the largest number.
    """
    numbers = torch.rand(batch, length, 1, generator=draw)
    classes = F.one_hot(torch.randint(CLASSES, (batch, length), generator=draw), CLASSES).float()
    target = classes[torch.arange(batch), numbers.argmax(1)[:, 0]]
    return torch.ones(batch, 1), torch.cat([numbers, classes], -1), target


def divergence(log_probs: Tensor, target: Tensor) -> Tensor:
    """KL(target | prediction) in nats."""
    return F.kl_div(log_probs, target, reduction="batchmean")


def accuracy(log_probs: Tensor, target: Tensor) -> Tensor:
    """The share of correct predictions, in percent."""
    return 100 * (log_probs.argmax(-1) == target.argmax(-1)).float().mean()


# --- many queries in one sequence ----------------------------------------------------------------


class Recall(nn.Module):
    """A causal layer that returns the log-probabilities at the query positions, (B, P, V).

    A convolution of two tokens before the attention lets one layer find a key and return the value
    that follows it.
    """

    def __init__(self, normalizer: Normalizer) -> None:
        super().__init__()
        self.embed, self.neighbour = nn.Embedding(VOCABULARY, SIZE), nn.Linear(SIZE, SIZE)
        self.attention = Attention(normalizer, is_causal=True)
        self.norms = nn.ModuleList(nn.LayerNorm(SIZE) for _ in range(2))
        self.classify = perceptron(SIZE, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.neighbour(F.pad(x, (0, 0, 1, -1)))  # (B, T, C): position t reads t - 1
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed)
        at_queries = x.gather(1, positions[..., None].expand(-1, -1, SIZE))
        return self.classify(self.norms[1](at_queries)).log_softmax(-1)


def multi_query(batch: int, length: int, draw: Generator) -> tuple[Tensor, ...]:
    """Sequences (B, T), the positions of queries (B, P), and one-hot targets (B, P, V).

    The first half are length / 4 pairs of a key and its value. In the second half, each key
    appears once more, followed by a random value, and the model predicts its value. Keys of early
    pairs tend to come early again.
    """
    pairs, half = length // 4, VOCABULARY // 2
    keys = torch.rand(batch, half, generator=draw).argsort(-1)[:, :pairs]
    values = torch.randint(half, VOCABULARY, (batch, pairs), generator=draw)
    tokens = torch.randint(half, VOCABULARY, (batch, length), generator=draw)
    tokens[:, : 2 * pairs] = torch.stack([keys, values], -1).flatten(1)
    slots = (length - 2 * pairs) // 2
    # The power law of Arora et al. 2023, exponent 0.01 - 1.
    weights = torch.arange(1, slots + 1).double() ** -0.99
    chosen = torch.multinomial(weights.expand(batch, -1), pairs, generator=draw)
    positions = 2 * pairs + 2 * chosen
    tokens.scatter_(1, positions, keys)
    return tokens, positions, F.one_hot(values, VOCABULARY).float()


# --- the table of tasks --------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A synthetic task.

    Attributes:
        title: for tables.
        model: model(normalizer) is a new model.
        batch: batch(size, length, generator) returns its inputs and the target.
        score: score(log-probabilities, target) of a batch.
        unit, digits: of the score in tables; is_error says whether lower is better.
        train: lengths in training, one for each update in turn.
        test: lengths in evaluation.
        updates: of the training.
        is_compared: train only the entries that the figure of noisy retrieval compares.
    """

    title: str
    model: Callable[[Normalizer], nn.Module]
    batch: Callable[[int, int, Generator], tuple[Tensor, ...]]
    score: Callable[[Tensor, Tensor], Tensor]
    unit: str
    digits: int
    is_error: bool
    train: tuple[int, ...]
    test: tuple[int, ...]
    updates: int
    is_compared: bool = False


def retrieval(
    title: str, batch: Callable[..., tuple[Tensor, ...]], digits: int = 3, **settings: Any
) -> Task:
    """A task in which a query averages the values of relevant items."""
    return Task(
        title,
        lambda normalizer: Retrieval(normalizer, FEATURES, FEATURES + CLASSES),
        batch,
        divergence,
        "KL, nats",
        digits=digits,
        is_error=True,
        train=(64,),
        updates=3000,
        **settings,
    )


LENGTHS = (64, 256, 1024, 4096)
NOISE, COUNTS = 0.5, (1, 8)
# {task: the noise}, {task: the number of relevant keys}: two axes of the figure.
NOISES = {"noise_0": 0.0, "noise_0.25": 0.25, "noisy": 0.5, "noise_0.75": 0.75, "noise_1": 1.0}
KEYS = {"needle": (1, 1), "noisy": COUNTS, "relevant_2_8": (2, 8), "relevant_16": (16, 16)}


def in_words(counts: tuple[int, int]) -> str:
    fewest, most = counts
    return f"{fewest} to {most}" if fewest < most else f"{most}"


def noisy(title: str, noise: float, counts: tuple[int, int], test: tuple[int, ...]) -> Task:
    """Noisy retrieval with its own noise and numbers of relevant keys, a task of the figure."""
    batch = functools.partial(noisy_copies, lambda length: counts, noise)
    return retrieval(title, batch, test=test, is_compared=True)


TASKS = {
    "retrieval": retrieval("multi-key retrieval", multi_key, digits=4, test=LENGTHS),
    "noisy": retrieval(
        "noisy retrieval",
        functools.partial(noisy_copies, lambda length: COUNTS, NOISE),
        test=LENGTHS,
    ),
    "recall": Task(
        "associative recall",
        Recall,
        multi_query,
        accuracy,
        "accuracy, %",
        digits=1,
        is_error=False,
        train=(32, 64, 128),
        test=(32, 64, 128, 512, 1024),
        updates=1000,
    ),
    "maximum": Task(
        "max retrieval",
        lambda normalizer: Retrieval(normalizer, 1, 1 + CLASSES),
        maximum,
        accuracy,
        "accuracy, %",
        digits=1,
        is_error=False,
        train=(16,),
        test=(16, 64, 256, 1024, 4096),
        updates=3000,
    ),
    "needle": noisy("one noisy key", NOISE, KEYS["needle"], LENGTHS),
    "share": retrieval(
        "an eighth of the keys, noisy",
        # With few classes, the mean over many relevant items differs from that over all items.
        functools.partial(
            noisy_copies, lambda length: (length // 8, length // 8), NOISE, classes=4
        ),
        digits=4,
        test=LENGTHS,
        is_compared=True,
    ),
    **{
        name: noisy(f"noisy retrieval, noise {noise}", noise, COUNTS, LENGTHS[:1])
        for name, noise in NOISES.items()
        if noise != NOISE
    },
    **{
        name: noisy(f"noisy retrieval, {in_words(counts)} keys", NOISE, counts, LENGTHS[:1])
        for name, counts in KEYS.items()
        if name.startswith("relevant")
    },
}

BATCH, RATE = 64, 0.003
TEST_BATCHES = 16


def loss_of(log_probs: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy in nats."""
    return -(log_probs * target).sum(-1).mean()


def train(task: Task, normalizer: Normalizer, seed: int, updates: int) -> nn.Module:
    """Train a model with Adam, at a learning rate that rises and then falls to zero."""
    model, draw = task.model(normalizer), Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=updates)
    for update in range(updates):
        *inputs, target = task.batch(BATCH, task.train[update % len(task.train)], draw)
        loss = loss_of(model(*inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def evaluate(
    task: Task, model: nn.Module, batches: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return {length: score} and the attention's statistics at the first length.

    All models are tested on the same data.
    """
    scores, statistics = {}, AttentionStatistics()
    attention = next(part for part in model.modules() if isinstance(part, Attention))
    for length in task.test:
        draw = Generator().manual_seed(10**6 + length)
        attention.statistics = statistics if length == task.test[0] else None
        of_batches = []
        for _ in range(batches):
            *inputs, target = task.batch(BATCH, length, draw)
            of_batches.append(task.score(model(*inputs), target))
        scores[str(length)] = float(torch.stack(of_batches).double().mean())
    return scores, statistics.means()
