"""Parses an HTML report, or opens it in headless Chromium; skips the test without Chromium."""

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

# Chromium's values for prefers-color-scheme
SCHEMES = {"dark": 0, "light": 1}


def run_in_page(file, script, tmp_path):
    """Add a script to a page, open it and return the JSON that the script sets as the title."""
    page = file.read_text(encoding="utf-8")
    # The load event comes after all images are decoded.
    script = script.replace("<script>", "<script>addEventListener('load', () => {").replace(
        "</script>", "});</script>"
    )
    (tmp_path / "page.html").write_text(page.replace("</body>", f"{script}</body>"), "utf-8")
    return open_page(tmp_path / "page.html", tmp_path)


def open_page(file, tmp_path, scheme="light"):
    """Open a page and return the JSON in its title; the console must stay empty."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if program is None:
        pytest.skip("no chromium: the page was not opened (it was parsed, its functions ran)")
    done = subprocess.run(
        [program, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
        + [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"]
        + [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout, re.DOTALL)
    assert title, done.stderr[-2000:]
    return json.loads(title[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))


class Page(HTMLParser):
    """The links, ids, images and text of a page."""

    def __init__(self, file):
        super().__init__()
        self.resources, self.links, self.ids, self.texts = [], [], [], []
        self.source = file.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids.append(attributes.get("id"))
        if tag == "a":
            self.links.append(attributes["href"])
        for name in ("src", "data", "srcset", "action", "poster"):
            if name in attributes:
                self.resources.append(attributes[name])
        assert tag not in ("link", "iframe", "object", "embed", "base")
        assert tag != "img" or attributes["alt"]

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())
