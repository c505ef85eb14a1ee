"""What fairseq 0.12.3 lacks under a current torch and numpy, and one sentence for a user's mistake.

One function a fix, each with its cause and when it can go; `apply()` runs them all, and running it
again changes nothing. models/__init__.py calls it under --user-dir; for a fairseq command without
one there is `python -m multimax_fairseq COMMAND`, which scripts/setup.sh puts into the project's
own environment under fairseq's names.
"""

from multimax_fairseq.compat import (
    checkpoints,
    commands,
    contents,
    data,
    distributed,
    ema,
    numerics,
    saving,
    settings,
    text,
)
from multimax_fairseq.compat.checkpoints import building_from_checkpoint
from multimax_fairseq.compat.explain import error_message, explain, plain_errors, wants_traceback
from multimax_fairseq.compat.patch import MONITOR, PACKAGE, command

__all__ = [
    "MONITOR",
    "PACKAGE",
    "apply",
    "building_from_checkpoint",
    "command",
    "error_message",
    "explain",
    "wants_traceback",
]


def apply():
    """Make fairseq, as installed, work with the torch and numpy that are installed."""
    contents.evaluate_literals()
    checkpoints.checkpoint_classes()
    checkpoints.checkpoint_errors()
    checkpoints.checkpoint_to_workers()
    checkpoints.checkpoint_models()
    checkpoints.checkpoint_numbers()
    checkpoints.checkpoint_training()
    checkpoints.resumed_model()
    checkpoints.checkpoint_adaptive_softmax()
    ema.ema_of_resumed_run()  # within last_checkpoint(), which may load another file
    saving.whole_checkpoints()
    saving.last_checkpoint()
    saving.finished_run()
    saving.interval_at_epoch_end()
    data.numpy_compat()
    data.token_blocks()
    data.last_batch()
    data.data_in_parts()
    data.source_only_data()
    data.older_format()
    data.indexed_data()
    text.text_lines()
    text.dictionaries()
    text.interactive_lines()
    text.symbols_in_input()
    text.scored_lines()
    distributed.processes()
    distributed.ddp()
    distributed.gathered_lists()
    data.same_batches()
    data.validation_on_training_data()
    data.end_of_curriculum()
    ema.ema_step()
    ema.ema_frequency()
    numerics.not_finite()
    numerics.not_finite_validation()
    numerics.adaptive_tails()
    commands.hydra_warnings()
    commands.score_command()
    commands.unknown_words_in_references()
    commands.diverse_beams()
    commands.impossible_words()
    commands.repeated_ngrams()
    commands.results()
    commands.user_dir()
    text.text_files()  # after user_dir(), which may answer instead of what it wraps
    commands.unknown_model()
    commands.progress_lines()
    settings.flags()
    settings.overrides()
    settings.criteria()
    settings.generation()
    settings.perplexity_of_a_part()
    if command():
        plain_errors()
