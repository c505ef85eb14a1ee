"""Export of fairseq's Transformers to ONNX, run by onnxruntime alone."""

import functools
import json
import logging
import re
import runpy

import numpy as np
import onnxruntime
import pytest
import torch
from commands import ROOT
from fairseq import checkpoint_utils
from fairseq.sequence_generator import SequenceGenerator

from multimax_fairseq.integrations.convert import __main__ as convert
from multimax_fairseq.integrations.onnx import export_onnx

pytestmark = pytest.mark.long

KINDS = {
    "stock": ("transformer", "--encoder-learned-pos", "--decoder-learned-pos"),
    "multimax": (
        "transformer_multimax",
        *("--output-normalizer", "multimax", "--multimax-sink", "learned"),
        *("--encoder-normalize-before", "--decoder-normalize-before"),
        *("--encoder-layers", "1", "--decoder-layers", "1"),
    ),
    "three mappings": (
        "transformer_multimax",
        *("--attention-normalizer-at", "encoder=entmax15,decoder=ssmax,cross=alpha_entmax"),
        *("--encoder-layers", "1", "--decoder-layers", "1"),
    ),
}


def load(file, data):
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(file)], {"data": str(data)}
    )
    return model.eval(), task


def session(file):
    return onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])


def step(decoder, tokens, cache, memory=None, excluded=None):
    """Return (logits, cache)."""
    given = {"tokens": tokens, "cache": cache, "memory": memory, "excluded": excluded}
    names = [each.name for each in decoder.get_inputs()]
    return decoder.run(None, {name: given[name] for name in names})


@pytest.fixture(scope="module")
def exported(data, checkpoint, tmp_path_factory):
    """exported(kind) -> the checkpoint and the folder of its export."""

    @functools.cache
    def export(kind):
        file, folder = checkpoint(*KINDS[kind]), tmp_path_factory.mktemp("onnx") / "out"
        export_onnx(file, data / "mt", folder)
        return file, folder

    return export


@pytest.mark.parametrize("kind", KINDS)
def test_onnx_translation_equals_fairseq(kind, data, exported):
    """With other sizes than at export, and the target in steps of one and of several words."""
    file, folder = exported(kind)
    model, task = load(file, data / "mt")
    encoder, decoder = (session(folder / f"{side}.onnx") for side in ("encoder", "decoder"))
    task.load_dataset("valid")
    rows = task.dataset("valid")
    batch = rows.collater([rows[index] for index in range(len(rows))])["net_input"]
    target = batch["prev_output_tokens"].numpy()
    with torch.no_grad():
        expected = model(**batch)[0].numpy()
    memory, excluded = encoder.run(None, {"tokens": batch["src_tokens"].numpy()})
    cache, logits = np.zeros((*memory.shape[:4], 0, memory.shape[5]), np.float32), []
    for part in (target[:, :1], target[:, 1:2], target[:, 2:]):
        some, cache = step(decoder, part, cache, memory, excluded)
        logits.append(some)
    real = target != task.target_dictionary.pad()
    np.testing.assert_allclose(np.concatenate(logits, 1)[real], expected[real], atol=1e-4)


def test_the_example_translates_as_fairseq(data, exported):
    file, folder = exported("multimax")
    model, task = load(file, data / "mt")
    lines = [*(data / "all.de").read_text().splitlines()[:6], "unheard of"]
    words = task.source_dictionary
    rows = [words.encode_line(line, add_if_not_exist=False).long() for line in lines]
    lengths = torch.tensor([len(row) for row in rows])
    source = torch.nn.utils.rnn.pad_sequence(rows, True, words.pad(), padding_side="left")
    sample = {"net_input": {"src_tokens": source, "src_lengths": lengths}}
    generator = SequenceGenerator([model], task.target_dictionary, beam_size=1, max_len_b=20)
    found = [hypotheses[0]["tokens"] for hypotheses in generator.generate([model], sample)]
    expected = [task.target_dictionary.string(tokens) for tokens in found]
    translate = runpy.run_path(str(ROOT / "user_dir" / "translate_onnx.py"))["translate"]
    assert translate(folder, lines, longest=20) == expected
    symbols, unknown = "</s> <s> Recht <pad>", "x x Recht x"
    found = translate(folder, [symbols, unknown], longest=20)
    assert found[0] == found[1]


def test_onnx_language_model_equals_fairseq(data, checkpoint, tmp_path, caplog, recwarn):
    flags = ("--decoder-normalize-before", "--attention-normalizer", "sparsemax")
    file = checkpoint("transformer_lm_multimax", *flags)
    model, task = load(file, data / "lm")
    command = ["onnx", str(file), str(data / "lm"), str(tmp_path / "out")]
    theirs = logging.getLogger("torch")  # it has a handler of its own
    theirs.addHandler(caplog.handler)
    recwarn.clear()
    try:
        convert.main(command)
    finally:
        theirs.removeHandler(caplog.handler)
    logged = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    # Hydra, which reads the checkpoint, warns too; the commands silence it at their start.
    warned = [str(w.message) for w in recwarn if re.search(r"/torch/|copyreg", w.filename)]
    assert (logged, warned) == ([], [])
    decoder = session(tmp_path / "out" / "decoder.onnx")
    sizes = json.loads((tmp_path / "out" / "settings.json").read_text())
    words = torch.randint(4, len(task.dictionary), (2, 9))
    words[:, 0] = sizes["eos"]
    with torch.no_grad():
        expected = model(words)[0].numpy()
    cache = np.zeros((2, sizes["layers"], 2, sizes["heads"], 0, sizes["head_size"]), np.float32)
    first, cache = step(decoder, words[:, :5].numpy(), cache)
    second, cache = step(decoder, words[:, 5:].numpy(), cache)
    np.testing.assert_allclose(np.concatenate([first, second], 1), expected, atol=1e-4)
    assert cache.shape[4] == 9
    with pytest.raises(SystemExit, match="exists already"):
        convert.main(command)


def test_onnx_names_an_unsupported_part(data, checkpoint, tmp_path):
    for arch, flags, what in (
        ("rnn_multimax", (), "the structure of a RecurrentModel. Use the model with"),
        ("transformer_multimax", ("--attention-gate",), "GatedAttention in encoder.self_attn"),
        ("transformer_multimax", ("--output-normalizer", "entmax15"), "sparse output mapping"),
    ):
        with pytest.raises(ValueError, match=what):
            export_onnx(checkpoint(arch, *flags), data / "mt", tmp_path / "out")
        assert not (tmp_path / "out").exists()
