"""Saving and loading Hugging Face models with normalizers, and imports."""

import copy
import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers as hf
from hugging_face import (
    LAYERS,
    MODELS,
    PAD,
    WIDTHS,
    WORDS,
    encoder_decoder,
    gpt2,
    llama,
    logits,
    made,
    tokens,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from multimax_fairseq import replace_softmax
from multimax_fairseq.integrations.transformers import attach, checkpoint, load, save
from multimax_fairseq.modules.normalizer import Normalizer

pytestmark = pytest.mark.long

FILE = "multimax.safetensors"


def bert_config():
    return hf.BertConfig(vocab_size=WORDS, pad_token_id=PAD, **LAYERS, **WIDTHS)


def bert_bert():
    return encoder_decoder(hf.BertModel(bert_config()), bert_config())


def bert_gpt2():
    return encoder_decoder(hf.BertModel(bert_config()), gpt2().config)


def vit_gpt2():
    config = hf.ViTConfig(image_size=8, patch_size=4, **LAYERS, **WIDTHS)
    return encoder_decoder(hf.ViTModel(config), gpt2().config, hf.VisionEncoderDecoderModel)


def same(model, other):
    mine, theirs = model.state_dict(), other.state_dict()
    assert list(mine) == list(theirs)
    for name, value in mine.items():
        assert value.dtype == theirs[name].dtype and torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("normalizer", ["multimax", "alpha_entmax", "topk"])
@pytest.mark.parametrize("make", MODELS)
def test_load_restores_the_model_bitwise(make, normalizer, tmp_path):
    model = made(make)
    settings = {"multimax": {"init_std": 0.3, "order": 1, "terms": "low"}, "topk": {"k": 2}}
    attach(model, normalizer, per_head=True, **settings.get(normalizer, {}))
    save(model, tmp_path / "new" / "folder")
    again = load(tmp_path / "new" / "folder")
    assert type(again) is type(model) and not again.training
    same(model, again)
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))
    save(again, tmp_path / "twice")
    same(model, load(tmp_path / "twice"))
    assert all(parameter.requires_grad for parameter in again.parameters())


@pytest.mark.parametrize("make", [bert_bert, bert_gpt2, vit_gpt2])
def test_load_restores_an_encoder_decoder_model(make, tmp_path):
    model, ids = made(make), tokens()
    inputs = {"input_ids": ids, "decoder_input_ids": ids}
    if make is vit_gpt2:
        inputs = {"pixel_values": torch.randn(3, 3, 8, 8), "decoder_input_ids": ids}
    names = attach(model, init_std=0.3, inputs=inputs)
    assert [name.split(".")[0] for name in names] == ["encoder"] * 2 + ["decoder"] * 4
    save(model, tmp_path)
    again = load(tmp_path)
    same(model, again)
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)


def test_load_keeps_dtypes(tmp_path):
    model = made(llama).to(torch.bfloat16)
    attach(model, init_std=0.3)
    save(model, tmp_path)
    again = load(tmp_path)
    same(model, again)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16, torch.float32}
    wide = load(tmp_path, hf.LlamaForCausalLM, dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}


def test_load_reads_shards(tmp_path):
    model = made(gpt2)
    attach(model, init_std=0.3)
    small = model.save_pretrained
    model.save_pretrained = lambda folder: small(folder, max_shard_size="20KB")
    save(model, tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    same(model, load(tmp_path))


def test_copies_keep_their_normalizers():
    model = made(llama)
    attach(model, init_std=0.3)
    expected = logits(model, tokens())
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(again, tokens()), expected)


def test_from_pretrained_drops_the_normalizers(tmp_path):
    """from_pretrained returns the softmax model, so `load` is needed."""
    model = made(gpt2)
    softmax = logits(model, tokens())
    attach(model, init_std=0.3)
    save(model, tmp_path)
    theirs, found = hf.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert len(found["unexpected_keys"]) == 8
    torch.testing.assert_close(logits(theirs, tokens()), softmax, atol=1e-5, rtol=0)


@pytest.fixture
def saved(tmp_path):
    model = made(llama)
    attach(model, init_std=0.3)
    save(model, tmp_path / "saved")
    return tmp_path / "saved"


def rewrite(folder, change):
    """Write the normalizers' tensors again after a change."""
    tensors = load_file(folder / FILE)
    with safe_open(folder / FILE, "pt") as file:
        metadata = file.metadata()
    change(tensors)
    save_file(tensors, folder / FILE, metadata)


FIRST = "model.layers.0.self_attn"
TENSOR = f"{FIRST}.modulator.low_threshold"


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop(TENSOR),
        lambda tensors: tensors.update({TENSOR: torch.ones(3)}),
        lambda tensors: tensors.update({f"{FIRST}.other": torch.ones(3)}),
    ],
)
def test_load_refuses_normalizers_that_do_not_fit(saved, change):
    rewrite(saved, change)
    with pytest.raises(RuntimeError, match="Normalizer"):
        load(saved)


def test_load_needs_the_file_of_save(saved):
    (saved / FILE).unlink()
    with pytest.raises(ValueError, match="does not exist: give a folder that save wrote"):
        load(saved)


class Code:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (self.marker, "w")


def test_load_runs_no_code_of_the_folder(saved, monkeypatch):
    """Not from a pickle in place of the weights, nor from a file that config.json names."""
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("load asks"))
    marker, config = saved / "ran", json.loads((saved / "config.json").read_text())
    (saved / "code.py").write_text(f"open({str(marker)!r}, 'w')")
    theirs = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    for change in ({"model_type": "theirs", "auto_map": theirs}, {"architectures": ["Trainer"]}):
        (saved / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match="trust_remote_code|has no class"):
            load(saved)
    (saved / "config.json").write_text(json.dumps(config))
    (saved / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.safetensors"):
        torch.save({"x": Code(str(marker))}, saved / name)
        with pytest.raises(Exception):  # noqa: B017  of transformers or safetensors
            load(saved)
    assert not marker.exists()


def test_load_checks_the_class(saved):
    with pytest.raises(ValueError, match="not those of LlamaForSequenceClassification"):
        load(saved, hf.LlamaForSequenceClassification)
    config = json.loads((saved / "config.json").read_text())
    config["architectures"] = ["MyLlama"]
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no class 'MyLlama': pass it as model_class"):
        load(saved)
    assert type(load(saved, hf.LlamaForCausalLM)) is hf.LlamaForCausalLM


def test_save_refuses_models_without_normalizers(tmp_path):
    model = made(llama)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no normalizers"):
        save(model, tmp_path)
    replace_softmax(model)
    with pytest.raises(ValueError, match="no normalizers from attach"):
        save(model, tmp_path)
    with pytest.raises(ValueError, match="has normalizers already"):
        attach(model)
    model = made(llama)
    attach(model)


def test_failed_save_keeps_the_earlier_model(saved, monkeypatch):
    def full(*arguments):
        raise OSError("no space left on device")

    before, other = load(saved), made(llama)
    attach(other, init_std=0.5)
    files = sorted(saved.iterdir())
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_file", full)
        with pytest.raises(OSError, match="no space"):
            save(other, saved)
    assert sorted(saved.iterdir()) == files
    same(before, load(saved))
    with monkeypatch.context() as patched:
        patched.setattr(
            checkpoint.Path, "replace", full
        )  # fails when the files are moved into place
        with pytest.raises(OSError, match="no space"):
            save(other, saved)
    with pytest.raises(ValueError, match="does not exist"):
        load(saved)
    (saved / "model.safetensors.index.json").write_text("{}")  # of an earlier sharded model
    save(other, saved)
    assert sorted(saved.iterdir()) == files
    same(other, load(saved))


def test_save_of_unserializable_settings_keeps_earlier_model(saved):
    before = load(saved)
    other = made(llama)
    attach(other, init_std=0.5)
    next(m for m in other.modules() if isinstance(m, Normalizer)).arguments["init_std"] = object()
    with pytest.raises(TypeError, match="object is not JSON"):
        save(other, saved)
    same(before, load(saved))


def test_save_accepts_numpy_settings(tmp_path):
    model = made(llama)
    attach(model, init_std=np.float32(0.5), order=np.int64(1))
    save(model, tmp_path)
    same(model, load(tmp_path))


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_import_names_the_missing_package():
    """Only multimax_fairseq.integrations.transformers needs the package, and names it."""
    code, out, error = python(
        "import sys; sys.modules['transformers'] = None\n"
        "import multimax_fairseq, multimax_fairseq.models, multimax_fairseq.criterions\n"
        "print('works')\n"
        "import multimax_fairseq.integrations.transformers"
    )
    assert code == 1 and out == "works\n"
    last = error.strip().splitlines()[-1]
    assert last == (
        "ModuleNotFoundError: multimax_fairseq.integrations.transformers needs the package "
        "transformers: "
        "pip install 'multimax-fairseq[transformers]'"
    )
    assert "During handling" not in error


def test_import_needs_fairseq_only_for_export():
    code, out, error = python(
        "import sys; sys.modules['fairseq'] = None\n"
        "import multimax_fairseq\n"
        "assert 'transformers' not in sys.modules\n"
        "from multimax_fairseq.integrations.transformers import attach, load, register, save\n"
        "register()\n"
        "from multimax_fairseq.integrations.transformers import export_translation"
    )
    assert code == 1 and "No module named 'fairseq" in error.strip().splitlines()[-1]
    import multimax_fairseq.integrations.transformers

    with pytest.raises(AttributeError, match="no attribute 'exports'"):
        multimax_fairseq.integrations.transformers.exports  # noqa: B018


def test_load_refuses_weights_that_the_class_drops(saved):
    weights = saved / "model.safetensors"
    state = load_file(weights) | {"model.layers.0.gate.weight": torch.ones(2)}
    save_file(state, weights, {"format": "pt"})
    with pytest.raises(ValueError, match=r"not those of .*'model\.layers\.0\.gate\.weight'"):
        load(saved)


def test_load_reads_no_pickle(saved):
    weights = saved / "model.safetensors"
    torch.save(load_file(weights), saved / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(OSError, match="model.safetensors"):
        load(saved)


def test_load_keeps_bfloat16_normalizers(tmp_path):
    model = made(llama)
    attach(model, init_std=0.3)
    save(model.to(torch.bfloat16), tmp_path)
    same(model, load(tmp_path))


def test_load_sets_evaluation_mode(saved):
    assert not any(module.training for module in load(saved).modules())
