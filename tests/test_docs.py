"""Runs the commands of README and docs/ with tiny models, and checks links, flags and examples."""

import os
import re
import stat
import sys

import pytest
from commands import BIN, ROOT, run
from corpus import ENGLISH, GERMAN

pytestmark = pytest.mark.long

# Commands run in this order: docs/your-data.md creates the data that the other pages use.
PAGES = ["docs/your-data.md", "docs/trained-models.md", "README.md", "docs/analysis.md"]
PAGES += ["docs/fairseq.md", "docs/python.md"]
PAGES += ["docs/flags.md", "docs/mappings.md", "docs/experiments.md", "docs/speed.md"]
PAGES += ["docs/architecture.md", "docs/scale.md", "docs/reliability.md", "docs/results.md"]
PAGES += ["CONTRIBUTING.md"]
# Commands with tests of their own.
ELSEWHERE = [
    "bash scripts/quickstart.sh\n",
    "bash scripts/test.sh\n",
    "multimax-compare text --source de --target en\n"
    "multimax-compare text --source de --target en --seeds 5\n",
    "bash scripts/iwslt14.sh\nbash scripts/wikitext103.sh\nbash scripts/iwslt17.sh\n"
    "bash scripts/adaptively_sparse.sh --data kftt\nbash scripts/imdb.sh\n"
    "bash scripts/imagenet.sh --data imagenet\n",
    "bash scripts/setup.sh\nsource .venv/bin/activate\nbash scripts/test.sh --fast\n",
    "multimax-convert from-authors authors.pt ours.pt\n"
    "multimax-convert to-authors ours.pt theirs.pt\n"
    "multimax-convert to-paddlefleet ours-lm.pt head.npz\n"
    "multimax-convert from-paddlefleet head.npz ours-lm.pt with-head.pt\n",
]

# Precedes the real command on PATH. The last of two flags wins, so these make the models tiny.
SMALLER = """#!{python}
import os, sys
name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
sides = ["decoder"] if "language_modeling" in arguments else ["encoder", "decoder"]
sizes = {{"layers": 1, "embed-dim": 8, "ffn-embed-dim": 8, "attention-heads": 2}}
sizes = {{f"{{side}}-{{name}}": value for side in sides for name, value in sizes.items()}}
if sides == ["decoder"]:
    sizes.update({{"decoder-input-dim": 8, "decoder-output-dim": 8}})
if name == "fairseq-train":
    sizes.update({{"max-update": 3, "save-interval-updates": 1}})
    if "--monitor-interval" in arguments:
        sizes["monitor-interval"] = 1
    for key, value in sizes.items():
        arguments += ["--" + key, str(value)]
else:
    arguments += [f"model.{{key.replace('-', '_')}}={{value}}" for key, value in sizes.items()]
    arguments = [a if a.startswith("--") or "=" not in a else "++" + a for a in arguments]
    arguments += ["optimization.max_update=3"]
os.execv("{real}/" + name, [name, *arguments])
"""


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(language, *pages):
    text = "".join(map(read, pages or PAGES))
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the package, the scripts and a user's text, as the commands need it."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("multimax_fairseq", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "text").mkdir()
    for split in ("train", "valid", "test"):
        (folder / "text" / f"{split}.de").write_text(GERMAN, encoding="utf-8")
        (folder / "text" / f"{split}.en").write_text(ENGLISH, encoding="utf-8")
        (folder / "text" / f"wiki.{split}.tokens").write_text(ENGLISH, encoding="utf-8")
    (folder / "bin").mkdir()
    for name in ("fairseq-train", "fairseq-hydra-train"):
        shim = folder / "bin" / name
        shim.write_text(SMALLER.format(python=sys.executable, real=BIN))
        shim.chmod(shim.stat().st_mode | stat.S_IXUSR)
    (experiment,) = blocks("yaml")
    (folder / "experiment.yaml").write_text(experiment)
    return folder


@pytest.fixture(scope="module")
def made(folder):
    """Run the pages' commands in the folder; return {command: output}."""
    commands = blocks("bash")
    assert all(command in commands for command in ELSEWHERE)
    path = f"{folder / 'bin'}:{BIN}:{os.environ['PATH']}"
    stock = (
        "fairseq-train data-bin --arch transformer_iwslt_de_en --share-all-embeddings "
        "--optimizer adam --max-tokens 500 --save-dir softmax"
    )
    made = {}
    for block in commands:
        if block in ELSEWHERE:
            continue
        if "softmax/checkpoint_best.pt" in block:
            run(folder, "bash", "-c", stock, PATH=path)
        made[block] = run(folder, "bash", "-c", f"set -euo pipefail\n{block}", PATH=path)
    return made


def test_commands_of_the_docs_run(folder, made):
    printed = "".join(made.values())
    assert re.search(r"nrefs:1.*tok:13a.*version:2", printed)
    assert "checkpoints/average.pt: the mean of" in printed
    assert re.search(r"Loss \(base 2\): \d", printed)
    assert re.search(r"^BLEU = [\d.]+", printed, re.MULTILINE)
    tuned = next(out for block, out in made.items() if "finetune" in block)
    assert "start at the identity" in tuned
    assert (folder / "hydra-checkpoints" / "checkpoint_last.pt").exists()
    assert (folder / "analysis" / "report.html").exists()
    assert (folder / "trajectories" / "trajectories-cross.svg").exists()
    translated = (folder / "translated.en").read_text(encoding="utf-8")
    assert len(translated.splitlines()) == len(GERMAN.splitlines())


def test_pages_pin_the_torch_of_setup():
    pinned = re.findall(r"^torch==(\S+)", read("scripts/requirements.txt"), re.MULTILINE)
    for page in ("README.md", "docs/flags.md", "docs/python.md", "scripts/setup.sh"):
        assert set(re.findall(r"torch==([\d.]+\d)", read(page))) == set(pinned), page


def test_training_commands_set_max_update():
    trainings = re.findall(r"^fairseq-train (?:.*\\\n)*.*", "".join(blocks("bash")), re.MULTILINE)
    assert len(trainings) >= 5
    assert [command for command in trainings if "--max-update" not in command] == []


def test_python_examples_run(folder, made):
    for code in blocks("python", "README.md", "docs/python.md", "docs/trained-models.md"):
        run(folder, "python", "-c", code)


def test_mapping_example_equals_the_tested_files(tmp_path):
    shown, compared = blocks("python", "docs/mappings.md")
    tested = read("user_dir/added_mapping/__init__.py").partition('"""\n\n')[2]
    assert shown == tested.replace("# noqa: F401  ", "# ")
    assert blocks("cpp", "docs/mappings.md") == [read("user_dir/added_mapping/sharpened.h")]
    run(tmp_path, "python", "-c", compared, PYTHONPATH=str(ROOT / "user_dir"))


def test_flag_rows_match_the_flags():
    """docs/flags.md has one row for each flag: its name, values, default and help."""
    from multimax_fairseq.criterions.cross_entropy import FusedOutputConfig
    from multimax_fairseq.models.config import (
        CONTINUOUS_OPTIONS,
        flag,
        mapping_options,
        settings,
        shared_options,
    )
    from multimax_fairseq.models.rnn_multimax import RECURRENT_OPTIONS, recurrent_config

    options = shared_options() | mapping_options() | CONTINUOUS_OPTIONS | RECURRENT_OPTIONS
    own = [recurrent_config().__dataclass_fields__[name] for name in RECURRENT_OPTIONS]
    of_kind = {int: "whole number", float: "number", bool: "", str: "text"}
    rows = []
    fields = FusedOutputConfig.__dataclass_fields__
    for setting in [*(fields[n] for n in ("rdrop_alpha", "z_loss", "maxsup")), *settings(), *own]:
        kind = options[setting.name].kind if setting.name in options else float
        values = of_kind[kind] if kind in of_kind else ", ".join(f"`{word}`" for word in kind)
        words = {"False": "off", "None": "none"}  # by text, because False equals 0.0
        default = words.get(str(setting.default), f"`{setting.default}`")
        rows.append(
            f"| `{flag(setting.name)}` | {values} | {default} | {setting.metadata['help']} |"
        )
    written = re.findall(r"^\| `--.*", read("docs/flags.md"), re.MULTILINE)
    assert written == rows


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths_exist(page):
    text = re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)", text):
        if not target.startswith("https://"):
            assert ((ROOT / page).parent / target).exists(), target
    for path in re.findall(
        r"`((?:scripts|docs|tests|configs|data-prep|user_dir)/[\w./-]*)", read(page)
    ):
        assert (ROOT / path).exists(), path


def test_readme_links_to_every_page():
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)\)", read("README.md")))
    assert linked == {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}


def test_architecture_page_lists_every_folder():
    tree = blocks("", "docs/architecture.md")[0]
    listed = set(re.findall(r"^  (\w+)/ ", tree, re.MULTILINE))
    package = ROOT / "multimax_fairseq"
    assert listed == {path.parent.name for path in package.glob("*/__init__.py")}


def test_version_is_the_same_everywhere():
    import multimax_fairseq

    version = multimax_fairseq.__version__
    assert f'\nversion = "{version}"\n' in read("pyproject.toml")
    assert f"\nversion: {version}\n" in read("CITATION.cff")
    assert re.findall(r"^## (\S+)", read("CHANGELOG.md"), re.MULTILINE)[0] == version
