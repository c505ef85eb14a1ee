"""Writes the corpus as subwords or words, binarized by fairseq-preprocess."""

from commands import run
from corpus import ENGLISH, GERMAN
from fairseq import options
from fairseq_cli import preprocess

PAIR = ("--source-lang", "de", "--target-lang", "en", "--joined-dictionary")


def subwords(text):
    """Return a question and eleven lines, with each long word as two subwords."""
    lines = ["Ist das das Recht jedes Menschen ?", *text.splitlines()[:11]]
    return [
        " ".join(w if len(w) < 7 else f"{w[:4]}@@ {w[4:]}" for w in line.split()) for line in lines
    ]


def binarize(folder, out, *flags, **prefixes):
    """Run fairseq-preprocess in this process; `prefixes` are {split: file prefix}."""
    words = [*flags, "--destdir", str(folder / out)]
    for split, prefix in prefixes.items():
        words += [f"--{split}pref", str(folder / prefix)]
    preprocess.main(options.get_preprocessing_parser().parse_args(words))


def write_subwords(folder):
    """Write mt/ and lm/, and mt-other/ with a smaller dictionary; return the folder."""
    for language, text in (("de", GERMAN), ("en", ENGLISH)):
        (folder / f"all.{language}").write_text("\n".join(subwords(text)) + "\n")
        (folder / f"less.{language}").write_text("\n".join(subwords(text)[:3]) + "\n")
        (folder / f"none.{language}").write_text("")
    binarize(folder, "mt", *PAIR, train="all", valid="all", test="none")
    binarize(folder, "mt-other", *PAIR, train="less", valid="less")
    binarize(folder, "lm", "--only-source", train="all.en", valid="all.en")
    return folder


def write_words(folder):
    """Write mt/ and lm/, each with train, valid and test, by the command; return the folder."""
    for language, lines in (("de", GERMAN.splitlines()), ("en", ENGLISH.splitlines())):
        for split, part in (("train", lines), ("valid", lines[::3]), ("test", lines[1::3])):
            (folder / f"{split}.{language}").write_text("\n".join(part) + "\n")
    prefixes = ["--trainpref", "train", "--validpref", "valid", "--testpref", "test"]
    run(folder, "fairseq-preprocess", *PAIR, *prefixes, "--destdir", "mt")
    prefixes = [f"{word}.en" if word in ("train", "valid", "test") else word for word in prefixes]
    run(folder, "fairseq-preprocess", "--only-source", *prefixes, "--destdir", "lm")
    return folder
