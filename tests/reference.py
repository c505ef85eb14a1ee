"""Independent float64 references in NumPy and loops; imports nothing from the package."""

import math

import numpy as np
from scipy import integrate


def _parameters(table):
    """Rows of t_b1 t_d1 t_b2 t_d2 b1 d1 b2 d2 as (t_b, t_d, b, d), each one entry per order."""
    for row in table.strip().splitlines():
        t_b1, t_d1, t_b2, t_d2, b1, d1, b2, d2 = map(float, row.split())
        yield [t_b1, t_b2], [t_d1, t_d2], [b1, b2], [d1, d2]


# Learned parameters, a row per layer: Zhou et al. 2024, Table 7 (Deit-small) and 8 (WikiText-103).
TABLE_7 = list(
    _parameters("""
1.8347933 2.815388 0.9864913 0.68440557 1.185235 -1.208543 -2.1076407 1.9158255
1.9773115 1.9971638 0.985555 0.74650276 -0.8580209 0.02481092 -0.49835142 1.9772723
-1.1411996 1.4711196 1.9901285 0.8758977 0.18852632 2.8039892 2.9608543 1.0462786
0.6694808 1.206692 1.8682657 0.93786246 3.4023566 -1.5490056 2.500237 0.986331
0.8902384 1.5881691 1.8920481 0.72857785 2.5070796 -1.1942928 1.8854694 1.2248528
0.6015882 0.877738 2.818536 0.96271396 2.6490533 0.8454426 1.6205754 0.89434063
0.8023207 1.2427123 3.040797 0.84531546 2.6984618 1.2127148 1.2652112 1.2134424
0.64486825 0.79173684 2.5263662 0.968745 3.0230901 0.62191963 1.6307493 1.6259384
0.5796288 0.6852025 3.500835 0.99119073 2.675157 0.68776745 1.3239485 1.5808712
0.54873073 0.8240905 3.5563424 0.9692498 2.176066 0.39797062 0.9276044 1.5223614
0.38645744 0.6951747 4.0935583 0.9958999 1.6583583 0.29572898 0.77263904 2.9975116
0.16383016 0.25565386 3.2074118 0.99102634 1.6852132 -0.04795134 0.9796309 2.1836245
""")
)
TABLE_8 = list(
    _parameters("""
0.6467285 0.7980957 0.98324585 0.9649048 0.7475586 -0.87939453 0.3395996 -0.14501953
0.69018555 0.8063965 0.98350525 0.9720764 0.25073242 0.15991211 0.2956543 -0.17687988
0.8557129 0.79797363 0.98939514 0.9855194 -0.12609863 0.06817627 0.14794922 -0.14428711
0.9662781 0.83569336 1.0231781 1.0240021 -0.07574463 0.8510742 -0.13220215 0.27368164
0.9260864 0.9187622 0.98670197 1.039093 -0.5239258 0.51416016 0.23999023 0.09521484
1.1514893 1.152832 0.98441315 1.0156403 0.1751709 0.05374146 -0.13269043 -0.08825684
""")
)


def sigma(x, t_b, t_d, b, d):
    """Eq. 6, one score at a time."""
    out = np.empty(np.shape(x))
    for index, score in np.ndenumerate(np.asarray(x, dtype=np.float64)):
        value = score
        for n in range(1, len(t_b) + 1):
            value += (1 - t_b[n - 1]) * max(b[n - 1] - score, 0.0) ** n
            value += (t_d[n - 1] - 1) * max(score - d[n - 1], 0.0) ** n
        out[index] = value
    return out


def softmax(scores, excluded=None):
    """Softmax over the last dimension; excluded entries and fully masked rows are 0."""
    scores = np.asarray(scores, dtype=np.float64)
    excluded = (
        np.zeros(scores.shape, bool)
        if excluded is None
        else np.broadcast_to(excluded, scores.shape)
    )
    probs = np.zeros(scores.shape)
    for row in np.ndindex(scores.shape[:-1]):
        kept = [k for k in range(scores.shape[-1]) if not excluded[row][k]]
        if kept:
            top = max(scores[row][k] for k in kept)
            weights = {k: math.exp(scores[row][k] - top) for k in kept}
            for k in kept:
                probs[row][k] = weights[k] / sum(weights.values())
    return probs


def _over_kept(mapping, scores, excluded):
    """Apply a mapping to the unmasked scores of each row; zero elsewhere."""
    probs = np.zeros(scores.shape)
    for row in np.ndindex(scores.shape[:-1]):
        kept = ~np.broadcast_to(excluded, scores.shape)[row]
        if kept.any():
            probs[row][kept] = mapping(scores[row][kept])
    return probs


def entmax(scores, excluded, alpha):
    """p_i = [(alpha - 1) x_i - tau]_+ ^ (1 / (alpha - 1)), with tau by bisection."""

    def mapping(x):
        x = (alpha - 1) * x
        low, high = x.max() - 1, x.max()
        for _ in range(200):
            tau = (low + high) / 2
            probs = np.maximum(x - tau, 0) ** (1 / (alpha - 1))
            low, high = (tau, high) if probs.sum() > 1 else (low, tau)
        return probs

    return _over_kept(mapping, scores, excluded)


def fenchel_young_loss(scores, target, alpha):
    """(p - onehot(y)) . z + sum_k (p_k - p_k^alpha) / (alpha (alpha - 1)), summed over rows."""
    loss = 0.0
    for row, wanted in zip(scores, target, strict=True):
        probs = entmax(row[None], np.zeros((1, len(row)), bool), alpha)[0]
        entropy = (probs - probs**alpha).sum() / (alpha * (alpha - 1))
        loss += probs @ row - row[wanted] + entropy
    return loss


def topk(scores, excluded, k):
    return _over_kept(
        lambda x: softmax(x, x < sorted(x)[-min(k, len(x))]), np.asarray(scores), excluded
    )


def evsoftmax(scores, excluded, training=False):
    def mapping(x):
        weights = ((x >= x.mean()) + (1e-6 if training else 0.0)) * np.exp(x - x.max())
        return weights / weights.sum()

    return _over_kept(mapping, scores, excluded)


def softmax_with_sink(scores, excluded, sink):
    return _over_kept(lambda x: softmax(np.append(x, sink)[None])[0, :-1], scores, excluded)


def ssmax(scores, excluded, length_scale):
    return _over_kept(
        lambda x: softmax(length_scale * math.log(len(x)) * x[None])[0], scores, excluded
    )


def asentmax(scores, excluded, beta, gamma):
    def mapping(x):
        factor = 1 + beta * math.log(len(x) + 1) ** gamma
        return entmax(factor * x[None], np.zeros((1, len(x)), bool), 1.5)[0]

    return _over_kept(mapping, scores, excluded)


def softpick(scores, excluded):
    def mapping(x):
        # exp(base) cancels; it prevents overflow.
        base = max(x.max(), 0.0)
        parts = np.where(
            x < 1, np.expm1(np.minimum(x, 1)) * np.exp(-base), np.exp(x - base) - np.exp(-base)
        )
        return np.maximum(parts, 0) / (np.abs(parts).sum() + 1e-6 * np.exp(-base))

    return _over_kept(mapping, scores, excluded)


def sigmoid(scores, excluded, bias=None):
    def mapping(x):
        shift = -math.log(len(x)) if bias is None else bias
        return np.exp(-np.logaddexp(0, -(x + shift)))

    return _over_kept(mapping, scores, excluded)


def adaptive_temperature(scores, excluded):
    def mapping(x):
        probs = softmax(x[None])[0]
        entropy = -sum(p * math.log(p) for p in probs if p > 0)
        fit = np.polyval([-0.037, 0.481, -2.3, 4.917, -1.791], entropy)
        return softmax((max(fit, 1.0) if entropy > 0.5 else 1.0) * x[None])[0]

    return _over_kept(mapping, scores, excluded)


def attention(query, key, value, map_scores, excluded=None):
    """softmax(map_scores(Q K^T / sqrt(D))) V."""
    scores = np.einsum("bhtd,bhsd->bhts", query, key) / math.sqrt(query.shape[-1])
    return np.einsum("bhts,bhsd->bhtd", softmax(map_scores(scores), excluded), value)


def cross_entropy(logits, target, label_smoothing=0.0, ignore_index=-100):
    """Return summed (loss, nll); smoothing spreads equally over the V - 1 other words."""
    loss = nll = 0.0
    for row, wanted in zip(logits, target, strict=True):
        if wanted == ignore_index:
            continue
        log_probs = row - row.max() - math.log(np.exp(row - row.max()).sum())
        others = np.delete(log_probs, wanted)
        nll -= log_probs[wanted]
        loss -= (1 - label_smoothing) * log_probs[wanted] + label_smoothing * others.mean()
    return loss, nll


def symmetric_divergence(logits, other):
    """(KL(p|q) + KL(q|p)) / 2 for each pair of rows."""
    found = np.empty(len(logits))
    for n, rows in enumerate(zip(logits, other, strict=True)):
        log_p, log_q = (x - x.max() - math.log(np.exp(x - x.max()).sum()) for x in rows)
        pairs = list(zip(log_p, log_q, strict=True))
        there = sum(math.exp(p) * (p - q) for p, q in pairs)
        back = sum(math.exp(q) * (q - p) for p, q in pairs)
        found[n] = (there + back) / 2
    return found


def rdrop(logits, other, target, alpha, label_smoothing=0.0, ignore_index=-100):
    """Return summed (loss, divergence) for the logits of two passes: R-Drop (Liang et al. 2021)."""
    loss = sum(
        cross_entropy(pass_, target, label_smoothing, ignore_index)[0] for pass_ in (logits, other)
    )
    counted = np.asarray(target) != ignore_index
    divergence = symmetric_divergence(logits[counted], other[counted]).sum()
    return loss + alpha * divergence, divergence


def multi_modality(scores, probs, threshold):
    """Definition 3.2."""
    top = scores.argmax()
    relevant = [n for n in range(len(scores)) if n != top and scores[n] > threshold]
    return 1 - np.mean([probs[top] - probs[n] for n in relevant])


def sparsity(scores, probs, threshold, reference):
    """Definition 3.3."""
    low = [n for n in range(len(scores)) if scores[n] < threshold]
    return np.mean([math.exp((reference - probs[n]) / reference - 1) for n in low])


def gaussian(t, center, width):
    return math.exp(-(((t - center) / width) ** 2) / 2) / (width * math.sqrt(2 * math.pi))


def integral(function, low, high, center, width):
    """Integrate a function with a Gaussian factor; splits at the Gaussian, so no peak is missed."""
    marks = [center + side * width for side in (-9, -3, -1, 0, 1, 3, 9)]
    cuts = [low, *(mark for mark in marks if low < mark < high), high]
    ends = zip(cuts, cuts[1:], strict=False)
    return sum(integrate.quad(function, *pair, epsabs=1e-13, epsrel=1e-12)[0] for pair in ends)


def continuous_attention(density, slopes, low, high, center, width):
    """Return the expectation of a Gaussian basis function and its derivatives.

    They are integrals of the function times the density and times each derivative of the density.
    The derivatives integrate to zero, so subtracting a constant from the function avoids
    cancellation.
    """
    middle = gaussian((low + high) / 2, center, width)
    parts = [(density, 0.0), *((slope, middle) for slope in slopes)]
    return [
        integral(
            lambda t, f=f, c=c: f(t) * (gaussian(t, center, width) - c), low, high, center, width
        )
        for f, c in parts
    ]


def normal_density(mean, variance):
    """Return a density, its derivatives and the ends of the integration.

    The derivatives are with respect to mean and variance.
    """
    sigma = math.sqrt(variance)

    def density(t):
        return gaussian(t, mean, sigma)

    slopes = (
        lambda t: density(t) * (t - mean) / variance,
        lambda t: density(t) * ((t - mean) ** 2 / variance - 1) / (2 * variance),
    )
    return density, slopes, mean - 12 * sigma, mean + 12 * sigma


def truncated_parabola(mean, variance):
    """The same for [-lambda - (t - mean)^2 / (2 variance)]_+ (Martins et al. 2020, Eq. 37)."""
    level = (3 / (2 * math.sqrt(variance))) ** (2 / 3) / 2  # -lambda
    half = math.sqrt(2 * variance * level)
    slopes = (
        lambda t: (t - mean) / variance,
        # The level's own derivative is -level / (3 variance).
        lambda t: (t - mean) ** 2 / (2 * variance**2) - level / (3 * variance),
    )
    return lambda t: level - (t - mean) ** 2 / (2 * variance), slopes, mean - half, mean + half


def paraboloid_expectation(mean, covariance, center, spread):
    """Return the expectation of a 2-D Gaussian basis function under a truncated paraboloid.

    Also returns its derivatives with respect to mean, (2,), and covariance, (2, 2). Adaptive
    cubature over the ellipse in polar coordinates (Martins et al. 2020, Eq. 11 and Prop. 3.2).
    """
    inverse, precise = np.linalg.inv(covariance), np.linalg.inv(spread)
    level = (math.gamma(3) / math.sqrt(np.linalg.det(2 * math.pi * covariance))) ** 0.5  # -lambda
    root = np.linalg.cholesky(covariance) * math.sqrt(2 * level)
    scale = 1 / (2 * math.pi * math.sqrt(np.linalg.det(spread)))

    def integrand(points):
        radius, angle = points.T
        way = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], -1) @ root.T
        off = way + mean - center
        basis = scale * np.exp(-np.einsum("ni,ij,nj->n", off, precise, off) / 2)
        basis *= radius * np.linalg.det(root)
        pull = way @ inverse
        density = level - np.einsum("ni,ni->n", way, pull) / 2
        by_covariance = (pull[:, :, None] * pull[:, None] - level / 2 * inverse) / 2
        rows = [density[:, None], pull, by_covariance.reshape(-1, 4)]
        return basis[:, None] * np.concatenate(rows, -1)

    found = integrate.cubature(integrand, [0, 0], [1, 2 * math.pi], rtol=1e-11, atol=1e-11)
    value, by_mean, by_covariance = np.split(found.estimate, [1, 3])
    return value[0], by_mean, by_covariance.reshape(2, 2)
