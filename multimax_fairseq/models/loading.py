"""Load the model of a checkpoint."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils, tasks
from fairseq.data.data_utils import infer_language_pair
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.registry import REGISTRIES
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.translation import TranslationTask
from omegaconf import MISSING, OmegaConf

from multimax_fairseq.compat.silent import check_languages, setting_names
from multimax_fairseq.errors import UsageError, no_file, remedy_for

# Flags of fairseq-generate that a search in Python reads.
SEARCH = frozenset(
    "beam constraints diverse_beam_groups diverse_beam_strength diversity_rate lenpen "
    "match_source_len max_len_a max_len_b min_len no_repeat_ngram_size print_alignment sampling "
    "sampling_topk sampling_topp score_reference temperature unkpen unnormalized".split()
)
# Other settings that a loaded model reads; `beam` and `score_reference` are arguments of each call.
LOADED = SEARCH - {"beam", "score_reference"} | {
    *("batch_size", "max_tokens", "retain_dropout", "retain_dropout_modules")
}
ENCODERS = {kind: REGISTRIES[kind] for kind in ("bpe", "tokenizer")}
KINDS = {"translation": TranslationTask, "language_modeling": LanguageModelingTask}


def load(
    path: Path, data: Path | None, kinds: Collection[str] = tuple(KINDS), **overrides: Any
) -> tuple[Any, Any, Any]:
    """Return a checkpoint's model in evaluation mode, its task and its settings.

    Args:
        path: written by fairseq-train; or the folder of a run.
        data: the folder of fairseq-preprocess that the model was trained on; None for the folder
            that the checkpoint names.
        kinds: some of `KINDS`.
        **overrides: settings that replace those in the checkpoint.

    Raises:
        UsageError: a file is missing or does not match, or the task is of another kind.
    """
    path = find_checkpoint(path)
    state = read(path, data, **overrides)
    data = data or Path(task_of(state, path).data)
    task = set_up_task(state, path, data, kinds)
    model, cfg = build(state, path, task, data)
    return model, task, cfg


def find_checkpoint(path: Path) -> Path:
    """Return the best checkpoint of a run's folder, else its last one; a file is returned as it is.

    Raises:
        UsageError: the folder has neither.
    """
    if not path.is_dir():
        return path
    names = ("checkpoint_best.pt", "checkpoint_last.pt")
    found = next((path / name for name in names if (path / name).is_file()), None)
    if found is None:
        raise UsageError(
            f"folder '{path}' has no {' or '.join(names)}: pass the --save-dir of a training"
        )
    return found


def kind_of(name: str) -> str | None:
    """Return the one of `KINDS` that a task is; None for other tasks of fairseq.

    A plugin's subclass has the kind of its base. fairseq's own subclasses have none: their batches
    or their search differ.
    """
    bases = getattr(tasks.TASK_REGISTRY.get(name), "__mro__", ())
    first = next((base for base in bases if base.__module__.startswith("fairseq.")), None)
    return next((kind for kind, task in KINDS.items() if task is first), None)


def set_up_task(
    state: dict[str, Any], path: Path, data: Path, kinds: Collection[str] = tuple(KINDS)
) -> Any:
    """Return the task of a checkpoint, with the dictionaries of `data`.

    Raises:
        UsageError: the task is of another kind, or `data` is of another.
    """
    cfg = task_of(state, path)
    kind = kind_of(cfg._name)
    if kind not in kinds:
        is_known = cfg._name in tasks.TASK_REGISTRY
        remedy = f"pass one of {' or '.join(kinds)}" if is_known else "import its plugin first"
        raise UsageError(f"checkpoint '{path}' is of the task {cfg._name}: {remedy}")
    remedy = "pass the folder that the model was trained on"
    is_pair_missing = kind == "translation" and None in (cfg.source_lang, cfg.target_lang)
    if is_pair_missing and None in infer_language_pair(str(data)):
        raise UsageError(f"data folder '{data}' has no data of a language pair: {remedy}")
    try:
        return tasks.setup_task(cfg, from_checkpoint=True)
    except FileNotFoundError as error:  # of its dictionaries
        missing = Path(error.filename).name
        raise UsageError(f"data folder '{data}' has no {missing}: {remedy}") from None


def read(path: Path, data: Path | None, **overrides: Any) -> dict[str, Any]:
    """Return a checkpoint's state, with `data` and other settings replaced.

    Raises:
        UsageError: one of the two, or a setting, does not exist.
    """
    if not path.is_file():
        raise no_file("checkpoint", path)
    if data is not None and not data.is_dir():
        raise UsageError(
            f"data folder '{data}' does not exist: pass the folder that fairseq-preprocess wrote"
        )
    state: dict[str, Any] = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    data = data or _find_data(state, path)
    if cfg := state.get("cfg"):
        check_languages(path, {"cfg": OmegaConf.to_container(cfg)}, None, overrides)
        _check_names(cfg, overrides)
        # overwrite_args_by_name replaces bpe and tokenizer only if they are None.
        cfg.update(dict.fromkeys(ENCODERS.keys() & overrides))
        overwrite_args_by_name(cfg, {"data": str(data), "eval_bleu": False, **overrides})
        state["args"] = None  # of an older checkpoint; fairseq would read its settings again
    return state


def _find_data(state: dict[str, Any], path: Path) -> Path:
    """Return the data folder that a checkpoint names, also if both have moved together."""
    named = task_of(state, path).data
    moved = path.parent / os.path.relpath(named, state["cfg"].checkpoint.save_dir)
    for data in (moved, Path(named)):
        if data.is_dir():
            return data
    raise UsageError(f"data folder '{named}' of checkpoint '{path}' does not exist: pass its path")


def _check_names(cfg: Any, overrides: dict[str, Any]) -> None:
    """Raise UsageError for a setting, tokenizer or subword encoder that does not exist."""
    known = {*setting_names(cfg, overrides), *LOADED, *ENCODERS}
    owners: dict[str, list[str]] = {}
    for kind, registry in ENCODERS.items():
        chosen = overrides.get(kind, (cfg.get(kind) or {}).get("_name"))
        if chosen is not None and chosen not in registry["registry"]:
            remedy = remedy_for(chosen, registry["registry"])
            raise UsageError(f"{kind}={chosen!r} does not exist: {remedy}")
        for name, options in registry["dataclass_registry"].items():
            for option, field in options.__dataclass_fields__.items():
                owners.setdefault(option, []).append(f"{kind}={name!r}")
                known |= {option} if name == chosen else set()
                is_missing = field.default == MISSING and option not in overrides
                if name == overrides.get(kind) and is_missing:
                    raise UsageError(f"{kind}={name!r} needs {option}: pass it too")
    for name in overrides:
        if name in owners and name not in known:
            raise UsageError(f"{name!r} belongs to {' or '.join(owners[name])}: pass both")
        if name not in known:
            raise UsageError(f"no setting is called {name!r}: {remedy_for(name, known)}")


def task_of(state: dict[str, Any], path: Path) -> Any:
    """Return the task settings of a checkpoint.

    Raises:
        UsageError: the checkpoint has none.
    """
    settings = (state.get("cfg") or {}).get("task")
    if settings is None:
        raise UsageError(
            f"checkpoint '{path}' has no task settings: pass one that fairseq-train wrote"
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
                f"the dictionaries of '{data}' do not match checkpoint '{path}' ({len(words):,} "
                f"words, where its {side} has {len(weight):,}): pass the data it was trained on"
            )
    (model,), cfg, _ = checkpoint_utils.load_model_ensemble_and_task(
        [str(path)], task=task, state=state
    )
    return model.eval(), cfg
