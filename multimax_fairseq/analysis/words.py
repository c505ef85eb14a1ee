"""Finds the words that subword tokens form."""

from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor


class WordBoundaries:
    """Finds words by the marks of the dictionary's subword model: @@ of BPE, ▁ of SentencePiece."""

    def __init__(self, dictionary: Dictionary) -> None:
        self.dictionary = dictionary
        symbols = dictionary.symbols
        special = [index < dictionary.nspecial for index in range(len(symbols))]
        pieces = any(s.startswith("▁") for s in symbols)
        joined = any(s.endswith("@@") for s in symbols)
        # SentencePiece attaches punctuation to the word before it; here it is a word.
        alone = [
            special[i] or not any(c.isalnum() or c == "▁" for c in s[1:] or s)
            for i, s in enumerate(symbols)
        ]
        if pieces:
            self.starts = torch.tensor(alone) | torch.tensor([s[:1] == "▁" for s in symbols])
            self.ends = torch.tensor(alone)
        else:
            self.ends = torch.tensor([not (joined and s.endswith("@@")) for s in symbols])
            self.starts = torch.tensor(special)
        self.asks = torch.tensor([s.strip("▁") == "?" for s in symbols])

    def numbers(self, tokens: Tensor) -> Tensor:
        """Return the index of the word that each token belongs to, (B, T)."""
        new = self.starts[tokens]
        new[:, 1:] |= self.ends[tokens[:, :-1]]
        return new.cumsum(1)

    def questions(self, tokens: Tensor) -> Tensor:
        """Return a mask of question marks that end a sentence, (B, T)."""
        pad, eos = self.dictionary.pad(), self.dictionary.eos()
        after = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], pad)], 1)
        return self.asks[tokens] & (after.eq(pad) | after.eq(eos))

    def display(self, tokens: Tensor) -> dict[str, Any]:
        """Return the tokens of a sentence, and the text and token range of its words."""
        numbers = self.numbers(tokens[None])[0].tolist()
        symbols = [self.dictionary[int(token)] for token in tokens]
        words: list[dict[str, Any]] = []
        for index, (symbol, number) in enumerate(zip(symbols, numbers, strict=True)):
            if index == 0 or number != numbers[index - 1]:
                words.append({"word": "", "start": index, "end": index})
            text = symbol.removesuffix("@@") if not self.ends[tokens[index]] else symbol
            words[-1]["word"] += text.replace("▁", "")
            words[-1]["end"] = index + 1
        return {"tokens": symbols, "words": words}
