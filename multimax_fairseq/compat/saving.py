"""Checkpoints on the disk: written whole or not at all, and found where the last one is damaged."""

import contextlib
import errno
import logging
import os
import re
import shutil
import time
import types

import torch

from multimax_fairseq.compat.checkpoints import DamagedCheckpointError, glance
from multimax_fairseq.compat.patch import wrap
from multimax_fairseq.errors import CheckpointError, UsageError
from multimax_fairseq.files import whole

logger = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Seconds before what failed for another reason, such as a network's, is tried once more.
PAUSE = 2.5
# What fairseq calls the checkpoints that a run can go on from, beside the last one; averages and
# what a crash left are none.
NUMBERED = re.compile(r"checkpoint(\d+|_\d+_\d+|_best|\.best_.+)\.pt")


class _Noting:
    """A file to torch.save, which reports a failed write as another error of its own."""

    def __init__(self, file):
        self.file, self.error = file, None

    def write(self, data):
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self):
        self.file.flush()


@contextlib.contextmanager
def _noting(file):
    """Give a file to torch.save; what went wrong in writing is raised as it was."""
    noting = _Noting(file)
    try:
        yield noting
    finally:
        if noting.error is not None:
            raise noting.error from None


def _write_aside(path, write):
    """Have a file written beside `path`, which takes its place once it is on the disk.

    The name is fairseq's, and always the same: what a killed run has left is written over.
    """
    aside = f"{path}.tmp"
    try:
        with open(aside, "wb") as file:
            with _noting(file) as noting:
                write(noting)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        with contextlib.suppress(OSError):
            os.remove(aside)
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a folder that cannot be synchronised
            os.fsync(folder)  # the new name
    finally:
        os.close(folder)


def save(state, path):
    """Write a checkpoint whole or not at all; UsageError where it cannot be written."""
    try:
        with whole(path) as aside, open(aside, "wb") as file, _noting(file) as noting:
            torch.save(state, noting)
    except OSError as error:
        raise UsageError(
            f"'{path}' could not be written ({error.strerror}): make room there, or name another "
            "place"
        ) from error


def _save(path, write):
    for last_try in (False, False, True):
        try:
            return _write_aside(path, write)
        except OSError as error:
            if not last_try and error.errno not in FULL:
                time.sleep(PAUSE)
                continue
            remedy = "see to that"
            if error.errno in FULL:
                remedy = (
                    "make room, or keep fewer checkpoints (--keep-interval-updates, "
                    "--keep-last-epochs, --no-epoch-checkpoints)"
                )
            raise CheckpointError(
                f"'{path}' could not be written ({error.strerror}); {remedy}, and start the same "
                "command again: it goes on from the last whole checkpoint, if there is one."
            ) from error


def whole_checkpoints():
    """fairseq copies a checkpoint onto checkpoint_last.pt, which is half written until it is done.

    And where a disk is full it tries three times to write on, prints three tracebacks and leaves
    its `.tmp`. Can go when fairseq copies aside, waits for the disk, and gives one reason.
    """
    from fairseq import checkpoint_utils
    from fairseq.file_io import PathManager

    def make_save(original):
        def torch_persistent_save(obj, filename, async_write=False):
            if (
                async_write
                or not isinstance(filename, str)
                or PathManager.path_requires_pathmanager(filename)
            ):
                return original(obj, filename, async_write)
            try:
                _save(filename, lambda file: torch.save(obj, file))
            except CheckpointError as error:
                if os.path.basename(filename) != "crash.pt":
                    raise
                logger.warning(error)  # the error that it was to be kept for follows

        return torch_persistent_save

    def make_copy(original):
        def copy(src_path, dst_path, overwrite=False):
            if any(map(PathManager.path_requires_pathmanager, (src_path, dst_path))):
                return original(src_path, dst_path, overwrite=overwrite)

            def write(file):
                with open(src_path, "rb") as source:
                    shutil.copyfileobj(source, file, 1 << 20)

            _save(dst_path, write)
            return True

        return copy

    wrap(checkpoint_utils, "torch_persistent_save", make_save)
    wrap(PathManager, "copy", make_copy)


def _beside(path):
    """The paths of the checkpoints beside one."""
    folder = os.path.dirname(path)
    names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else ()
    return [os.path.join(folder, name) for name in sorted(names) if NUMBERED.fullmatch(name)]


def updates(path):
    """The number of updates behind a checkpoint; None if it cannot be read, or is not there."""
    return glance(path, lambda state: state["optimizer_history"][-1]["num_updates"])


def last_checkpoint():
    """A run whose checkpoint_last.pt is damaged stops, though a whole one may lie beside it.

    And one without that file, or without that of --restore-file, begins anew without a word. Can go
    when fairseq looks for another one.
    """
    from fairseq.file_io import PathManager
    from fairseq.trainer import Trainer

    def make(original):
        def load_checkpoint(self, filename, *args, **kwargs):
            given = self.cfg.checkpoint
            named = given.restore_file != "checkpoint_last.pt"
            last = os.path.join(given.save_dir, f"checkpoint_last{self.checkpoint_suffix}.pt")
            is_first = self.data_parallel_rank == 0 and not os.path.lexists(last)
            if not named and filename == last and is_first and _beside(last):
                logger.warning(
                    f"there is no '{last}', so that this run begins at update 0, though "
                    f"'{_beside(last)[-1]}' lies there; --restore-file goes on from such a file"
                )
            is_missing = named and not PathManager.exists(filename)
            if is_missing and self.data_parallel_rank == 0:
                logger.warning(
                    f"there is no '{filename}', so that this run begins at update 0, with new "
                    "parameters: check the path of --restore-file"
                )
            # Only the first worker reads, and only readers see damage; the others get the state.
            try:
                return original(self, filename, *args, **kwargs)
            except DamagedCheckpointError as error:
                damaged = error
            if named or filename != last or self.checkpoint_suffix:
                raise CheckpointError(
                    f"'{filename}' is damaged or incomplete; give another checkpoint with "
                    "--restore-file."
                ) from damaged
            found = [(made, path) for path in _beside(last) if (made := updates(path))]
            for made, path in sorted(found, reverse=True):
                with contextlib.suppress(DamagedCheckpointError):
                    state = original(self, path, *args, **kwargs)
                    logger.warning(
                        f"'{last}' is damaged or incomplete: this run goes on from '{path}' "
                        f"(update {made}), the newest whole checkpoint beside it"
                    )
                    return state
            raise CheckpointError(
                f"'{last}' is damaged or incomplete, and no whole checkpoint lies beside it; give "
                "one with --restore-file, or delete it to begin at update 0."
            ) from damaged

        return load_checkpoint

    wrap(Trainer, "load_checkpoint", make)


def interval_at_epoch_end():
    """--save-interval-updates saves nothing at the end of an epoch. fairseq relies on the epoch's
    checkpoint, even if --no-epoch-checkpoints or --save-interval omits it.

    Can go when fairseq saves one of the two.
    """
    from fairseq import checkpoint_utils

    def make(original):
        def save_checkpoint(cfg, trainer, epoch_itr, val_loss):
            if cfg.no_epoch_checkpoints or epoch_itr.epoch % cfg.save_interval:
                epoch_itr = types.SimpleNamespace(
                    epoch=epoch_itr.epoch,
                    state_dict=epoch_itr.state_dict,
                    end_of_epoch=lambda: False,
                )
            return original(cfg, trainer, epoch_itr, val_loss)

        return save_checkpoint

    wrap(checkpoint_utils, "save_checkpoint", make)


def finished_run():
    """A run that --max-update has ended does one update more each time it is started again.

    So does one that is killed between its last checkpoint and its end. Can go when fairseq looks at
    --max-update before it trains.
    """
    from fairseq import checkpoint_utils

    def make(original):
        def load_checkpoint(cfg, trainer, **kwargs):
            loaded = original(cfg, trainer, **kwargs)
            optimization = trainer.cfg.optimization
            if 0 < (optimization.max_update or 0) <= trainer.get_num_updates():
                logger.info(f"nothing is left of --max-update {optimization.max_update}")
                optimization.max_epoch = -1  # which fairseq reads next
            return loaded

        return load_checkpoint

    wrap(checkpoint_utils, "load_checkpoint", make)
