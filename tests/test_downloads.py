"""Downloads of data-prep/ resume, verify checksums and try several hosts."""

import hashlib
import http.server
import signal
import subprocess
import threading
import time

import archives
import iwslt14
import pytest
from prep_archives import layout, pack
from prep_scripts import environment, files_up_to, refused, script

pytestmark = pytest.mark.long

DATA = bytes(range(256)) * 4000
SHA256 = f"sha256={hashlib.sha256(DATA).hexdigest()}"


class Host(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append((self.path, dict(self.headers)))
        name = self.path.rpartition("/")[2]
        data = self.server.files.get(name, DATA)
        if name == "missing":
            return self.send_error(404)
        start = 0
        if name != "without-range" and "Range" in self.headers:
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            if start >= len(data):
                return self.send_error(416)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        half = name == "cut" or (name == "slow" and not start)
        self.wfile.write(data[start : len(data) // 2 if half else None])
        if name == "slow" and not start:
            self.rfile.read(1)  # until the client disconnects

    def log_message(self, *_):
        pass


@pytest.fixture
def host(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Host) as server:
        server.requests, server.files = [], {"wrong": b"not found here" * 99}
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    ("left", "names", "ranges"),
    [
        (None, ["file"], [None]),
        (DATA[:70000], ["file"], ["bytes=70000-"]),
        (DATA[:70000], ["without-range"], ["bytes=70000-"]),
        (DATA, ["file"], []),
        (DATA + b"more", ["file"], [f"bytes={len(DATA) + 4}-", None]),
        (b"another file", ["file"], ["bytes=12-", None]),
        (None, ["missing", "file"], [None, None]),
        (None, ["wrong", "file"], [None, None]),
        (None, ["cut", "file"], [None, f"bytes={len(DATA) // 2}-"]),
    ],
)
def test_download_resumes_and_checks(left, names, ranges, host, tmp_path):
    target = tmp_path / "archives" / "file"
    target.parent.mkdir()
    if left is not None:
        (target.parent / "file.part").write_bytes(left)
    archives.download([f"{host.url}/{name}" for name in names], target, SHA256)
    assert target.read_bytes() == DATA
    assert sorted(file.name for file in target.parent.iterdir()) == [".file.lock", "file"]
    assert [headers.get("Range") for _, headers in host.requests] == ranges
    assert not any("python" in headers["User-Agent"].lower() for _, headers in host.requests)

    archives.download([f"{host.url}/missing"], target, SHA256)  # already downloaded
    target.write_bytes(b"damaged")
    with pytest.raises(SystemExit, match="nothing was unpacked; remove it"):
        archives.download([f"{host.url}/file"], target, SHA256)


def test_download_runs_once_for_concurrent_calls(host, tmp_path):
    target = tmp_path / "file"
    runs = [
        threading.Thread(target=archives.download, args=([f"{host.url}/file"], target, SHA256))
        for _ in range(4)
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert target.read_bytes() == DATA and len(host.requests) == 1


def test_download_reports_failing_hosts(host, tmp_path, capsys):
    urls = [f"{host.url}/missing", f"{host.url}/wrong", "http://127.0.0.1:9/file", "odd://x/file"]
    with pytest.raises(SystemExit) as failed:
        archives.download(urls, tmp_path / "file", SHA256, 1024000)
    facts = f"1,024,000 bytes, {SHA256}"
    for part in (host.url, "http://127.0.0.1:9", facts, f"at {tmp_path / 'file'},", "--archive"):
        assert part in str(failed.value)
    assert "\n" not in str(failed.value)
    printed = capsys.readouterr().out
    for reason in ("404", "has the SHA-256", "Connection refused", "unknown url type"):
        assert reason in printed
    assert [file.name for file in tmp_path.iterdir()] == [".file.lock"]


def test_obtain_downloads_from_a_url(host, tmp_path):
    tgz = pack(tmp_path / "made.tgz", layout().items())
    host.files["own.tgz"] = tgz.read_bytes()
    address = f"{host.url}/own.tgz"
    assert "md5=10936dfdf616504ddbd844e91b94ef4a" in refused(
        script("iwslt14.py", "--archive", address, "--out", "out"), tmp_path
    )
    sha256 = archives.digest(tgz)
    found = archives.obtain(iwslt14.OFFICIAL, f"{address}#sha256={sha256}", tmp_path)
    assert found == (tmp_path / f"{sha256[:12]}-own.tgz", sha256, False)


def test_download_reports_a_full_disk(host, tmp_path):
    address = f"{host.url}/file#{SHA256}"
    command = script("iwslt14.py", "--archive", address, "--out", tmp_path)
    assert "File too large" in refused(command, tmp_path, **files_up_to(500_000, tmp_path))
    assert [file.suffix for file in (tmp_path / "archives").iterdir() if file.stat().st_size] == [
        ".part"
    ]


def test_download_resumes_after_ctrl_c(host, tmp_path):
    address = f"{host.url}/slow#{SHA256}"
    command = script("iwslt14.py", "--archive", address, "--out", tmp_path)
    part = tmp_path / "archives" / f"{SHA256[7:19]}-slow.part"
    process = subprocess.Popen(
        command,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    while not part.exists() or not part.stat().st_size:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert said.strip() == "Stopped; the same command resumes."
    have = part.stat().st_size
    assert 0 < have < len(DATA)
    assert "is truncated or corrupt" in refused(command, tmp_path)  # complete, but no archive
    assert host.requests[-1][1]["Range"] == f"bytes={have}-"
    assert part.with_suffix("").read_bytes() == DATA
