"""Options of fairseq-train for toy models on the corpus; readers of its logs and files."""

import re

from fairseq import checkpoint_utils

DIMS = {"layers": 1, "embed-dim": 16, "ffn-embed-dim": 32, "attention-heads": 2}
ENCODER, DECODER = (
    [word for name, value in DIMS.items() for word in (f"--{side}-{name}", str(value))]
    for side in ("encoder", "decoder")
)
# Use every sentence. The default multiple of 8 drops most of such a small corpus.
ALL = ("--required-batch-size-multiple", "1")
TRAIN = [
    *("--optimizer", "adam", "--lr", "0.005", "--max-tokens", "120", "--max-update", "6", *ALL),
    *("--save-interval-updates", "2", "--no-epoch-checkpoints", "--log-interval", "1"),
    *("--log-format", "simple", "--seed", "3", "--num-workers", "0"),
]
TRANSLATE = [
    *("--arch", "transformer_iwslt_de_en_multimax", *ENCODER, *DECODER, "--share-all-embeddings"),
    *("--output-normalizer", "multimax", "--dropout", "0.1", *TRAIN),
    *("--criterion", "label_smoothed_multimax_cross_entropy", "--label-smoothing", "0.1"),
]
MODEL_LANGUAGE = [
    *("--task", "language_modeling", "--arch", "transformer_lm_multimax", *DECODER),
    *("--decoder-input-dim", "16", "--decoder-output-dim", "16", "--tokens-per-sample", "32"),
    *("--share-decoder-input-output-embed", *TRAIN, "--criterion", "multimax_cross_entropy"),
]


def parameters(path):
    return checkpoint_utils.load_checkpoint_to_cpu(str(path))["model"]


def losses(log):
    return [float(loss) for loss in re.findall(r"train_inner.*? loss=([\d.]+)", log)]


def hypotheses(output):
    """Return {sentence: (score, text)} of the best hypotheses in fairseq-generate's output."""
    found = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", output, re.MULTILINE)
    return {int(number): (float(score), text) for number, score, text in found}
