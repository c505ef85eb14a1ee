"""Prints what scripts/quickstart.sh has made: one table, some translations, and where all of it is.

python scripts/quickstart_report.py OUT NORMALIZER...
"""

import json
import sys
from pathlib import Path
from typing import Any

import evaluate


def lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").split("\n")[:-1]


def row(name: str, normalizer: str, result: dict[str, Any], score: str) -> list[str]:
    speed, minutes = f"{result['tokens_per_second'] or 0:,.0f}", f"{result['seconds'] / 60:.1f}"
    return [name, normalizer, f"{result['parameters']:,}", speed, minutes, score]


def main() -> None:
    out, normalizers = Path(sys.argv[1]), sys.argv[2:]
    data = out / "data" / "translation"
    sources, references = lines(data / "test.es"), lines(data / "test.en")

    rows = [["Model", "Normalizer", "Parameters", "Tokens/s", "Minutes", "On held-out text"]]
    translations: dict[str, dict[int, str]] = {}
    notes = []
    for what, name in (("translation", "Spanish-English"), ("lm", "language model")):
        for normalizer in normalizers:
            folder = out / what / normalizer / "seed-1"
            result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
            if what == "translation":
                output = (folder / "evaluate.log").read_text(encoding="utf-8")
                translations[normalizer] = evaluate.sentences(output, "H")
                score = f"BLEU {result['value']:.1f}"
            else:
                score = f"perplexity {result['value']:.1f} a subword, "
                score += f"{result['word_perplexity']:.1f} a word"
            notes.append(f"{score.split()[0]}: {result['signature']} ({result['protocol']})")
            rows.append(row(name, normalizer, result, score))

    widths = [max(len(cells[i]) for cells in rows) for i in range(len(rows[0]))]
    rows.insert(1, ["-" * width for width in widths])
    print()
    for cells in rows:
        print("| " + " | ".join(map(str.ljust, cells, widths)) + " |")
    print("\n" + "\n".join(dict.fromkeys(notes)))
    print("Words are split at spaces, and each paragraph's end counts as one more.")
    print("Tokens/s and Minutes are those of training.")

    for i in range(min(5, len(references))):
        print(f"\n  {'source':10}{sources[i]}\n  {'reference':10}{references[i]}")
        for normalizer, sentences in translations.items():
            print(f"  {normalizer:10}{sentences[i]}")

    print(f"\nIn {out}:")
    print("  data/translation, data/lm   the text, its authors (ATTRIBUTION.txt), data-bin")
    print("  translation, lm             NORMALIZER/seed-1: checkpoints, logs, result.json")


if __name__ == "__main__":
    main()
