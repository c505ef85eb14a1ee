"""A run that is killed or meets a full disk ends bit for bit like an uninterrupted run."""

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
import torch
from commands import BIN, PLUGIN, programs_first, refused, run
from corpus import ENGLISH, GERMAN
from fairseq import checkpoint_utils
from fairseq.data import LanguagePairDataset
from fairseq.file_io import PathManager
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from multimax_fairseq.compat import saving
from multimax_fairseq.errors import CheckpointError
from multimax_fairseq.files import whole

pytestmark = pytest.mark.long

# A --user-dir that injects a fault: a kill in the middle of a write, a full disk or a maximum file
# size. It can also write its process id to a file.
FAULTY = """
import os, resource, signal, sys
import multimax_fairseq.models
from multimax_fairseq.compat import saving

write, done = saving._CheckedFile.write, [0, 0]

def faulty(self, data):
    done[0] += 1
    done[1] += len(data)
    if done[0] == int(os.environ.get("KILLED_AT", 0)):
        write(self, bytes(data)[: len(data) // 2])
        self.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    if done[1] > int(os.environ.get("ROOM", 1 << 60)):
        self.error = OSError(28, "No space left on device")
        raise self.error
    return write(self, data)

saving._CheckedFile.write = faulty
if size := int(os.environ.get("LARGEST", 0)):
    sys.dont_write_bytecode = True  # Python would leave truncated bytecode
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
if path := os.environ.get("NUMBER"):
    with open(path + ".part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(path + ".part", path)
"""
SIZES = {"layers": 2, "embed-dim": 16, "ffn-embed-dim": 32, "attention-heads": 2}
ENCODER, DECODER = (
    [word for name, value in SIZES.items() for word in (f"--{side}-{name}", str(value))]
    for side in ("encoder", "decoder")
)
# Ragged batches, about four epochs, checkpoints within epochs and at their ends.
TRAIN = [
    *("--optimizer", "adam", "--lr", "0.005", "--max-tokens", "60", "--dropout", "0.1", "--cpu"),
    *("--required-batch-size-multiple", "1", "--multimax-init-std", "0.3", "--seed", "3"),
    *("--num-workers", "0", "--log-format", "none", "--save-interval-updates", "3"),
    *("--max-update", "20"),
]
TRANSLATE = [
    *("mt", "--arch", "transformer_iwslt_de_en_multimax", *ENCODER, *DECODER, *TRAIN),
    *("--share-all-embeddings", "--output-normalizer", "multimax", "--label-smoothing", "0.1"),
    *("--criterion", "label_smoothed_multimax_cross_entropy"),
]
MODEL_LANGUAGE = [
    *("lm", "--task", "language_modeling", "--arch", "transformer_lm_multimax", *DECODER, *TRAIN),
    *("--decoder-input-dim", "16", "--decoder-output-dim", "16", "--tokens-per-sample", "16"),
    *("--share-decoder-input-output-embed", "--criterion", "multimax_cross_entropy"),
]
RUNS = {"translation": TRANSLATE, "language model": MODEL_LANGUAGE}
MORE = {
    "accumulated": [*TRANSLATE, "--update-freq", "2", "--curriculum", "1"],
    "LayerDrop": [*TRANSLATE, "--encoder-layerdrop", "0.3", "--decoder-layerdrop", "0.3"],
    "watched": [*TRANSLATE, "--monitor-interval", "2", "--attention-normalizer", "alpha_entmax"],
    "R-Drop": [*TRANSLATE, "--rdrop-alpha", "1"],
    "EMA": [*TRANSLATE, "--store-ema", "--ema-decay", "0.9", "--ema-update-freq", "4"],
    "shards": ["lm:lm2", *MODEL_LANGUAGE[1:], "--optimizer", "multimax_adam"],
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with mt/, lm/ and lm2/, and the --user-dir faulty/."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "faulty").mkdir()
    (folder / "faulty" / "__init__.py").write_text(FAULTY)
    for language, lines in (("de", GERMAN.splitlines()), ("en", ENGLISH.splitlines())):
        for split, part in (("train", lines), ("other", lines[:4:-1]), ("valid", lines[::3])):
            (folder / f"{split}.{language}").write_text("\n".join(part) + "\n")
    pair = ("--source-lang", "de", "--target-lang", "en", "--joined-dictionary")
    names = ("--trainpref", "train", "--validpref", "valid", "--destdir", "mt")
    run(folder, "fairseq-preprocess", *pair, *names)
    for train, out, more in (("train", "lm", ()), ("other", "lm2", ("--srcdict", "lm/dict.txt"))):
        names = ("--trainpref", f"{train}.en", "--validpref", "valid.en", "--destdir", out)
        run(folder, "fairseq-preprocess", "--only-source", *names, *more)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(text):
    """uninterrupted(name) -> the folder of a whole run's checkpoints."""

    def make(name):
        folder = text / f"{name}-whole"
        if not folder.exists():
            run(text, "fairseq-train", *(RUNS | MORE)[name], *PLUGIN, "--save-dir", folder)
        return folder

    return make


def numbers(value, at=""):
    """Yield each value of a checkpoint with its path."""
    if isinstance(value, dict):
        for key in value:
            yield from numbers(value[key], f"{at}/{key}")
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from numbers(entry, f"{at}/{index}")
    else:
        yield at, value


def assert_same_end(first, second):
    """Check that two runs end bitwise equal: parameters, optimizer, schedule, data iterator."""
    states = []
    for folder in (first, second):
        state = checkpoint_utils.load_checkpoint_to_cpu(str(folder / "checkpoint_last.pt"))
        kept = {key: state[key] for key in ("model", "last_optimizer_state")}
        kept["schedule"] = state["optimizer_history"][-1]  # each start adds one
        kept["data"] = state["extra_state"]["train_iterator"]
        kept["average"] = state["extra_state"].get("ema")
        states.append(dict(numbers(kept)))
    assert states[0].keys() == states[1].keys() and len(states[0]) > 100
    for name, value in states[0].items():
        other = states[1][name]
        same = torch.equal(value, other) if torch.is_tensor(value) else value == other
        assert same, name


def train(text, name, folder, plugin="faulty", code=0, **fault):
    command = ("fairseq-train", *(RUNS | MORE)[name], "--user-dir", plugin, "--save-dir", folder)
    return run(text, *command, code=code, **fault)


def updates(path):
    return torch.load(path, weights_only=False)["optimizer_history"][-1]["num_updates"]


def resumable(whole, folder, at):
    """Copy the files of a run that was killed after this update."""
    shutil.copytree(whole, folder)
    for path in folder.glob("checkpoint*"):
        if updates(path) > at:
            path.unlink()
    [last] = [path for path in folder.iterdir() if updates(path) == at]
    shutil.copy(last, folder / "checkpoint_last.pt")
    return last


@pytest.mark.parametrize("name", RUNS)
def test_train_killed_while_saving_resumes_bitwise(text, uninterrupted, name):
    """The kill is in the third epoch, where stock fairseq reorders sentences of equal length."""
    folder = text / f"{name}-killed"
    resumable(uninterrupted(name), folder, at=15)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    train(text, name, folder, code=128 + signal.SIGKILL, KILLED_AT="40")
    [half] = {path.name for path in folder.iterdir()} - set(before)
    assert half == "checkpoint3.pt.tmp"
    assert all((folder / file).read_bytes() == data for file, data in before.items())
    train(text, name, folder)
    assert_same_end(uninterrupted(name), folder)
    assert not list(folder.glob("*.tmp"))


def test_train_resumes_from_the_newest_intact_checkpoint(text, uninterrupted):
    folder = text / "damaged"
    newest = resumable(uninterrupted("translation"), folder, at=15)
    last, older = folder / "checkpoint_last.pt", folder / "checkpoint2.pt"
    whole = last.read_bytes()
    (folder / "crash.pt").write_bytes(whole)
    last.write_bytes(whole[: len(whole) // 2])
    middle = len(whole) // 2
    newest.write_bytes(whole[:middle] + bytes(8) + whole[middle + 8 :])  # PyTorch would load it
    log = train(text, "translation", folder)
    assert (
        f"'{last}' is damaged or incomplete: this run resumes from '{older}' (update 12), the "
        "newest intact checkpoint beside it" in log
    )
    assert_same_end(uninterrupted("translation"), folder)


def test_train_stops_without_an_intact_checkpoint(text, uninterrupted):
    folder = text / "nothing"
    folder.mkdir()
    (folder / "checkpoint_last.pt").write_bytes(b"")
    command = ("fairseq-train", *TRANSLATE, *PLUGIN, "--save-dir", folder)
    assert refused(text, *command) == (
        f"'{folder}/checkpoint_last.pt' is damaged or incomplete, and no intact checkpoint lies "
        "beside it; pass one with --restore-file, or delete it to begin at update 0."
    )
    shutil.copy(uninterrupted("translation") / "checkpoint_1_3.pt", folder)
    named = folder / "checkpoint_best.pt"
    named.write_bytes(b"PK")
    assert refused(text, *command, "--restore-file", named) == (
        f"'{named}' is damaged or incomplete; pass another checkpoint with --restore-file."
    )


def test_train_on_a_full_disk_keeps_checkpoints_and_resumes(text, uninterrupted):
    folder = text / "full"
    resumable(uninterrupted("translation"), folder, at=15)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    size = str(len(before["checkpoint_last.pt"]) - 10_000)
    command = ("fairseq-train", *TRANSLATE, "--user-dir", "faulty", "--save-dir", folder)
    found = refused(text, *command, LARGEST=size)
    assert found == (
        f"'{folder}/checkpoint3.pt' could not be written (File too large); make room, or keep "
        "fewer checkpoints (--keep-interval-updates, --keep-last-epochs, --no-epoch-checkpoints), "
        "and start the same command again: it resumes from the last intact checkpoint, if there is "
        "one."
    )
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    train(text, "translation", folder)
    assert_same_end(uninterrupted("translation"), folder)


def test_train_leaves_a_finished_run_unchanged(text, uninterrupted):
    folder = text / "ended"
    shutil.copytree(uninterrupted("language model"), folder)
    before = (folder / "checkpoint_last.pt").read_bytes()
    assert "nothing is left of --max-update 20" in train(text, "language model", folder)
    assert (folder / "checkpoint_last.pt").read_bytes() == before


def test_train_reports_a_restart_beside_other_checkpoints(text, uninterrupted):
    folder = text / "anew"
    folder.mkdir()
    shutil.copy(uninterrupted("language model") / "checkpoint_1_3.pt", folder)
    words = [*MODEL_LANGUAGE, *PLUGIN, "--save-dir", folder, "--max-update", "1"]
    assert (
        f"there is no '{folder}/checkpoint_last.pt', so this run begins at update 0, although "
        f"'{folder}/checkpoint_1_3.pt' exists" in run(text, "fairseq-train", *words)
    )


def test_train_reports_a_missing_restore_file(text):
    words = [*MODEL_LANGUAGE, *PLUGIN, "--save-dir", text / "nothing", "--max-update", "1"]
    output = run(text, "fairseq-train", *words, "--restore-file", "none.pt")
    assert "there is no 'none.pt', so this run begins at update 0" in output


# --- a write, in this process -------------------------------------------------------------------


# Before any fork: a child would wait forever for this process's OpenMP threads.
NEW = {"new": torch.ones(50_000)}


def save(path):
    checkpoint_utils.torch_persistent_save(NEW, str(path))


def copy(path):
    torch.save(NEW, path.with_name("source"))
    assert PathManager.copy(str(path.with_name("source")), str(path), overwrite=True)


@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
@pytest.mark.parametrize("put", [save, copy])
def test_save_killed_midway_keeps_the_old_checkpoint(tmp_path, put, where):
    path = tmp_path / "checkpoint_last.pt"
    torch.save({"old": torch.zeros(3)}, path)
    before = path.read_bytes()
    child = os.fork()
    if child == 0:

        def killed(self, data=None):
            if where == "write":
                self.file.write(bytes(data)[: len(data) // 2])
                self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(saving._CheckedFile if where == "write" else saving.os, where, killed)
        put(path)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert path.read_bytes() == before
    assert path.with_name("checkpoint_last.pt.tmp").exists()
    put(path)
    assert torch.load(path)["new"].sum() == 50_000
    assert not path.with_name("checkpoint_last.pt.tmp").exists()


# PyTorch reports a late write failure as its own error type.
@pytest.mark.parametrize("put, at", [(save, 1), (save, 4), (save, 12), (copy, 1)])
def test_save_retries_failed_writes_except_on_a_full_disk(tmp_path, put, at, monkeypatch):
    path, write, left, done = tmp_path / "checkpoint_last.pt", saving._CheckedFile.write, [], {}

    def failing(self, data):
        done[self] = done.get(self, 0) + 1
        if left and done[self] == at:
            self.error = OSError(left.pop(), "of the disk")
        if self.error is not None:
            raise self.error
        return write(self, data)

    monkeypatch.setattr(saving._CheckedFile, "write", failing)
    monkeypatch.setattr(saving, "PAUSE", 0)
    torch.save({"old": torch.zeros(3)}, path)
    before = path.read_bytes()
    for errors in ([5, 28], [28], [5, 5, 5]):
        left[:] = reversed(errors)
        with pytest.raises(CheckpointError, match=r"t\.pt' could not be written \(of the disk\)"):
            put(path)
        assert left == [] and path.read_bytes() == before
        assert not path.with_name("checkpoint_last.pt.tmp").exists()
    left[:] = [5, 5]
    put(path)
    assert left == [] and torch.load(path)["new"].sum() == 50_000


def test_save_of_crash_checkpoint_logs_a_full_disk(tmp_path, monkeypatch, caplog):
    def full(self, data):
        self.error = OSError(28, "No space left on device")
        raise self.error

    monkeypatch.setattr(saving._CheckedFile, "write", full)
    save(tmp_path / "crash.pt")
    assert "crash.pt' could not be written (No space left on device)" in caplog.text
    assert not list(tmp_path.iterdir())


WORKERS = """
import os, sys, torch
from omegaconf import OmegaConf
from fairseq.distributed import utils
from multimax_fairseq import compat
compat.apply()
child = os.fork()
rank = int(child == 0)
torch.distributed.init_process_group(
    "gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2
)
state = {"cfg": OmegaConf.create({"seed": 3}), "model": [torch.ones(2, 3)], "name": "last"}
got = utils.broadcast_object(None if rank else state, 0, torch.distributed.group.WORLD)
assert got["cfg"].seed == 3 and got["model"][0].sum() == 6 and got["name"] == "last"
if rank:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_broadcast_object_sends_the_checkpoint_to_all_ranks(tmp_path):
    run(tmp_path, "python", "-c", WORKERS, tmp_path / "meeting")


# --- batches ------------------------------------------------------------------------------------


class Sentences(torch.utils.data.Dataset):
    """Sentences of one length, so that only the seed determines their order."""

    sizes = np.full(40, 5)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((5,), index % 20 + 4)


def batches(task, dataset, dictionary, epoch, shuffled, drawn):
    """Return the sentences of the next `drawn` epochs of a run."""
    iterator = task.get_batch_iterator(dataset, max_sentences=4, seed=1, epoch=epoch)
    iterator.load_state_dict({"epoch": epoch, "iterations_in_epoch": 0})
    assert iterator.next_epoch_idx == epoch
    return [
        [batch["id"].tolist() for batch in iterator.next_epoch_itr(shuffle=now > shuffled)]
        for now in range(epoch, epoch + drawn)
    ]


@pytest.mark.parametrize("curriculum", [0, 1, 2])
def test_batch_iterator_resumes_with_the_same_batches(dictionary, curriculum):
    def started(epoch, drawn):
        task = TranslationTask(TranslationConfig(), dictionary, dictionary)
        dataset = LanguagePairDataset(
            Sentences(), Sentences.sizes, dictionary, Sentences(), Sentences.sizes, dictionary
        )
        return batches(task, dataset, dictionary, epoch, curriculum, drawn)

    whole = started(1, 4)
    assert started(3, 2) == whole[2:]
    for epoch, found in enumerate(whole, 1):
        assert (found == whole[0]) == (epoch <= max(curriculum, 1))


# --- many faults --------------------------------------------------------------------------------


def ended(text, name, folder, kill_after=None, **fault):
    """Run a training, kill it so many seconds after it has loaded the plugin, if it still runs;
    return its exit status, and what it printed."""
    number, log = text / "number", text / "log"
    number.unlink(missing_ok=True)
    command = ("fairseq-train", *(RUNS | MORE)[name], "--user-dir", "faulty", "--save-dir", folder)
    with open(log, "w") as file:
        process = subprocess.Popen(
            [BIN / command[0], *command[1:]],
            cwd=text,
            env=programs_first() | fault | {"NUMBER": str(number)},
            stdout=file,
            stderr=file,
        )
    if kill_after is not None:
        while not number.exists():
            assert process.poll() is None, log.read_text()[-2000:]
            time.sleep(0.01)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(kill_after)
        if process.poll() is None:
            os.kill(int(number.read_text()), signal.SIGKILL)
    return process.wait(300), log.read_text()


def test_train_reports_ctrl_c_in_one_sentence(text):
    log = text / "interrupted.log"
    with open(log, "w") as file:
        process = subprocess.Popen(
            [BIN / "fairseq-train", *TRANSLATE, *PLUGIN, "--no-save", "--max-update", "1000000"],
            cwd=text,
            env=programs_first(),
            stdout=file,
            stderr=file,
        )
    while "Start iterating over samples" not in log.read_text():
        assert process.poll() is None, log.read_text()[-2000:]
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    said = log.read_text()
    assert "interrupted; the same command resumes a training" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_train_survives_fifty_kills_and_ten_full_disks(text, uninterrupted):
    draw, kills, full, halves, names = random.Random(17), 0, 0, 0, list(RUNS | MORE)
    for name in itertools.cycle(names):
        if kills >= 50 and full >= 10:
            break
        begin = time.monotonic()
        whole, folder = uninterrupted(name), text / "many"
        seconds = max(5, time.monotonic() - begin)
        shutil.rmtree(folder, ignore_errors=True)
        for _ in range(10):
            if draw.random() < 0.25:
                status, log = ended(text, name, folder, ROOM=str(draw.randint(1, 5_000_000)))
                assert "Traceback" not in log
                if status != 0:
                    full += 1
                    assert status == 1 and "could not be written (No space left on device)" in log
                    assert not list(folder.glob("*.tmp"))
            else:
                status, log = ended(text, name, folder, draw.uniform(0, 0.7 * seconds))
                kills += status != 0
                assert status in (0, -signal.SIGKILL, 128 + signal.SIGKILL), log[-2000:]
                halves += bool(list(folder.glob("*.tmp")))
            if (folder / "checkpoint_last.pt").exists() and draw.random() < 0.5:
                if updates(folder / "checkpoint_last.pt") == 20:  # the run is complete
                    assert_same_end(whole, folder)
                    shutil.rmtree(folder)
        assert ended(text, name, folder)[0] == 0
        assert_same_end(whole, folder)
    print(f"{kills} kills, {halves} of them in a write, {full} full disks: nothing lost")


def test_whole_isolates_concurrent_writers(tmp_path):
    file = tmp_path / "file"
    with whole(file) as one, whole(file) as other:
        one.write_text("one")
        other.write_text("other")
    assert file.read_text() == "one" and list(tmp_path.iterdir()) == [file]
