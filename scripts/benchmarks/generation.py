"""Beam search.

Contestants: MultiMax and a softmax model of the same weights, with fairseq's search and with ours,
in int8, and in CTranslate2 if it is installed.
"""

import argparse
import copy
import functools
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq import checkpoint_utils, utils
from fairseq.models.transformer import TransformerModel
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf

import multimax_fairseq.models  # noqa: F401
from benchmarks.measurement import Case, Contestant, Ready
from multimax_fairseq.errors import CheckpointError, UsageError
from multimax_fairseq.models.config import as_namespace
from multimax_fairseq.models.loading import task_of
from multimax_fairseq.models.quantize import quantize
from multimax_fairseq.models.search_layers import faster_layers


class Trained(NamedTuple):
    """A translation model with MultiMax, and the data that it translates."""

    cfg: Any
    task: Any
    model: Any
    batches: list[dict[str, Any]]


Search = Callable[[dict[str, Any]], list[list[Any]]]  # a batch -> the tokens of each translation


def generate(args: argparse.Namespace) -> list[Case]:
    @functools.cache
    def trained() -> Trained:
        return load(args)  # once, when the first contestant is built

    def contestant(family: str, backend: str = "auto", loop: Any = None) -> Contestant:
        return Contestant(
            lambda: ready(fairseq_search(trained(), family, loop, args), trained().batches),
            family,
            backend,
        )

    def in_ctranslate2(compute_type: str) -> Contestant:
        return Contestant(
            lambda: ready(ctranslate2_search(trained(), compute_type, args), trained().batches),
            f"CTranslate2 {compute_type}",
        )

    contestants = {
        "softmax (fairseq)": contestant("stock", loop=SequenceGenerator),
        "softmax (our loop)": contestant("stock"),
        "MultiMax (plain)": contestant("ours", "plain"),
        "MultiMax (auto)": contestant("ours"),
    }
    if args.device == "cpu" and args.dtype == "float32":
        contestants["MultiMax (int8)"] = contestant("int8")
        if importlib.util.find_spec("ctranslate2"):
            contestants["softmax (CTranslate2)"] = in_ctranslate2("float32")
            contestants["softmax (CTranslate2, int8)"] = in_ctranslate2("int8")
    label = f"generation, {args.subset}, beam {args.beam}"
    quantities = ["tokens/s", "hypotheses/s"]
    return [Case(label, 0, contestants, ["softmax (fairseq)", "MultiMax (plain)"], quantities)]


def load(args: argparse.Namespace) -> Trained:
    path = str(args.checkpoint)
    refusal = UsageError(
        f"--checkpoint {path} holds no translation model with MultiMax attention: train one with "
        "--arch transformer_multimax or transformer_iwslt_de_en_multimax"
    )
    state = checkpoint_utils.load_checkpoint_to_cpu(path, {"data": str(args.data)})
    if task_of(state, args.checkpoint)._name != "translation":
        raise refusal
    try:
        models, cfg, task = checkpoint_utils.load_model_ensemble_and_task([path], state=state)
    except RuntimeError:
        raise CheckpointError(
            f"--checkpoint {path} does not match the dictionary of {args.data} or this version: "
            "pass one that this version has trained on that data"
        ) from None
    if not any(name.endswith("normalizer.modulator") for name, _ in models[0].named_modules()):
        raise refusal
    cfg.generation.beam, cfg.generation.max_len_a, cfg.generation.max_len_b = args.beam, 1.2, 10
    task.load_dataset(args.subset)
    batches = task.get_batch_iterator(
        task.dataset(args.subset), max_tokens=args.max_tokens, seed=1
    ).next_epoch_itr()  # shuffled: else the first rounds have the shortest sentences
    return Trained(cfg, task, models[0], list(batches))


def softmax_twin(trained: Trained) -> Any:
    """Return fairseq's model with the same weights, without the modulators."""
    weights = trained.model.state_dict()
    settings = copy.deepcopy(as_namespace(trained.cfg.model))
    twin = TransformerModel.build_model(settings, trained.task)
    twin.load_state_dict({key: weights[key] for key in twin.state_dict()})
    return twin


def ready(search: Search, batches: list[dict[str, Any]]) -> Ready:
    """Return steps that translate one batch each."""

    def step(number: int) -> dict[str, int]:
        found = search(batches[number % len(batches)])
        return {"hypotheses": len(found), "tokens": sum(map(len, found))}

    return Ready(step, lambda: [best for batch in batches for best in search(batch)])


def fairseq_search(trained: Trained, family: str, loop: Any, args: argparse.Namespace) -> Search:
    """Return a beam search of fairseq, or of this package if `loop` is None.

    family: "stock" (the softmax twin), "ours" (MultiMax) or "int8" (MultiMax in int8).
    """
    cfg, task = trained.cfg, trained.task
    model = softmax_twin(trained) if family == "stock" else copy.deepcopy(trained.model)
    model = model.to(args.device, getattr(torch, args.dtype))
    model.prepare_for_inference_(cfg)
    if family == "int8":
        quantize([model])
    if loop is None:
        faster_layers([model])  # as fairseq-generate does
    generator = task.build_generator([model], cfg.generation, seq_gen_cls=loop)

    def search(batch: dict[str, Any]) -> list[list[int]]:
        batch = utils.move_to_cuda(batch) if args.device == "cuda" else batch
        found = task.inference_step(generator, [model], batch)
        return [best["tokens"].tolist() for best, *_ in found]

    return search


def ctranslate2_search(trained: Trained, compute_type: str, args: argparse.Namespace) -> Search:
    """Return CTranslate2's beam search on the softmax twin."""
    import ctranslate2

    cfg = trained.cfg
    with tempfile.TemporaryDirectory() as folder:
        # One namespace of all settings, as in a checkpoint of fairseq-train.
        names = vars(as_namespace(cfg.task)) | vars(as_namespace(cfg.model))
        names |= {"arch": "transformer", "_name": "transformer", "task": cfg.task._name}
        state = {
            "cfg": OmegaConf.to_container(cfg) | {"model": argparse.Namespace(**names)},
            "model": softmax_twin(trained).state_dict(),
            "args": None,
            "best_loss": None,
        }
        file, converted = Path(folder, "twin.pt"), str(Path(folder, "converted"))
        torch.save(state, file)
        converter = ctranslate2.converters.FairseqConverter(str(file), str(args.data))
        converter.convert(converted, quantization=compute_type)
        translator = ctranslate2.Translator(
            converted,
            compute_type=compute_type,
            inter_threads=1,
            intra_threads=torch.get_num_threads(),
        )
    words = trained.task.source_dictionary
    special = {words.pad(), words.eos()}

    def search(batch: dict[str, Any]) -> list[list[str]]:
        source = batch["net_input"]["src_tokens"]
        texts = [[words[token] for token in row if token not in special] for row in source.tolist()]
        found = translator.translate_batch(
            texts,
            beam_size=args.beam,
            max_decoding_length=int(1.2 * source.shape[1] + 10),
        )
        # The others count the end of sentence.
        return [[*result.hypotheses[0], "</s>"] for result in found]

    return search
