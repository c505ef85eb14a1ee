"""Opens a page in a real browser without a screen; a test that finds none says so."""

import json
import os
import re
import shutil
import subprocess

import pytest

# As Chromium numbers what a page is told of the user's preference.
SCHEMES = {"dark": 0, "light": 1}


def driven(file, drive, tmp_path):
    """What a script leaves as the title of a page that it is put into."""
    page = file.read_text(encoding="utf-8")
    # The images are decoded by the time that the page has loaded.
    drive = drive.replace("<script>", "<script>addEventListener('load', () => {").replace(
        "</script>", "});</script>"
    )
    (tmp_path / "page.html").write_text(page.replace("</body>", f"{drive}</body>"), "utf-8")
    return titled(tmp_path / "page.html", tmp_path)


def titled(file, tmp_path, scheme="light"):
    """The JSON that a page leaves as its title; the console must stay empty."""
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
