#!/usr/bin/env python3
"""Prints what scripts/quickstart.sh has made: one table, some translations, and where all of it is.

python scripts/quickstart_report.py OUT NORMALIZER...
"""

import re
import sys
from pathlib import Path

from sacrebleu.metrics import BLEU


def lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").split("\n")[:-1]


def training(log: str) -> list[str]:
    """Parameters, tokens a second (target tokens, the median) and minutes, from fairseq's log."""
    parameters = re.findall(r"num\. shared model params: ([\d,]+)", log)[-1]
    speeds = sorted(float(x) for x in re.findall(r" wps=([\d.]+)", log)) or [0.0]
    # By the update, because an interrupted run and the one that goes on may both have made some.
    seconds = dict(re.findall(r"num_updates=(\d+), .*train_wall=(\d+)", log)).values()
    minutes = sum(map(int, seconds)) / 60
    return [parameters, f"{speeds[len(speeds) // 2]:,.0f}", f"{minutes:.1f}"]


def perplexities(folder: Path, data: Path) -> str:
    result = (folder / "test.perplexity").read_text()
    bits = float(re.findall(r"Loss \(base 2\): ([\d.]+)", result)[0])
    evaluated = int(re.findall(r"Evaluated ([\d,]+) tokens", result)[0].replace(",", ""))
    subwords, words = (
        sum(len(line.split()) + 1 for line in lines(data / file)) for file in ("test.sp", "test.en")
    )
    if evaluated != subwords:
        sys.exit(f"quickstart_report.py: {evaluated:,} of {subwords:,} subwords were evaluated.")
    # The same probability of the same text, shared out over other units.
    return f"{2**bits:.1f} a subword, {2 ** (bits * subwords / words):.1f} a word"


def main() -> None:
    out, normalizers = Path(sys.argv[1]), sys.argv[2:]
    data = out / "data" / "translation"
    sources, references = lines(data / "test.es"), lines(data / "test.en")
    bleu = BLEU()

    rows = [["Model", "Normalizer", "Parameters", "Tokens/s", "Minutes", "On held-out text"]]
    translations: dict[str, list[str]] = {}
    for normalizer in normalizers:
        folder = out / f"translation-{normalizer}"
        translations[normalizer] = lines(folder / "test.en")
        score = bleu.corpus_score(translations[normalizer], [references]).score
        numbers = training((folder / "train.log").read_text())
        rows.append(["Spanish-English", normalizer, *numbers, f"BLEU {score:.1f}"])
    for normalizer in normalizers:
        folder = out / f"lm-{normalizer}"
        numbers = training((folder / "train.log").read_text())
        score = f"perplexity {perplexities(folder, out / 'data' / 'lm')}"
        rows.append(["language model", normalizer, *numbers, score])

    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rows.insert(1, ["-" * width for width in widths])
    print()
    for row in rows:
        print("| " + " | ".join(map(str.ljust, row, widths)) + " |")
    print(f"\nBLEU: {bleu.get_signature()}, {len(references):,} sentences, beam 5")
    print("A word: between spaces, and each paragraph's end. Tokens/s, Minutes: of training.")

    for i in range(min(5, len(references))):
        print(f"\n  {'source':10}{sources[i]}\n  {'reference':10}{references[i]}")
        for normalizer, sentences in translations.items():
            print(f"  {normalizer:10}{sentences[i]}")

    print(f"\nIn {out}:")
    print(
        "  data/translation, data/lm            the text, its authors (ATTRIBUTION.txt), data-bin"
    )
    print("  translation-*, lm-*                  model.pt, train.log, evaluate.log, results")


if __name__ == "__main__":
    main()
