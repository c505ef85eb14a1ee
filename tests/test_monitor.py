"""--monitor-interval logs the numbers of multimax-analyze and does not change training."""

import copy
import gc
import json
import logging
import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from commands import PLUGIN, run
from fairseq import checkpoint_utils
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.data import Dictionary
from fairseq.distributed import LegacyDistributedDataParallel, ModuleProxyWrapper
from fairseq.logging import metrics
from numpy_transformer import NumpyTransformer
from torch.nn.parallel import DistributedDataParallel
from toy_collection import TRANSLATION, VARIANTS, gather, table
from toy_models import scatter_modulators
from train_commands import MODEL_LANGUAGE, TRANSLATE, parameters

from multimax_fairseq.criterions.cross_entropy import MultimaxCrossEntropyCriterion
from multimax_fairseq.criterions.entmax_loss import EntmaxLossCriterion
from multimax_fairseq.errors import UsageError
from multimax_fairseq.models import monitor
from multimax_fairseq.models.config import ATTENTIONS
from multimax_fairseq.statistics import observer

pytestmark = pytest.mark.long

LANGUAGE_MODEL, RECURRENT = "transformer_lm_multimax", "rnn_multimax"
EVERY = ("--monitor-interval", "8")
SPARSE = ("--output-normalizer", "entmax15")
MODELS = {
    **{
        name: (TRANSLATION, *flags)
        for name, flags in VARIANTS.items()
        if name not in ("softmax", "topk")
    },
    "some": (TRANSLATION, "--attention-normalizer-at", "decoder,encoder=sparsemax"),
    "monotone": (TRANSLATION, "--multimax-monotone"),
    "recomputed": (TRANSLATION, "--checkpoint-activations"),
    "continuous": (
        *(TRANSLATION, "--cross-attention", "continuous_sparsemax"),
        *("--encoder-self-attention", "continuous_softmax"),
    ),
    "sink": (TRANSLATION, "--multimax-sink", "learned"),
    "softpick": (TRANSLATION, "--attention-normalizer", "softpick"),
    "asentmax": (TRANSLATION, "--attention-normalizer", "asentmax", "--attention-gate"),
    "language model": (LANGUAGE_MODEL,),
    "adaptive": (
        *(LANGUAGE_MODEL, "--adaptive-softmax-cutoff", "10,20", "--adaptive-softmax-dropout"),
        *("0.3", "--output-normalizer", "softmax", "--attention-normalizer", "sparsemax"),
    ),
    "recurrent": (RECURRENT,),
    "recurrent, continuous": (RECURRENT, "--cross-attention", "continuous_softmax"),
    "recurrent, sparse": (RECURRENT, "--attention-normalizer", "entmax15"),
}


@pytest.fixture(autouse=True)
def nothing_logged():
    metrics.reset()
    yield
    metrics.reset()


def criterion_of(task, flags=(), fused=True):
    if "--adaptive-softmax-cutoff" in flags:
        return AdaptiveLoss(task, False)
    if set(SPARSE) <= set(flags):
        return EntmaxLossCriterion(task, False)
    return (MultimaxCrossEntropyCriterion if fused else CrossEntropyCriterion)(task, False)


def step(model, criterion, sample, done=7):
    """Run forward and backward pass of a training step; return the logged numbers."""
    with metrics.aggregate("train"), metrics.aggregate("train_inner") as logged:
        model.train()
        model.set_num_updates(done)
        criterion(model, sample)[0].backward()
    return {
        key.removeprefix("monitor/"): value
        for key, value in logged.get_smoothed_values().items()
        if value is not None
    }


# --- logged numbers -------------------------------------------------------------------------------


def loaded(path):
    """Return a checkpoint's model, its task and the valid set in one batch."""
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    task.load_dataset("valid")
    dataset = task.dataset("valid")
    return model, task, dataset.collater([dataset[i] for i in range(len(dataset))])


STOCK_LOSS = ("multimax", "language model", "recurrent")


@pytest.mark.parametrize(
    "name, fused", [*((name, True) for name in MODELS), *((name, False) for name in STOCK_LOSS)]
)
def test_monitor_metrics_equal_a_collection(data, checkpoint, tmp_path, name, fused, monkeypatch):
    monkeypatch.setattr(observer, "SCORES_AT_ONCE", 1500)  # several parts of a batch
    monkeypatch.setattr(monitor, "LOGITS_AT_ONCE", 500)
    arch, *flags = MODELS[name]
    path = checkpoint(arch, *flags, *EVERY)
    folder = data / ("lm" if "_lm" in arch else "mt")
    gather(tmp_path / "collection", path, data=folder)
    model, task, sample = loaded(path)
    found = step(model, criterion_of(task, flags, fused), sample)
    expected = {"updates": 8.0}
    rows = table(tmp_path / "collection", "heads")
    for at in {(row["place"], row["layer"]) for row in rows}:
        heads = [row for row in rows if (row["place"], row["layer"]) == at]
        figures = ["sparsity", "multi_modality", "entropy", "density", "past_turning_point"]
        for figure in figures + ["mass"] * (name in ("sink", "softpick")):
            values = [row[figure] for row in heads if row[figure] is not None]
            if values:
                mean = sum(values) / len(values)
                shown = ("zeros", 1 - mean) if figure == "density" else (figure, mean)
                expected["{}.{:.0f}/{}".format(*at, shown[0])] = shown[1]
    for row in table(tmp_path / "collection", "parameters"):
        at = row["place"] if row["layer"] is None else f"{row['place']}.{row['layer']:.0f}"
        head = "" if row["head"] is None else f".{row['head']:.0f}"
        expected[f"{at}/{row['name']}{head}"] = row["value"]
    buckets = table(tmp_path / "collection", "output")
    tokens = sum(row["tokens"] for row in buckets)
    expected["output/entropy"] = sum(row["entropy"] * row["tokens"] for row in buckets) / tokens
    others = {key for key in found if key.endswith(("largest_score", "top1", "top10"))}
    assert found.keys() - others == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, abs=1e-5, rel=1e-5), key
    learns = name.startswith("multimax") or name in ("language model", "monotone")
    assert not learns or any(key.endswith("past_turning_point") for key in found)
    sparse = name in ("entmax15", "alpha_entmax", "evsoftmax", "adaptive", "softpick", "asentmax")
    zeros = [value for key, value in found.items() if key.endswith("/zeros")]
    assert len(zeros) == len([key for key in others if "largest" in key]) > 0
    assert all(zeros) if sparse else not any(zeros) or name in ("some", "recurrent, sparse")


@pytest.mark.parametrize("variant", ["multimax-heads", "evsoftmax"])
def test_monitor_largest_score_and_output_equal_reference(data, checkpoint, variant):
    """Compares with float64 for each sentence alone; the output's numbers with PyTorch."""
    path = checkpoint(TRANSLATION, *VARIANTS[variant], *EVERY)
    model, task, sample = loaded(path)
    found = step(model, criterion_of(task, VARIANTS[variant]), sample)
    words = Dictionary.load(str(data / "mt" / "dict.de.txt"))
    network = NumpyTransformer(torch.load(path, weights_only=False)["model"], variant)
    largest = {}
    texts = ((data / f"all.{side}").read_text().splitlines() for side in ("de", "en"))
    for pair in zip(*texts, strict=True):
        source, target = (words.encode_line(line, add_if_not_exist=False).tolist() for line in pair)
        for at, (scores, _, excluded) in network.run(source, [words.eos(), *target[:-1]]).items():
            for head, own in enumerate(scores):
                if variant.startswith("multimax"):
                    own = network.sigma(*at, own, head)
                largest[at] = max(largest.get(at, -math.inf), own[~excluded].max())
    for (kind, layer), value in largest.items():
        assert found[f"{kind}.{layer}/largest_score"] == pytest.approx(value, rel=1e-5, abs=1e-5)
    model.double().eval()
    with torch.no_grad():
        logits = model(**sample["net_input"])[0][sample["target"] != words.pad()]
    best = logits.softmax(-1).sort(-1, descending=True).values
    assert found["output/top1"] == pytest.approx(float(best[:, 0].mean()), abs=1e-5)
    assert found["output/top10"] == pytest.approx(float(best[:, :10].sum(-1).mean()), abs=1e-5)


def test_monitor_separates_layers_that_share_an_attention(build, task, translation_batch):
    models = [build(TRANSLATION, *EVERY), build(TRANSLATION, *EVERY)]
    for model in models:
        scatter_modulators(model)
    models[0].decoder.layers[1].encoder_attn = models[0].decoder.layers[0].encoder_attn
    models[1].decoder.layers[1].encoder_attn.load_state_dict(
        models[1].decoder.layers[0].encoder_attn.state_dict()
    )
    shared, own = (step(model, criterion_of(task), translation_batch()) for model in models)
    assert shared == pytest.approx(own, abs=1e-6)
    assert shared["cross.0/entropy"] != shared["cross.1/entropy"]


@pytest.mark.parametrize("normalizer", ["multimax", "softmax", "sparsemax"])
def test_monitor_is_accurate_in_half_precision(build, task, translation_batch, normalizer):
    flags = ("--attention-normalizer", normalizer, *EVERY)
    exact, half = (scatter_modulators(build(TRANSLATION, *flags)) for _ in range(2))
    expected = step(exact, criterion_of(task), translation_batch())
    found = step(half.bfloat16(), criterion_of(task), translation_batch())
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=0.03, abs=0.03), key
    with torch.autocast("cpu", torch.bfloat16):
        cast = step(exact, criterion_of(task), translation_batch())
    assert cast == pytest.approx(expected, rel=0.03, abs=0.03)


# --- which passes are seen ------------------------------------------------------------------------


def test_monitor_observes_first_batch_of_every_nth_update(build, task, lm_batch):
    model, criterion = build(LANGUAGE_MODEL, "--monitor-interval", "3"), criterion_of(task)
    batches = [lm_batch(seed=seed) for seed in range(2)]
    entropies = []
    for done in range(6):
        for batch in batches:  # as under --update-freq 2
            entropies.append(step(model, criterion, batch, done).get("decoder.0/entropy"))
            metrics.reset()
    assert [i for i, entropy in enumerate(entropies) if entropy is not None] == [4, 10]
    assert entropies[4] == step(model, criterion, batches[0], 8)["decoder.0/entropy"]


def test_monitor_omits_undefined_metrics(build, task, lm_batch):
    """A query with one key has no lower and no intermediate score."""
    model, criterion = build(LANGUAGE_MODEL, *EVERY), criterion_of(task)
    found = step(model, criterion, lm_batch((1, 1)))
    assert all(map(math.isfinite, found.values())) and found["decoder.0/entropy"] == 0
    names = {f"decoder.0/{name}" for name in ("sparsity", "multi_modality")}
    assert not names & found.keys() and names < step(model, criterion, lm_batch(), 15).keys()


def test_monitor_ignores_the_split_of_a_batch(build, task, translation_batch, monkeypatch):
    model = scatter_modulators(build(TRANSLATION, *EVERY, "--attention-normalizer-at", "decoder"))
    whole = step(model, criterion_of(task), translation_batch())
    monkeypatch.setattr(observer, "SCORES_AT_ONCE", 1)
    monkeypatch.setattr(monitor, "LOGITS_AT_ONCE", 1)
    parts = step(model, criterion_of(task), translation_batch(), 15)
    assert parts == pytest.approx({**whole, "updates": 16}, rel=1e-5, abs=1e-6)


def test_monitor_logs_negative_largest_score(build, task, lm_batch):
    model = build(LANGUAGE_MODEL, *EVERY, "--multimax-init-std", "0")
    attention = model.decoder.layers[0].self_attn
    for projection, value in ((attention.q_proj, 1.0), (attention.k_proj, -1.0)):
        torch.nn.init.zeros_(projection.weight)
        torch.nn.init.constant_(projection.bias, value)
    found = step(model, criterion_of(task), lm_batch())
    assert found["decoder.0/largest_score"] == pytest.approx(-math.sqrt(attention.head_dim))


def step_of_one(rank, folder):
    """Run a worker's step under each kind of DDP; save the logged numbers in the folder."""
    store = (folder / "store").as_uri()
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    start, criterion, batches = torch.load(folder / "start.pt", weights_only=False)
    found = []
    for wrap in (
        lambda model: LegacyDistributedDataParallel(model, torch.distributed.group.WORLD),
        lambda model: DistributedDataParallel(model, find_unused_parameters=True),
    ):
        parallel = ModuleProxyWrapper(wrap(copy.deepcopy(start)))
        found.append(step(parallel, criterion, batches[rank]))
        if isinstance(parallel.module, LegacyDistributedDataParallel):
            parallel.module.all_reduce_grads()
        metrics.reset()
        del parallel  # before its process group
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.barrier()
    gc.collect()
    torch.distributed.destroy_process_group()


def test_monitor_logs_on_the_first_worker_only(build, task, lm_batch, tmp_path):
    model, criterion = scatter_modulators(build(LANGUAGE_MODEL, *EVERY)), criterion_of(task)
    batches = [lm_batch(), lm_batch((6, 2), seed=1)]
    torch.save((model, criterion, batches), tmp_path / "start.pt")
    code = f"""if True:
        import pathlib, sys
        sys.path.append({str(Path(__file__).parent)!r})
        import multimax_fairseq.models, test_monitor
        test_monitor.step_of_one(int(sys.argv[1]), pathlib.Path({str(tmp_path)!r}))
    """
    with ThreadPoolExecutor() as workers:  # forks, which need not import torch
        list(workers.map(lambda rank: run(tmp_path, "python", "-c", code, rank), "01"))
    alone = step(model, criterion, batches[0])
    for found in torch.load(tmp_path / "0.pt"):
        assert found == pytest.approx(alone, abs=1e-6)
    assert torch.load(tmp_path / "1.pt") == [{}, {}]


def hooks(model):
    return [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks] + [
        m for m in model.modules() if "attend" in vars(m)
    ]


def test_monitor_observes_only_training_and_removes_hooks(build, task, translation_batch):
    model, criterion = build(TRANSLATION, "--monitor-interval", "1"), criterion_of(task)
    sample = translation_batch()
    model.set_num_updates(7)  # as when a checkpoint is loaded
    assert hooks(model) == []
    criterion(model, sample)
    assert step(model, criterion, sample)["updates"] == 8 and hooks(model) == []
    with metrics.aggregate("train"), metrics.aggregate(new_root=True) as valid, torch.no_grad():
        criterion(model.eval(), sample)
    assert not valid
    broken = {**sample, "net_input": {**sample["net_input"], "src_tokens": None}}
    with pytest.raises(AttributeError):
        step(model, criterion, broken, 8)
    assert hooks(model)
    metrics.reset()
    assert step(model, criterion, sample, 9)["updates"] == 10 and hooks(model) == []


@pytest.mark.parametrize("arch", [TRANSLATION, LANGUAGE_MODEL, RECURRENT])
@pytest.mark.parametrize("value", ["0", "-100"])
def test_build_model_refuses_interval_below_one(build, arch, value):
    with pytest.raises(UsageError, match=f"^--monitor-interval {value} must be a whole number"):
        build(arch, "--monitor-interval", value)
    assert build(arch).monitor is None


# --- training is not changed ----------------------------------------------------------------------

NOISY = ("--dropout", "0.3", "--attention-dropout", "0.2")
STOCHASTIC = {
    "translation": (TRANSLATION, *NOISY),
    "dropped layers": (TRANSLATION, *NOISY, "--encoder-layerdrop", "0.4"),
    "noisy weights": (
        *(TRANSLATION, *NOISY, "--quant-noise-pq", "0.3", "--quant-noise-pq-block-size", "8"),
        *("--attention-normalizer-at", "decoder"),
    ),
    "alpha": (TRANSLATION, *NOISY, "--attention-normalizer", "alpha_entmax"),
    "sparse": (TRANSLATION, *NOISY, "--attention-normalizer", "evsoftmax", *SPARSE),
    "recomputed": (TRANSLATION, *NOISY, "--checkpoint-activations"),
    "adaptive": (*MODELS["adaptive"], *NOISY),
    "recurrent": (*MODELS["recurrent, continuous"], "--dropout", "0.3", "--hidden-dropout", "0.3"),
}


@pytest.mark.parametrize("name", STOCHASTIC)
def test_monitor_leaves_a_training_step_unchanged(build, task, translation_batch, lm_batch, name):
    arch, *flags = STOCHASTIC[name]
    sample = lm_batch() if "_lm" in arch else translation_batch()
    left = []
    for more in ((), EVERY):
        model = build(arch, *flags, *more)
        torch.manual_seed(5)
        found = step(model, criterion_of(task, flags), sample)
        assert bool(found) == bool(more)
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        left.append({**model.state_dict(), **gradients, "random": torch.get_rng_state()})
        metrics.reset()
    assert left[0].keys() == left[1].keys()
    for key, value in left[0].items():
        assert torch.equal(value, left[1][key]), key


def lines(output, kind="train_inner"):
    """Parse the progress lines in JSON."""
    found = re.findall(rf"\| {kind} \| (\{{.*)", output)
    return [json.loads(line) for line in found]


def train(text, data, out, *words, **environment):
    return run(text, "fairseq-train", data, *PLUGIN, *words, "--save-dir", out, **environment)


def test_train_with_monitor_keeps_result_and_log_format(text, tmp_path):
    plain, seen = tmp_path / "plain", tmp_path / "seen"
    silent = train(text, "lm", plain, *MODEL_LANGUAGE)
    told = train(text, "lm", seen, *MODEL_LANGUAGE, "--monitor-interval", "2")
    ended = [parameters(folder / "checkpoint_last.pt") for folder in (plain, seen)]
    assert ended[0].keys() == ended[1].keys()
    assert all(torch.equal(value, ended[1][name]) for name, value in ended[0].items())
    shown = [re.findall(r"\| train(?:_inner)? \|.*", output) for output in (silent, told)]
    keys = [[re.findall(r"(\w+)[= ]\S+", line) for line in lines] for lines in shown]
    assert keys[0] == keys[1] and len(keys[0]) > 6
    assert max(map(len, shown[1])) <= max(map(len, shown[0])) + 10
    assert told.count("monitor") == silent.count("monitor") + 2  # the settings and one message


def test_train_logs_monitor_metrics_as_json_after_resume(text, tmp_path):
    words = [*TRANSLATE, "--log-format", "json", "--monitor-interval", "2", "--update-freq", "2"]
    first = train(text, "mt", tmp_path, *words)
    second = train(text, "mt", tmp_path, *words, "--max-update", "9")
    every = [line for output in (first, second) for line in lines(output)]
    assert [line["num_updates"] for line in every] == [str(n) for n in range(1, 10)]
    told = [line for line in every if "monitor/updates" in line]
    assert [line["monitor/updates"] for line in told] == ["2", "4", "6", "8"]
    assert all(line["monitor/updates"] == line["num_updates"] for line in told)
    scalars = [f"{t}{side}{n}" for t in ("t_", "") for side in "bd" for n in (1, 2)]
    figures = ["entropy", "sparsity", "multi_modality", "zeros", "past_turning_point"]
    keys = {f"{kind}.0/{name}" for kind in ATTENTIONS for name in (*scalars, *figures)}
    keys |= {f"{kind}.0/largest_score" for kind in ATTENTIONS} | {"updates"}
    keys |= {f"output/{name}" for name in (*scalars, "entropy", "top1", "top10")}
    for line in told:
        found = {key for key in line if key.startswith("monitor/")}
        assert found == {f"monitor/{key}" for key in keys}
        assert None not in line.values()
    assert None not in [value for line in every for value in line.values()]


# --- the warning ----------------------------------------------------------------------------------


def turned(model, layer, low=2.0):
    """Return a modulator whose low side has a turning point near 0."""
    modulator = layer.normalizer.modulator
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)  # scores of some size
        modulator.low_coefficient.copy_(torch.tensor([0.0, low]))
    return model


def warnings(caplog):
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_monitor_warns_once_of_a_decreasing_modulator(build, task, translation_batch, caplog):
    model = build(TRANSLATION, "--monitor-interval", "1", "--multimax-init-std", "0")
    turned(model, model.decoder.layers[1].self_attn)
    caplog.set_level(logging.INFO, monitor.logger.name)
    for done in range(3):
        found = step(model, criterion_of(task), translation_batch(), done)
    # The log has the last value, and says once where to find the values.
    assert metrics.get_smoothed_value("train", "monitor/updates") == 3
    assert sum("logs to JSON lines" in message for message in caplog.messages) == 1
    share = found["decoder.1/past_turning_point"]
    assert share > 0
    (said,) = warnings(caplog)
    assert said.startswith("update 1: the modulator in the self-attention of decoder layer 2 falls")
    assert "--multimax-monotone" in said


@pytest.mark.parametrize(
    "flags, low",
    [
        ((), 0.0),  # the identity
        ((), -2.0),  # increases everywhere
        (("--multimax-monotone",), 2.0),
    ],
)
def test_monitor_does_not_warn_of_increasing_modulators(
    build, task, translation_batch, caplog, flags, low
):
    model = build(TRANSLATION, "--monitor-interval", "1", "--multimax-init-std", "0", *flags)
    turned(model, model.decoder.layers[1].self_attn, low)
    found = step(model, criterion_of(task), translation_batch(), 0)
    assert found["decoder.1/past_turning_point"] == 0 and warnings(caplog) == []
