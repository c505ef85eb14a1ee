"""compat/saving.py: writing checkpoints, and choosing the checkpoint to resume from."""

import contextlib
import errno
import os
import stat
from types import SimpleNamespace
from unittest import mock

import pytest
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import CheckpointConfig
from fairseq.file_io import PathManager

from multimax_fairseq import compat
from multimax_fairseq.compat import saving
from multimax_fairseq.compat.untrusted import DamagedCheckpointError
from multimax_fairseq.errors import CheckpointError


@pytest.fixture(autouse=True)
def without_a_pause(monkeypatch):
    monkeypatch.setattr(saving, "PAUSE", 0)


@pytest.fixture
def replacements(monkeypatch):
    """Return the functions that replace fairseq's, in order."""
    made = []
    monkeypatch.setattr(saving, "replace", lambda owner, name: made.append)
    return made


@pytest.mark.parametrize("can_synchronise_folders", [True, False])
def test_write_checkpoint_syncs_before_rename(can_synchronise_folders, tmp_path, monkeypatch):
    seen, fsync, replace = [], os.fsync, os.replace

    def noted_fsync(number):
        status = os.fstat(number)
        if stat.S_ISDIR(status.st_mode):
            seen.append("folder")
            if not can_synchronise_folders:
                raise OSError(errno.EINVAL, "a folder")
        else:
            seen.append(status.st_size)
        fsync(number)

    def noted_replace(*paths):
        seen.append("replace")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    saving._write_checkpoint(str(tmp_path / "checkpoint.pt"), lambda file: file.write(b"x" * 100))
    assert seen == [100, "replace", "folder"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_write_checkpoint_fails_at_once_on_a_full_disk(number, tmp_path):
    tries = []

    def write(file):
        tries.append(file)
        raise OSError(number, "full")

    with pytest.raises(CheckpointError, match="keep fewer checkpoints"):
        saving._write_checkpoint(str(tmp_path / "checkpoint.pt"), write)
    assert len(tries) == 1


def test_numbered_checkpoints_omits_averages(tmp_path):
    names = ["checkpoint.best_bleu_27.1.pt", "checkpoint3.pt", "checkpoint_2_500.pt"]
    names += ["checkpoint_best.pt"]
    others = ["checkpoint_last.pt", "crash.pt", "average.pt", "checkpoint3.pt.tmp"]
    for name in (*names, *others):
        (tmp_path / name).touch()
    found = saving._numbered_checkpoints(str(tmp_path / "checkpoint_last.pt"))
    assert found == [str(tmp_path / name) for name in names]


@pytest.mark.parametrize("path, is_async", [("x.pt", True), ("s3://x.pt", False)])
def test_whole_checkpoints_leaves_other_files_to_fairseq(path, is_async, replacements, monkeypatch):
    monkeypatch.setattr(saving, "_write_checkpoint", lambda *_: pytest.fail("saved here"))
    monkeypatch.setattr(PathManager, "path_requires_pathmanager", lambda path: "://" in path)
    saving.whole_checkpoints()
    given = []
    replacements[0](lambda *arguments: given.append(arguments), {}, path, is_async)
    assert given == [({}, path, is_async)]


@pytest.mark.parametrize(
    "most, done, ends",
    [(5, 5, True), (5, 7, True), (5, 4, False), (0, 7, False), (None, 7, False)],
)
def test_finished_run_stops_at_max_update(most, done, ends, replacements):
    saving.finished_run()
    optimization = SimpleNamespace(max_update=most, max_epoch=0)
    settings = SimpleNamespace(optimization=optimization)
    trainer = SimpleNamespace(cfg=settings, get_num_updates=lambda: done)
    assert replacements[0](lambda *_: "loaded", None, trainer) == "loaded"
    assert (optimization.max_epoch == -1) == ends


@pytest.mark.parametrize(
    "omitted, saved",
    [
        ({"no_epoch_checkpoints": True}, "checkpoint_3_8.pt"),
        ({"save_interval": 2}, "checkpoint_3_8.pt"),
        ({}, "checkpoint3.pt"),
    ],
)
def test_save_checkpoint_saves_at_the_end_of_an_epoch(omitted, saved, tmp_path):
    compat.apply()
    cfg = CheckpointConfig(save_dir=str(tmp_path), save_interval_updates=2, **omitted)
    cfg.no_last_checkpoints = True
    trainer = mock.Mock(data_parallel_rank=0, checkpoint_suffix="")
    trainer.get_num_updates.return_value, trainer.task = 8, None
    end = mock.Mock(epoch=3)
    end.end_of_epoch.return_value = True
    checkpoint_utils.save_checkpoint(cfg, trainer, end, None)
    [((path, state), _)] = trainer.save_checkpoint.call_args_list
    assert path == str(tmp_path / saved)
    assert state["train_iterator"] is end.state_dict.return_value


@pytest.fixture
def load(replacements, tmp_path, monkeypatch):
    """load(file, rank=0, suffix="", given=...) -> the file that a run goes on from in place of a
    damaged one."""
    monkeypatch.setattr(saving, "_resume", lambda load, trainer, filename: load(trainer, filename))
    saving.resumed_runs()
    updates = {"checkpoint1.pt": 3, "checkpoint2.pt": 12, "checkpoint3.pt": 9, "checkpoint4.pt": 0}
    monkeypatch.setattr(saving, "updates", lambda path: updates[os.path.basename(path)])
    for name in updates:
        (tmp_path / name).touch()

    def original(self, filename):
        if os.path.basename(filename) in ("checkpoint_last.pt", "checkpoint_last-shard0.pt"):
            raise DamagedCheckpointError("damaged")
        return os.path.basename(filename)

    def call(name, rank=0, suffix="", given="checkpoint_last.pt"):
        checkpoint = SimpleNamespace(restore_file=given, save_dir=str(tmp_path))
        trainer = SimpleNamespace(cfg=SimpleNamespace(checkpoint=checkpoint))
        trainer.checkpoint_suffix, trainer.data_parallel_rank = suffix, rank
        return replacements[0](original, trainer, str(tmp_path / name))

    return call


def test_resumed_runs_falls_back_to_the_newest_checkpoint(load, tmp_path):
    for name in ("checkpoint_last.pt", "checkpoint_last-shard0.pt"):
        (tmp_path / name).touch()
    assert load("checkpoint_last.pt") == "checkpoint2.pt"
    with pytest.raises(CheckpointError, match="pass another checkpoint with --restore-file"):
        load("checkpoint_last-shard0.pt", suffix="-shard0")  # shards must match
    with pytest.raises(CheckpointError, match="pass another checkpoint with --restore-file"):
        load("checkpoint_last.pt", given=str(tmp_path / "checkpoint_last.pt"))


@pytest.mark.parametrize("given", ["checkpoint_last.pt", "none.pt"])
def test_resumed_runs_warns_of_a_missing_file_once(load, given, caplog):
    for rank in (0, 1):
        with contextlib.suppress(DamagedCheckpointError, CheckpointError):
            load(given, rank, given=given)
        [told] = [
            record.message for record in caplog.records if "begins at update 0" in record.message
        ]
        assert given in told
