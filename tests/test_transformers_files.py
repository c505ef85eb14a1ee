"""Saving and loading Hugging Face models with normalizers, and imports."""

import copy
import json
import pickle
import shutil
import sys
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers as hf
from commands import ROOT, run
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
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import nn

from multimax_fairseq import replace_softmax
from multimax_fairseq.integrations.transformers import attach, checkpoint, load, save
from multimax_fairseq.integrations.transformers.layers import KEY
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


IMAGE = WORDS - 1  # the token that stands for an image


def llava():
    """A model whose weights have other names in its files."""
    vision = hf.CLIPVisionConfig(image_size=8, patch_size=4, **LAYERS, **WIDTHS)
    text = {"vision_config": vision, "text_config": llama().config, "image_token_id": IMAGE}
    return hf.LlavaForConditionalGeneration(hf.LlavaConfig(**text))


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


@pytest.mark.parametrize("normalizer", ["multimax", "topk"])
@pytest.mark.parametrize("make", [gpt2, llava])
def test_load_reads_what_save_pretrained_writes(make, normalizer, tmp_path):
    """As Trainer calls it, in one file, and as a user does, in shards."""
    model = made(make)
    images = {"pixel_values": torch.randn(1, 3, 8, 8)} if make is llava else {}
    inputs = {"input_ids": tokens(1).index_fill(1, torch.arange(4), IMAGE), **images}
    settings = {"multimax": {"init_std": 0.3}, "topk": {"k": 2}}[normalizer]
    attach(model, normalizer, inputs=inputs, **settings)
    model.save_pretrained(tmp_path / "trainer", state_dict=model.state_dict())
    load(tmp_path / "trainer").save_pretrained(tmp_path / "user", max_shard_size="20KB")
    assert len(list((tmp_path / "user").glob("model-*.safetensors"))) > 1
    again = load(tmp_path / "user")
    same(model, again)
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)


def test_trainer_resumes_from_a_loaded_checkpoint(tmp_path):
    """In its own process: fairseq's fixes replace classes that Trainer unpickles."""
    code = """if True:
        import torch, transformers as hf
        from hugging_face import gpt2, made, tokens
        from multimax_fairseq.integrations.transformers import attach, load

        def parameters(model):
            return torch.nn.utils.parameters_to_vector(model.parameters())

        model = made(gpt2)
        attach(model, init_std=0.3)
        rows = [{"input_ids": row, "labels": row} for row in tokens(16)]
        settings = hf.TrainingArguments("runs", max_steps=4, save_steps=2, report_to=[])
        hf.Trainer(model, settings, train_dataset=rows).train()
        again = load("runs/checkpoint-2")
        assert not torch.equal(parameters(again), parameters(model))
        resumed = hf.Trainer(again, settings, train_dataset=rows)
        resumed.train(resume_from_checkpoint="runs/checkpoint-2")
        assert torch.equal(parameters(again), parameters(model))
        assert torch.equal(parameters(load("runs/checkpoint-4")), parameters(model))
    """
    run(tmp_path, "python", "-c", code, PYTHONPATH=str(ROOT / "tests"))


def test_load_reads_folders_with_the_normalizers_beside_the_config(tmp_path):
    """`save` wrote the normalizers' arguments to the metadata of multimax.safetensors."""
    model = made(llama)
    names = attach(model, "multimax", init_std=0.3, order=1)
    arguments = model.config.__dict__.pop(KEY)
    assert [*arguments] == names
    model.save_pretrained(tmp_path)
    assert KEY not in json.loads((tmp_path / "config.json").read_text())
    tensors = {n: p.detach() for n, p in model.named_parameters() if ".normalizer." in n}
    tensors = {name.replace(".normalizer.", "."): value for name, value in tensors.items()}
    save_file(tensors, tmp_path / FILE, {"layers": json.dumps(arguments)})
    again = load(tmp_path)
    same(model, again)
    save(again, tmp_path)
    assert not (tmp_path / FILE).exists()
    same(model, load(tmp_path))


class ModulesToSave(nn.Module):
    """A module and its trained copy, as PEFT's wrapper for modules_to_save."""

    def __init__(self, module):
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(module)})

    def attend(self, *arguments, **options):
        return self.modules_to_save["default"].attend(*arguments, **options)


class Adapted(nn.Module):
    """A model with the structure of PEFT's."""

    def __init__(self, model, names):
        super().__init__()
        self.base_model, self.names = nn.Module(), names
        self.base_model.model = model
        for name in names:
            layer = model.get_submodule(name)
            layer.normalizer = ModulesToSave(layer.normalizer)

    def merge_and_unload(self):
        for name in self.names:
            layer = self.base_model.model.get_submodule(name)
            layer.normalizer = layer.normalizer.modules_to_save["default"]
        return self.base_model.model


@pytest.mark.parametrize("wrap", ["peft", "data parallel", "compiled"])
def test_save_writes_the_model_inside_a_wrapper(wrap, tmp_path):
    model = made(llama)
    names = attach(model, init_std=0.3)
    wrapped = {
        "peft": lambda: nn.DataParallel(Adapted(model, names)),
        "data parallel": lambda: nn.DataParallel(model),
        "compiled": lambda: torch.compile(model),
    }[wrap]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "normalizer" in name and "original_module" not in name:
                parameter += 0.1  # as training does
    expected, keys = logits(model, tokens()), list(wrapped.state_dict())
    save(wrapped, tmp_path)
    assert list(wrapped.state_dict()) == keys
    assert torch.equal(logits(load(tmp_path), tokens()), expected)


def test_save_writes_a_model_card(tmp_path):
    model = made(gpt2)
    attach(model, "topk", k=2)
    save(model, tmp_path, metrics={"perplexity": 12.3456789, "steps": 4})
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\ntags:\n- multimax-fairseq\n---\n")
    assert "# GPT2LMHeadModel with topk\n" in card
    assert "- topk (k=2) in `transformer.h.0.attn`, `transformer.h.1.attn`\n" in card
    assert "| perplexity | 12.3457 |\n| steps | 4 |\n" in card
    code = card.partition("```python\n")[2].partition("```")[0]
    found = {"name": tmp_path}
    exec(code, found)
    same(model, found["model"])
    save(model, tmp_path)
    assert "perplexity" not in (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").write_text("mine")
    save(model, tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


class Hub:
    """A local stand-in for the client of the Hub; a repository is a folder."""

    def __init__(self, folder):
        self.folder = folder

    def create_repo(self, repo_id, **options):
        return SimpleNamespace(repo_id=repo_id)

    def create_commit(self, repo_id, operations, **options):
        (self.folder / repo_id).mkdir(parents=True, exist_ok=True)
        for operation in operations:
            target = self.folder / repo_id / operation.path_in_repo
            shutil.copyfile(operation.path_or_fileobj, target)

    def load_card(self, repo_id, token=None):
        if not (self.folder / repo_id / "README.md").exists():
            raise EntryNotFoundError("README.md")
        return huggingface_hub.ModelCard((self.folder / repo_id / "README.md").read_text())

    def snapshot_download(self, repo_id, allow_patterns, revision=None):
        if not (self.folder / repo_id).is_dir():
            raise OSError(f"no repository {repo_id} {revision}")
        return str(self.folder / repo_id)


def test_push_to_hub_uploads_a_model_that_load_reads(tmp_path, monkeypatch):
    hub = Hub(tmp_path)
    monkeypatch.setattr(hf.utils.hub, "hf_api", lambda: hub)
    monkeypatch.setattr(hf.utils.hub.ModelCard, "load", hub.load_card)
    monkeypatch.setattr(checkpoint, "snapshot_download", hub.snapshot_download)
    model = made(gpt2)
    attach(model, init_std=0.3)
    model.push_to_hub("me/gpt2")
    again = load("me/gpt2", revision="main")
    same(model, again)
    assert huggingface_hub.ModelCard.load("me/gpt2").data.tags == ["multimax-fairseq"]
    # A card that is in the repository already stays.
    save(model, tmp_path / "me" / "other")
    card = (tmp_path / "me" / "other" / "README.md").read_text()
    again.push_to_hub("me/other")
    assert (tmp_path / "me" / "other" / "README.md").read_text() == card
    same(model, load("me/other"))
    with pytest.raises(ValueError, match="'me/none' is neither a folder nor a repository"):
        load("me/none")


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


FIRST = "model.layers.0.self_attn.normalizer"
TENSOR = f"{FIRST}.modulator.low_threshold"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda tensors: tensors.pop(TENSOR), ValueError),
        (lambda tensors: tensors.update({TENSOR: torch.ones(3)}), RuntimeError),
        (lambda tensors: tensors.update({f"{FIRST}.other": torch.ones(3)}), ValueError),
    ],
)
def test_load_refuses_normalizers_that_do_not_fit(change, error, saved):
    tensors = load_file(saved / "model.safetensors")
    change(tensors)
    save_file(tensors, saved / "model.safetensors", {"format": "pt"})
    with pytest.raises(error, match="not those of LlamaForCausalLM with its normalizers|mismatch"):
        load(saved)


def test_load_names_what_a_folder_lacks(saved, tmp_path):
    made(llama).save_pretrained(tmp_path / "softmax")
    with pytest.raises(ValueError, match="names no normalizers: use from_pretrained"):
        load(tmp_path / "softmax")
    (saved / "config.json").unlink()
    with pytest.raises(ValueError, match="does not exist: pass a folder that save, save_pre"):
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
    with pytest.raises(ValueError, match="normalizers from attach.* this LlamaForCausalLM is not"):
        save(model, tmp_path)
    replace_softmax(model)
    with pytest.raises(ValueError, match="normalizers from attach.* this LlamaForCausalLM is not"):
        save(model, tmp_path)
    with pytest.raises(ValueError, match="has normalizers already"):
        attach(model)
    model = made(llama)
    attach(model)
    with pytest.raises(ValueError, match="this Sequential is not"):
        save(nn.Sequential(model, nn.Linear(2, 2)), tmp_path)


def test_failed_save_keeps_the_earlier_model(saved, monkeypatch):
    def full(*arguments):
        raise OSError("no space left on device")

    before, other = load(saved), made(llama)
    attach(other, init_std=0.5)
    files = sorted(saved.iterdir())
    with monkeypatch.context() as patched:
        patched.setattr(hf.GenerationConfig, "save_pretrained", full)
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


def test_import_names_the_missing_package(tmp_path):
    """Only multimax_fairseq.integrations.transformers needs the package, and names it."""
    code = """if True:
        import sys
        sys.modules["transformers"] = None
        import multimax_fairseq, multimax_fairseq.models, multimax_fairseq.criterions
        print("works")
        import multimax_fairseq.integrations.transformers
    """
    output = run(tmp_path, "python", "-c", code, code=1)
    assert "works\n" in output and "During handling" not in output
    assert output.splitlines()[-1] == (
        "ModuleNotFoundError: multimax_fairseq.integrations.transformers needs the package "
        "transformers: pip install 'multimax-fairseq[transformers]'"
    )


def test_import_needs_fairseq_only_for_export(tmp_path):
    code = """if True:
        import sys
        sys.modules["fairseq"] = None
        import multimax_fairseq
        assert "transformers" not in sys.modules
        from multimax_fairseq.integrations.transformers import attach, load, register, save
        register()
        print("works")
        from multimax_fairseq.integrations.transformers import export_translation
    """
    output = run(tmp_path, sys.executable, "-c", code, code=1)
    assert "works\n" in output and "No module named 'fairseq" in output.splitlines()[-1]
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_load_gives_normalizers_at_least_float32(dtype, tmp_path):
    model = made(gpt2)
    attach(model, init_std=0.3)
    save(model.to(dtype), tmp_path)
    again = load(tmp_path)
    wide = torch.promote_types(dtype, torch.float32)
    for name, parameter in again.named_parameters():
        assert parameter.dtype == (wide if ".normalizer." in name else dtype)
    torch.testing.assert_close(logits(again, tokens()), logits(model, tokens()))


def test_load_sets_evaluation_mode(saved):
    assert not any(module.training for module in load(saved).modules())
