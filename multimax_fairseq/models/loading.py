"""Load the model of a checkpoint."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils, tasks

from multimax_fairseq.errors import UsageError, no_file


def load(
    path: Path, data: Path, kinds: Collection[str] = (), **overrides: Any
) -> tuple[Any, Any, Any]:
    """Return a checkpoint's model in evaluation mode, its task and its settings.

    Args:
        path: written by fairseq-train.
        data: the folder of fairseq-preprocess that the model was trained on.
        kinds: names of tasks; empty for any task.
        **overrides: settings that replace those in the checkpoint.

    Raises:
        UsageError: a file is missing or does not fit, or the task is of another kind.
    """
    state = read(path, data, **overrides)
    cfg = task_of(state, path)
    if kinds and cfg._name not in kinds:
        raise UsageError(
            f"checkpoint '{path}' is of the task {cfg._name}: give one of {' or '.join(kinds)}"
        )
    try:
        task = tasks.setup_task(cfg, from_checkpoint=True)
    except FileNotFoundError as error:  # of its dictionaries
        raise UsageError(
            f"data folder '{data}' has no {Path(error.filename).name}: give the folder that the "
            "model was trained on"
        ) from None
    model, cfg = build(state, path, task, data)
    return model, task, cfg


def read(path: Path, data: Path, **overrides: Any) -> dict[str, Any]:
    """Return a checkpoint's state, with `data` and other settings replaced.

    Raises:
        UsageError: one of the two does not exist.
    """
    if not path.is_file():
        raise no_file("checkpoint", path)
    if not data.is_dir():
        raise UsageError(
            f"data folder '{data}' does not exist: give the folder that fairseq-preprocess wrote"
        )
    overrides = {"data": str(data), "eval_bleu": False, **overrides}
    state: dict[str, Any] = checkpoint_utils.load_checkpoint_to_cpu(str(path), overrides)
    return state


def task_of(state: dict[str, Any], path: Path) -> Any:
    """Return the task settings of a checkpoint.

    Raises:
        UsageError: the checkpoint has none.
    """
    settings = (state.get("cfg") or {}).get("task")
    if settings is None:
        raise UsageError(
            f"checkpoint '{path}' has no task settings: give one that fairseq-train wrote"
        )
    return settings


def build(state: dict[str, Any], path: Path, task: Any, data: Path) -> tuple[Any, Any]:
    """Return the model of a checkpoint, in evaluation mode, and its settings.

    Raises:
        UsageError: the dictionaries of `data`, which the task has read, are not the model's.
    """
    for side, words in (("encoder", task.source_dictionary), ("decoder", task.target_dictionary)):
        weight = state["model"].get(f"{side}.embed_tokens.weight")
        if weight is not None and len(weight) != len(words):
            raise UsageError(
                f"the dictionaries of '{data}' do not fit checkpoint '{path}' ({len(words):,} "
                f"words, where its {side} has {len(weight):,}): give the data it was trained on"
            )
    (model,), cfg, _ = checkpoint_utils.load_model_ensemble_and_task(
        [str(path)], task=task, state=state
    )
    return model.eval(), cfg
