"""Several CPU processes train the model of one process, and report an error in one of them."""

import contextlib
import copy
import gc
import importlib
import random
import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from commands import PLUGIN, ROOT, refused, run
from fairseq.distributed import LegacyDistributedDataParallel, ModuleProxyWrapper
from fairseq.distributed import utils as distributed_utils
from omegaconf import OmegaConf
from torch.nn.parallel import DistributedDataParallel
from toy_models import scatter_modulators
from train_commands import DECODER, ENCODER, losses, parameters

from multimax_fairseq import compat
from multimax_fairseq.compat import running
from multimax_fairseq.criterions.cross_entropy import MultimaxCrossEntropyCriterion

pytestmark = pytest.mark.long

# A gradient that is 0 up to rounding, as of a key's bias, must not become a step of Adam.
TRAIN = [
    *("--optimizer", "adam", "--adam-eps", "1e-5", "--lr", "0.005", "--max-tokens", "90", "--cpu"),
    *("--max-update", "6", "--required-batch-size-multiple", "1", "--no-epoch-checkpoints"),
    *("--log-format", "simple", "--log-interval", "1", "--seed", "3", "--num-workers", "0"),
    *("--dropout", "0"),
]
TRANSLATE = ["mt", "--arch", "transformer_iwslt_de_en_multimax", *ENCODER, *DECODER, *TRAIN]
MODEL_LANGUAGE = [
    *("lm", "--task", "language_modeling", "--arch", "transformer_lm_multimax", *DECODER, *TRAIN),
    *("--decoder-input-dim", "16", "--decoder-output-dim", "16", "--tokens-per-sample", "32"),
]
# The fused loss uses the output layer outside of the model's forward.
FUSED = {
    "mt": ["--criterion", "label_smoothed_multimax_cross_entropy", "--label-smoothing", "0.1"],
    "lm": ["--criterion", "multimax_cross_entropy"],
}
OUTPUT = ["--output-normalizer", "multimax"]
LEGACY, TORCH = ["--ddp-backend", "legacy_ddp"], ["--ddp-backend", "pytorch_ddp"]
# Seed for each batch, so that one process and several drop the same layers of a batch. legacy_ddp
# gives parameters without a gradient zeros, and momentum then moves them.
SEEDED = """
import os
import torch
import multimax_fairseq.models
from fairseq.tasks import FairseqTask
train_step = FairseqTask.train_step

def seeded(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
    torch.manual_seed(update_num)
    done = train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad)
    if "ZEROS" in os.environ:
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    return done

FairseqTask.train_step = seeded
"""


def free_port():
    """Return a free port below the ephemeral ports, which the system could assign meanwhile."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("localhost", port))
            return str(port)
    raise AssertionError("no port is free")


def side_by_side(folder, processes, start, *words, **environment):
    """Run `start` in forks with torchrun's environment variables; return each result."""
    port = free_port()

    def of_rank(rank):
        told = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": str(processes)}
        told |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return start(folder, *words, **told, **environment)

    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(of_rank, range(processes)))


def one(folder, words, name, processes, **environment):
    """Return parameters and losses of one process with the same number of batches per update."""
    flags = ("--update-freq", str(processes), "--save-dir", f"{name}-one")
    log = run(folder, "fairseq-train", *words, *flags, **environment)
    return log, parameters(folder / f"{name}-one" / "checkpoint_last.pt")


def assert_as_one(folder, words, flags, name, processes=2, zeros=False):
    """Check that parameters and printed losses, to three digits, equal those of one process."""
    several = side_by_side(
        folder, processes, run, "fairseq-train", *words, *flags, "--save-dir", name
    )
    expected = one(folder, words, name, processes, **({"ZEROS": "1"} if zeros else {}))
    assert f"training on {processes} devices" in several[0]
    assert_same((several[0], parameters(folder / name / "checkpoint_last.pt")), expected)


def assert_same(found, expected):
    for log in (found[0], expected[0]):
        assert len(losses(log)) == 6 and "valid on" in log
    told = (re.findall(r"\b(?:valid_)?loss[= ]([\d.]+)", log) for log, _ in (found, expected))
    for loss, wanted in zip(*told, strict=True):
        assert abs(float(loss) - float(wanted)) <= 0.0011
    for key, value in expected[1].items():
        torch.testing.assert_close(found[1][key], value, rtol=0, atol=1e-5)


# --- as one process -------------------------------------------------------------------------------


def test_torchrun_environment_trains_like_one_process(text):
    """With only --cpu, and with the loss that uses parameters outside of the model."""
    assert_as_one(text, [*TRANSLATE, *PLUGIN, *OUTPUT, *FUSED["mt"]], [], "two")


def seeded(folder):
    (folder / "seeded").mkdir(exist_ok=True)
    (folder / "seeded" / "__init__.py").write_text(SEEDED)
    return ["--user-dir", str(folder / "seeded")]


STOCK = {"mt": ["--arch", "transformer"], "lm": ["--arch", "transformer_lm"]}
TIED = {"mt": ["--share-all-embeddings"], "lm": ["--share-decoder-input-output-embed"]}
SOME = {"mt": "cross=sparsemax,decoder", "lm": "decoder=alpha_entmax"}
MODELS = {
    "stock": lambda kind: STOCK[kind],
    "fused": lambda kind: [*OUTPUT, *FUSED[kind]],
    "tied": lambda kind: [*OUTPUT, *FUSED[kind], *TIED[kind]],
    "logits": lambda kind: OUTPUT,
    "entmax_loss": lambda kind: ["--criterion", "entmax_loss", "--output-normalizer", "entmax15"],
    "some": lambda kind: ["--attention-normalizer-at", SOME[kind], *FUSED[kind]],
    "layerdrop": lambda kind: (
        [*OUTPUT, *FUSED[kind], "--decoder-layers", "4"] + ["--decoder-layerdrop", "0.4"]
    ),
}
BACKENDS = {"legacy": LEGACY, "torch": TORCH, "unused": [*TORCH, "--find-unused-parameters"]}
OF_FOUR = ["fused", "entmax_loss", "layerdrop"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, processes, backend",
    [
        (model, processes, backend)
        for model, processes in [*((m, 2) for m in MODELS), *((m, 4) for m in OF_FOUR)]
        for backend in BACKENDS
        # DDP of torch waits for the gradients of layers that are left out.
        if (model, backend) != ("layerdrop", "torch")
    ],
)
@pytest.mark.parametrize("kind", ["mt", "lm"])
def test_ddp_of_several_processes_trains_like_one(text, kind, model, backend, processes):
    """Covers losses, backends, LayerDrop, and mappings in some attentions only."""
    words = [*(TRANSLATE if kind == "mt" else MODEL_LANGUAGE), *seeded(text), *MODELS[model](kind)]
    name = f"{kind}-{model}-{backend}-{processes}"
    zeros = (model, backend) == ("layerdrop", "legacy")
    assert_as_one(text, words, BACKENDS[backend], name, processes, zeros)


# --- gradients -----------------------------------------------------------------------------------

DDP = [("legacy_ddp", False), ("pytorch_ddp", False), ("pytorch_ddp", True)]


def gradients_of_one(rank, folder):
    """Run half of a training step in each kind of DDP and save the reduced gradients."""
    store = (folder / "store").as_uri()
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    start, criterion, batches = torch.load(folder / "start.pt", weights_only=False)
    results = []
    for backend, find_unused in DDP:
        model = copy.deepcopy(start)
        # As fairseq wraps them; its own function needs a GPU.
        if backend == "legacy_ddp":
            parallel = LegacyDistributedDataParallel(model, torch.distributed.group.WORLD)
        else:
            parallel = DistributedDataParallel(model, find_unused_parameters=find_unused)
        torch.manual_seed(rank)
        loss, *_ = criterion(ModuleProxyWrapper(parallel), batches[rank])
        loss.backward()
        if backend == "legacy_ddp":
            parallel.all_reduce_grads()
        results.append({name: p.grad for name, p in model.named_parameters()})
        del parallel, loss  # before the process group is destroyed
    torch.save(results, folder / f"{rank}.pt")
    torch.distributed.barrier()
    gc.collect()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("shared", "alpha"),
    [(False, 0.0), (True, 0.0), (False, 5.0)],
    ids=["separate embeddings", "shared embeddings", "R-Drop"],
)
def test_ddp_averages_the_gradients_of_two_processes(
    build, task, lm_batch, tmp_path, shared, alpha
):
    flags = ["--share-decoder-input-output-embed"] if shared else []
    model = scatter_modulators(build("transformer_lm_multimax", *flags, "--dropout", "0.2"))
    criterion = MultimaxCrossEntropyCriterion(task, sentence_avg=False, rdrop_alpha=alpha)
    batches = [lm_batch(), lm_batch((6, 2), seed=1)]
    torch.save((model, criterion, batches), tmp_path / "start.pt")
    # DDP imports it, which takes seconds in each process that has no parent with it.
    importlib.import_module("torch._dynamo")
    torch.multiprocessing.start_processes(
        gradients_of_one, (tmp_path,), nprocs=2, start_method="fork"
    )
    expected = []
    for rank, batch in enumerate(batches):
        torch.manual_seed(rank)
        model.zero_grad()
        criterion(model, batch)[0].backward()
        expected.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for rank in range(2):
        for kind, gradients in zip(DDP, torch.load(tmp_path / f"{rank}.pt"), strict=True):
            for name, gradient in gradients.items():
                mean = (expected[0][name] + expected[1][name]) / 2
                torch.testing.assert_close(
                    gradient, mean, rtol=1e-4, atol=1e-5, msg=f"{kind} {name}"
                )


# --- how they are started -------------------------------------------------------------------------


@pytest.fixture
def script(text, tmp_path):
    """fairseq-train as scripts/setup.sh writes it; spawned processes import it again."""
    (tmp_path / "bin").mkdir()
    file = tmp_path / "bin" / "fairseq-train"
    file.touch()
    setup = (ROOT / "scripts" / "setup.sh").read_text()
    (loop,) = re.findall(r'^for script in "\$venv".*?^done$', setup, re.MULTILINE | re.DOTALL)
    run(tmp_path, "bash", "-euc", loop, venv=tmp_path)
    return file


def test_spawned_processes_report_errors(text, script):
    """A damaged checkpoint stops the process that reads it and the one that waits for it."""
    (text / "spawned").mkdir(exist_ok=True)
    (text / "spawned" / "checkpoint_last.pt").write_bytes(b"PK\3\4")
    words = [*TRANSLATE, *PLUGIN, "--distributed-world-size", "2", "--save-dir", "spawned"]
    log = run(text, "python", script, *words, code=1)
    assert "training on 2 devices" in log and "Traceback" not in log
    assert "fairseq-train: error: rank 0: 'spawned/checkpoint_last.pt' is damaged" in log
    assert "fairseq-train: error: rank 1: the connection to another rank is lost" in log
    assert re.search("error: process [01] terminated with exit code 1: its message", log)


def test_torchrun_processes_report_errors(text):
    """PyTorch stores the error's text, and the process ends before it is shown."""
    (text / "damaged").mkdir(exist_ok=True)
    (text / "damaged" / "checkpoint_last.pt").write_bytes(b"PK\3\4")
    words = ("fairseq-train", *TRANSLATE, *PLUGIN, "--save-dir", "damaged")
    first, second = side_by_side(text, 2, refused, *words)
    assert first.startswith("rank 0: 'damaged/checkpoint_last.pt' is damaged")
    assert second.startswith("rank 1: the connection to another rank is lost")


@pytest.mark.slow
def test_spawned_processes_train_like_one(text, script):
    words = [*TRANSLATE, *PLUGIN]
    flags = ("--distributed-world-size", "2", "--save-dir", "spawn")
    log = run(text, sys.executable, script, *words, *flags)
    found = parameters(text / "spawn" / "checkpoint_last.pt")
    assert_same((log, found), one(text, words, "spawn", 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [(), ("--distributed-world-size=2", "--distributed-backend=gloo")]
)
def test_torchrun_on_two_nodes_trains_like_one_process(text, script, flags):
    """Two nodes of one process each, with one rendezvous address."""
    words, name = [*TRANSLATE, *PLUGIN], f"nodes-{len(flags)}"
    port = free_port()
    torchrun = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1")
    torchrun += ("--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{port}")

    def of_node(_):
        command = (*torchrun, script, *words, *flags, "--save-dir", name)
        return run(text, sys.executable, *command, PYTHONPATH=str(ROOT))

    with ThreadPoolExecutor(2) as pool:
        logs = list(pool.map(of_node, range(2)))
    (log,) = (log for log in logs if "training on 2 devices" in log)
    found = parameters(text / name / "checkpoint_last.pt")
    assert_same((log, found), one(text, words, name, 2))


def settings(**given):
    """Return the settings that call_main reads."""
    values = {
        "distributed_world_size": 2,
        "distributed_init_method": None,
        "distributed_no_spawn": False,
        "distributed_rank": 0,
        "distributed_port": -1,
        "distributed_backend": "nccl",
        "ddp_backend": "pytorch_ddp",
        "zero_sharding": "none",
        "tpu": False,
        "pipeline_model_parallel": False,
    }
    common = {"cpu": True, "tpu": False, "user_dir": None}
    groups = {"common": common, "dataset": {}, "distributed_training": values | given}
    return OmegaConf.create(groups)


def test_call_main_ignores_torchrun_for_other_commands(monkeypatch):
    """fairseq-eval-lm in two processes would report the perplexity of one half each."""
    told = dict(zip(running.TORCHRUN, ("localhost", "1", "2", "0"), strict=True))
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    compat.apply()
    ran = []

    def main(cfg):
        ran.append(cfg.distributed_training.distributed_world_size)

    distributed_utils.call_main(settings(distributed_world_size=1), main)
    assert ran == [1]


@pytest.fixture
def started(monkeypatch):
    """Return the settings of each process that call_main starts without torchrun."""
    compat.apply()
    for name in running.TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    found = []

    def spawn(function, arguments, processes, join):
        found.append(arguments[2].distributed_training)
        return SimpleNamespace(join=lambda grace_period: True)

    def start(device, main, cfg, kwargs):
        found.append(cfg.distributed_training)

    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    monkeypatch.setattr(distributed_utils, "distributed_main", start)
    return found


TRAINING = SimpleNamespace(__globals__={"__spec__": SimpleNamespace(name="fairseq_cli.train")})


@pytest.mark.parametrize("is_torchruns", [False, True])
def test_call_main_keeps_a_given_init_method(started, is_torchruns, monkeypatch):
    for name in running.TORCHRUN if is_torchruns else ():
        monkeypatch.setenv(name, "4")
    given = {"distributed_init_method": "tcp://host:1", "distributed_no_spawn": True}
    distributed_utils.call_main(settings(device_id=0, **given), TRAINING)
    assert started[0].distributed_init_method == "tcp://host:1"
    assert started[0].distributed_world_size == 2


@pytest.mark.parametrize("port", [-1, 0])
def test_call_main_spawns_at_a_free_port(started, port):
    distributed_utils.call_main(settings(distributed_port=port), TRAINING)
    assert int(started[0].distributed_init_method.rpartition(":")[2]) > 0


def test_call_main_takes_world_size_from_torchrun(started, monkeypatch):
    for name in running.TORCHRUN:
        monkeypatch.setenv(name, "2")
    distributed_utils.call_main(settings(distributed_world_size=1, device_id=0), TRAINING)
    assert started[0].distributed_world_size == 2


GATHER = """
import os, torch
from fairseq.distributed import utils
from multimax_fairseq import compat
compat.apply()
torch.distributed.init_process_group("gloo")
print(utils.all_gather_list({"rank": torch.tensor(int(os.environ["RANK"]))}))
"""


def test_all_gather_list_works_on_cpu(text):
    said = side_by_side(text, 2, run, "python", "-c", GATHER)
    assert all("[{'rank': tensor(0)}, {'rank': tensor(1)}]" in line for line in said)
