"""Writes the files of `multimax-analyze collect`, with random but plausible numbers."""

import json

import numpy as np
import pandas as pd
import torch
from examples import EXAMPLES
from reference import TABLE_8, normal_density, truncated_parabola

from multimax_fairseq import Modulator, normalize

SYMBOLS = ("t_b", "t_d", "b", "d")
TEMPERATURES = [0.25, 0.35, 0.5, 0.71, 1.0, 1.41, 2.0, 2.83, 4.0]
SCORE_EDGES = [-np.inf, *np.arange(-40, 40.5, 0.5), np.inf]
PROBABILITY_EDGES = [0.0, *np.logspace(-8, 0, 65)]
BUCKETS = ["1-50", "51-200", "201-1000", "1001-4000", "4001-"]
KEYS, QUERIES = 20, 48
GERMAN = "ein kleiner Hund läuft über eine grüne Wiese ?".split()
ENGLISH = "a small dog is running across a green meadow ?".split()


def write(
    folder,
    normalizer="multimax",
    *,
    language_model=False,
    updates=(1000, 4000, 16000),
    layers=4,
    heads=4,
    order=2,
    separate=False,
    temperature=False,
    output=None,
    continuous=None,
    seed=1,
):
    """Write a collection into a folder and return the folder.

    Args:
        output: the output normalizer; by default the architecture's.
        continuous: {kind of attention: density}.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    output = output or ("multimax" if language_model and normalizer == "multimax" else "softmax")
    kinds = ["decoder"] if language_model else ["encoder", "decoder", "cross"]
    tables = {name: [] for name in ("parameters", "heads", "layers", "histograms", "temperatures")}
    for update in updates:
        trained = update / max(updates)
        for kind in kinds:
            for layer in range(layers):
                row = {"updates": update, "place": kind, "layer": layer}
                at = {"updates": update, "place": kind, "layer": layer}
                learned = learn(random, normalizer, layer, heads, trained, order, separate)
                if temperature:
                    learned = {"temperature": [0.8 + 0.1 * layer]}
                tables["parameters"] += [
                    {**at, "head": head if len(values) > 1 else None, "name": name, "value": value}
                    for name, values in learned.items()
                    for head, value in enumerate(values)
                ]
                # Scores of cross-attention reach the range in which sigma decreases.
                spread = (1.0 + trained + 0.3 * layer) * (3 if kind == "cross" else 1)
                scores = random.normal(0, spread, (heads, QUERIES, KEYS)) - 0.5
                scores[:, np.arange(QUERIES), np.arange(QUERIES) % KEYS] += 2 + layer
                probs, slope = mapping(normalizer, learned, scores)
                tables["heads"] += [
                    {
                        **row,
                        "head": head,
                        **head_metrics(random, kind, scores[head], probs[head], slope[head]),
                    }
                    for head in range(heads)
                ]
                depth = (layer + 1) / layers
                mixing = 0.6 if normalizer == "softmax" else 0.35
                similarity = mixing * depth * (0.5 + trained / 2)
                tables["layers"].append(
                    {
                        **row,
                        "head_diversity": 0.3 + 0.2 * np.sin(3 * depth) + random.uniform(0, 0.1),
                        "patch_similarity": similarity if kind != "cross" else None,
                        "mean_average_distance": 1 - similarity if kind != "cross" else None,
                        "rollout_similarity": 1 - mixing * (depth - 1 / layers),
                    }
                )
                tables["histograms"] += histograms(row, scores, probs)
                tables["temperatures"] += [
                    {**row, "temperature": t, **trade(scores, torch_softmax(scores / t))}
                    for t in TEMPERATURES
                ]
                tables["temperatures"].append({**row, "temperature": None, **trade(scores, probs)})
        if output == "multimax":
            tables["parameters"] += [
                {"updates": update, "place": "output", "name": name, "value": values[0]}
                for name, values in learn(random, "multimax", 0, 1, trained, order, False).items()
            ]
    for name, rows in tables.items():
        columns = ["updates", "place", "layer", "head", "name", "value"]
        frame = pd.DataFrame(rows, columns=columns if name == "parameters" else None)
        if name == "parameters":
            frame = frame.astype({"layer": "Int64", "head": "Int64"})
        frame.to_csv(folder / f"{name}.csv", index=False)
    output_rows(random, updates, output, normalizer).to_csv(folder / "output.csv", index=False)
    examples = [example(random, kinds, layers, heads, normalizer) for _ in range(2)]
    if continuous:
        for found in examples:
            found["densities"] = {
                kind: [densities(density, np.array(probs)) for probs in found["attention"][kind]]
                for kind, density in continuous.items()
            }
    (folder / "examples.json").write_text(json.dumps(examples), encoding="utf-8")
    signed = signature(folder, normalizer, kinds, output, updates, order, separate, seed)
    if continuous:
        signed["checkpoints"][-1]["densities"] = continuous
    (folder / "collection.json").write_text(json.dumps(signed, indent=2), encoding="utf-8")
    return folder


def learn(random, normalizer, layer, heads, trained, order, separate):
    """{symbol: values}, one value or one per head, between the identity and the paper's values."""
    if normalizer == "alpha_entmax":
        ends = random.uniform(1.05, 1.95, heads)
        return {"alpha": 1.5 + (ends - 1.5) * trained}
    if normalizer != "multimax":
        return {}
    learned = {}
    for symbol, values in zip(SYMBOLS, TABLE_8[layer % len(TABLE_8)], strict=True):
        neutral = 1.0 if symbol.startswith("t") else 0.0
        for n, value in enumerate(values[:order], 1):
            noise = random.normal(0, 0.02 / n**3, heads if separate else 1)
            learned[f"{symbol}{n}"] = neutral + (value - neutral) * trained + noise
    return learned


def mapping(normalizer, learned, scores):
    """Return the probabilities and the slope of sigma at each score."""
    scores = torch.from_numpy(scores)
    slope = np.ones(scores.shape)
    if normalizer == "multimax":
        terms = {symbol: [v for k, v in learned.items() if k[:-1] == symbol] for symbol in SYMBOLS}
        shared = all(len(values) == 1 for values in learned.values())
        values = {
            symbol: [float(v[0]) for v in vs] if shared else np.stack(vs, -1).tolist()
            for symbol, vs in terms.items()
        }
        modulator = Modulator.from_values(**values)
        (slope,) = torch.autograd.grad(modulator(scores.requires_grad_()).sum(), scores)
        return normalize("multimax", scores, modulator=modulator).detach(), slope.numpy()
    if normalizer == "alpha_entmax":
        alpha = torch.as_tensor(learned["alpha"])[:, None, None]
        return normalize(normalizer, scores, alpha=alpha), slope
    if "temperature" in learned:
        return normalize("softmax", scores, temperature=learned["temperature"][0]), slope
    arguments = {} if normalizer == "softmax" else EXAMPLES[normalizer].arguments
    return normalize(normalizer, scores, **arguments), slope


def torch_softmax(scores):
    return torch.from_numpy(scores).softmax(-1)


def trade(scores, probs):
    """Sparsity and multi-modality with the thresholds at zero and the reference 1 / KEYS."""
    probs = np.asarray(probs)
    low = scores < 0
    relevant = (scores > 0) & (scores < scores.max(-1, keepdims=True))
    gap = probs.max(-1, keepdims=True) - probs
    return {
        "sparsity": np.exp(-probs * KEYS)[low].mean(),
        "multi_modality": 1 - gap[relevant].mean(),
    }


def head_metrics(random, kind, scores, probs, slope):
    probs = np.asarray(probs)
    shares = probs / np.maximum(probs.sum(-1, keepdims=True), 1e-30)
    logs = np.log(np.where(shares > 0, shares, 1))
    confidence = float(np.mean(probs.max(-1)))
    return {
        "queries": QUERIES,
        **trade(scores, probs),
        "entropy": -(shares * logs).sum(-1).mean(),
        "density": (probs > 0).mean(),
        "mass": probs.sum(-1).mean(),
        "offset": int(random.integers(-2, 1 if kind == "decoder" else 3)),
        "confidence": confidence,
        "bpe_merging": random.uniform(0.02, 0.4) if kind != "cross" else None,
        "interrogation": random.uniform(0, 0.3) if kind != "decoder" else None,
        "past_turning_point": (slope < 0).mean(),
    }


def histograms(row, scores, probs):
    rows = []
    for quantity, values, edges in (
        ("score", scores, SCORE_EDGES),
        ("probability", np.asarray(probs), PROBABILITY_EDGES),
    ):
        values = values.ravel()
        if quantity == "probability":
            rows.append(
                {**row, "quantity": quantity, "left": 0, "right": 0, "count": (values == 0).sum()}
            )
            values = values[values > 0]
        for left, right in zip(edges[:-1], edges[1:], strict=True):
            count = ((values > left) & (values <= right)).sum()
            rows.append({**row, "quantity": quantity, "left": left, "right": right, "count": count})
    densities = (np.asarray(probs) > 0).mean(-1)  # of each query, as a sentence of its own
    counts, edges = np.histogram(densities, np.linspace(0, 1, 21))
    rows += [
        {**row, "quantity": "density", "left": left, "right": right, "count": count}
        for left, right, count in zip(edges, edges[1:], counts, strict=False)
    ]
    return rows


def output_rows(random, updates, output, normalizer):
    rows = []
    for update in updates:
        trained = update / max(updates)
        for rank, bucket in enumerate(BUCKETS):
            nll = 2 + 0.05 * len(normalizer) + 1.4 * rank - 0.8 * trained
            probability = float(np.exp(-nll))
            row = {
                "updates": update,
                "bucket": bucket,
                "tokens": 10 ** (5 - rank // 2),
                "entropy": nll + 0.4,
                "sparsity": 0.8 + 0.03 * rank,
                "nll": nll,
                "nll_without_modulator": None,
                "probability": probability,
                "probability_without_modulator": None,
            }
            if output == "multimax":
                row["nll_without_modulator"] = nll * 1.08 + random.uniform(0, 0.1)
                row["probability_without_modulator"] = probability * 0.9
            rows.append(row)
    return pd.DataFrame(rows)


def example(random, kinds, layers, heads, normalizer):
    """A sentence pair, long words split into two subwords, with attention and roll-out."""
    sides = {"source": subwords(GERMAN), "target": subwords(ENGLISH)}
    if kinds == ["decoder"]:
        sides["source"] = {"tokens": [], "words": []}
    lengths = {side: len(found["tokens"]) for side, found in sides.items()}
    attention, rollout = {}, {}
    for kind in kinds:
        shape = {
            "encoder": (lengths["source"], lengths["source"]),
            "decoder": (lengths["target"], lengths["target"]),
            "cross": (lengths["target"], lengths["source"]),
        }[kind]
        near = -0.4 * np.abs(np.arange(shape[0])[:, None] - np.arange(shape[1])) + 2
        scores = near + random.normal(0, 1.5, (layers, heads, *shape))
        excluded = np.triu(np.ones(shape, bool), 1) if kind == "decoder" else np.zeros(shape, bool)
        name = normalizer if normalizer in ("softmax", "sparsemax", "entmax15") else "entmax15"
        probs = normalize(name, torch.from_numpy(scores), mask=torch.from_numpy(excluded))
        attention[kind] = probs.numpy().round(4).tolist()
        if kind != "cross":
            mixed = np.eye(shape[0])
            rollout[kind] = []
            for layer in probs.numpy():
                mixed = (layer.mean(0) + np.eye(shape[0])) / 2 @ mixed
                rollout[kind].append(mixed.round(4).tolist())
    return {**sides, "attention": attention, "rollout": rollout}


def densities(kind, probs):
    """The densities of a layer with the moments of its probabilities, (heads, queries, keys)."""
    keys = probs.shape[-1]
    time = np.arange(1, keys + 1) / keys
    probs = probs / probs.sum(-1, keepdims=True)
    mean = probs @ time
    variance = np.maximum(probs @ time**2 - mean**2, 1e-6)
    form = normal_density if kind == "softmax" else truncated_parabola
    values, support = np.zeros(probs.shape), np.zeros((*mean.shape, 2), int)
    for row in np.ndindex(mean.shape):
        density, _, low, high = form(mean[row], variance[row])
        inside = (time > low) & (time < high) | (kind == "softmax")
        values[row] = [density(t) if within else 0 for t, within in zip(time, inside, strict=True)]
        support[row] = [inside.argmax(), inside.argmax() + inside.sum()]
    return {
        "kind": kind,
        "positions": time.round(6).tolist(),
        "mean": mean.round(6).tolist(),
        "variance": variance.round(8).tolist(),
        "values": values.round(4).tolist(),
        "support": support.tolist(),
    }


def subwords(words):
    tokens, ranges = [], []
    for word in words:
        parts = [word] if len(word) < 6 else [f"{word[:4]}@@", word[4:]]
        ranges.append({"word": word, "start": len(tokens), "end": len(tokens) + len(parts)})
        tokens += parts
    ranges.append({"word": "</s>", "start": len(tokens), "end": len(tokens) + 1})
    return {"tokens": [*tokens, "</s>"], "words": ranges}


def signature(folder, normalizer, kinds, output, updates, order, separate, seed):
    return {
        "command": ["multimax-analyze", "collect", "checkpoint.pt", "data-bin", "--out", "DIR"],
        "versions": {"multimax-fairseq": "0.1.0", "torch": torch.__version__},
        "commit": "0" * 40,
        "date": "2026-01-01T00:00:00+00:00",
        "data": {"folder": "data-bin", "sha256": "0" * 64},
        "subset": "valid",
        "sentences": 100,
        "tokens": 1234,
        "epsilon": 0.0,
        "reference": 1 / KEYS,
        "checkpoints": [
            {
                "path": f"checkpoints/checkpoint_{update}.pt",
                "sha256": "0" * 64,
                "updates": update,
                "architecture": "transformer_lm_multimax" if len(kinds) == 1 else "transformer",
                "normalizer": {kind: normalizer for kind in kinds},
                "output_normalizer": output,
                "seed": seed,
                "settings": {
                    "multimax_order": order,
                    "multimax_terms": "both",
                    "multimax_heads": "separate" if separate else "shared",
                },
            }
            for update in updates
        ],
    }
