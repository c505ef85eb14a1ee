"""Fixes for fairseq 0.12.3, and one sentence for each common mistake of a user.

A fix has one of four reasons:

    fairseq does not run                            running.py, unknown_words.py
    it returns a wrong result without an error      silent.py, text.py
    it loses data                                   saving.py
    a file can run code, or is not a checkpoint     untrusted.py

Each fix is one function. Its docstring says what the fix does, its cause, and when to remove it.
mistakes.py lists the mistakes of users. hooks.py lets models/ run its own functions where fairseq
offers no hook.

`apply()` applies all of them; a second call changes nothing. models/__init__.py calls it under
--user-dir. `python -m multimax_fairseq COMMAND` calls it for a command without --user-dir.
"""

import logging

from multimax_fairseq.compat import (
    mistakes,
    running,
    saving,
    silent,
    text,
    unknown_words,
    untrusted,
)
from multimax_fairseq.compat.hooks import (
    on_build_generator,
    on_generation_flags,
    on_prepare_for_inference,
    on_settings_of_flags,
)
from multimax_fairseq.compat.mistakes import error_message, explain, wants_traceback
from multimax_fairseq.compat.patch import MONITOR, PACKAGE, command
from multimax_fairseq.compat.untrusted import building_from_checkpoint

__all__ = [
    "MONITOR",
    "PACKAGE",
    "apply",
    "building_from_checkpoint",
    "command",
    "error_message",
    "explain",
    "on_build_generator",
    "on_generation_flags",
    "on_prepare_for_inference",
    "on_settings_of_flags",
    "wants_traceback",
]

FIXES = (
    running.numpy_compat,
    running.repeated_warnings,
    running.score_command,
    running.command_line,
    running.user_dir,
    running.progress_lines,
    running.sharded_data,
    running.zero_probability_words,
    running.adaptive_softmax_checkpoints,
    running.pretrained_bart,
    running.checkpoint_to_workers,
    running.ddp,
    running.gathered_lists,
    running.non_finite_updates,
    silent.token_blocks,
    silent.last_batch,
    silent.resumed_batches,
    silent.validation_on_training_data,
    silent.end_of_curriculum,
    silent.older_data_format,
    silent.indexed_data,
    silent.ema_step,
    silent.ema_frequency,
    silent.adaptive_tails,
    silent.unknown_words_in_references,
    silent.tokenizer_of_target_language,
    silent.diverse_beams,
    silent.repeated_ngrams,
    silent.partial_perplexity,
    silent.inferred_languages,
    silent.model_overrides,
    text.text_lines,
    text.dictionaries,
    text.interactive_lines,
    text.symbols_in_input,
    text.truncated_input,
    text.scored_lines,
    unknown_words.replaced_unknown_words,
    saving.whole_checkpoints,
    saving.saved_checkpoints,
    saving.resumed_runs,
    saving.finished_run,
    saving.result_files,
    untrusted.evaluate_literals,
    untrusted.checkpoint_files,
    untrusted.checkpoint_numbers,
    untrusted.checkpoint_models,
    mistakes.save_folder,
    mistakes.unknown_model,
    mistakes.criterion_and_model,
)


def apply():
    """Apply all fixes; in a fairseq command, also print mistakes as one sentence.

    The fixes import fairseq, some of whose modules set up logging when they are imported. The
    caller's own setup of logging is kept.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    logging.disable(logging.INFO)
    try:
        for fix in FIXES:
            fix()
        running.processes(apply)  # which applies all fixes in the processes that fairseq starts
    finally:
        logging.disable(logging.NOTSET)
        root.handlers[:] = handlers
        root.setLevel(level)
    if command():
        mistakes.plain_errors()
