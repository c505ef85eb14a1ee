"""Trained models in Python: translate, score, features, attention."""

import functools

import pytest
import torch
from commands import run
from fairseq import tasks
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from fairseq.token_generation_constraints import pack_constraints

from multimax_fairseq.analysis.collect import collect
from multimax_fairseq.commands.evaluate import evaluate
from multimax_fairseq.errors import UsageError
from multimax_fairseq.trained import load

SOURCES = ["Ist das das Recht jedes Mens@@ chen ?", "Jeder hat das Recht"]
TARGETS = ["All are born free and equal .", "Everyone has the right"]


@pytest.fixture
def model(checkpoint, data):
    return load(checkpoint("transformer_multimax"), data / "mt")


def teacher_forced(trained, model, source, target):
    """Return the log-probabilities of the target's words and of its end."""
    source, target = (
        words.encode_line(line, add_if_not_exist=False).long()
        for words, line in ((trained.src_dict, source), (trained.tgt_dict, target))
    )
    before = torch.cat([target[-1:], target[:-1]])[None]
    with torch.no_grad():
        output = model(source[None], torch.tensor([len(source)]), before)
    logits = output[0][0].double()
    return logits.log_softmax(-1)[torch.arange(len(target)), target]


def test_score_equals_teacher_forcing(model):
    for scored, source, target in zip(model.score(SOURCES, TARGETS), SOURCES, TARGETS, strict=True):
        expected = teacher_forced(model, model.models[0], source, target)
        torch.testing.assert_close(scored["positional_scores"], expected.float())
        torch.testing.assert_close(scored["score"], expected.mean().float())


def test_score_of_an_ensemble_uses_the_mean_probability(checkpoint, data):
    files = checkpoint("transformer_multimax"), checkpoint("transformer")
    both = load(files[0], data / "mt", files[1])
    (scored,) = both.score(SOURCES[:1], TARGETS[:1])
    parts = [teacher_forced(both, model, SOURCES[0], TARGETS[0]) for model in both.models]
    expected = torch.stack(parts).exp().mean(0).log()
    torch.testing.assert_close(scored["positional_scores"], expected.float())


def test_score_needs_targets_for_translation(model):
    with pytest.raises(UsageError, match="2 sentences have 0 targets, not 2"):
        model.score(SOURCES)
    with pytest.raises(UsageError, match="takes lists of sentences"):
        model.score(SOURCES[0], TARGETS[0])


def test_language_model_scores_and_continues_text(checkpoint, data):
    model = load(checkpoint("transformer_lm_multimax"), data / "lm")
    (scored,) = model.score([TARGETS[0]])
    tokens = model.encode(TARGETS[0])[:-1]
    before = torch.cat([torch.tensor([model.tgt_dict.eos()]), tokens[:-1]])[None]
    with torch.no_grad():
        logits = model.models[0](before)[0][0].double()
    expected = logits.log_softmax(-1)[torch.arange(len(tokens)), tokens]
    torch.testing.assert_close(scored["positional_scores"], expected.float())
    torch.manual_seed(3)
    text = model.sample("All are", sampling=True, sampling_topk=5, max_len_b=8)
    assert text.startswith("All are ")
    for call in (model.score, model.attention):
        with pytest.raises(UsageError, match="language model"):
            call(["All are"], ["All are"])
    with pytest.raises(UsageError, match="sentence 1 has no tokens"):
        model.score(["All are", ""])
    assert model.features("All are").shape == (3, 16)
    found = model.attention("All are")
    assert (found.source, found.encoder, found.cross) == ([], [], [])
    assert found.target == ["</s>", "All", "are"]
    assert [probs.shape for probs in found.decoder] == [(4, 3, 3)] * 2


def test_attention_of_a_stock_model_equals_fairseqs(checkpoint, data):
    trained = load(checkpoint("transformer"), data / "mt")
    found = trained.attention(*SOURCES[:1], *TARGETS[:1])
    assert found.source == [*SOURCES[0].split(), "</s>"]
    assert found.target == ["</s>", *TARGETS[0].split()]
    assert [probs.shape for probs in found.encoder] == [(4, 9, 9)] * 2
    assert all(probs.triu(1).eq(0).all() for probs in found.decoder)
    (model,) = trained.models
    source = trained.encode(SOURCES[0])[None]
    target = trained.tgt_dict.encode_line(TARGETS[0], add_if_not_exist=False).long()
    before = torch.cat([target[-1:], target[:-1]])[None]
    with torch.no_grad():
        encoded = model.encoder(source, torch.tensor([source.shape[1]]))
        for layer in range(2):
            _, more = model.decoder(before, encoded, alignment_layer=layer)
            torch.testing.assert_close(found.cross[layer].mean(0), more["attn"][0][0])
        torch.testing.assert_close(trained.features(SOURCES[0]), encoded["encoder_out"][0][:, 0])


def test_attention_without_target_follows_the_translation(model):
    translation = model.translate(SOURCES[:1])[0]
    found = model.attention(SOURCES[0])
    assert found.target == ["</s>", *translation.split()]
    for probs in (*found.encoder, *found.decoder, *found.cross):
        torch.testing.assert_close(probs.sum(-1), torch.ones(probs.shape[:-1]))


def test_attention_of_a_recurrent_model(checkpoint, data):
    model = load(checkpoint("rnn_multimax"), data / "mt")
    found = model.attention(SOURCES[0], TARGETS[0])
    assert [probs.shape for probs in found.cross] == [(1, 8, 9)]
    assert len(model.features(SOURCES[0])) == 9


def _translate(model, sentences, arguments, **flags):
    return model.translate(sentences, max_len_b=4, inference_step_args=arguments, **flags)


def test_results_belong_to_their_sentences(checkpoint, data):
    """With one batch and with several: prefixes, constraints, allowed tokens, skipped sentences."""
    sentences = ["Jeder hat das Recht", SOURCES[0], "hat", "Recht Recht"]
    words = ["free", "equal", "right", "All"]
    for size in (None, 2):
        model = load(checkpoint("transformer_multimax"), data / "mt", batch_size=size)
        rows = [[model.tgt_dict.index(word)] for word in words]

        translate = functools.partial(_translate, model, sentences)
        for prefixes in (torch.tensor(rows), rows):
            found = translate({"prefix_tokens": prefixes})
            assert [line.split()[0] for line in found] == words
        lengths = translate({"prefix_tokens": [row * n for n, row in enumerate(rows)]})
        assert [line.split()[:n] for n, line in enumerate(lengths)] == [
            [word] * n for n, word in enumerate(words)
        ]
        constraints = [[torch.tensor(row)] for row in rows]
        for packed in (constraints, pack_constraints(constraints)):
            found = translate({"constraints": packed}, constraints="ordered")
            assert all(map(str.__contains__, found, words))

        def follow(number, tokens, rows=rows, model=model):
            return rows[number] if len(tokens) < 3 else [model.tgt_dict.eos()]

        found = model.translate(sentences, max_len_b=4, prefix_allowed_tokens_fn=follow)
        assert found == [f"{word} {word}" for word in words]
        alone = model.generate(
            model.encode(sentences[1]), prefix_allowed_tokens_fn=lambda _, tokens: follow(1, tokens)
        )
        assert model.decode(alone[0]["tokens"]) == "equal equal"
        expected = model.translate(sentences, max_len_b=3)
        some = [sentences[0], "hat " * 2000, *sentences[1:]]
        found = model.translate(some, max_len_b=3, skip_invalid_size_inputs=True)
        assert found == [expected[0], "", *expected[1:]]
    with pytest.raises(UsageError, match="prefix_tokens has 3 rows for 4 sentences: pass one for"):
        translate({"prefix_tokens": rows[:3]})


def test_empty_lists_have_no_results(model):
    assert model.translate([]) == model.sample([]) == model.score([], []) == []


def test_search_refuses_wrong_arguments(model):
    for flags, remedy in (
        ({"beams": 1}, "no flag 'beams': did you mean 'beam'"),
        ({"length_penalty": 9.0}, "no flag 'length_penalty': did you mean 'lenpen'"),
        ({"nbest": 3}, "no flag 'nbest': choose from beam, constraints, .*, unnormalized"),
        ({"beam": "5"}, "beam must be a whole number of at least 1, got '5'"),
        ({"constraints": "any"}, "constraints must be 'ordered' or 'unordered', got 'any'"),
    ):
        for call in (model.translate, model.sample):
            with pytest.raises(UsageError, match=remedy):
                call(SOURCES, **flags)
        with pytest.raises(UsageError, match=remedy):
            model.generate(model.encode(SOURCES[0]), **flags)
    with pytest.raises(UsageError, match="prefix_tokens must be token indices"):
        model.translate(SOURCES[:1], inference_step_args={"prefix_tokens": ["A"]})
    with pytest.raises(UsageError, match="a sentence must be a string, got"):
        model.attention(SOURCES[:1], SOURCES[:1])


def test_load_refuses_misspelt_settings(checkpoint, data):
    for settings, remedy in (
        ({"bep": "sentencepiece"}, "no setting is called 'bep': did you mean 'bpe'"),
        ({"bpe": "sentence_piece"}, "bpe='sentence_piece' does not exist: did you mean 'sentence"),
        ({"tokenizer": "mose"}, "tokenizer='mose' does not exist: did you mean 'moses'"),
        ({"sentencepiece_model": "x"}, "'sentencepiece_model' belongs to bpe='sentencepiece': "),
        ({"bpe": "characters", "bpe_codes": "x"}, "'bpe_codes' belongs to bpe='fastbpe' or"),
        ({"bpe": "sentencepiece"}, "bpe='sentencepiece' needs sentencepiece_model: pass it too"),
    ):
        with pytest.raises(UsageError, match=remedy):
            load(checkpoint("transformer_multimax"), data / "mt", **settings)


def test_load_replaces_the_subwords_of_the_checkpoint(checkpoint, data, tmp_path):
    state = torch.load(checkpoint("transformer_multimax"), weights_only=False)
    state["cfg"]["bpe"] = {"_name": "subword_nmt", "bpe_codes": "none", "bpe_separator": "@@"}
    torch.save(state, tmp_path / "subwords.pt")
    model = load(tmp_path / "subwords.pt", data / "mt", bpe="characters")
    assert model.apply_bpe("das") == "d a s"
    assert load(tmp_path / "subwords.pt", data / "mt", bpe=None).bpe is None


def with_task(file, folder, name, **settings):
    """Return a copy of a checkpoint whose task has another name."""
    state = torch.load(file, weights_only=False)
    state["cfg"]["task"] |= {"_name": name, **settings}
    torch.save(state, folder / f"{name}.pt")
    return folder / f"{name}.pt"


LOADED = ("translation", "language_modeling")
# Those that are close to these two, by name or as a subclass.
OTHER_TASKS = sorted(
    name
    for name, task in tasks.TASK_REGISTRY.items()
    if name.startswith("translation_")
    or (issubclass(task, TranslationTask | LanguageModelingTask) and name not in LOADED)
)


def test_load_refuses_other_tasks_by_name(checkpoint, data, tmp_path):
    assert {"translation_multi_simple_epoch", "translation_lev"} <= {*OTHER_TASKS}
    for name in (*OTHER_TASKS, "denoising"):
        file = with_task(checkpoint("transformer_multimax"), tmp_path, name)
        sentence = f"of the task {name}: pass one of translation or language_modeling"
        with pytest.raises(UsageError, match=sentence):
            load(file, data / "mt")
    with pytest.raises(UsageError, match=sentence):
        collect([file], data / "mt", "valid", 1, tmp_path / "out", [])
    with pytest.raises(UsageError, match=sentence):
        evaluate(file, data / "mt")


def test_load_accepts_a_plugins_translation_task(checkpoint, data, tmp_path, monkeypatch):
    file = with_task(checkpoint("transformer_multimax"), tmp_path, "of_a_plugin")
    with pytest.raises(UsageError, match="of the task of_a_plugin: import its plugin first"):
        load(file, data / "mt")
    task = type("PluginTask", (TranslationTask,), {})
    monkeypatch.setitem(tasks.TASK_REGISTRY, "of_a_plugin", task)
    monkeypatch.setitem(tasks.TASK_DATACLASS_REGISTRY, "of_a_plugin", TranslationConfig)
    assert type(load(file, data / "mt").task) is task


def test_load_finds_the_checkpoint_and_data_of_a_run(checkpoint, data, tmp_path, monkeypatch):
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    run, moved = project / "runs" / "one", elsewhere / "runs" / "one"
    run.mkdir(parents=True)
    state = torch.load(checkpoint("transformer_multimax"), weights_only=False)
    expected = load(checkpoint("transformer_multimax"), data / "mt").score(SOURCES, TARGETS)

    def check():
        for one, other in zip(load(folder).score(SOURCES, TARGETS), expected, strict=True):
            assert torch.equal(one["positional_scores"], other["positional_scores"])

    for named, save_dir in (("mt", "runs/one"), (str(project / "mt"), str(run))):
        state["cfg"]["task"]["data"], state["cfg"]["checkpoint"]["save_dir"] = named, save_dir
        torch.save(state, run / "checkpoint_last.pt")
        (project / "mt").symlink_to(data / "mt")
        folder = run
        check()
        project.rename(elsewhere)  # to another folder than the one that it names
        folder = moved
        check()
        elsewhere.rename(project)
        monkeypatch.chdir(project)
        folder = "runs/one"
        check()
        monkeypatch.chdir(tmp_path)
        (project / "mt").unlink()
        with pytest.raises(UsageError, match=f"data folder '{named}' of checkpoint '.*' does not"):
            load(run)
        load(run, data / "mt")
    (run / "checkpoint_best.pt").write_text("not a checkpoint")
    with pytest.raises(UsageError, match="checkpoint_best.pt"):  # preferred
        load(run, data / "mt")
    with pytest.raises(UsageError, match="has no checkpoint_best.pt or checkpoint_last.pt: pass"):
        load(project)


def test_load_names_a_folder_without_data(checkpoint, data, tmp_path):
    languages = dict.fromkeys(("source_lang", "target_lang"))
    file = with_task(checkpoint("transformer_multimax"), tmp_path, "translation", **languages)
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", data / "lm"):
        with pytest.raises(UsageError, match=f"'{folder}' has no data of a language pair: pass"):
            load(file, folder)
    load(file, data / "mt")


def test_symbols_in_text_are_unknown_words(model, checkpoint, data):
    language_model = load(checkpoint("transformer_lm_multimax"), data / "lm")
    symbols, unknown = "</s> Everyone <s> has <pad> <unk>", "x Everyone x has x x"
    for found, expected in (
        (model.score([symbols], [symbols]), model.score([unknown], [unknown])),
        (language_model.score([symbols]), language_model.score([unknown])),
    ):
        assert torch.equal(found[0]["tokens"], expected[0]["tokens"])
        assert torch.equal(found[0]["positional_scores"], expected[0]["positional_scores"])
    assert model.translate([symbols], max_len_b=9) == model.translate([unknown], max_len_b=9)
    found, expected = model.attention(symbols, symbols), model.attention(unknown, unknown)
    assert (found.source, found.target) == (expected.source, expected.target)
    for each in (model, language_model):
        assert torch.equal(each.features(symbols), each.features(unknown))


def test_load_prints_nothing_and_keeps_the_logging_setup(checkpoint, data, tmp_path):
    """test_package.py tests the imports, in a process that has imported nothing."""
    file = checkpoint("transformer_multimax")
    code = f"""if True:
        import logging, warnings
        warnings.simplefilter("ignore", FutureWarning)  # of newer torch
        from multimax_fairseq.trained import load
        root = logging.getLogger()
        assert (root.level, root.handlers) == (logging.WARNING, [])
        load({str(file)!r}, {str(data / "mt")!r}).translate({SOURCES!r}, max_len_b=5)
    """
    assert run(tmp_path, "python", "-c", code) == ""
