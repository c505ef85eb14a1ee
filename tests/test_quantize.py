"""Translation in int8."""

import copy
import re

import pytest
import torch
from commands import PLUGIN, refused, run
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models.transformer import TransformerModel
from fairseq.sequence_generator import SequenceGenerator
from toy_models import scatter_modulators, settings_of_model

from multimax_fairseq.commands.evaluate import evaluate
from multimax_fairseq.errors import UsageError
from multimax_fairseq.models.beam_search import BeamGenerator
from multimax_fairseq.models.config import as_namespace
from multimax_fairseq.models.quantize import quantize

pytestmark = pytest.mark.long

ARCH = "transformer_multimax"
SOFTMAX = ("--attention-normalizer", "softmax")


@pytest.fixture(params=["multimax", "softmax", "gate", "fairseq's own"])
def model(request, build, task):
    if request.param == "fairseq's own":
        settings = copy.deepcopy(as_namespace(settings_of_model(ARCH, *SOFTMAX)))
        torch.manual_seed(1)
        return TransformerModel.build_model(settings, task).eval()
    flags = {"multimax": ("--output-normalizer", "multimax"), "softmax": SOFTMAX}
    return scatter_modulators(build(ARCH, *flags.get(request.param, ("--attention-gate",)))).eval()


@torch.no_grad()
def test_quantize_keeps_the_outputs_close(model, dictionary, translation_batch):
    inputs = translation_batch(((9, 7), (4, 5), (6, 1)))["net_input"]
    wanted = model(**inputs)[0].log_softmax(-1)
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    narrow = copy.deepcopy(model)
    quantize([narrow])
    found = narrow(**inputs)[0].log_softmax(-1)
    assert 0 < (found - wanted).abs().max() < 0.3
    left = {name for name, _ in narrow.named_parameters()}
    gone = {name.rpartition(".")[0].rpartition(".")[2] for name in kept.keys() - left}
    attention = {"q_proj", "k_proj", "v_proj", "out_proj"}
    assert gone == {*attention, "fc1", "fc2", "output_projection"}
    for name, parameter in narrow.named_parameters():
        assert torch.equal(parameter, kept[name])
    for kind in (SequenceGenerator, BeamGenerator):
        generator = kind([narrow], dictionary, beam_size=3, max_len_b=8)
        assert all(len(hypotheses) == 3 for hypotheses in generator.generate([narrow], {
            "net_input": inputs}))  # fmt: skip


def test_quantize_refuses_unsupported_models(build):
    with pytest.raises(UsageError, match="float32 on the CPU, and the model is torch.float16 on"):
        quantize([build(ARCH).half()])
    with torch.device("meta"):
        elsewhere = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match="on meta: add --cpu"):
        quantize([elsewhere])
    with pytest.raises(UsageError, match="for Transformers, and LSTM has none of their linear"):
        quantize([torch.nn.LSTM(2, 2)])
    with pytest.raises(UsageError, match="for Transformers, and RecurrentModel has none of their"):
        quantize([build("rnn_multimax")])


def test_quantize_flag_applies_to_its_own_command_line(build):
    settings = []
    for more in (("--quantize", "int8"), ()):
        parser = options.get_generation_parser()
        args = options.parse_args_and_arch(parser, ["data", "--path", "model.pt", *more])
        settings.append(convert_namespace_to_omegaconf(args))
    for cfg, is_narrow in zip(settings, (True, False), strict=True):
        model = build(ARCH).eval()
        model.prepare_for_inference_(cfg)
        assert isinstance(model.encoder.layers[0].fc1, torch.nn.Linear) != is_narrow


def test_commands_translate_in_int8(data, checkpoint, tmp_path):
    path = checkpoint(ARCH, "--share-all-embeddings")
    words = (*PLUGIN, "--path", path, "--beam", "3", "--cpu", "--max-len-b", "10")
    generate = ("fairseq-generate", data / "mt", *words, "--gen-subset", "valid")
    outputs = [run(tmp_path, *generate, *more) for more in ((), ("--quantize", "int8"))]
    scores = [re.findall(r"^H-\d+\t(\S+)", output, re.MULTILINE) for output in outputs]
    assert len(scores[0]) == len(scores[1]) > 3 and scores[0] != scores[1]
    assert "invalid choice: 'int4'" in refused(tmp_path, *generate, "--quantize", "int4", code=2)


def test_evaluate_prints_the_int8_difference(data, checkpoint, tmp_path):
    path = checkpoint(ARCH, "--share-all-embeddings")
    words = ("multimax-evaluate", path, data / "mt", "--subset", "valid", "--quantize", "int8")
    output = run(tmp_path, *words, "--json", tmp_path / "found.json")
    value, narrow, difference = (
        float(x) for x in re.search(
            r"SacreBLEU (\S+) (?:.|\n)*in int8 (\S+): ([+-]\S+)", output).groups())  # fmt: skip
    assert narrow - value == pytest.approx(difference, abs=0.011)
    assert '"int8": ' in (tmp_path / "found.json").read_text()
    path = checkpoint("transformer_lm_multimax")
    with pytest.raises(UsageError, match="--quantize int8 is for translation"):
        evaluate(path, data / "lm", "valid", quantized=True)
