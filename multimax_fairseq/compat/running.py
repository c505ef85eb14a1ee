"""What fairseq 0.12.3 cannot do under a current torch, numpy, sacrebleu and hydra."""

import os
import socket
import sys
import types
import warnings

import numpy as np
import torch

from multimax_fairseq.compat import mistakes, text
from multimax_fairseq.compat.patch import MONITOR, PACKAGE, command, replace
from multimax_fairseq.errors import UsageError

TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
# The commands whose processes share their work and add up their results.
SHARED = ("fairseq_cli.train", "fairseq_cli.validate")
# In a search, the log-probability of a word whose probability is 0.
IMPOSSIBLE = -1e4
# Regular expressions: how hydra's warnings about fairseq's use of it begin.
HYDRA_WARNINGS = (
    r"hydra\.experimental\.\w+\(\) is no longer experimental",
    r"\nThe version_base parameter is not specified",
    r"In 'config': Usage of deprecated keyword in package header",
    r"\n'.*' is validated against ConfigStore schema with the same name",
    r"\nThe strict flag in the compose API is deprecated",
    r"Future Hydra versions will no longer change working directory",
)
# The groups of a training's configuration whose settings are checked.
GROUPS = ("common", "dataset", "optimization", "checkpoint", "task", "lr_scheduler")


def numpy_compat():
    """numpy 2 has no np.compat, and np.percentile no `interpolation`.

    TokenBlockDataset and LanguagePairDataset use np.compat.long, --num-batch-buckets the other.
    Can go when fairseq writes np.int64 and `method`.
    """
    if not hasattr(np, "compat"):
        np.compat = types.SimpleNamespace(long=int)

    @replace(np, "percentile")
    def percentile(original, *args, **kwargs):
        if "interpolation" in kwargs:
            kwargs["method"] = kwargs.pop("interpolation")
        return original(*args, **kwargs)


def hydra_warnings():
    """Each command prints 22 lines of warnings, because fairseq uses hydra's interface of 1.0.

    Can go when fairseq uses the present one.
    """
    for message in HYDRA_WARNINGS:
        warnings.filterwarnings("ignore", message, UserWarning)


def score_command():
    """fairseq-score gives open files to sacrebleu, and three numbers to its own Scorer.

    sacrebleu 2 takes lists of lines (--sacrebleu); the Scorer takes a BleuConfig
    (--sentence-bleu). Can go when fairseq-score passes those.
    """
    import sacrebleu
    from fairseq.scoring import bleu

    @replace(sacrebleu, "corpus_bleu")
    def corpus_bleu(original, hypotheses, references, *args, **kwargs):
        references = [r if r is None else list(r) for r in references]
        return original(list(hypotheses), references, *args, **kwargs)

    @replace(bleu.Scorer, "__init__")
    def __init__(original, self, cfg, *numbers):
        if numbers:
            cfg = bleu.BleuConfig(pad=cfg, eos=numbers[0], unk=numbers[1])
        original(self, cfg)


def command_line():
    """--bf16 means a TPU to fairseq's command line, so training looks for torch_xla.

    The settings are checked here too, against mistakes.SETTINGS. Can go when fairseq reads --bf16
    as it reads common.bf16.
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
    """fairseq takes a package that is imported already for a plugin whose models are registered.

    Here --user-dir multimax_fairseq imports this package's models, from any folder.
    fairseq-preprocess, which begins with this function, has its text checked. Can go when fairseq
    imports the models.
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
    """Return the --user-dir that a path means: this package for its name, unless the current
    folder has a package of that name."""
    if path == os.path.basename(PACKAGE) and not os.path.isfile(f"{path}/__init__.py"):
        return PACKAGE
    return path


def progress_lines():
    """fairseq prints every logged value in every line of text, and null in JSON once it is shown.

    Hundreds of values of --monitor-interval would hide the loss. Text leaves them out, and JSON
    has them in the lines that follow their update. Can go when fairseq selects values by line.
    """
    from fairseq.logging import progress_bar

    def shows(is_shown):
        def _format_stats(original, self, stats, *args, **kwargs):
            kept = {
                key: value
                for key, value in stats.items()
                if not key.removeprefix("train_").startswith(MONITOR) or is_shown(value)
            }
            return original(self, kept, *args, **kwargs)

        return _format_stats

    replace(progress_bar.BaseProgressBar, "_format_stats")(shows(lambda value: False))
    replace(progress_bar.JsonProgressBar, "_format_stats")(shows(lambda value: value is not None))


def data_in_parts():
    """The default --upsample-primary -1 gives train a negative number of copies beside train1.

    Here -1 means 1, as in fairseq's multilingual_translation. Can go when translation has this
    default too.
    """
    from fairseq.data import ConcatDataset

    @replace(ConcatDataset, "__init__")
    def __init__(original, self, datasets, sample_ratios=1):
        if not isinstance(sample_ratios, int):
            sample_ratios = [1 if ratio == -1 else ratio for ratio in sample_ratios]
        original(self, datasets, sample_ratios)


def impossible_words():
    """Generation fails an assertion where a forced end of sentence has probability 0.

    A sparse output layer gives most words the score -inf. In a search such words get a finite
    score below all others. Sampling takes the exponential of the score, so the scores start at 0
    where no other word is left. Can go when fairseq ends such hypotheses.
    """
    from fairseq.search import Sampling
    from fairseq.sequence_generator import SequenceGenerator

    @replace(Sampling, "step")
    def step(original, self, step, lprobs, scores, *rest, **kwargs):
        most = lprobs.amax(-1, keepdim=True)
        least = most.clamp(min=IMPOSSIBLE).masked_fill(most > IMPOSSIBLE / 100, 0.0)
        found, words, beams = original(self, step, lprobs - least, scores, *rest, **kwargs)
        return found + least[:, :, 0].gather(1, beams), words, beams

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
    """fairseq loads shared embeddings into an `output_projection`, which a decoder with an
    adaptive softmax does not have: its checkpoints cannot be loaded.

    Can go when fairseq asks whether there is one.
    """
    from fairseq.models.transformer import TransformerDecoderBase

    @replace(TransformerDecoderBase, "upgrade_state_dict_named")
    def upgrade_state_dict_named(original, self, state_dict, name):
        upgraded = original(self, state_dict, name)
        if self.adaptive_softmax is not None:
            state_dict.pop(f"{name}.output_projection.weight", None)
        return upgraded


def checkpoint_to_workers():
    """The first worker reads a checkpoint and sends it on; torch 2.6 refuses what it sends.

    Here torch's own broadcast of objects is used: the processes of a run trust each other, and the
    first worker has read the file under torch's protection. Can go when fairseq uses it too.
    """
    from fairseq.distributed import utils

    @replace(utils, "_broadcast_object_slow")
    def _broadcast_object_slow(original, obj, src_rank, group, dist_device):
        box = [obj]
        torch.distributed.broadcast_object_list(box, src_rank, group, dist_device)
        return box[0]


def processes():
    """fairseq counts processes by the GPUs that it sees, and only then reads torchrun's number.

    Without GPUs, torchrun's processes are separate trainings that write into one folder, and
    --distributed-world-size fails an assertion. Can go when fairseq asks torchrun first, and
    starts processes without GPUs.
    """
    from fairseq.distributed import utils

    @replace(utils, "call_main")
    def call_main(original, cfg, main, **kwargs):
        if command() == "fairseq-hydra-train":
            mistakes.check_settings(_settings(cfg))
        cfg.common.user_dir = resolve(cfg.common.user_dir)  # spawned processes read it
        wanted = cfg.distributed_training
        shared = getattr(main.__globals__.get("__spec__"), "name", None) in SHARED
        is_torchruns = all(name in os.environ for name in TORCHRUN)
        if shared and is_torchruns and wanted.distributed_init_method is None:
            world_size = int(os.environ["WORLD_SIZE"])
            wanted.distributed_world_size = max(wanted.distributed_world_size, world_size)
        on_cpu = cfg.common.cpu or not (torch.cuda.is_available() or cfg.common.tpu)
        if on_cpu and shared and wanted.distributed_world_size > 1:
            if wanted.distributed_backend == "nccl":  # fairseq's default, which is for GPUs
                wanted.distributed_backend = "gloo"
            if wanted.distributed_init_method is None and not is_torchruns:
                return _spawn(cfg, main, kwargs)
            if wanted.distributed_init_method is None:
                wanted.distributed_init_method = "env://"
                wanted.distributed_world_size = int(os.environ["WORLD_SIZE"])
                wanted.distributed_rank = int(os.environ["RANK"])
                wanted.distributed_no_spawn = True
        return original(cfg, main, **kwargs)


def _settings(cfg):
    """Return {name: value} of a training's configuration and of the file that it is read from."""
    from hydra.utils import to_absolute_path

    found = {}
    for group in GROUPS:
        found |= dict(cfg[group]) if hasattr(cfg[group], "keys") else {}
    found |= {name: getattr(cfg[name], "_name", None) for name in ("task", "lr_scheduler")}
    words = dict(zip(sys.argv, sys.argv[1:], strict=False))
    if "--config-dir" in words and "--config-name" in words:
        # hydra falls back to fairseq's defaults if the file is missing.
        name = words["--config-name"].removesuffix(".yaml")
        found["config_file"] = to_absolute_path(os.path.join(words["--config-dir"], f"{name}.yaml"))
    return found


def _spawn(cfg, main, kwargs):
    """Start the processes on a CPU, as fairseq starts one a GPU; return when all have ended."""
    wanted = cfg.distributed_training
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks > 1:  # they would write into one folder
        raise UsageError(
            f"each of the {tasks} tasks of this SLURM step would start its own training: start one "
            "task a node, and in it torchrun"
        )
    port = wanted.distributed_port
    if port <= 0:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
    wanted.distributed_init_method = f"tcp://localhost:{port}"
    kwargs["start_rank"], wanted.distributed_rank = wanted.distributed_rank, None
    context = torch.multiprocessing.spawn(
        _process, (main, cfg, kwargs), wanted.distributed_world_size, join=False
    )
    while not context.join(grace_period=5):  # so that each can print its message
        pass


def _process(index, main, cfg, kwargs):
    """Run one spawned process; it connects before it reads --user-dir."""
    from fairseq.distributed import utils

    from multimax_fairseq import compat

    compat.apply()
    if "OMP_NUM_THREADS" not in os.environ:
        threads = torch.get_num_threads() // cfg.distributed_training.distributed_world_size
        torch.set_num_threads(max(threads, 1))
    try:
        utils.distributed_main(index, main, cfg, kwargs)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def ddp():
    """fairseq names a GPU to torch's DDP on a CPU too, which refuses it.

    Can go when fairseq names no GPU.
    """
    from fairseq.models import distributed_fairseq_model

    @replace(distributed_fairseq_model, "DistributedDataParallel")
    def build(original, module, *args, device_ids, output_device, **kwargs):
        if next(module.parameters()).device.type == "cpu":
            device_ids = output_device = None
        return original(module, *args, device_ids=device_ids, output_device=output_device, **kwargs)


def gathered_lists():
    """all_gather_list, by which criteria whose metrics cannot be summed are logged, needs a GPU.

    Can go when its buffers are where the process group is.
    """
    from fairseq import utils
    from fairseq.distributed import utils as distributed_utils

    @replace(distributed_utils, "all_gather_list")
    def all_gather_list(original, data, group=None, max_size=16384):
        group = group or distributed_utils.get_global_group()
        if torch.distributed.get_backend(group) != "gloo":
            return original(data, group, max_size)
        found = [None] * distributed_utils.get_world_size(group)
        torch.distributed.all_gather_object(found, utils.move_to_cpu(data), group)
        return found


def not_finite():
    """fairseq's search for a NaN ends in a StopIteration.

    Its hooks on the gradients of modules look for a tensor in what a module returns, and an
    encoder returns lists. Here they are left out. A model that has `why_not_finite` names the
    layer, on the same batches with the same dropout. Can go when fairseq finds the layer.
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
                "(--clip-norm), or warm up for longer (--warmup-updates), and go on from a "
                "checkpoint of before."
            ) from error
