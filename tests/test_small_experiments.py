"""scripts/multi30k.sh and scripts/speeches.sh end to end, on small archives."""

import gzip
import itertools
import json
import shlex

import pytest
import torch
from commands import ROOT, run
from corpus import ENGLISH, GERMAN
from prep_archives import speeches_wheel, stated

pytestmark = pytest.mark.long

TRAIN = "--lr 0.005 --warmup-updates 2 --log-interval 1 --num-workers 0 --max-tokens 400"
LAYER = "--{0}-layers 1 --{0}-embed-dim 16 --{0}-ffn-embed-dim 32"
COUNTS = {"train": 29_000, "val": 1_014, "test_2016_flickr": 1_000}


def write(folder, name, language, lines):
    """Write a file; compress the training text, as the repository does."""
    text = "".join(f"{line}\n" for line in lines).encode()
    if name == "train":
        with gzip.open(folder / f"{name}.{language}.gz", "wb", compresslevel=1) as file:
            file.write(text)
    else:
        (folder / f"{name}.{language}").write_bytes(text)


@pytest.fixture(scope="module")
def multi30k(tmp_path_factory):
    """Texts with the official numbers of lines and a small vocabulary."""
    folder = tmp_path_factory.mktemp("raw")
    for language, text in (("de", GERMAN), ("en", ENGLISH)):
        lines = text.splitlines()
        for name, count in COUNTS.items():
            write(folder, name, language, itertools.islice(itertools.cycle(lines), count))
    return folder


@pytest.fixture(scope="module")
def speeches(tmp_path_factory):
    return stated(speeches_wheel(tmp_path_factory.mktemp("wheel")))


def lines_of(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_multi30k_trains_named_rows_and_skips_finished_ones(multi30k, tmp_path):
    layers = f"{LAYER.format('encoder')} {LAYER.format('decoder')}"
    command = ["bash", ROOT / "scripts" / "multi30k.sh", "--archive", multi30k]
    command += ["--data-bin", "data/data-bin", "--out", "out", "--seeds", "1", "--max-update", "2"]
    rest = ["--", *layers.split(), *TRAIN.split()]
    run(tmp_path, *command, "--rows", "freeze_third", *rest)
    before = lines_of(tmp_path / "out")
    output = run(tmp_path, *command, "--rows", "freeze_third,self_attention", *rest)
    assert "multi30k freeze_third, seed 1 is finished." in output
    lines = {line["row"]: line for line in lines_of(tmp_path / "out")}
    assert lines.keys() == {"self_attention", "freeze_third"} and lines["freeze_third"] == before[0]
    for line in lines.values():
        assert {"value", "chrf", "tokenized_bleu", "validation", "hypotheses"} <= line.keys()
    assert "softmax_decoding" in lines["self_attention"]
    assert {name.split(".")[3] for name in lines["self_attention"]["learned"]} == {"self_attn"}
    words = shlex.split(lines["freeze_third"]["command"])
    assert words[words.index("--scalar-freeze-updates") + 1] == "833"
    text = tmp_path / "data" / "text"
    for split, name in (("train", "train"), ("valid", "val"), ("test", "test_2016_flickr")):
        count = len((text / f"{split}.de").read_text(encoding="utf-8").splitlines())
        assert count == COUNTS[name]
    reference = tmp_path / "data" / "data-bin" / "test.reference.en"
    assert reference.read_bytes() == (multi30k / "test_2016_flickr.en").read_bytes()


def test_speeches_trains_rows_with_another_plugin(speeches, tmp_path):
    sizes = f"{LAYER.format('decoder')} --decoder-input-dim 16 --decoder-output-dim 16"
    command = ["bash", ROOT / "scripts" / "speeches.sh", "--archive", speeches]
    command += ["--data-bin", "data/lm/data-bin", "--out", "out", "--seeds", "3"]
    command += ["--max-update", "2", "--rows", "softmax,output_temperature,fit_temperature"]
    command += ["--", *sizes.split(), *TRAIN.split()]
    run(tmp_path, *command)
    lines = lines_of(tmp_path / "out")
    assert [x["row"] for x in lines] == ["fit_temperature", "output_temperature", "softmax"]
    assert {x["seed"] for x in lines} == {3}
    assert all(min(line["word_perplexity"], line["value"]) > 1 for line in lines)
    assert len({line["data"] for line in lines}) == 1
    for line in lines:
        assert "blocks of 512" in line["longer"]["signature"] and line["longer"]["value"] > 1
        assert line["attention"]["zeros"] == 0 and line["attention"]["entropy"] > 0
        (layer,) = line["layers"]
        assert layer["largest_score"] == line["attention"]["largest_score"]
        assert 0 <= layer["patch_similarity"] <= 1 <= layer["kurtosis"]
        assert 0 < line["calibration_error"] < 1
        assert abs(line["int8"]["loss"] - line["int8"]["quantized_loss"]) < 0.05
    (fitted_temperature,) = lines[0]["learned"].values()
    assert fitted_temperature["temperature"] != [1.0] and not lines[2]["learned"]
    model = tmp_path / "out/output_temperature/seed-3/checkpoint_best.pt"
    words = ("--user-dir", ROOT / "user_dir/tempered")
    said = run(tmp_path, "multimax-evaluate", model, "data/lm/data-bin", *words)
    assert f"perplexity {lines[1]['value']:.2f}" in said
    said = run(tmp_path, "multimax-evaluate", model, "data/lm/data-bin", *words, "--longer", "4")
    assert f"perplexity {lines[1]['longer']['value']:.2f}" in said
    said = run(tmp_path, "multimax-evaluate", model, "data/lm/data-bin", *words, "--longer", "8")
    assert "blocks of 1024" in said
    # The fitted model has the weights of the row softmax, which must be finished.
    started, fitted = (
        torch.load(tmp_path / f"out/{row}/seed-3/checkpoint_best.pt", weights_only=False)["model"]
        for row in ("softmax", "fit_temperature")
    )
    assert all(fitted[name].equal(value) for name, value in started.items())
    (tmp_path / "out/softmax/seed-3/trained").unlink()
    (tmp_path / "out/fit_temperature/seed-3/result.json").unlink()
    said = run(tmp_path, *command, code=1)
    assert "which is not finished: train its row first" in said


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda folder: (folder / "val.en").unlink(), "has no val.en, nor val.en.gz"),
        (lambda folder: write(folder, "val", "en", ["a"]), "val has 1,014 and 1 lines, not 1,014"),
        (lambda folder: (folder / "val.de").write_bytes(b"\xff\n" * 1014), "valid.de"),
        (lambda folder: (folder / "train.de.gz").write_bytes(b"\x1f\x8b"), "train.de.gz"),
    ],
)
def test_multi30k_refuses_another_folder(multi30k, tmp_path, change, said):
    folder = tmp_path / "raw"
    folder.mkdir()
    for file in multi30k.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    change(folder)
    script = ("bash", ROOT / "data-prep" / "multi30k.sh", "--archive", folder, "--out", "out")
    output = run(tmp_path, *script, code=1)
    assert said in output and "Traceback" not in output
    assert not (tmp_path / "out" / "text").exists()
