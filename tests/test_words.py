"""analysis/words.py: word boundaries of subword tokens."""

import torch
from fairseq.data import Dictionary

from multimax_fairseq.analysis.words import WordBoundaries


def test_display_joins_subwords():
    for symbols, words in (
        (["ein", "un@@", "be@@", "kannt", "?"], ["ein", "unbekannt", "?"]),
        (["▁ein", "▁un", "be", "kannt", "?"], ["ein", "unbekannt", "?"]),
        (["ein", "unbekannt"], ["ein", "unbekannt"]),
        (["wohl", "@-@", "be@@", "kannt", "."], ["wohl-bekannt", "."]),
        (["@-@", "bekannt", "wohl", "@-@"], ["-bekannt", "wohl-"]),
        (["▁wohl", "-", "bekannt", "▁-", "▁ja", "."], ["wohl-bekannt", "-", "ja", "."]),
    ):
        dictionary = Dictionary()
        tokens = torch.tensor([dictionary.add_symbol(s) for s in symbols] + [dictionary.eos()])
        shown = WordBoundaries(dictionary).display(tokens)
        rotated = WordBoundaries(dictionary).display(tokens.roll(1))  # as a language model's input
        assert [word["word"] for word in rotated["words"]] == ["</s>", *words]
        assert [word["word"] for word in shown["words"]] == [*words, "</s>"]
        assert shown["tokens"] == [*symbols, "</s>"]
        spans = [tuple(range(word["start"], word["end"])) for word in shown["words"]]
        assert sum(spans, ()) == tuple(range(len(tokens)))


def test_questions_marks_final_question_marks():
    dictionary = Dictionary()
    a, mark = dictionary.add_symbol("a"), dictionary.add_symbol("▁?")
    eos, pad = dictionary.eos(), dictionary.pad()
    tokens = torch.tensor([[a, mark, a, mark, eos], [eos, a, a, mark, pad], [mark, a, a, a, mark]])
    found = WordBoundaries(dictionary).questions(tokens)
    assert found.nonzero().tolist() == [[0, 3], [1, 3], [2, 4]]


def test_interrogatives_marks_whole_words_of_the_language():
    dictionary = Dictionary()
    tokens = [dictionary.add_symbol(s) for s in ("Wer", "was@@", "sich", "was", "who", "wer@@")]
    rows = torch.tensor([tokens])

    german, english = (
        WordBoundaries(dictionary, language).interrogatives(rows)[0].tolist()
        for language in ("de", "en")
    )

    assert german == [True, False, False, True, False, False]
    assert english == [False, False, False, False, True, False]
