"""scripts/imdb.sh on 200 reviews in the official layout: prepared, trained, killed, resumed."""

import importlib
import io
import json
import random
import tarfile
import zipfile

import pytest
from commands import ROOT, kill_after, run

pytestmark = pytest.mark.long

WORDS = {0: ["awful", "dull", "bad", "weak"], 1: ["great", "fine", "good", "fun"]}
FILLER = "the film was a story with some people in it and an end".split()
SIZE = 6


def review(label, draw):
    words = draw.choices(FILLER, k=20) + draw.choices(WORDS[label], k=4) + ["unseen"]
    draw.shuffle(words)
    return " ".join(words) + ".<br /><br />It&amp;s over!"


def archive(file):
    draw = random.Random(1)
    with tarfile.open(file, "w:gz") as packed:
        for split in ("train", "test"):
            for label, name in ((0, "neg"), (1, "pos")):
                for number in range(50):
                    text = review(label, draw).encode()
                    member = tarfile.TarInfo(f"aclImdb/{split}/{name}/{number}_{1 + 8 * label}.txt")
                    member.size = len(text)
                    packed.addfile(member, io.BytesIO(text))
        member = tarfile.TarInfo("aclImdb/train/unsup/0_0.txt")
        packed.addfile(member, io.BytesIO())
    return file


def vectors(file):
    draw = random.Random(2)
    # As in GloVe's 840B vectors, one word contains spaces.
    words = [*WORDS[0], *WORDS[1], *FILLER, ".", "!", "nowhere", ". . ."]
    lines = (f"{w} {' '.join(f'{draw.gauss(0, 1):.4f}' for _ in range(SIZE))}\n" for w in words)
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr("glove.txt", "".join(lines))
    return file


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("imdb")
    given = ("--archive", archive(folder / "reviews.tar.gz"))
    given += ("--vectors", vectors(folder / "glove.zip"), "--out", folder / "data")
    run(folder, str(ROOT / "data-prep" / "imdb.sh"), *given)
    return folder / "data" / "text"


def train(text, out, *options):
    words = [str(ROOT / "scripts" / "imdb.sh"), "--data", str(text), "--out", str(out)]
    return [*words, "--epochs", "4", *options]


def test_data_prep_splits_and_tokenizes_reviews(prepared):
    counts = {
        split: len((prepared / f"{split}.tsv").read_text().splitlines())
        for split in ("train", "valid", "test")
    }
    label, _, first = (prepared / "train.tsv").read_text().splitlines()[0].partition("\t")
    rows = [line.split(" ") for line in (prepared / "vectors.txt").read_text().splitlines()]
    known = [row[0] for row in rows]

    assert counts == {"train": 90, "valid": 10, "test": 100}
    assert label == "0" and first.endswith(". It & s over !")
    assert "awful" in known and not {"nowhere", "unseen"} & {*known}
    assert known.count(".") == 1 and {len(row) for row in rows} == {1 + SIZE}


def test_settings_are_those_of_the_paper(monkeypatch):
    """Table 3 of Martins et al. 2020."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    imdb = importlib.import_module("imdb")
    assert (imdb.BATCH_SIZE, imdb.HIDDEN, imdb.EPOCHS, imdb.PATIENCE) == (16, 128, 10, 5)
    assert (imdb.LEARNING_RATE, imdb.L2) == (0.001, 0.0001)
    assert len(imdb.ROWS) == 14 and {row.num_bases for row in imdb.ROWS.values()} == {32, 64, 128}


def test_data_prep_refuses_missing_vectors(tmp_path):
    words = (str(ROOT / "data-prep" / "imdb.sh"), "--vectors", "none.txt")
    assert "--vectors none.txt does not exist" in run(tmp_path, *words, code=1)


def test_imdb_resumes_a_killed_run_with_the_same_result(prepared, tmp_path):
    row = ("--rows", "combined_sparsemax_32")
    printed = run(tmp_path, *train(prepared, tmp_path / "whole", *row))
    kill_after("epoch 2 of 4: batch", tmp_path, *train(prepared, tmp_path / "killed", *row))

    resumed = run(tmp_path, *train(prepared, tmp_path / "killed", *row))

    whole, again = (
        json.loads((tmp_path / name / "results.jsonl").read_text()) for name in ("whole", "killed")
    )
    assert "resuming after epoch 1" in resumed and "Nothing to do" not in resumed
    assert whole["value"] == again["value"]
    assert whole["validation"] == again["validation"] and whole["epochs"] == 4
    assert f"| combined sparsemax, N = 32 | {whole['value']:.2f} |" in printed
    assert "| 91.10 |" in printed


def test_imdb_skips_finished_runs_and_tabulates_all(prepared, tmp_path):
    command = train(prepared, tmp_path / "out", "--rows", "sparsemax,continuous_softmax_64")
    command[command.index("--epochs") + 1] = "1"
    run(tmp_path, *command)

    printed = run(tmp_path, *command)

    assert printed.count("Nothing to do") == 2
    assert "| discrete sparsemax |" in printed and "| continuous softmax, N = 64 |" in printed


def test_imdb_refuses_another_row_on_other_data(prepared, tmp_path):
    trained = tmp_path / "out" / "sparsemax" / "seed-1"
    trained.mkdir(parents=True)
    (trained / "command").write_text("of other reviews\nscripts/imdb.sh\n")
    output = run(tmp_path, *train(prepared, tmp_path / "out", "--rows", "softmax"), code=1)
    assert "sparsemax/seed-1' was trained on other data" in output


def test_imdb_names_an_unknown_row(prepared, tmp_path):
    output = run(tmp_path, *train(prepared, tmp_path, "--rows", "entmax"), code=2)
    assert "imdb.sh: error: argument --rows: no row 'entmax': choose from softmax, " in output
