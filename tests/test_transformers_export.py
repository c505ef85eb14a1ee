"""Export of fairseq's translation and language models to transformers."""

import sys

import pytest
import torch
import transformers
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator

from multimax_fairseq.compat.text import SYMBOLS
from multimax_fairseq.integrations import transformers as ours
from multimax_fairseq.integrations.transformers import (
    export,
    export_language_model,
    export_translation,
)

pytestmark = pytest.mark.long

LM = "transformer_lm_multimax"
SOFTMAX = ("--attention-normalizer", "softmax")
PRE_NORM = ("--encoder-normalize-before", "--decoder-normalize-before")
KINDS = {
    "post-norm": ("transformer_iwslt_de_en", "FSMTForConditionalGeneration"),
    "gelu": ("transformer", "FSMTForConditionalGeneration", "--activation-fn", "gelu"),
    "ours at softmax": ("transformer_multimax", "FSMTForConditionalGeneration", *SOFTMAX),
    "uneven": (
        "transformer",
        "FSMTForConditionalGeneration",
        *("--encoder-layers", "1", "--decoder-ffn-embed-dim", "24", "--decoder-attention-heads"),
        *("2", "--no-scale-embedding"),
    ),
    "pre-norm": ("transformer_iwslt_de_en", "M2M100ForConditionalGeneration", *PRE_NORM),
}
NORMALIZED = {
    "multimax": "",
    "multimax with sinks": "--multimax-sink learned --multimax-heads separate",
    "length scale": "--multimax-length-scale",
    "alpha_entmax": "--attention-normalizer alpha_entmax --entmax-heads separate",
    "ssmax": "--attention-normalizer ssmax",
    "temperature": "--attention-normalizer softmax --softmax-temperature 2",
    "both": "--output-normalizer multimax",
}


def load(file, data, name="mt"):
    overrides = {"data": str(data / name)}
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(file)], overrides)
    return model.eval(), task


def sentences(task):
    task.load_dataset("valid")
    rows = task.dataset("valid")
    return rows.collater([rows[index] for index in range(len(rows))])


@pytest.mark.parametrize("kind", KINDS)
def test_export_keeps_the_logits(kind, data, checkpoint, tmp_path):
    arch, name, *flags = KINDS[kind]
    file, out = checkpoint(arch, *flags), tmp_path / "new" / "out"
    export_translation(file, data / "mt", out)
    model, task = load(file, data)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(out)
    assert type(theirs).__name__ == name
    batch = sentences(task)["net_input"]
    source, previous = batch["src_tokens"], batch["prev_output_tokens"]
    assert source.eq(task.source_dictionary.pad()).any()
    with torch.no_grad():
        expected = model(**batch)[0]
        logits = theirs(
            source,
            source.ne(task.source_dictionary.pad()).long(),
            decoder_input_ids=previous,
            use_cache=False,
        ).logits
    real = previous.ne(task.target_dictionary.pad())
    assert (logits - expected)[real].abs().max() < 1e-5 * expected.abs().max()
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]


@pytest.mark.parametrize("kind", [*NORMALIZED, "cross"])
def test_export_keeps_the_logits_of_a_normalizer(kind, data, checkpoint, tmp_path):
    flags = "--attention-normalizer sparsemax --attention-normalizer-at cross"
    flags = NORMALIZED.get(kind, flags).split()
    norms = PRE_NORM if kind in ("both", "multimax with sinks") else ()
    file, out = checkpoint("transformer_multimax", *flags, *norms), tmp_path / "out"
    export_translation(file, data / "mt", out)
    model, task = load(file, data)
    theirs = ours.load(out)
    batch = sentences(task)["net_input"]
    source, previous = batch["src_tokens"], batch["prev_output_tokens"]
    mask = source.ne(task.source_dictionary.pad()).long()
    with torch.no_grad():
        expected = model(**batch)[0]
        logits = theirs(source, mask, decoder_input_ids=previous, labels=previous).logits
    real = previous.ne(task.target_dictionary.pad())
    assert (logits - expected)[real].abs().max() < 1e-5 * expected.abs().max()


LANGUAGE_MODELS = {
    "multimax with sinks": (LM, *NORMALIZED["multimax with sinks"].split()),
    "length scale": (LM, *NORMALIZED["length scale"].split()),
    "stock": ("transformer_lm",),
    "pre-norm": (LM, "--decoder-normalize-before"),
    "learned positions": (LM, "--decoder-learned-pos"),
    "own output": (LM, "--no-scale-embedding"),
}


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_export_keeps_the_logits_of_a_language_model(kind, data, checkpoint, tmp_path):
    """In one call, and word by word with a cache."""
    arch, *flags = LANGUAGE_MODELS[kind]
    file, out = checkpoint(arch, *flags), tmp_path / "out"
    export_language_model(file, data / "lm", out)
    model, task = load(file, data, "lm")
    is_plain = kind == "stock"
    theirs = (transformers.OPTForCausalLM.from_pretrained if is_plain else ours.load)(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    line = " ".join(task.dictionary.symbols[4:12])
    words = tokenizer(line, return_tensors="pt").input_ids
    ids = task.dictionary.encode_line(line, add_if_not_exist=False).long()
    assert words[0].tolist() == [task.dictionary.eos(), *ids[:-1].tolist()]
    with torch.no_grad():
        expected, cache = model(words)[0], None
        atol = 1e-5 * expected.abs().max().item()
        torch.testing.assert_close(theirs(words).logits, expected, atol=atol, rtol=0)
        for position in range(words.shape[1]):
            step = theirs(words[:, position : position + 1], past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            torch.testing.assert_close(step.logits[:, 0], expected[:, position], atol=atol, rtol=0)


TRANSLATED = {
    "post-norm": KINDS["post-norm"],
    "pre-norm": KINDS["pre-norm"],
    "multimax post-norm": ("transformer_multimax", ""),
    "multimax pre-norm": ("transformer_multimax", "", *PRE_NORM),
}


# At the maximum length both force the end of sentence. fairseq adds its log-probability to the
# score, transformers does not, so a beam of untrained models can be ranked otherwise.
@pytest.mark.parametrize(
    ("kind", "beam"),
    [(kind, beam) for kind in TRANSLATED for beam in (1, 5) if beam == 1 or "multimax" not in kind],
)
def test_export_keeps_the_translations(kind, beam, data, checkpoint, tmp_path):
    """The exported folder alone translates text as fairseq does."""
    arch, name, *flags = TRANSLATED[kind]
    file = checkpoint(arch, *flags)
    export_translation(file, data / "mt", tmp_path / "out")
    model, task = load(file, data)
    lines = (data / "all.de").read_text().splitlines()[:6]
    load_theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained if name else ours.load
    theirs = load_theirs(tmp_path / "out")
    source = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    target = transformers.AutoTokenizer.from_pretrained(tmp_path / "out" / "target")
    inputs = source([*lines, "unheard of"], padding=True, return_tensors="pt")
    words = task.source_dictionary
    ids = [words.encode_line(line, add_if_not_exist=False).long() for line in lines]
    for row, mask, expected in zip(inputs.input_ids, inputs.attention_mask, ids, strict=False):
        assert torch.equal(row[mask.bool()], expected)
    assert words.unk() in inputs.input_ids[-1]
    generator = SequenceGenerator([model], task.target_dictionary, beam_size=beam, max_len_b=20)
    sample = {
        "net_input": {
            "src_tokens": inputs.input_ids,
            "src_lengths": inputs.attention_mask.sum(1),
        }
    }
    expected = [hypotheses[0]["tokens"] for hypotheses in generator.generate([model], sample)]
    config = theirs.generation_config
    # As fairseq's --beam 5 --min-len 1 --max-len-b 200, which exclude the end of sentence.
    lengths = (config.num_beams, config.min_new_tokens, config.max_new_tokens)
    assert lengths == (5, 1, 201)
    chosen = theirs.generate(
        inputs.input_ids, attention_mask=inputs.attention_mask, num_beams=beam, max_new_tokens=21
    )
    texts = target.batch_decode(chosen, skip_special_tokens=True)
    assert texts == [task.target_dictionary.string(tokens) for tokens in expected]


def with_own_embeddings(file, folder):
    """The checkpoint has three embedding tables instead of one."""
    state = torch.load(file, weights_only=False)
    state["cfg"]["model"].share_all_embeddings = False
    for name in ("decoder.embed_tokens.weight", "decoder.output_projection.weight"):
        weight = state["model"][name]
        state["model"][name] = weight + torch.randn_like(weight)
    torch.save(state, folder / "own.pt")
    return folder / "own.pt"


def test_export_supports_separate_embeddings(data, checkpoint, tmp_path):
    file = with_own_embeddings(checkpoint("transformer"), tmp_path)
    export_translation(file, data / "mt", tmp_path / "out")
    model, task = load(file, data)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    batch = sentences(task)["net_input"]
    source, previous = batch["src_tokens"], batch["prev_output_tokens"]
    mask = source.ne(task.source_dictionary.pad()).long()
    with torch.no_grad():
        logits = theirs(source, mask, decoder_input_ids=previous, labels=previous).logits
        torch.testing.assert_close(logits[:, 0], model(**batch)[0][:, 0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("arch", "flags", "what"),
    [
        (
            "transformer_multimax",
            "--attention-normalizer asentmax --attention-normalizer-at cross",
            "asentmax, which reads hidden states",
        ),
        (
            "transformer_multimax",
            "--attention-normalizer softmax --cross-attention continuous_softmax",
            "ContinuousAttention in decoder.encoder_attn",
        ),
        (
            "transformer_multimax",
            "--attention-normalizer softmax --attention-gate",
            "GatedAttention in encoder.self_attn",
        ),
        (
            "transformer_multimax",
            "--attention-normalizer softmax --output-normalizer entmax15",
            "the sparse output mapping entmax15",
        ),
        ("rnn_multimax", "", "the structure of a RecurrentModel"),
        ("transformer", "--encoder-learned-pos", "learned positions in the encoder"),
        ("transformer", "--decoder-learned-pos", "learned positions in the decoder"),
        ("transformer", "--no-token-positional-embeddings", "no positions in the encoder"),
        ("transformer", "--layernorm-embedding", "a layer norm of the embeddings in the encoder"),
        ("transformer", "--encoder-normalize-before", "layer norms before some sublayers"),
        (
            "transformer",
            "--encoder-normalize-before --decoder-normalize-before --no-decoder-final-norm",
            "but not before all and at the end, in the decoder",
        ),
        ("transformer", "--cross-self-attention", "cross-self-attention"),
        ("transformer", "--no-cross-attention", "no attention in decoder.encoder_attn"),
    ],
)
def test_export_translation_names_an_unsupported_part(
    arch, flags, what, data, checkpoint, tmp_path
):
    file = checkpoint(arch, *flags.split())
    with pytest.raises(ValueError, match=f"it has .*{what}"):
        export_translation(file, data / "mt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ("--attention-normalizer asentmax", "asentmax, which reads hidden states"),
        ("--decoder-input-dim 8", "a decoder input of another width"),
        ("--no-token-positional-embeddings", "no positions in the decoder"),
        ("--decoder-normalize-before --no-decoder-final-norm", "not before all and at the end"),
    ],
)
def test_export_language_model_names_an_unsupported_part(flags, what, data, checkpoint, tmp_path):
    file = checkpoint(LM, *flags.split())
    with pytest.raises(ValueError, match=f"it has .*{what}.*OPT does not support"):
        export_language_model(file, data / "lm", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_refuses_pre_norm_with_separate_embeddings(data, checkpoint, tmp_path):
    file = with_own_embeddings(checkpoint("transformer", *PRE_NORM), tmp_path)
    with pytest.raises(ValueError, match="embeddings that are not all shared"):
        export_translation(file, data / "mt", tmp_path / "out")


def test_export_refuses_different_logits(data, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setitem(export.ACTIVATIONS, "relu", "gelu")
    with pytest.raises(ValueError, match="logits of FSMTForConditionalGeneration differ"):
        export_translation(checkpoint("transformer"), data / "mt", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_export_refuses_a_parameter_of_one_side(data, checkpoint, tmp_path, monkeypatch):
    def with_gate(*arguments):
        model, *rest = stock(*arguments)
        model.encoder.gate = torch.nn.Parameter(torch.ones(1))
        return model, *rest

    stock = export.load_plain
    monkeypatch.setattr(export, "load_plain", with_gate)
    with pytest.raises(ValueError, match="only one of them has encoder.gate"):
        export_translation(checkpoint("transformer"), data / "mt", tmp_path / "out")


def test_export_names_a_missing_file(data, checkpoint, tmp_path):
    file, out = checkpoint("transformer"), tmp_path / "out"
    (data / "noise.pt").write_bytes(b"noise")
    for wrong, message in (
        ((tmp_path / "no.pt", data / "mt", out), "no.pt' does not exist"),
        ((file, tmp_path / "no", out), "no' does not exist"),
        ((data / "noise.pt", data / "mt", out), "noise.pt"),
        ((file, data / "mt-other", out), "do not match checkpoint"),
        ((file, data / "lm", out), r"lm' has no dict\.de\.txt: pass the folder"),
        ((checkpoint(LM), data / "lm", out), "language_modeling"),
        ((file, data / "mt", data), "exists already: pass a new folder"),
    ):
        with pytest.raises(ValueError, match=message):
            export_translation(*wrong)
    assert not list(tmp_path.iterdir())


def test_export_keeps_a_link_to_an_empty_folder(data, checkpoint, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    export_translation(checkpoint("transformer"), data / "mt", tmp_path / "link")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "config.json").is_file()


def test_tokenizer_splits_words_as_fairseq(tmp_path):
    """Unusual spaces, and dictionary symbols as words or within words."""
    words = Dictionary()
    for word in ("a", "b", ".", "(", ")", "-", "@@"):
        words.add_symbol(word)
    export._tokenizer(words, True).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    spaces = [chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace()]
    assert "\x1c" in spaces and len(spaces) > 20
    texts = ["</s>.", "(<pad>)", "<unk>@@ a", "<s>-", "a</s> b", "</s> <s> <pad> <unk> a", "", "  "]
    for text in [*texts, *(f"{space}a{space}{space}b" for space in spaces), "a\u200bb"]:
        known = [word if word not in SYMBOLS else "unheard" for word in text.split()]
        expected = words.encode_line(" ".join(known), add_if_not_exist=False).tolist()
        assert tokenizer(text).input_ids == expected, text
    assert tokenizer.decode([4, 5, 2], skip_special_tokens=True) == "a b"
