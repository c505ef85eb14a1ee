"""Hooks that fairseq 0.12.3 does not offer to a plugin. models/ registers its functions here.

Each hook takes f(original, *args, **kwargs), which runs in place of fairseq's function.
"""

from multimax_fairseq.compat.patch import replace


def on_build_generator(function):
    """Run a function where a task builds its generator.

    Cause: fairseq chooses the class of the generator itself.
    Remove when a setting names the class.
    """
    from fairseq.tasks import FairseqTask

    replace(FairseqTask, "build_generator")(function)


def on_generation_flags(function):
    """Run a function where fairseq adds the flags of fairseq-generate and fairseq-interactive.

    Cause: the flags come from a dataclass that a plugin cannot extend.
    Remove when a plugin can.
    """
    from fairseq import options

    replace(options, "add_generation_args")(function)


def on_settings_of_flags(function):
    """Run a function where fairseq turns the flags of a command line into settings.

    Cause: fairseq drops flags that its dataclasses lack.
    Remove when a plugin can extend the dataclasses.
    """
    from fairseq.dataclass import utils

    replace(utils, "override_module_args")(function)


def on_prepare_for_inference(function):
    """Run a function where fairseq prepares a loaded model for generation.

    Cause: only a model's own class can override the method, and --quantize is for stock models too.
    Remove when fairseq calls a plugin for each loaded model.
    """
    from fairseq.models import BaseFairseqModel

    replace(BaseFairseqModel, "prepare_for_inference_")(function)
