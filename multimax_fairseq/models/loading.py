"""Build the model of a checkpoint."""

from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils

from multimax_fairseq.errors import UsageError


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
