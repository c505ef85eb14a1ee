"""Attention to a region of a grid, by a density on the plane (Martins et al. 2020, Table 2).

    python user_dir/continuous_grid.py

Grids of 14 x 14 cells are noise but for a disk somewhere, whose cells are marked and of one class.
A linear function scores each cell, and softmax turns the scores into probabilities. The density has
their mean and covariance, by moment matching. The context is the expectation of 100 Gaussian basis
functions under the density. This file does not import fairseq.
"""

import torch
import torch.nn.functional as F
from torch import nn

from multimax_fairseq import continuous_softmax_nd, continuous_sparsemax_2d
from multimax_fairseq.continuous import match_covariance

DENSITIES = ("softmax", "sparsemax")
CELLS, BASES, VARIANCE, RIDGE = 14, 10, 0.001, 0.1
CLASSES = 4


def cell_centers():
    """Return the centres of the cells on the unit square, (196, 2)."""
    steps = (torch.arange(CELLS, dtype=torch.float64) + 0.5) / CELLS
    return torch.cartesian_prod(steps, steps)


class GridAttention(nn.Module):
    """Context of (B, 196, D) cells, (B, D), with the density's parameters."""

    def __init__(self, size, density="sparsemax"):
        super().__init__()
        self.score, self.density = nn.Linear(size, 1), density
        steps = torch.linspace(0, 1, BASES, dtype=torch.float64)
        self.cells, self.centers = cell_centers(), torch.cartesian_prod(steps, steps)
        self.covariances = VARIANCE * torch.eye(2).double().expand(BASES**2, 2, 2)
        point = torch.zeros(2, 2).double()
        basis = continuous_softmax_nd(self.cells, point, self.centers, self.covariances)
        inner = basis.T @ basis + RIDGE * torch.eye(BASES**2)
        self.regression = torch.linalg.solve(inner, basis.T).float()

    def moments(self, cells):
        """Return the mean, (B, 2), and the covariance, (B, 2, 2), of the discrete attention."""
        probs = self.score(cells).squeeze(-1).softmax(-1).double()
        mean = probs @ self.cells
        off = self.cells - mean[:, None]
        # The covariance of a single cell is 0: add a standard deviation of a tenth of a cell.
        least = (0.1 / CELLS) ** 2 * torch.eye(2)
        return mean, (probs[..., None] * off).mT @ off + least

    def forward(self, cells):
        mean, covariance = self.moments(cells)
        if self.density == "softmax":
            weights = continuous_softmax_nd(mean, covariance, self.centers, self.covariances)
        else:
            scale = match_covariance(covariance)
            weights = continuous_sparsemax_2d(mean, scale, self.centers, self.covariances)
        context = (weights.float()[:, None] @ (self.regression @ cells)).squeeze(1)
        return context, mean, covariance


def draw(count, generator):
    """Return grids, (count, 196, 1 + CLASSES), their classes, and the centres of their disks."""
    classes = torch.randint(CLASSES, (count,), generator=generator)
    centers = 0.2 + 0.6 * torch.rand(count, 2, generator=generator)
    marked = (cell_centers() - centers[:, None]).norm(dim=-1) < 0.15
    noise = torch.randint(CLASSES, (count, CELLS**2), generator=generator)
    shown = torch.where(marked, classes[:, None], noise)
    features = torch.cat([marked[..., None].float(), F.one_hot(shown, CLASSES).float()], -1)
    return features, classes, centers


def train(density="sparsemax", steps=200, seed=1):
    """Return (attention, classifier), trained on grids that are drawn anew for each step."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    attention = GridAttention(1 + CLASSES, density)
    classifier = nn.Linear(1 + CLASSES, CLASSES)
    parameters = [*attention.parameters(), *classifier.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.03)
    for _ in range(steps):
        features, classes, _ = draw(16, generator)
        loss = F.cross_entropy(classifier(attention(features)[0]), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return attention, classifier


@torch.no_grad()
def evaluate(attention, classifier, count=200, seed=2):
    """Return the accuracy, and how far the densities' means are from the disks' centres."""
    features, classes, centers = draw(count, torch.Generator().manual_seed(seed))
    context, mean, _ = attention(features)
    right = classifier(context).argmax(-1) == classes
    return right.float().mean().item(), (mean - centers).norm(dim=-1)


def main():
    for density in DENSITIES:
        accuracy, distance = evaluate(*train(density))
        print(
            f"continuous {density}: accuracy {accuracy:.2f}, the density's mean within "
            f"{distance.quantile(0.9):.3f} of the region's centre in nine of ten grids"
        )


if __name__ == "__main__":
    main()
