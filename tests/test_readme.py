"""Every command of the README runs, in its order, on a little text and with a tiny model."""

import os
import re
import stat
import subprocess
import sys

import pytest
from commands import BIN, ROOT, run
from corpus import ENGLISH, GERMAN

README = (ROOT / "README.md").read_text(encoding="utf-8")
# The commands that have tests of their own.
ELSEWHERE = [
    "bash scripts/quickstart.sh\n",
    "bash scripts/test.sh\n",
    "bash scripts/iwslt14.sh\nbash scripts/wikitext103.sh\n",
]

# Stands before the real command: the last of two flags wins, so the README's are made tiny.
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
    for key, value in sizes.items():
        arguments += ["--" + key, str(value)]
else:
    arguments += [f"model.{{key.replace('-', '_')}}={{value}}" for key, value in sizes.items()]
    arguments = [a if a.startswith("--") or "=" not in a else "+" + a for a in arguments]
    arguments += ["optimization.max_update=3"]
os.execv("{real}/" + name, [name, *arguments])
"""


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkout's root as far as the README's commands need it, and text of one's own."""
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


def test_every_command(folder):
    commands = blocks("bash")
    assert all(command in commands for command in ELSEWHERE)
    commands = [command for command in commands if command not in ELSEWHERE]
    path = f"{folder / 'bin'}:{BIN}:{os.environ['PATH']}"
    stock = (
        "fairseq-train data-bin --arch transformer_iwslt_de_en --share-all-embeddings "
        "--optimizer adam --max-tokens 500 --save-dir softmax"
    )
    made = {}
    for block in [*commands[:-1], stock, commands[-1]]:
        script = f"set -euo pipefail\n{block}"
        made[block] = run(folder, "bash", "-c", script, PATH=path)
    printed = "".join(made.values())
    assert re.search(r"nrefs:1.*tok:13a.*version:2", printed)
    assert "checkpoints/average.pt: the mean of" in printed
    assert re.search(r"Loss \(base 2\): \d", printed)
    assert "start at identity" in made[commands[-1]]
    assert (folder / "hydra-checkpoints" / "checkpoint_last.pt").exists()


def test_the_python_lines(folder):
    for code in blocks("python"):
        words = [sys.executable, "-c", code]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_every_flag_is_in_the_table_and_every_file_in_the_tree():
    from dataclasses import fields

    from multimax_fairseq.models.config import NormalizerConfig

    named = set(re.findall(r"^\| `--([\w-]+)`", README, re.MULTILINE))
    flags = {f.name.replace("_", "-") for f in fields(NormalizerConfig) if f.name[0] != "_"}
    assert named == flags
    tree = README[README.index("## The tree") :]
    for path in re.findall(r"^ *([\w-]+/|[\w-]+\.py) ", tree, re.MULTILINE):
        assert (ROOT / path).exists() or (ROOT / "multimax_fairseq" / path).exists(), path
