"""Fixes that let fairseq 0.12.3 run with a current torch, numpy, sacrebleu and hydra."""

import os
import socket
import sys
import types
import warnings

import numpy as np
import torch

from multimax_fairseq import bleu
from multimax_fairseq.compat import mistakes, text
from multimax_fairseq.compat.patch import MONITOR, PACKAGE, command, replace
from multimax_fairseq.errors import UsageError

TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
# Commands whose processes share the work and sum the results.
SHARED = ("fairseq_cli.train", "fairseq_cli.validate")
# Log-probability in a search of a word with probability 0.
IMPOSSIBLE = -1e4
# Regular expressions for the beginnings of hydra's warnings about fairseq.
WARNINGS = (
    r"hydra\.experimental\.\w+\(\) is no longer experimental",
    r"\nThe version_base parameter is not specified",
    r"In 'config': Usage of deprecated keyword in package header",
    r"\n'.*' is validated against ConfigStore schema with the same name",
    r"\nThe strict flag in the compose API is deprecated",
    r"Future Hydra versions will no longer change working directory",
    r"'pin_memory' argument is set as true but no accelerator is found",
)
# Groups of a training's configuration that are checked for mistakes.
GROUPS = ("common", "dataset", "optimization", "checkpoint", "task", "lr_scheduler")


def numpy_compat():
    """Restore what fairseq uses of numpy 1: np.compat, and `interpolation` of np.percentile.

    Cause: TokenBlockDataset and LanguagePairDataset use np.compat.long; --num-batch-buckets uses
    `interpolation`. numpy 2 has neither.
    Remove when fairseq writes np.int64 and `method`.
    """
    if not hasattr(np, "compat"):
        np.compat = types.SimpleNamespace(long=int)

    @replace(np, "percentile")
    def percentile(original, *args, **kwargs):
        if "interpolation" in kwargs:
            kwargs["method"] = kwargs.pop("interpolation")
        return original(*args, **kwargs)


def repeated_warnings():
    """Silence the 24 lines of warnings that each command prints.

    Cause: fairseq uses the interface of hydra 1.0, and pins memory also without a GPU.
    Remove when fairseq uses the current interface, and pins memory for a GPU only.
    """
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message, UserWarning)


def score_command():
    """Give sacrebleu 2 and fairseq's Scorer the arguments that they accept.

    Cause: fairseq-score passes open files to sacrebleu (--sacrebleu), which takes lists of lines,
    and three numbers to its own Scorer (--sentence-bleu), which takes a BleuConfig.
    Remove when fairseq-score passes those.
    """
    import sacrebleu
    from fairseq.scoring.bleu import BleuConfig, Scorer

    @replace(sacrebleu, "corpus_bleu")
    def corpus_bleu(original, hypotheses, references, *args, **kwargs):
        references = [r if r is None else list(r) for r in references]
        if language := bleu.LANGUAGE.get():  # see silent.tokenizer_of_target_language
            kwargs.setdefault("tokenize", bleu.tokenizer(language))
        return original(list(hypotheses), references, *args, **kwargs)

    @replace(Scorer, "__init__")
    def __init__(original, self, cfg, *numbers):
        if numbers:
            cfg = BleuConfig(pad=cfg, eos=numbers[0], unk=numbers[1])
        original(self, cfg)


def command_line():
    """Let --bf16 train on a GPU or CPU; refuse mistaken settings.

    Cause: fairseq's command line sets `tpu` for --bf16, so training looks for torch_xla.
    Remove when fairseq reads --bf16 as it reads common.bf16.
    """
    from fairseq import options

    @replace(options, "parse_args_and_arch")
    def parse_args_and_arch(original, parser, input_args=None, *rest, **kwargs):
        try:
            parsed = original(parser, input_args, *rest, **kwargs)
        except RuntimeError as error:  # without a message
            if error.args:
                raise
            raise UsageError(
                "no model is named: add --arch, such as --arch transformer_multimax"
            ) from error
        args = parsed[0] if isinstance(parsed, tuple) else parsed
        if "--tpu" not in (sys.argv if input_args is None else input_args):
            args.tpu = False
        mistakes.check_settings(vars(args))
        return parsed


def user_dir():
    """Import this package's models for --user-dir multimax_fairseq, from any folder.

    Cause: fairseq assumes that a package that is already imported has registered its models. The
    fix also checks the text of fairseq-preprocess, which calls this function first.
    Remove when fairseq imports the models.
    """
    from fairseq import utils
    from fairseq.models import import_models

    @replace(utils, "import_user_module")
    def import_user_module(original, args):
        args.user_dir = resolve(getattr(args, "user_dir", None))
        if args.user_dir and os.path.realpath(args.user_dir) == os.path.realpath(PACKAGE):
            name = os.path.basename(PACKAGE)
            import_models(os.path.join(PACKAGE, "models"), f"{name}.models")
        else:
            original(args)
        if hasattr(args, "trainpref"):
            text.check_files(args)


def resolve(path):
    """Return the path of a --user-dir.

    The name multimax_fairseq means this package, unless the current folder has a package of that
    name.
    """
    if path == os.path.basename(PACKAGE) and not os.path.isfile(f"{path}/__init__.py"):
        return PACKAGE
    return path


def progress_lines():
    """Leave the values of --monitor-interval out of text lines, and write them to JSON lines once.

    Cause: fairseq prints every logged value in every line of text, so hundreds of values would hide
    the loss. In JSON it prints null for a value that it has already shown.
    Remove when fairseq selects values by line.
    """
    from fairseq.logging import progress_bar

    def shows(is_shown):
        def _format_stats(original, self, stats, *args, **kwargs):
            shown = {
                key: value
                for key, value in stats.items()
                if not key.removeprefix("train_").startswith(MONITOR) or is_shown(value)
            }
            return original(self, shown, *args, **kwargs)

        return _format_stats

    replace(progress_bar.BaseProgressBar, "_format_stats")(shows(lambda value: False))
    replace(progress_bar.JsonProgressBar, "_format_stats")(shows(lambda value: value is not None))


def sharded_data():
    """Read the default --upsample-primary -1 as 1 copy of `train` beside `train1`.

    Cause: fairseq uses -1 as the number of copies. Only multilingual_translation reads it as 1.
    Remove when translation does too.
    """
    from fairseq.data import ConcatDataset

    @replace(ConcatDataset, "__init__")
    def __init__(original, self, datasets, sample_ratios=1):
        if not isinstance(sample_ratios, int):
            sample_ratios = [1 if ratio == -1 else ratio for ratio in sample_ratios]
        original(self, datasets, sample_ratios)


def zero_probability_words():
    """Let generation end a hypothesis whose forced word has probability 0.

    Cause: a sparse output layer gives most words the score -inf, and an assertion fails if no other
    score is left. In a search these words get a finite score below all others. Sampling takes the
    exponential of the score, so the scores are shifted to start at 0 where no other word is left.
    Remove when fairseq ends such hypotheses.
    """
    from fairseq.search import Sampling
    from fairseq.sequence_generator import SequenceGenerator

    @replace(Sampling, "step")
    def step(original, self, step, lprobs, scores, *rest, **kwargs):
        best = lprobs.amax(-1, keepdim=True)
        shift = best.clamp(min=IMPOSSIBLE).masked_fill(best > IMPOSSIBLE / 100, 0.0)
        sampled, words, beams = original(self, step, lprobs - shift, scores, *rest, **kwargs)
        return sampled + shift[:, :, 0].gather(1, beams), words, beams

    @replace(SequenceGenerator, "__init__")
    def __init__(original, self, models, *args, **kwargs):
        original(self, models, *args, **kwargs)
        decoders = (getattr(model, "decoder", None) for model in self.model.models)
        if all(getattr(decoder, "output_normalizer", None) is None for decoder in decoders):
            return
        step = self.model.forward_decoder

        def forward_decoder(*args, **kwargs):
            log_probs, attention = step(*args, **kwargs)
            return log_probs.clamp(min=IMPOSSIBLE), attention

        self.model.forward_decoder = forward_decoder


def adaptive_softmax_checkpoints():
    """Load checkpoints of a decoder with an adaptive softmax and shared embeddings.

    Cause: fairseq copies shared embeddings to `output_projection`, which such a decoder does not
    have.
    Remove when fairseq checks that the decoder has one.
    """
    from fairseq.models.transformer import TransformerDecoderBase

    @replace(TransformerDecoderBase, "upgrade_state_dict_named")
    def upgrade_state_dict_named(original, self, state_dict, name):
        upgraded = original(self, state_dict, name)
        if self.adaptive_softmax is not None:
            state_dict.pop(f"{name}.output_projection.weight", None)
        return upgraded


def pretrained_bart():
    """Run the task translation_from_pretrained_bart.

    Cause: it reads its settings as `args`, and its base class stores them as `cfg`.
    Remove when fairseq uses one name.
    """
    from fairseq.tasks.translation_from_pretrained_bart import TranslationFromPretrainedBARTTask

    TranslationFromPretrainedBARTTask.args = property(lambda self: self.cfg)


def checkpoint_to_workers():
    """Send a checkpoint to the other workers with torch's own broadcast of objects.

    Cause: fairseq pickles the checkpoint with torch.save, and torch 2.6 refuses to load it in the
    other workers. The processes of a run trust each other, and the first one has read the file
    safely.
    Remove when fairseq uses torch's broadcast.
    """
    from fairseq.distributed import utils

    @replace(utils, "_broadcast_object_slow")
    def _broadcast_object_slow(original, obj, src_rank, group, dist_device):
        box = [obj]
        torch.distributed.broadcast_object_list(box, src_rank, group, dist_device)
        return box[0]


def processes(apply):
    """Train with several processes on a CPU, started by torchrun or by fairseq.

    Cause: fairseq counts processes by GPUs before it reads torchrun's variables. Without GPUs,
    torchrun's processes are separate trainings that write into one folder, and
    --distributed-world-size fails an assertion.
    Remove when fairseq reads torchrun's variables first, and starts processes without GPUs.

    Args:
        apply: applies all fixes in a spawned process.
    """
    from fairseq.distributed import utils

    @replace(utils, "call_main")
    def call_main(original, cfg, main, **kwargs):
        if command() == "fairseq-hydra-train":
            mistakes.check_settings(_settings(cfg))
        cfg.common.user_dir = resolve(cfg.common.user_dir)  # spawned processes read it
        options = cfg.distributed_training
        is_shared = getattr(main.__globals__.get("__spec__"), "name", None) in SHARED
        has_torchrun = all(name in os.environ for name in TORCHRUN)
        if is_shared and has_torchrun and options.distributed_init_method is None:
            world_size = int(os.environ["WORLD_SIZE"])
            options.distributed_world_size = max(options.distributed_world_size, world_size)
        on_cpu = cfg.common.cpu or not (torch.cuda.is_available() or cfg.common.tpu)
        if on_cpu and is_shared and options.distributed_world_size > 1:
            if options.distributed_backend == "nccl":  # fairseq's default, which is for GPUs
                options.distributed_backend = "gloo"
            if options.distributed_init_method is None and not has_torchrun:
                return _spawn(apply, cfg, main, kwargs)
            if options.distributed_init_method is None:
                options.distributed_init_method = "env://"
                options.distributed_world_size = int(os.environ["WORLD_SIZE"])
                options.distributed_rank = int(os.environ["RANK"])
                options.distributed_no_spawn = True
        return original(cfg, main, **kwargs)


def _settings(cfg):
    """Return a training's settings, and the path of its YAML file as config_file."""
    from hydra.utils import to_absolute_path

    settings = {}
    for group in GROUPS:
        settings |= dict(cfg[group]) if hasattr(cfg[group], "keys") else {}
    settings |= {name: getattr(cfg[name], "_name", None) for name in ("task", "lr_scheduler")}
    words = dict(zip(sys.argv, sys.argv[1:], strict=False))
    if "--config-dir" in words and "--config-name" in words:
        # hydra falls back to fairseq's defaults if the file is missing.
        name = words["--config-name"].removesuffix(".yaml")
        path = os.path.join(words["--config-dir"], f"{name}.yaml")
        settings["config_file"] = to_absolute_path(path)
    return settings


def _spawn(apply, cfg, main, kwargs):
    """Start the processes of a run on a CPU; return when all have ended."""
    options = cfg.distributed_training
    port = options.distributed_port
    if port <= 0:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
    options.distributed_init_method = f"tcp://localhost:{port}"
    kwargs["start_rank"], options.distributed_rank = options.distributed_rank, None
    context = torch.multiprocessing.spawn(
        _process, (apply, main, cfg, kwargs), options.distributed_world_size, join=False
    )
    while not context.join(grace_period=5):  # so that each can print its message
        pass


def _process(index, apply, main, cfg, kwargs):
    """Run one spawned process. It connects before it reads --user-dir, so it applies the fixes."""
    from fairseq.distributed import utils

    apply()
    if "OMP_NUM_THREADS" not in os.environ:
        threads = torch.get_num_threads() // cfg.distributed_training.distributed_world_size
        torch.set_num_threads(max(threads, 1))
    try:
        utils.distributed_main(index, main, cfg, kwargs)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def ddp():
    """Name no GPU to torch's DDP for a model on a CPU.

    Cause: fairseq always names one, which DDP refuses for a CPU model.
    Remove when fairseq names none.
    """
    from fairseq.models import distributed_fairseq_model

    @replace(distributed_fairseq_model, "DistributedDataParallel")
    def build(original, module, *args, device_ids, output_device, **kwargs):
        if next(module.parameters()).device.type == "cpu":
            device_ids = output_device = None
        return original(module, *args, device_ids=device_ids, output_device=output_device, **kwargs)


def gathered_lists():
    """Gather lists on a CPU.

    Cause: fairseq's all_gather_list, which logs criteria whose metrics cannot be summed, needs a
    GPU.
    Remove when its buffers are on the device of the process group.
    """
    from fairseq import utils
    from fairseq.distributed import utils as distributed_utils

    @replace(distributed_utils, "all_gather_list")
    def all_gather_list(original, data, group=None, max_size=16384):
        group = group or distributed_utils.get_global_group()
        if torch.distributed.get_backend(group) != "gloo":
            return original(data, group, max_size)
        gathered = [None] * distributed_utils.get_world_size(group)
        torch.distributed.all_gather_object(gathered, utils.move_to_cpu(data), group)
        return gathered


def non_finite_updates():
    """Name the layer in which an update stops being finite.

    Cause: fairseq's search for a NaN ends in a StopIteration. Its hooks on gradients expect
    tensors, and an encoder returns lists. The fix leaves these hooks out. It asks the model's
    `why_not_finite`, which repeats the batches with the same dropout.
    Remove when fairseq finds the layer.
    """
    from fairseq.nan_detector import NanDetector
    from fairseq.trainer import Trainer

    @replace(NanDetector, "__init__")
    def __init__(original, self, model, forward=True, backward=True):
        original(self, model, forward, backward=False)

    @replace(Trainer, "train_step")
    def train_step(original, self, samples, *args, **kwargs):
        try:
            return original(self, samples, *args, **kwargs)
        except FloatingPointError as error:
            model, criterion = self.get_model(), self.get_criterion()
            if not hasattr(model, "why_not_finite"):
                raise

            def forward():
                self._set_seed()
                for sample in samples:
                    criterion(model, self._prepare_sample(sample)[0])

            reason = str(error).splitlines()[0].rstrip(".")
            raise UsageError(
                f"update {self.get_num_updates() + 1} is not finite ({reason}): "
                f"{model.why_not_finite(forward)}; lower --lr, clip the gradient "
                "(--clip-norm), or warm up for longer (--warmup-updates), and resume from an "
                "earlier checkpoint."
            ) from error
