import json
import re
import signal
import socket
import subprocess
import sys
import time
import wave

import httpx
import pytest

pytestmark = pytest.mark.e2e

COMMAND = [sys.executable, "-c", "from slackwater_inference.cli import app; app()", "serve"]
TEXT = "one two three four five six seven eight nine ten"  # 48 bytes: 45 frames


class Server:
    """A supervised engine process."""

    def __init__(self, *options):
        self.process = subprocess.Popen(
            [*COMMAND, "--supervised", *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def event(self, name):
        """Read events up to the next one of this name."""
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == name:
                return event
        raise AssertionError(f"the server ended before it said {name}")


@pytest.fixture
def serve():
    servers = []

    def start(*options):
        servers.append(Server(*options))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.process.communicate()


def body(**fields):
    return {"text": TEXT, "format": "wav", **fields}


def metric(url, line):
    return float(re.search(rf"^{re.escape(line)} (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)[1])


def test_a_standby_wakes_serves_notices_who_leaves_and_finishes_its_streams(serve):
    # 45 frames: 10 at once and 35 at 20 a second, so that a stream lasts long enough to be left or drained.
    server = serve("--standby", "--slots", "1", "--max-queued", "1", "--pace", "20")

    server.event("standby")
    server.process.send_signal(signal.SIGUSR1)
    ready = server.event("ready")
    url = ready["url"]
    assert ready["slots"] == 1
    assert httpx.get(f"{url}/readyz").status_code == 200

    # A client that vanishes in the middle frees its row and pages.
    with httpx.stream("POST", f"{url}/v1/tts", json=body()) as answer:
        assert answer.status_code == 200
        chunks = answer.iter_raw()
        next(chunks)
        assert metric(url, 'tts_requests_running{model="tiny"}') == 1
    deadline_s = time.monotonic() + 20
    while metric(url, "tts_kv_used_ratio") > 0:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert metric(url, 'tts_client_aborts_total{phase="streaming"}') == 1
    assert server.event("load")["slots"] == 1

    # A client that vanishes before the first audio does, too.
    with httpx.stream("POST", f"{url}/v1/tts", json=body()) as first:
        chunks = first.iter_raw()
        next(chunks)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/tts", json=body(), timeout=0.3)
        deadline_s = time.monotonic() + 20
        while metric(url, 'tts_requests_waiting{model="tiny"}') > 0:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)

    # Told to leave, it finishes what it has and takes nothing new.
    with httpx.stream("POST", f"{url}/v1/tts", json=body()) as answer:
        chunks = answer.iter_raw()
        audio = next(chunks)
        server.process.send_signal(signal.SIGTERM)
        assert server.event("leaving")["reason"] == "SIGTERM"
        deadline_s = time.monotonic() + 20
        while httpx.get(f"{url}/readyz").status_code != 503:
            assert time.monotonic() < deadline_s
        refused = httpx.post(f"{url}/v1/tts", json=body())
        assert (refused.status_code, refused.json()["status"]) == (503, 503)
        audio += b"".join(chunks)
    assert len(audio) == 44 + 45 * 2048 * 2
    assert server.process.wait(20) == 0


def test_serves_at_once_with_keys_from_a_file(serve, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first\n\n second \n")
    server = serve("--key-file", str(keys), "--key", "third")
    url = server.event("ready")["url"]

    assert httpx.post(f"{url}/v1/tts", json=body()).status_code == 401
    for key in ("first", "second", "third"):
        answer = httpx.post(f"{url}/v1/tts", json=body(), headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200
    (tmp_path / "a.wav").write_bytes(answer.content)

    with wave.open(str(tmp_path / "a.wav")) as spoken:
        assert (spoken.getframerate(), spoken.getnchannels(), spoken.getsampwidth()) == (44100, 1, 2)
        assert len(spoken.readframes(10**6)) == 45 * 2048 * 2


def test_a_port_in_use_is_said_in_one_line_with_exit_code_2():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        ended = subprocess.run([*COMMAND, "--port", str(port)], capture_output=True, text=True, timeout=60)

    assert ended.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param(["--slots", "0"], "Invalid value for '--slots'", id="no slots"),
        pytest.param(["--key-file", "/nowhere/keys"], "cannot read the key file", id="no key file"),
        pytest.param(["--key-file", "/dev/null"], "has no key", id="no key in the file"),
    ],
)
def test_bad_options_are_refused_with_exit_code_2(options, words):
    ended = subprocess.run(
        [*COMMAND, *options], capture_output=True, text=True, timeout=60, env={"COLUMNS": "300", "PATH": ""}
    )

    assert ended.returncode == 2
    assert words in ended.stderr
