"""The stock commands on a small corpus, from preprocessing to scores, by argparse and hydra."""

import math
import re

import pytest
import torch
from commands import PLUGIN, ROOT, refused, run
from figure_checks import check_figure
from train_commands import (
    ALL,
    DECODER,
    DIMS,
    ENCODER,
    MODEL_LANGUAGE,
    TRAIN,
    TRANSLATE,
    hypotheses,
    losses,
    parameters,
)

from multimax_fairseq import Modulator, trained
from multimax_fairseq.analysis import collection, figures
from multimax_fairseq.models.transformer_multimax import MultimaxTransformerModel

pytestmark = pytest.mark.long

FAR = ("--multimax-init-std", "0.3")
# Continuous cross-attention in an LSTM: decoding must keep each kind of state.
RECURRENT = [
    *("--arch", "rnn_multimax", "--cell-type", "lstm", "--cross-attention", "continuous_sparsemax"),
    *("--encoder-embed-dim", "16", "--encoder-hidden-size", "8", "--decoder-embed-dim", "16"),
    *("--decoder-hidden-size", "16", "--share-all-embeddings", "--dropout", "0", *TRAIN, *FAR),
    *("--hidden-dropout", "0", "--criterion", "label_smoothed_multimax_cross_entropy"),
    *("--label-smoothing", "0.1"),
]


def numbered(folder):
    """Return a run's numbered checkpoints, oldest first."""
    return sorted(folder.glob("checkpoint_*_*.pt"), key=lambda file: int(file.stem.split("_")[2]))


@pytest.fixture(scope="module")
def translation(text):
    """The log of a translation model's training; its checkpoints are in mt-model/."""
    return run(text, "fairseq-train", "mt", *PLUGIN, *TRANSLATE, *FAR, "--save-dir", "mt-model")


@pytest.fixture(scope="module")
def language_model(text):
    command = ("fairseq-train", "lm", *PLUGIN, *MODEL_LANGUAGE, *FAR)
    return run(text, *command, "--save-dir", "lm-model")


@pytest.fixture(scope="module")
def generated(text, translation):
    return run(
        *(text, "fairseq-generate", "mt", *PLUGIN, "--path", "mt-model/checkpoint_last.pt"),
        *("--beam", "5", "--max-len-b", "12", *ALL),
    )


def test_train_updates_modulators_and_lowers_loss(text, translation):
    model = text / "mt-model"
    first, last = (parameters(file) for file in (numbered(model)[0], model / "checkpoint_last.pt"))
    learned = [name for name in first if "modulator" in name]
    assert len(learned) == 4 * 4
    assert all((first[name] != last[name]).any() for name in learned)
    assert losses(translation)[-1] < losses(translation)[0]


def test_train_and_generate_keep_stock_log_format(translation, generated):
    for log, name in ((translation, "train_inner"), (generated, "fairseq_cli.generate")):
        stamp = rf"^\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d \| INFO \| {name} \| "
        assert re.search(stamp, log, re.MULTILINE)
        assert not re.search(r"^INFO:", log, re.MULTILINE)


def drawn(text, folder, data, *names):
    """Collect from the first and the last checkpoint of a run; draw these figures."""
    first, *_, last = numbered(text / folder)
    out = text / f"{folder}-analysis"
    words = ("python", "-m", "multimax_fairseq.analysis", "collect", first, last, data)
    run(text, *words, "--out", out)
    found = list(figures.draw([collection.read(out)], names))
    for entry in found:
        check_figure(entry)
    return {entry.name for entry in found}


# (mappings by attention, flags, {learned scalar: its printed value}, learned matrices)
MIXED = [
    (
        "encoder=alpha_entmax,decoder=ssmax,cross=sink",
        ["--ssmax-start", "0.5"],
        {"alpha": lambda x: 1 + x.sigmoid(), "length_scale": lambda x: x, "sink": lambda x: x},
        {},
    ),
    (
        "encoder=softmax,decoder=asentmax,cross=adaptive_temperature",
        ["--learn-temperature", "--attention-gate"],
        {"log_temperature": lambda x: x.exp()},
        {"beta": 1, "gamma": 1, "gate": 3},
    ),
]


@pytest.mark.parametrize("places, flags, scalars, matrices", MIXED, ids=["scalars", "matrices"])
def test_train_resumes_with_what_mappings_learn(text, places, flags, scalars, matrices):
    folder = f"mt-with-{len(matrices)}"
    flags = [*flags, "--attention-normalizer-at", places, "--output-normalizer", "softmax"]
    command = ("fairseq-train", "mt", *PLUGIN, *TRANSLATE, *flags, "--save-dir", folder)
    run(text, *command, "--max-update", "4")
    resumed = run(text, *command)
    assert f"Loaded checkpoint {folder}/checkpoint_last.pt (epoch" in resumed
    path = text / folder / "checkpoint_last.pt"
    output = run(text, "fairseq-generate", "mt", *PLUGIN, "--path", path, "--max-len-b", "8", *ALL)
    assert len(hypotheses(output)) == 8
    if "alpha" in scalars:
        assert drawn(text, folder, "mt", "alpha-trajectories")
    first, last = (parameters(file) for file in (numbered(text / folder)[0], path))
    for part, count in matrices.items():
        names = [name for name in first if f".{part}.weight" in name]
        assert len(names) == count and all((first[name] != last[name]).any() for name in names)
    names = {scalar: [name for name in first if scalar in name] for scalar in scalars}
    assert [len(found) for found in names.values()] == [1] * len(scalars)
    assert all((first[name] != last[name]).all() for (name,) in names.values())
    lines = run(text, "python", "-m", "multimax_fairseq.analysis", "parameters", path).splitlines()
    expected = [value for s, (name,) in names.items() for value in scalars[s](last[name]).flatten()]
    assert len(lines) == 1 + len(expected)
    values = {float(line.split()[-1]) for line in lines[1:]}
    assert values == {round(float(value), 4) for value in expected}


def test_train_with_sparse_output_needs_entmax_loss(text):
    flags = [*TRANSLATE, "--output-normalizer", "entmax15", "--save-dir", "mt-sparse"]
    command = ("fairseq-train", "mt", *PLUGIN, *flags)
    assert "label smoothing" in refused(text, *command, "--no-save")
    at = flags.index("--criterion")
    flags[at : at + 4] = ["--criterion", "entmax_loss"]
    log = run(text, "fairseq-train", "mt", *PLUGIN, *flags)
    assert losses(log)[-1] < losses(log)[0] and re.search(r"train_inner.* zero=", log)
    path = ("--path", "mt-sparse/checkpoint_last.pt", "--max-len-b", "6", *ALL)
    found = hypotheses(run(text, "fairseq-generate", "mt", *PLUGIN, *path))
    assert len(found) == 8 and all(math.isfinite(score) for score, _ in found.values())


def test_train_exits_despite_running_threads_after_an_error(text):
    """The end of the interpreter would kill a data-loading thread and abort the process."""
    plugin = text / "threads"
    plugin.mkdir()
    (plugin / "__init__.py").write_text(
        "import atexit, pathlib, threading, time\n"
        "import multimax_fairseq.models\n"
        "threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "atexit.register(pathlib.Path('at-exit').touch)\n"
    )
    command = ("fairseq-train", "mt", "--user-dir", plugin, *TRANSLATE)
    assert "--topk" in refused(text, *command, "--attention-normalizer", "topk")
    assert (text / "at-exit").exists()


def test_collect_and_draw_plot_trained_modulators(text, translation, language_model):
    names = {"modulators-encoder", "modulators-cross", "parameters", "over-smoothing"}
    assert drawn(text, "mt-model", "mt", *names) == names
    names = {"modulators-decoder", "modulators-output", "pareto", "output-layer"}
    assert drawn(text, "lm-model", "lm", *names) == names


def test_parameters_lists_modulators_in_the_papers_symbols(text, translation):
    path = text / "mt-model" / "checkpoint_last.pt"
    listing = ("python", "-m", "multimax_fairseq.analysis", "parameters")
    head, *lines = run(text, *listing, path).splitlines()
    assert head.split() == "t_b1 t_b2 b1 b2 t_d1 t_d2 d1 d2".split()
    assert [line.split("  ")[0] for line in lines] == [
        "encoder layer 1, self-attention",
        "decoder layer 1, self-attention",
        "decoder layer 1, cross-attention",
        "output layer",
    ]
    values = parameters(path)
    own = {
        kind: values[f"decoder.output_modulator.{kind}"]
        for kind in ("low_coefficient", "low_threshold", "high_coefficient", "high_threshold")
    }
    own["low_coefficient"], own["high_coefficient"] = (
        1 - own["low_coefficient"],
        1 + own["high_coefficient"],
    )
    expected = [f"{float(value):.4f}" for kind in own.values() for value in kind]
    assert lines[-1].split()[2:] == expected
    assert "does not exist" in run(text, *listing, "none.pt", code=1)


def test_train_resumes_with_the_same_losses(text):
    """Equal up to rounding: a resumed fairseq run orders sentences of equal length differently."""
    command = ("fairseq-train", "mt", *PLUGIN, *TRANSLATE, *FAR, "--dropout", "0", "--save-dir")
    whole = losses(run(text, *command, "mt-whole"))
    run(text, *command, "mt-resumed", "--max-update", "3")
    resumed = run(text, *command, "mt-resumed")
    assert "Loaded checkpoint mt-resumed/checkpoint_last.pt" in resumed
    assert losses(resumed) == pytest.approx(whole[3:], rel=1e-3) and len(whole) == 6
    # Resuming with another function is an error; a new run from its weights is not.
    other = ("--attention-normalizer", "multimax", "--multimax-monotone")
    message = run(text, *command, "mt-resumed", *other, code=1)
    assert "--multimax-monotone is True, but was False in the run to resume" in message
    new = (*other, "--reset-optimizer", "--reset-dataloader", "--max-update", "2")
    run(text, *command, "mt-resumed", *new)


def test_average_writes_the_mean(text, translation):
    output = ("--output", "mt-model/average.pt")
    run(text, "multimax-average", "mt-model", "--last", "2", *output)
    files = (text / "mt-model/average.pt", *numbered(text / "mt-model")[-2:])
    mean, *parts = (parameters(file) for file in files)
    for name, value in mean.items():
        expected = (parts[0][name].double() + parts[1][name].double()) / 2
        torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-7)
    path = ("--path", "mt-model/average.pt", "--max-len-b", "5", *ALL)
    assert len(hypotheses(run(text, "fairseq-generate", "mt", *PLUGIN, *path))) == 8
    message = run(text, "multimax-average", "mt-model", "--last", "9", *output, code=1)
    assert "fewer than 9" in message and "Traceback" not in message
    for name in ("checkpoint_last.pt", "checkpoint_best.pt", "checkpoint3.pt"):
        output = ("--output", f"mt-model/{name}")
        message = run(text, "multimax-average", "mt-model", "--last", "2", *output, code=1)
        assert "is what training calls a checkpoint of its own" in message


def assert_scores_are_reference_scores(text, found, model):
    """Check the scores of the test set's best hypotheses."""
    assert len(found) == 8 and any(hypothesis for _, hypothesis in found.values())
    (text / "hypotheses.de").write_text((text / "test.de").read_text())
    (text / "hypotheses.en").write_text("".join(f"{found[i][1]}\n" for i in range(8)))
    dictionaries = [
        f"--{side}dict=mt/dict.{language}.txt" for side, language in (("src", "de"), ("tgt", "en"))
    ]
    both = ["--source-lang", "de", "--target-lang", "en", "--testpref", "hypotheses"]
    run(text, "fairseq-preprocess", *both, *dictionaries, "--destdir", "mt-hypotheses")
    scored = run(
        *(text, "fairseq-generate", "mt-hypotheses", *PLUGIN, "--score-reference", *ALL),
        *("--path", f"{model}/checkpoint_last.pt"),
    )
    scores = hypotheses(scored)
    assert scores.keys() == found.keys()
    for number, (score, _) in scores.items():
        assert score == pytest.approx(found[number][0], abs=1e-3)


def test_generate_scores_equal_reference_scores(text, generated):
    assert_scores_are_reference_scores(text, hypotheses(generated), "mt-model")


def test_rnn_trains_resumes_and_translates(text):
    command = ("fairseq-train", "mt", *PLUGIN, *RECURRENT, "--save-dir")
    whole = losses(run(text, *command, "rnn-whole"))
    run(text, *command, "rnn", "--max-update", "3")
    resumed = losses(run(text, *command, "rnn"))
    assert resumed == pytest.approx(whole[3:], rel=1e-3) and whole[-1] < whole[0]
    path = "rnn/checkpoint_last.pt"
    words = ("fairseq-generate", "mt", *PLUGIN, "--path", path, "--beam", "5", *ALL)
    output = run(text, *words, "--max-len-b", "12", "--print-alignment", "soft")
    assert_scores_are_reference_scores(text, hypotheses(output), "rnn")
    alignments = re.findall(r"^A-\d+\t(.*)$", output, re.MULTILINE)
    assert len(alignments) == 8
    for alignment in alignments:
        sums = [sum(map(float, row.split(","))) for row in alignment.split()]
        assert sums == pytest.approx([1] * len(sums), abs=1e-4)
    analysis = ("python", "-m", "multimax_fairseq.analysis")
    lines = run(text, *analysis, "parameters", path).splitlines()
    assert len(lines) == 2 and lines[1].startswith("cross-attention  ")


def test_hydra_train_trains_an_rnn(text, settings):
    config = (text / "mt.yaml").read_text()
    model = "model: {_name: rnn_iwslt_de_en_multimax, decoder_hidden_size: 16, hidden_dropout: 0}"
    config = re.sub(r"model: \{.*?\}", model, config, flags=re.DOTALL).replace("mt-hyd", "rnn-hyd")
    (text / "rnn.yaml").write_text(config)
    once = "optimization.max_update=1"
    run(text, "fairseq-hydra-train", "--config-dir", text, "--config-name", "rnn", once)
    found = parameters(text / "rnn-hydra" / "checkpoint_last.pt")
    assert found["encoder.embed_tokens.weight"].shape[1] == 620
    assert found["decoder.bridge.weight"].shape == (16, 1000)


@pytest.mark.parametrize("limit", [(), ("--truncate-source", "--max-source-positions", "6")])
def test_interactive_equals_generate(text, generated, limit):
    words = ("mt", *PLUGIN, "--path", "mt-model/checkpoint_last.pt", "--beam", "5", *limit)
    words += ("--max-len-b", "12", "--source-lang", "de", "--target-lang", "en")
    found = hypotheses(run(text, "fairseq-generate", *words, *ALL) if limit else generated)
    output = run(text, "fairseq-interactive", *words, stdin=(text / "test.de").read_text())
    given = hypotheses(output)
    assert given.keys() == found.keys() and len(found) == 8
    for number, (score, hypothesis) in given.items():
        assert hypothesis == found[number][1]
        assert score == pytest.approx(found[number][0], abs=1e-3)


def test_replace_unk_copies_the_word_with_the_largest_attention(text, translation):
    lines = ["Quax und Frob Mensch", "Menschen Zorg hat", "Recht Wubb"]
    for language in ("de", "en"):
        (text / f"odd.{language}").write_text("\n".join(lines) + "\n")
    raw = ("--dataset-impl", "raw")
    dictionaries = ("--srcdict", "mt/dict.de.txt", "--tgtdict", "mt/dict.en.txt")
    pair = ("-s", "de", "-t", "en")
    words = (*pair, *dictionaries, *raw, "--testpref", "odd", "--destdir", "odd")
    run(text, "fairseq-preprocess", *words)
    (text / "pairs").write_text("Zorg care\nQuax quack\n")
    path = text / "mt-model" / "checkpoint_last.pt"
    model = trained.load(path, text / "mt")
    words = []
    for line in lines:
        [[best, *_]] = model.generate([model.encode(line)], beam=2, max_len_b=4, unkpen=-100)
        assert best["tokens"].tolist() == [model.tgt_dict.unk()] * 4 + [model.tgt_dict.eos()]
        source = line.split()
        words.append([source[i] for i in best["attention"][: len(source), :4].argmax(0)])
    unknown = {"Quax", "Frob", "Zorg", "Wubb"}
    assert unknown & {word for each in words for word in each}
    options = ("odd", *PLUGIN, *pair, "--path", path, "--beam", "2", "--max-len-b", "4")
    options += ("--unkpen", "-100")
    stdin = (text / "odd.de").read_text()
    generate, interactive = ("fairseq-generate", *options, *raw), ("fairseq-interactive", *options)
    for command, more in (
        *((generate, ()), (generate, ("pairs",)), (generate, ("--print-alignment",))),
        *((interactive, ()), (interactive, ("pairs",))),
    ):
        output = run(text, *command, "--replace-unk", *more, stdin=stdin)
        pairs = {"Zorg": "care", "Quax": "quack"} if more == ("pairs",) else {}
        expected = [" ".join(pairs.get(word, word) for word in each) for each in words]
        assert [line for _, (_, line) in sorted(hypotheses(output).items())] == expected
        assert ("T-0\tQuax und Frob Mensch\n" in output) == (command is generate)
    assert "fairseq-interactive" in refused(text, *("fairseq-generate", *options, "--replace-unk"))


def test_score_of_identical_files_is_100(text):
    for option, figure in (((), "BLEU4 = 100.00"), (("--sacrebleu",), "BLEU = 100.00")):
        output = run(text, "fairseq-score", "--sys", "test.en", "--ref", "test.en", *option)
        assert figure in output


def test_eval_lm_equals_validation_loss(text, language_model):
    path = ("--path", "lm-model/checkpoint_last.pt", "--gen-subset", "valid", *ALL)
    shape = ("--tokens-per-sample", "32", "--max-tokens", "120")
    command = ("fairseq-eval-lm", "lm", *PLUGIN, *path, *shape)
    plain = run(text, *command)
    validated = re.findall(r"valid on 'valid' subset \| loss ([\d.]+)", language_model)[-1]
    assert float(re.search(r"Loss \(base 2\): ([\d.]+)", plain)[1]) == pytest.approx(
        float(validated), abs=2e-3
    )
    with_context = run(text, *command, "--context-window", "16")
    counts = [re.search(r"Evaluated ([\d,]+) tokens", out)[1] for out in (plain, with_context)]
    assert counts[0] == counts[1] == str(len((text / "valid.en").read_text().split()) + 8)
    perplexity = float(re.search(r"Perplexity: ([\d.]+)", with_context)[1])
    loss = float(re.search(r"Loss \(base 2\): ([\d.]+)", with_context)[1])
    assert perplexity == pytest.approx(2**loss, rel=1e-2)


@pytest.fixture(scope="module")
def settings(text):
    """mt.yaml and lm.yaml with the settings of the flags above."""
    sides = {
        side: ", ".join(f"{side}_{name.replace('-', '_')}: {value}" for name, value in DIMS.items())
        for side in ("encoder", "decoder")
    }
    parts = {
        "mt": f"""
task: {{_name: translation, data: mt, source_lang: de, target_lang: en}}
criterion: {{_name: label_smoothed_multimax_cross_entropy, label_smoothing: 0.1}}
model: {{_name: transformer_iwslt_de_en_multimax, {sides["encoder"]}, {sides["decoder"]},
  share_all_embeddings: true, output_normalizer: multimax, dropout: 0.1, multimax_init_std: 0.3}}
""",
        "lm": f"""
task: {{_name: language_modeling, data: lm, tokens_per_sample: 32}}
criterion: {{_name: multimax_cross_entropy}}
model: {{_name: transformer_lm_multimax, {sides["decoder"]}, decoder_input_dim: 16,
  decoder_output_dim: 16, share_decoder_input_output_embed: true, multimax_init_std: 0.3}}
""",
    }
    for kind, part in parts.items():
        (text / f"{kind}.yaml").write_text(f"""{part}
hydra: {{run: {{dir: .}}}}
common: {{user_dir: {PLUGIN[1]}, seed: 3, log_interval: 1, log_format: simple}}
dataset: {{max_tokens: 120, num_workers: 0, required_batch_size_multiple: 1}}
optimization: {{max_update: 6, lr: [0.005]}}
optimizer: {{_name: adam}}
lr_scheduler: {{_name: fixed}}
checkpoint: {{save_dir: {kind}-hydra, no_epoch_checkpoints: true}}
""")


@pytest.mark.parametrize("kind", ["mt", "lm"])
def test_hydra_train_equals_argparse_training(text, settings, kind, translation, language_model):
    run(text, "fairseq-hydra-train", "--config-dir", text, "--config-name", kind)
    argparse_model = parameters(text / f"{kind}-model" / "checkpoint_last.pt")
    hydra_model = parameters(text / f"{kind}-hydra" / "checkpoint_last.pt")
    assert hydra_model.keys() == argparse_model.keys()
    for name, value in hydra_model.items():
        torch.testing.assert_close(value, argparse_model[name], msg=name)
    described = []
    for folder in ("model", "hydra"):
        path, out = f"{kind}-{folder}/checkpoint_last.pt", f"{kind}-{folder}-collected"
        run(text, "python", "-m", "multimax_fairseq.analysis", "collect", path, kind, "--out", out)
        (about,) = collection.read(text / out).metadata["checkpoints"]
        described.append({key: about[key] for key in about.keys() - {"path", "sha256"}})
    assert described[0] == described[1] and described[0]["settings"]["multimax_order"] == 2


def test_train_finetunes_stock_checkpoint_from_the_identity(text):
    """README's command: the first loss is the stock model's on the same data."""
    softmax = ["--arch", "transformer_iwslt_de_en", *ENCODER, *DECODER, "--share-all-embeddings"]
    common = ["--dropout", "0", *TRAIN]
    common += ["--criterion", "label_smoothed_cross_entropy", "--label-smoothing", "0.1"]
    run(text, "fairseq-train", "mt", *softmax, *common, "--save-dir", "mt-softmax")
    start = ["--finetune-from-model", "mt-softmax/checkpoint_last.pt", "--max-update", "1"]
    softmax_log = run(text, "fairseq-train", "mt", *softmax, *common, *start, "--no-save")
    ours = ["--arch", "transformer_iwslt_de_en_multimax", *softmax[2:], "--output-normalizer"]
    our_log = run(
        text, "fairseq-train", "mt", *PLUGIN, *ours, "multimax", *common, *start, "--no-save"
    )
    assert "start at the identity" in our_log
    assert losses(our_log)[0] == losses(softmax_log)[0]
    words = ["--train-scalars-only", "--max-update", "3", "--save-dir", "mt-fitted"]
    run(text, "fairseq-train", "mt", *PLUGIN, *ours, "multimax", *common, *start, *words)
    before, after = (
        torch.load(text / folder / "checkpoint_last.pt", weights_only=False)["model"]
        for folder in ("mt-softmax", "mt-fitted")
    )
    assert all(torch.equal(after[name], value) for name, value in before.items())
    fitted = [value for name, value in after.items() if name not in before]
    assert len(fitted) >= 16 and all(value.any() for value in fitted)
    listing = ("python", "-m", "multimax_fairseq.analysis", "parameters")
    assert "no learned scalars" in run(text, *listing, "mt-softmax/checkpoint_last.pt", code=1)


@pytest.mark.parametrize("loaded_by", ["load", "from_pretrained"])
def test_python_translates_like_generate(text, generated, loaded_by):
    if loaded_by == "load":
        model = trained.load(text / "mt-model" / "checkpoint_last.pt", text / "mt")
    else:
        model = MultimaxTransformerModel.from_pretrained(
            str(text / "mt-model"), "checkpoint_last.pt", str(text / "mt")
        )
    assert sum(isinstance(module, Modulator) for module in model.modules()) == 4
    lines = (text / "test.de").read_text().splitlines()
    translations = model.translate(lines, beam=5, max_len_b=12)
    assert translations == [
        hypothesis for _, (_, hypothesis) in sorted(hypotheses(generated).items())
    ]


def test_train_accepts_custom_user_dir(text):
    small = ["--arch", "transformer_multimax_small", "--encoder-embed-dim", "16"]
    output = run(
        *(text, "fairseq-train", "mt", "--user-dir", ROOT / "user_dir", *small, *DECODER),
        *(*TRAIN, "--max-update", "1", "--save-dir", "mt-small"),
        *("--criterion", "label_smoothed_multimax_cross_entropy", "--label-smoothing", "0.1"),
    )
    assert math.isfinite(losses(output)[0])
    learned = {
        n: p for n, p in parameters(text / "mt-small/checkpoint_last.pt").items() if "modul" in n
    }
    assert all(value.shape in ((4, 2), (2, 2)) for value in learned.values())
    assert {"encoder.", "decoder."} == {name[:8] for name in learned}
    assert not any(".self_attn." in name for name in learned if name.startswith("decoder."))


def test_hydra_train_refuses_option_of_another_mapping(text, settings):
    config = ("--config-dir", text, "--config-name", "mt")
    sentence = refused(text, "fairseq-hydra-train", *config, "+model.entmax_alpha=1.5")
    assert sentence.startswith("--entmax-alpha 1.5 belongs to alpha_entmax attention")


def test_generate_and_eval_lm_warn_of_unused_stored_settings(text, translation, language_model):
    """Earlier versions accepted and stored settings that training refuses now."""
    evaluation = ("--gen-subset", "valid", "--tokens-per-sample", "32", "--max-tokens", "120")
    for kind, command in (
        ("mt", ("fairseq-generate", "mt", "--max-len-b", "5")),
        ("lm", ("fairseq-eval-lm", "lm", *evaluation)),
    ):
        state = torch.load(text / f"{kind}-model" / "checkpoint_last.pt", weights_only=False)
        stored = state["cfg"]["model"]
        stored = stored if isinstance(stored, dict) else vars(stored)
        # The second and the third are invalid, but were never read.
        stored.update(topk=5, softmax_temperature=math.inf, entmax_alpha=0.5)
        path = text / f"{kind}-earlier.pt"
        torch.save(state, path)
        output = run(text, *command, *PLUGIN, "--path", path, *ALL)
        for setting in ("--topk 5", "--softmax-temperature inf", "--entmax-alpha 0.5"):
            assert f"checkpoint's settings does nothing: {setting} belongs to" in output
        path = f"{kind}-model/checkpoint_last.pt"
        with_original = run(text, *command, *PLUGIN, "--path", path, *ALL)
        assert "does nothing" not in with_original
        figures = r"^[HP]-\d+\t.*|Perplexity: .*"
        found = [re.findall(figures, log, re.MULTILINE) for log in (output, with_original)]
        assert found[0] == found[1] != []


@pytest.mark.parametrize(
    "kind, slip", [("mt", "attention_normalizer=sofmax"), ("lm", "attention_normalyzer=softmax")]
)
def test_hydra_train_names_typos_in_the_config(text, settings, kind, slip):
    config = ("--config-dir", text, "--config-name", kind)
    sentence = refused(text, "fairseq-hydra-train", *config, f"+model.{slip}")
    assert ("sofmax" if "sofmax" in slip else "attention_normalyzer") in sentence
