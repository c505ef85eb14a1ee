"""Many processes: how they start on a CPU, and what torch's DDP is not told there."""

import importlib.util
import os
import socket
import sys

import torch

from multimax_fairseq.compat.patch import wrap
from multimax_fairseq.errors import UsageError

TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
# The commands whose processes share their work and add up what they found.
SHARED = ("fairseq_cli.train", "fairseq_cli.validate")


def processes():
    """fairseq counts processes by the GPUs that it sees, and reads torchrun's number only then.

    Without GPUs, or with one a machine, torchrun's processes were trainings of their own that
    wrote into one folder, and --distributed-world-size met an assertion. Can go when fairseq asks
    torchrun first, and starts processes without GPUs.
    """
    from fairseq.distributed import utils

    def make(original):
        def call_main(cfg, main, **kwargs):
            wanted = cfg.distributed_training
            _refuse_fairscale(wanted)
            shared = getattr(main.__globals__.get("__spec__"), "name", None) in SHARED
            if shared and wanted.distributed_init_method is None:
                _ask_torchrun(wanted)
            on_cpu = cfg.common.cpu or not (torch.cuda.is_available() or cfg.common.tpu)
            if on_cpu and wanted.distributed_world_size > 1:
                if not shared:
                    raise UsageError(
                        f"--distributed-world-size {wanted.distributed_world_size}: on a CPU this "
                        "command works in one process; leave it out"
                    )
                if _prepare(wanted):
                    return _start(cfg, main, kwargs)
            return original(cfg, main, **kwargs)

        return call_main

    wrap(utils, "call_main", make)


def _refuse_fairscale(wanted):
    if importlib.util.find_spec("fairscale"):
        return
    for flag, value, names, remedy in (
        ("--ddp-backend", wanted.ddp_backend, ("fully_sharded", "slowmo"), "legacy_ddp"),
        ("--zero-sharding", wanted.zero_sharding, ("os",), "none"),
    ):
        if value in names:
            raise UsageError(
                f"{flag} {value} needs the package fairscale, which is not installed; give {remedy}"
            )


def _ask_torchrun(wanted):
    if all(name in os.environ for name in TORCHRUN):
        wanted.distributed_world_size = max(
            wanted.distributed_world_size, int(os.environ["WORLD_SIZE"])
        )


def _prepare(wanted):
    """Set what processes on a CPU need; say whether they are still to be started."""
    if wanted.distributed_backend == "nccl":  # fairseq's default, which is for GPUs
        wanted.distributed_backend = "gloo"
    by_hand = wanted.distributed_init_method is not None
    if not by_hand and all(name in os.environ for name in TORCHRUN):
        wanted.distributed_init_method = "env://"
        wanted.distributed_world_size = int(os.environ["WORLD_SIZE"])
        wanted.distributed_rank = int(os.environ["RANK"])
        wanted.distributed_no_spawn = True
        return False
    if by_hand != wanted.distributed_no_spawn:
        raise UsageError(
            "on a CPU --distributed-no-spawn and --distributed-init-method go together; leave both "
            "out, and the processes start by themselves"
        )
    if by_hand:
        return False
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        raise UsageError(
            f"each of the {os.environ['SLURM_STEP_NUM_TASKS']} tasks of this SLURM step would "
            f"start {wanted.distributed_world_size} processes of its own on the CPU; start one "
            "task a node, and in it torchrun"
        )
    port = wanted.distributed_port
    if port <= 0:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
    wanted.distributed_init_method = f"tcp://localhost:{port}"
    return True


def _start(cfg, main, kwargs):
    """As fairseq starts one process a GPU; it returns when all have ended."""
    wanted = cfg.distributed_training
    kwargs["start_rank"], wanted.distributed_rank = wanted.distributed_rank, None
    context = torch.multiprocessing.spawn(
        _process, (main, cfg, kwargs), wanted.distributed_world_size, join=False
    )
    while not context.join(grace_period=5):  # so that each can say its sentence
        pass


def _process(index, main, cfg, kwargs):
    """What runs in a process of its own; --user-dir comes too late for its connection."""
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

    And layers that --*-layerdrop leaves out have no gradients, for which DDP waits without
    --find-unused-parameters; it says so in the update after, when the models differ already. Can
    go when fairseq names no GPU, and refuses the second.
    """
    from fairseq.models import distributed_fairseq_model
    from fairseq.modules import LayerDropModuleList

    def make(original):
        def build(module, *args, device_ids, output_device, **kwargs):
            dropped = any(isinstance(m, LayerDropModuleList) and m.p > 0 for m in module.modules())
            if dropped and not kwargs["find_unused_parameters"]:
                raise UsageError(
                    "--encoder-layerdrop and --decoder-layerdrop leave parameters without a "
                    "gradient: add --find-unused-parameters, or give --ddp-backend legacy_ddp"
                )
            if next(module.parameters()).device.type == "cpu":
                device_ids = output_device = None
            return original(
                module, *args, device_ids=device_ids, output_device=output_device, **kwargs
            )

        return build

    wrap(distributed_fairseq_model, "DistributedDataParallel", make)


def gathered_lists():
    """all_gather_list, by which criteria whose figures cannot be summed are logged, wants a GPU.

    Can go when its buffers are where the process group is.
    """
    from fairseq import utils
    from fairseq.distributed import utils as distributed_utils

    def make(original):
        def all_gather_list(data, group=None, max_size=16384):
            group = group or distributed_utils.get_global_group()
            if torch.distributed.get_backend(group) != "gloo":
                return original(data, group, max_size)
            found = [None] * distributed_utils.get_world_size(group)
            torch.distributed.all_gather_object(found, utils.move_to_cpu(data), group)
            return found

        return all_gather_list

    wrap(distributed_utils, "all_gather_list", make)
