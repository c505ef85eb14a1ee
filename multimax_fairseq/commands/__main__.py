"""The commands multimax-average, multimax-compare and multimax-evaluate: their options.

A command's own module imports torch and fairseq, which takes seconds. `--help` does not import it.
"""

import argparse
import importlib
from pathlib import Path

AVERAGE = """\
Averages the parameters of a run's checkpoints into one checkpoint for all fairseq commands.

    multimax-average CHECKPOINT... --output FILE
    multimax-average SAVE_DIR --last N --output FILE

--last N averages the newest N numbered checkpoints of the folder: those of updates
(checkpoint_1_500.pt) if there are enough, else those of epochs (checkpoint3.pt).
"""

COMPARE = """\
Trains softmax and MultiMax on your parallel text, and compares their translations.

    multimax-compare TEXT --source de --target en [--seeds 5] [--out comparison]
    multimax-compare DATA-BIN [--seeds 5] [--out comparison]

TEXT has train, valid and test in both languages, one sentence per line: train.de, train.en, and so
on. The command learns subwords and trains models with softmax attention and models with MultiMax.
It takes the subwords of DATA-BIN, a folder of fairseq-preprocess, as they are.
It prints SacreBLEU, chrF and three translations, and draws the validation losses. The models suit
two CPU cores, or one GPU if there is one. The same command resumes after an interruption.

With several seeds each score has a mean and a standard deviation, and a t-test, paired by seed,
compares the mappings. More --seeds in the same --out train only the models that are missing.
"""

EVALUATE = """\
Evaluates a checkpoint on a folder of fairseq-preprocess: SacreBLEU, or perplexity.

    multimax-evaluate CHECKPOINT DATA-BIN [--average N] [--subset test] [--beam 5] [--longer N]
                      [--json FILE] [--user-dir DIR] [--quantize int8]

Translation: SacreBLEU and chrF of the detokenised text, and BLEU of its Moses tokens, as older
papers report it. The target language selects SacreBLEU's tokenizer: zh, ja-mecab or ko-mecab; char
for Thai, Lao, Khmer, Burmese and Tibetan; 13a for all others. Moses tokens are for 13a alone. A
translation has at most 1.2 tokens per source token plus 10, or the max_len_a and max_len_b of the
training's --eval-bleu-args. References are the lines of DATA-BIN/SUBSET.reference.LANGUAGE, raw
text, if data preparation wrote it. Otherwise they are decoded from DATA-BIN, where an unknown word
matches nothing, and the output gives the number of references with unknown words.
DATA-BIN/evaluation.json says whether scores ignore case, and whether the numbers of sentence pairs
differ from those expected, which the signatures then report.

Language model: perplexity per token, end-of-sentence tokens included, by fairseq's protocol: each
token after at least 400 earlier ones in blocks of 512 (in the same proportion for other blocks).
Blocks are as long as in training; --longer N makes them N times as long.
Also perplexity per word of the text before subwords, if evaluation.json has the number of words.

Both compute in float32, also for models trained with --bf16. A source longer than the model's
maximum is an error: --truncate-source of the training has no effect here.
"""


def average() -> None:
    parser = new_parser("average", AVERAGE)
    parser.add_argument("inputs", nargs="+", type=Path, metavar="CHECKPOINT or SAVE_DIR")
    parser.add_argument("--last", type=int, metavar="N", help="the newest N of SAVE_DIR")
    parser.add_argument("--output", type=Path, required=True)
    start("average", parser)


def compare() -> None:
    parser = new_parser("compare", COMPARE)
    parser.add_argument(
        "text", type=Path, metavar="TEXT", help="the folder of the text, or of fairseq-preprocess"
    )
    parser.add_argument("--source", metavar="LANGUAGE", help="ending of the files to translate")
    parser.add_argument("--target", metavar="LANGUAGE", help="ending of their translations")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("comparison"),
        metavar="DIR",
        help="folder for data, models and results; default: %(default)s",
    )
    parser.add_argument(
        "--updates",
        type=int,
        metavar="N",
        help="of each training; default: 2500 on a CPU, 30000 on a GPU",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        metavar="N",
        help="trainings of each mapping; default: %(default)s",
    )
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="the first seed; default: %(default)s"
    )
    start("compare", parser, resumes=True)


def evaluate() -> None:
    parser = new_parser("evaluate", EVALUATE)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path, metavar="DATA-BIN")
    parser.add_argument(
        "--average",
        type=int,
        metavar="N",
        help="first average the newest N checkpoints of the folder into averageN.pt",
    )
    parser.add_argument("--subset", default="test", help="of DATA-BIN; default test")
    parser.add_argument("--beam", type=int, help="of a translation; default 5")
    parser.add_argument(
        "--longer",
        type=int,
        metavar="N",
        help="evaluate a language model on blocks N times as long as in training",
    )
    parser.add_argument(
        "--quantize",
        choices=["int8"],
        help="also evaluate in int8 on the CPU, and print the difference",
    )
    parser.add_argument(
        "--user-dir",
        type=Path,
        metavar="DIR",
        help="a plugin on top of this one; default multimax_fairseq",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    start("evaluate", parser)


def new_parser(name: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"multimax-{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def start(name: str, parser: argparse.ArgumentParser, resumes: bool = False) -> None:
    """Run a command; a user's mistake or a missing package ends in one sentence."""
    args = parser.parse_args()
    from multimax_fairseq import compat  # imports torch; --help does without it
    from multimax_fairseq.compat.program import program

    with program(parser.prog, resumes):
        compat.apply()
        importlib.import_module(f"multimax_fairseq.commands.{name}").main(args)
