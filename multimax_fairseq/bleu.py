"""Chooses the tokens of BLEU by the target language."""

import contextvars
import re
from collections.abc import Iterable

from sacrebleu.metrics.bleu import BLEU

from multimax_fairseq.errors import UsageError

# Language codes by SacreBLEU's tokenizer: ISO 639, and cn and jp, which are in use. SacreBLEU does
# not split the languages of "char" into words, so BLEU compares their characters.
CODES = {
    "zh": "zh zho chi cmn yue wuu lzh cn",
    "ja-mecab": "ja jpn jp",
    "ko-mecab": "ko kor",
    "char": "th tha lo lao km khm my mya bur shn bo bod tib dz dzo",
}
TOKENIZERS = {code: name for name, codes in CODES.items() for code in codes.split()}
# Letters, without combining marks, of Thai, Lao, Tibetan, Burmese; Khmer; Japanese and Chinese.
LETTERS = re.compile(r"(?=[\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff])\w")
MAX_MEAN_WORD = 5  # letters, on average
DEFAULT = BLEU.TOKENIZER_DEFAULT  # 13a
# The target language of sacrebleu.corpus_bleu, which fairseq calls without one.
LANGUAGE = contextvars.ContextVar("language", default="")


def tokenizer(language: str) -> str:
    """Return SacreBLEU's tokenizer for a language, such as zh, zh_CN or zho_Hans."""
    return TOKENIZERS.get(re.split("[-_.]", language.lower())[0], DEFAULT)


def metric(language: str, lowercase: bool = False) -> BLEU:
    """Return SacreBLEU's metric for a target language.

    Raises:
        UsageError: the tokenizer needs a package that is not installed.
    """
    name = tokenizer(language)
    try:
        return BLEU(lowercase=lowercase, tokenize=name)
    except RuntimeError:  # MeCab is missing
        raise UsageError(
            f"BLEU of the language '{language}' needs MeCab: install it with "
            f"pip install 'sacrebleu[{name[:2]}]'"
        ) from None


def lacks_spaces(lines: Iterable[str]) -> bool:
    """Whether the text is written without spaces between words."""
    text = "\n".join(lines)
    return len(LETTERS.findall(text)) > MAX_MEAN_WORD * len(text.split())


def language_mistake(language: str, lines: Iterable[str]) -> str | None:
    """Return the sentence for text without spaces in a language that is not in CODES, or None."""
    if tokenizer(language) != DEFAULT or not lacks_spaces(lines):
        return None
    return (
        f"the text in '{language}' has no spaces between words, so BLEU compares whole sentences: "
        "name the files by the language's code, such as test.zh, before you prepare the data"
    )
