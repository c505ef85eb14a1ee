"""A checkpoint's model, of data that it fits."""

from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils

from multimax_fairseq.errors import UsageError


def task_of(state: dict[str, Any], path: Path) -> Any:
    """Return the settings of a checkpoint's task; UsageError where it says none."""
    settings = (state.get("cfg") or {}).get("task")
    if settings is None:
        raise UsageError(f"checkpoint '{path}' says no task: give one that fairseq-train wrote")
    return settings


def build(state: dict[str, Any], path: Path, task: Any, data: Path) -> tuple[Any, Any]:
    """Return the model of a checkpoint, for evaluation, and its settings; UsageError where it is
    not of the data that the task is of."""
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
