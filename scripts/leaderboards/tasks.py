"""Three synthetic tasks that one attention layer can solve, and their models.

Each task draws its batches from a generator, so a seed fixes the data. All models attend with four
heads of 16 through `Normalizer.attend`. A mapping that draws initial parameters also changes the
other initial weights of a seed.
"""

from collections.abc import Callable
from dataclasses import dataclass

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
    count = torch.randint(1, 9, (batch, 1), generator=draw)
    is_relevant = torch.rand(batch, length, generator=draw).argsort(-1) < count
    symbols = torch.where(is_relevant, wanted, (wanted + others) % SYMBOLS)
    values = F.one_hot(torch.randint(CLASSES, (batch, length), generator=draw), CLASSES).float()
    target = (values * is_relevant[..., None]).sum(1) / count
    return features[wanted[:, 0]], torch.cat([features[symbols], values], -1), target


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


TASKS = {
    "retrieval": Task(
        "multi-key retrieval",
        lambda normalizer: Retrieval(normalizer, FEATURES, FEATURES + CLASSES),
        multi_key,
        divergence,
        "KL, nats",
        digits=4,
        is_error=True,
        train=(64,),
        test=(64, 256, 1024, 4096),
        updates=3000,
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
