"""Fixes for lost data: half-written checkpoints and results, runs that cannot resume."""

import contextlib
import errno
import logging
import math
import os
import re
import shutil
import tempfile
import time
import types

import torch

from multimax_fairseq.compat.mistakes import explain, is_raised_by_fairseq
from multimax_fairseq.compat.patch import replace
from multimax_fairseq.compat.untrusted import DamagedCheckpointError, read_metadata
from multimax_fairseq.errors import CheckpointError, UsageError, first_line
from multimax_fairseq.files import whole

logger = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Seconds before a write is tried again, unless the disk is full.
PAUSE = 2.5
# Checkpoints from which a run can resume. Averages and crash.pt do not match.
NUMBERED = re.compile(r"checkpoint(\d+|_\d+_\d+|_best|\.best_.+)\.pt")
# Tensors of an optimizer's state that have the shape of their parameter.
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


class _CheckedFile:
    """A file for torch.save. On exit it raises the OSError of a failed write, which torch hides."""

    def __init__(self, file):
        self.file, self.error = file, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.error is not None:
            raise self.error from None

    def write(self, data):
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self):
        self.file.flush()


def _write_synchronised(path, write):
    """Write a temporary file beside `path`, and rename it to `path` once it is on the disk.

    Its name is fairseq's own, so the next save overwrites the remains of a killed run.
    """
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "wb") as file:
            with _CheckedFile(file) as checked:
                write(checked)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not every file system synchronises a folder
            os.fsync(folder)  # the new name
    finally:
        os.close(folder)


def save(state, path):
    """Write a checkpoint atomically; UsageError if it cannot be written."""
    try:
        with whole(path) as part, open(part, "wb") as file, _CheckedFile(file) as checked:
            torch.save(state, checked)
    except OSError as error:
        raise UsageError(
            f"'{path}' could not be written ({error.strerror}): make room there, or "
            "pass another path"
        ) from error


def _write_checkpoint(path, write):
    """Write a file in up to three tries; CheckpointError names the reason and the remedy."""
    for last_try in (False, False, True):
        try:
            return _write_synchronised(path, write)
        except OSError as error:
            if not last_try and error.errno not in FULL:
                time.sleep(PAUSE)
                continue
            remedy = "remove the cause"
            if error.errno in FULL:
                remedy = (
                    "make room, or keep fewer checkpoints (--keep-interval-updates, "
                    "--keep-last-epochs, --no-epoch-checkpoints)"
                )
            raise CheckpointError(
                f"'{path}' could not be written ({error.strerror}); {remedy}, and start the same "
                "command again: it resumes from the last intact checkpoint, if there is one."
            ) from error


def whole_checkpoints():
    """Write each checkpoint atomically, and give one reason if it cannot be written.

    Cause: fairseq copies a checkpoint onto checkpoint_last.pt, so a killed run leaves half a file.
    On a full disk it tries three times, prints three tracebacks and leaves its `.tmp`.
    Remove when fairseq writes another file, waits for the disk and renames the file.
    """
    from fairseq import checkpoint_utils
    from fairseq.file_io import PathManager

    @replace(checkpoint_utils, "torch_persistent_save")
    def torch_persistent_save(original, obj, filename, async_write=False):
        if (
            async_write
            or not isinstance(filename, str)
            or PathManager.path_requires_pathmanager(filename)
        ):
            return original(obj, filename, async_write)
        try:
            _write_checkpoint(filename, lambda file: torch.save(obj, file))
        except CheckpointError as error:
            if os.path.basename(filename) != "crash.pt":
                raise
            logger.warning(error)  # the error that crash.pt was for follows

    @replace(PathManager, "copy")
    def copy(original, src_path, dst_path, overwrite=False):
        if any(map(PathManager.path_requires_pathmanager, (src_path, dst_path))):
            return original(src_path, dst_path, overwrite=overwrite)

        def write(file):
            with open(src_path, "rb") as source:
                shutil.copyfileobj(source, file, 1 << 20)

        _write_checkpoint(dst_path, write)
        return True


def _numbered_checkpoints(path):
    """Return the paths of the numbered checkpoints in the folder of a path."""
    folder = os.path.dirname(path)
    names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else ()
    return [os.path.join(folder, name) for name in sorted(names) if NUMBERED.fullmatch(name)]


def updates(path):
    """Return the number of updates of a checkpoint; None if it cannot be read."""
    return read_metadata(path, lambda state: state["optimizer_history"][-1]["num_updates"])


def resumed_runs():
    """Resume from the newest intact checkpoint; warn if a run starts again at update 0.

    Cause: a run stops at a damaged checkpoint_last.pt, though other checkpoints lie beside it.
    Without that file, or without the one of --restore-file, it starts at update 0 and overwrites
    the others.
    Remove when fairseq looks for another checkpoint. See also `_resume`.
    """
    from fairseq.file_io import PathManager
    from fairseq.trainer import Trainer

    @replace(Trainer, "load_checkpoint")
    def load_checkpoint(original, self, filename, *args, **kwargs):
        options = self.cfg.checkpoint
        is_named = options.restore_file != "checkpoint_last.pt"
        last = os.path.join(options.save_dir, f"checkpoint_last{self.checkpoint_suffix}.pt")
        if self.data_parallel_rank == 0 and not PathManager.exists(filename):
            _warn_of_restart(filename, is_named, last)
        # Only the first worker reads, and only readers see damage; the others get the state.
        try:
            return _resume(original, self, filename, *args, **kwargs)
        except DamagedCheckpointError as error:
            damaged = error
        if is_named or filename != last or self.checkpoint_suffix:
            raise CheckpointError(
                f"'{filename}' is damaged or incomplete; pass another checkpoint with "
                "--restore-file."
            ) from damaged
        others = [(count, path) for path in _numbered_checkpoints(last) if (count := updates(path))]
        for count, path in sorted(others, reverse=True):
            with contextlib.suppress(DamagedCheckpointError):
                state = _resume(original, self, path, *args, **kwargs)
                logger.warning(
                    f"'{last}' is damaged or incomplete: this run resumes from '{path}' (update "
                    f"{count}), the newest intact checkpoint beside it"
                )
                return state
        raise CheckpointError(
            f"'{last}' is damaged or incomplete, and no intact checkpoint lies beside it; pass "
            "one with --restore-file, or delete it to begin at update 0."
        ) from damaged


def _warn_of_restart(filename, is_named, last):
    """Warn that a run starts at update 0, if a checkpoint is named or other ones exist."""
    if is_named:
        logger.warning(
            f"there is no '{filename}', so this run begins at update 0, with new parameters: check "
            "the path of --restore-file"
        )
    elif filename == last and (others := _numbered_checkpoints(last)):
        logger.warning(
            f"there is no '{last}', so this run begins at update 0, although '{others[-1]}' "
            "exists: --restore-file resumes from such a file"
        )


def _resume(load, trainer, filename, reset_optimizer=False, *args, **kwargs):
    """Load a checkpoint into a trainer; CheckpointError if the run cannot resume from it.

    Cause: fairseq does not compare a model's settings, or the shapes of an optimizer's state, with
    the checkpoint's. Without an optimizer's state it counts updates from 0 again, but not epochs.
    It deletes the parameters before it starts an average (--store-ema) from them; here the average
    starts from the loaded model. A model's `check_resumed(settings, before)` compares the settings.
    Remove when fairseq compares both, requires an optimizer's state, and starts an average from the
    loaded model.
    """
    check = getattr(trainer.get_model(), "check_resumed", None)
    must_resume = not reset_optimizer and trainer.data_parallel_rank == 0
    if check is not None and must_resume:
        before = read_metadata(filename, lambda state: state["cfg"]["model"])
        if before is not None:
            check(trainer.cfg.model, before)
    ema = trainer.cfg.ema
    stores_ema = ema.store_ema
    if stores_ema and read_metadata(filename, lambda state: "ema" not in state["extra_state"]):
        ema.store_ema = False
    try:
        loaded = load(trainer, filename, reset_optimizer, *args, **kwargs)
        if must_resume and read_metadata(filename, lambda s: "last_optimizer_state" not in s):
            raise CheckpointError(
                f"a run cannot resume from '{filename}', which has no optimizer state (as with "
                "--no-save-optimizer-state, or after multimax-average): pass --reset-optimizer to "
                "train its parameters from update 0, or pass it as --finetune-from-model with "
                "another --save-dir"
            )
        _check_moments(trainer._optimizer)
    except Exception as error:
        if isinstance(error, OSError | ImportError) or explain(error):
            raise
        if not is_raised_by_fairseq(error):
            raise
        raise CheckpointError(
            f"a run cannot resume from '{filename}' ({first_line(error)}); pass another "
            "checkpoint with --restore-file, or take its parameters alone "
            "(--finetune-from-model)"
        ) from error
    finally:
        ema.store_ema = stores_ema
    if stores_ema and loaded is not None and trainer._ema is None:
        trainer._build_ema()
    return loaded


def _check_moments(optimizer):
    states = getattr(getattr(optimizer, "optimizer", None), "state", {})
    for parameter, state in states.items():
        for name in MOMENTS:
            shape = getattr(state.get(name), "shape", parameter.shape)
            if shape != parameter.shape:
                raise ValueError(
                    f"its optimizer has {name} of shape {list(shape)} for parameters of shape "
                    f"{list(parameter.shape)}"
                )


def saved_checkpoints():
    """Also save at the end of an epoch without a checkpoint; never take NaN as the best value.

    Cause: fairseq saves nothing at the end of an epoch whose checkpoint --no-epoch-checkpoints or
    --save-interval leaves out. A validation loss of NaN becomes the best value. No later value
    compares as better, so worse checkpoints replace the best one.
    Remove when fairseq saves there, and compares only finite values.
    """
    from fairseq import checkpoint_utils

    @replace(checkpoint_utils, "save_checkpoint")
    def save_checkpoint(original, cfg, trainer, epoch_itr, val_loss):
        if val_loss is not None and not math.isfinite(val_loss):
            logger.warning(
                f"{cfg.best_checkpoint_metric} of the validation at update "
                f"{trainer.get_num_updates()} is {float(val_loss)}: not compared with the best."
            )
            val_loss = None
        if cfg.no_epoch_checkpoints or epoch_itr.epoch % cfg.save_interval:
            epoch_itr = types.SimpleNamespace(
                epoch=epoch_itr.epoch,
                state_dict=epoch_itr.state_dict,
                end_of_epoch=lambda: False,
            )
        return original(cfg, trainer, epoch_itr, val_loss)


def finished_run():
    """Do not train a run beyond --max-update when it is started again.

    Cause: fairseq checks --max-update only after an update.
    Remove when fairseq checks it before it trains.
    """
    from fairseq import checkpoint_utils

    @replace(checkpoint_utils, "load_checkpoint")
    def load_checkpoint(original, cfg, trainer, **kwargs):
        loaded = original(cfg, trainer, **kwargs)
        optimization = trainer.cfg.optimization
        if 0 < (optimization.max_update or 0) <= trainer.get_num_updates():
            logger.info(f"nothing is left of --max-update {optimization.max_update}")
            optimization.max_epoch = -1  # which fairseq reads next
        return loaded


def result_files():
    """Write the file of --results-path atomically.

    Cause: fairseq-generate empties the existing file before it checks its arguments, and leaves
    half a file if it stops.
    Remove when fairseq-generate renames a complete file.
    """
    from fairseq_cli import generate

    @replace(generate, "main")
    def main(original, args):
        folder = getattr(args, "results_path", None)  # of the command line
        if folder is None:
            return original(args)
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as args.results_path:
            scorer = original(args)
            name = f"generate-{args.gen_subset}.txt"
            os.replace(os.path.join(args.results_path, name), os.path.join(folder, name))
        return scorer
