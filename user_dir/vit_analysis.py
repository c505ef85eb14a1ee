"""Analyses the attention of trained DeiT models: the MultiMax paper's figures on images.

    python user_dir/vit_analysis.py CHECKPOINT... --data DATA --out OUT [--images N] [--query N]

CHECKPOINT is one or more epoch-N.pt of one run of scripts/imagenet.sh. N images of DATA/val, evenly
spaced, become the tables of a collection in OUT, from which `multimax-analyze plot OUT` draws the
modulators, over-smoothing, the attention weights and roll-out (Figures 3, 4, 5, 8 and 9). For the
checkpoint with the most updates, OUT/image-N.png shows Grad-CAM (Figure 6), and the attention of
one query in three layers (Figure 7).
"""

import argparse
import logging
import os
import sys
from functools import partial
from pathlib import Path

import torch
import vit_multimax  # noqa: F401  registers the models, and says if timm is missing

# isort: split
import timm
from matplotlib.figure import Figure
from timm.data import ImageDataset, create_transform
from tqdm import tqdm

from multimax_fairseq import NORMALIZERS, replace_softmax
from multimax_fairseq.analysis import writing
from multimax_fairseq.errors import UsageError
from multimax_fairseq.signature import signature
from multimax_fairseq.statistics import metrics
from multimax_fairseq.statistics.sums import AttentionSums, QueriesAndKeys

BATCH_SIZE, SHOWN = 8, 4
LAYERS = (0, 4, 9)  # layers 1, 5 and 10 of Figure 7


def load(file):
    """Return the model of a checkpoint, and the checkpoint."""
    state = torch.load(file, map_location="cpu", weights_only=True)
    model = timm.create_model(state["name"], **state["options"])
    model.load_state_dict(state["model"])
    if not hasattr(model.blocks[0].attn, "normalizer"):
        replace_softmax(model, "softmax")  # the same function, which hooks can observe
    return model.eval(), state


def tokens(batch, count):
    """Return the description of an image's tokens: no padding, words or questions."""
    none = torch.zeros(batch, count, dtype=torch.bool)
    position = torch.arange(count).expand(batch, -1)
    return QueriesAndKeys(
        query_padding=none,
        key_padding=none,
        offsets=metrics.relative_positions(position, position)[:, None],
        same=True,
        words=position,
        questions=none[:, None, None],
        interrogatives=none,
    )


class Recorder:
    """Sums over the attention and the outputs of all layers, while the model runs."""

    def __init__(self, model):
        self.sums = [
            AttentionSums(block.attn.normalizer, block.attn.num_heads) for block in model.blocks
        ]
        self.weights = {}  # {layer: (B, H, T, T)} of the last batch
        self.rolled = None
        self.prefix = model.num_prefix_tokens
        for layer, block in enumerate(model.blocks):
            block.attn.normalizer.register_forward_hook(partial(self.on_attention, layer))
            block.register_forward_hook(partial(self.on_output, layer))

    def on_attention(self, layer, module, inputs, probs):
        scores = inputs[0]
        excluded = torch.zeros(1, 1, 1, scores.shape[-1], dtype=torch.bool)
        self.sums[layer].add(scores, probs, excluded, tokens(len(scores), scores.shape[-1]))
        self.weights[layer] = probs
        mean = probs.mean(1)
        self.rolled = metrics.rollout(mean, self.rolled if layer else None)
        own = torch.eye(mean.shape[-1], dtype=torch.bool)  # the residual connection
        similarity = metrics.correlation(self.rolled, mean, own)
        self.sums[layer].layer["rollout_similarity"].add(similarity[None])

    def on_output(self, layer, module, inputs, output):
        patches, sums = output[:, self.prefix :], self.sums[layer].layer
        sums["patch_similarity"].add(metrics.patch_similarity(patches)[None])
        sums["mean_average_distance"].add(metrics.mean_average_distance(patches)[None])


def grad_cam(model, images):
    """Return Grad-CAM (Selvaraju et al. 2017) of the predicted classes, (B, rows, columns).

    The weight of a channel is the mean, over the patches, of the logit's gradient with respect to
    the input of the last attention. The largest value is 1.
    """
    kept = []
    handle = model.blocks[-1].norm1.register_forward_hook(lambda *call: kept.append(call[-1]))
    logits = model(images)
    handle.remove()
    (gradient,) = torch.autograd.grad(logits.amax(-1).sum(), kept)
    gradient, features = (x[:, model.num_prefix_tokens :] for x in (gradient, kept[0].detach()))
    heat = (gradient.mean(1, keepdim=True) * features).sum(-1).relu()
    heat = heat / heat.amax(-1, keepdim=True).clamp(min=1e-12)
    return heat.unflatten(-1, model.patch_embed.grid_size)


def draw(image, heat, weights, query, grid, file):
    """Draw one image: Grad-CAM, and the attention of a query, {layer: (H, patches)}."""
    heads = len(next(iter(weights.values())))
    figure = Figure(figsize=(1.4 * heads, 1.6 * (1 + len(weights))), layout="constrained")
    axes = figure.subplots(1 + len(weights), heads, squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    low, high = image.amin(), image.amax()
    picture = ((image - low) / (high - low)).permute(1, 2, 0)
    extent = (0, grid[1], grid[0], 0)
    for axis in axes[0, :2]:
        axis.imshow(picture, extent=extent)
    axes[0, 0].plot(query % grid[1] + 0.5, query // grid[1] + 0.5, "rs", fillstyle="none")
    axes[0, 0].set_title("image, query", fontsize=8)
    axes[0, 1].imshow(heat, extent=extent, alpha=0.5, cmap="jet")
    axes[0, 1].set_title("Grad-CAM", fontsize=8)
    for row, (layer, heads_of_layer) in zip(axes[1:], weights.items(), strict=True):
        for head, axis in enumerate(row):
            axis.imshow(heads_of_layer[head].unflatten(-1, grid))
            axis.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=8)
    figure.savefig(file, dpi=150)


def describe(file, model, state):
    """Return the checkpoint's entry in collection.json."""
    name = model.blocks[0].attn.normalizer.name
    output = "multimax" if hasattr(model.head, "modulator") else "softmax"
    return {
        "path": str(file),
        "updates": state["updates"],
        "architecture": state["name"],
        "settings": state["options"],
        "normalizer": {"encoder": name},
        "densities": {},
        "output_normalizer": output,
        "labels": {each: NORMALIZERS[each].label for each in (name, output)},
    }


def analyse(args):
    """Write the collection and the pictures."""
    data = ImageDataset(
        str(args.data / "val"),
        transform=create_transform(224, interpolation="bicubic", crop_pct=0.875),
    )
    count = min(args.images, len(data))
    images = torch.utils.data.Subset(data, range(0, len(data), max(1, len(data) // count))[:count])
    files = sorted(args.checkpoints, key=lambda file: load(file)[1]["updates"])
    with writing.temporary_folder(args.out) as folder:
        tables, described = writing.empty_tables(), []
        for file in files:
            model, state = load(file)
            recorder, shown = Recorder(model), None
            batches = torch.utils.data.DataLoader(images, BATCH_SIZE)
            for batch, _ in tqdm(batches, desc=file.name, disable=None):
                with torch.no_grad():
                    model(batch)
                shown = shown or (batch[:SHOWN], dict(recorder.weights))
            for layer, sums in enumerate(recorder.sums):
                writing.add_attention(tables, state["updates"], "encoder", layer, sums)
            if hasattr(model.head, "modulator"):
                tables["parameters"] += writing.parameter_rows(
                    state["updates"], "output", None, model.head.modulator
                )
            described.append(describe(file, model, state))
        metadata = {
            "command": sys.argv,
            **signature("timm"),
            "data": {"folder": str(args.data)},
            "subset": "val",
            "sentences": count,  # the key that figures and reports read
            "epsilon": "the mean of the scores of the query",
            "reference": "1 / the number of tokens",
            "checkpoints": described,
        }
        writing.write(args.out, folder, tables, [], metadata)
    batch, weights = shown
    heats = grad_cam(load(file)[0], batch)
    grid = model.patch_embed.grid_size
    for number, (image, heat) in enumerate(zip(batch, heats, strict=True)):
        first = model.num_prefix_tokens
        chosen = {i: weights[i][number, :, first + args.query, first:] for i in LAYERS}
        draw(image, heat, chosen, args.query, grid, args.out / f"image-{number + 1}.png")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--images", type=int, default=1000, metavar="N", help="default 1000")
    parser.add_argument(
        "--query", type=int, default=34, metavar="N", help="patch, from 0; default 34, the paper's"
    )
    logging.disable(logging.INFO)  # importing fairseq lets all libraries log
    # The plain backend returns the weights.
    os.environ["MULTIMAX_BACKEND"] = "plain"
    try:
        analyse(parser.parse_args())
    except (UsageError, OSError) as error:
        sys.exit(f"vit_analysis.py: error: {error}")


if __name__ == "__main__":
    main()
