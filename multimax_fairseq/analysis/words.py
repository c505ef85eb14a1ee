"""Finds the words that subword tokens form."""

from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor

# Words that ask, in lower case, of the languages of the papers' data.
INTERROGATIVES = {
    "de": "wer wen wem wessen was welche welcher welches welchen welchem wann wo woher wohin wie "
    "warum wieso weshalb womit wofür wozu woran worüber",
    "en": "who whom whose what which when where why how",
    "es": "quién quiénes qué cuál cuáles cuándo dónde cómo cuánto cuántos",
    "fr": "qui que quoi quel quelle quels quelles quand où comment pourquoi combien",
    "ja": "何 誰 どこ いつ なぜ どう どの どれ どんな どちら いくつ いくら",
    "ro": "cine ce care când unde cum cât câtă câți câte",
}
HYPHEN = "@-@"  # how Moses writes a hyphen inside a word


class WordBoundaries:
    """Finds words by the marks of the dictionary's subword model: @@ of BPE, ▁ of SentencePiece.

    A hyphenated word is one word. `language` is the language of the dictionary, for questions.
    """

    def __init__(self, dictionary: Dictionary, language: str | None = None) -> None:
        self.dictionary = dictionary
        symbols = dictionary.symbols
        special = [index < dictionary.nspecial for index in range(len(symbols))]
        pieces = any(s.startswith("▁") for s in symbols)
        joined = any(s.endswith("@@") for s in symbols)
        # SentencePiece attaches punctuation to the word before it; here it is a word.
        alone = [
            special[i] or s != "-" and not any(c.isalnum() or c == "▁" for c in s[1:] or s)
            for i, s in enumerate(symbols)
        ]
        if pieces:
            self.starts = torch.tensor(alone) | torch.tensor([s[:1] == "▁" for s in symbols])
            self.ends = torch.tensor(alone)
        else:
            self.ends = torch.tensor([not (joined and s.endswith("@@")) for s in symbols])
            self.starts = torch.tensor(special)
        self.joins = torch.tensor([s == HYPHEN for s in symbols])
        around = (dictionary.bos(), dictionary.pad(), dictionary.eos())
        self.edges = torch.tensor([index in around for index in range(len(symbols))])
        self.question_marks = torch.tensor([s.strip("▁") == "?" for s in symbols])
        asking = INTERROGATIVES.get(language or "en", "").split()
        self.asks = torch.tensor([s.strip("▁").lower() in asking for s in symbols])

    def numbers(self, tokens: Tensor) -> Tensor:
        """Return the index of the word that each token belongs to, (B, T)."""
        new, joins, edges = self.starts[tokens], self.joins[tokens], self.edges[tokens]
        new[:, 1:] |= self.ends[tokens[:, :-1]]
        hyphenated = joins[:, 1:] | joins[:, :-1]
        new[:, 1:] &= ~hyphenated | edges[:, 1:] | edges[:, :-1]
        return new.cumsum(1)

    def interrogatives(self, tokens: Tensor) -> Tensor:
        """Return a mask of tokens that are a whole interrogative word, (B, T)."""
        numbers = self.numbers(tokens)
        alone = torch.ones_like(numbers, dtype=torch.bool)
        same = numbers[:, 1:] == numbers[:, :-1]
        alone[:, 1:] &= ~same
        alone[:, :-1] &= ~same
        return self.asks[tokens] & alone

    def questions(self, tokens: Tensor) -> Tensor:
        """Return a mask of question marks that end a sentence, (B, T)."""
        pad, eos = self.dictionary.pad(), self.dictionary.eos()
        after = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], pad)], 1)
        return self.question_marks[tokens] & (after.eq(pad) | after.eq(eos))

    def display(self, tokens: Tensor) -> dict[str, Any]:
        """Return the tokens of a sentence, and the text and token range of its words."""
        numbers = self.numbers(tokens[None])[0].tolist()
        symbols = [self.dictionary[int(token)] for token in tokens]
        words: list[dict[str, Any]] = []
        for index, (symbol, number) in enumerate(zip(symbols, numbers, strict=True)):
            if index == 0 or number != numbers[index - 1]:
                words.append({"word": "", "start": index, "end": index})
            text = symbol.removesuffix("@@") if not self.ends[tokens[index]] else symbol
            words[-1]["word"] += "-" if symbol == HYPHEN else text.replace("▁", "")
            words[-1]["end"] = index + 1
        return {"tokens": symbols, "words": words}
