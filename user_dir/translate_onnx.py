#!/usr/bin/env python3
"""Translates greedily with onnxruntime alone, without PyTorch and fairseq.

    multimax-convert onnx checkpoint_best.pt data-bin exported
    python user_dir/translate_onnx.py exported < subwords.de > subwords.en

Each line is a sentence of subwords, as fairseq-interactive takes it.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime


def words_of(file: Path) -> list[str]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return ["<s>", "<pad>", "</s>", "<unk>", *(line.split(" ")[0] for line in lines)]


def translate(folder: Path, lines: list[str], longest: int = 200) -> list[str]:
    sizes = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    pad, eos = sizes["pad"], sizes["eos"]
    source, target = (words_of(folder / f"dict.{side}.txt") for side in ("source", "target"))
    # In a sentence <s>, <pad> and </s> are unknown words, as in fairseq-interactive.
    ids = {word: number for number, word in enumerate(source) if number > eos}
    rows = [[ids.get(word, ids["<unk>"]) for word in line.split()] + [eos] for line in lines]
    tokens = np.full((len(rows), max(map(len, rows))), pad)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
    encoder, decoder = (
        onnxruntime.InferenceSession(str(folder / f"{side}.onnx"))
        for side in ("encoder", "decoder")
    )
    memory, excluded = encoder.run(None, {"tokens": tokens})
    cache = memory[:, :, :, :, :0]  # no earlier words
    chosen = np.full((len(rows), 1), eos)  # fairseq's decoder starts with the end of sentence
    is_open = np.ones(len(rows), bool)
    for step in range(longest):
        last = {"tokens": chosen[:, -1:], "cache": cache, "memory": memory, "excluded": excluded}
        logits, cache = decoder.run(None, last)
        logits[:, -1, [pad, eos] if step == 0 else [pad]] = -np.inf  # at least one word
        chosen = np.c_[chosen, np.where(is_open, logits[:, -1].argmax(-1), pad)]
        is_open &= chosen[:, -1] != eos
        if not is_open.any():
            break
    return [" ".join(target[word] for word in row if word not in (pad, eos)) for row in chosen]


if __name__ == "__main__":
    sentences = [line.rstrip("\n") for line in sys.stdin]
    print("\n".join(translate(Path(sys.argv[1]), sentences)))
