"""Prints what scripts/quickstart.sh has made: a table, some translations, and where the files are.

python scripts/quickstart_report.py OUT MAPPING...
"""

import json
import sys
from pathlib import Path

from multimax_fairseq.commands.stock import sentences
from multimax_fairseq.commands.tables import markdown
from multimax_fairseq.files import read_lines

HEAD = ["Model", "Mapping", "Parameters", "Tokens/s", "Minutes", "On held-out text"]


def main() -> None:
    out, mappings = Path(sys.argv[1]), sys.argv[2:]
    rows, notes, translations = [], [], {}
    for what, name in (("translation", "Spanish-English"), ("lm", "language model")):
        for mapping in mappings:
            folder = out / what / mapping / "seed-1"
            result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
            if what == "translation":
                output = (folder / "evaluate.log").read_text(encoding="utf-8")
                translations[mapping] = sentences(output, "H")
                score = f"BLEU {result['value']:.1f}"
            else:
                score = f"perplexity {result['value']:.1f} per subword, "
                score += f"{result['word_perplexity']:.1f} per word"
            notes.append(f"{score.split()[0]}: {result['signature']} ({result['protocol']})")
            speed, minutes = result["tokens_per_second"] or 0, result["seconds"] / 60
            parameters = f"{result['parameters']:,}"
            rows.append([name, mapping, parameters, f"{speed:,.0f}", f"{minutes:.1f}", score])
    print("\n" + markdown(HEAD, rows, align=True))
    print("\n".join(dict.fromkeys(notes)))
    print("Words are split at spaces, and each paragraph's end counts as one more.")
    print("Tokens/s and Minutes are those of training.")

    data = out / "data" / "translation"
    sources, references = (read_lines(data / f"test.{language}") for language in ("es", "en"))
    for i in range(min(5, len(references))):
        print(f"\n  {'source':10}{sources[i]}\n  {'reference':10}{references[i]}")
        for mapping, found in translations.items():
            print(f"  {mapping:10}{found[i]}")

    print(f"\nIn {out}:")
    print("  data/translation, data/lm   the text, its authors (ATTRIBUTION.txt), data-bin")
    print("  translation, lm             MAPPING/seed-1: checkpoints, logs, result.json")


if __name__ == "__main__":
    main()
