import dataclasses
import io
import json
import re
import signal
import socket
import subprocess
import sys
import time
import wave

import httpx
import httpx_ws
import numpy as np
import ormsgpack
import pytest

from slackwater_inference.core import Speech
from slackwater_inference.server import Options, build_engine, build_services
from slackwater_inference.store.database import Database
from slackwater_inference.store.keys import KeyStore
from slackwater_inference.store.objects import ObjectStore
from slackwater_inference.store.voices import VoiceStore
from slackwater_inference.testing.checkpoint import write_checkpoint

COMMAND = [sys.executable, "-c", "from slackwater_inference.cli import app; app()", "serve"]
TEXT = "one two three four five six seven eight nine ten"  # 48 bytes: 45 frames


def options(**changed):
    plain = Options(
        host="127.0.0.1",
        port=0,
        model="tiny",
        slots=1,
        max_queued=1,
        pace_frames_per_s=0.0,
        length=None,
        seed=0,
        store=None,
        database=None,
        asr=None,
        keys=(),
        require_key=False,
        threads=1,
    )
    return dataclasses.replace(plain, **changed)


@pytest.fixture(scope="module")
def engine():
    return build_engine(options())


def test_without_a_key_everybody_may_speak(engine):
    assert build_services(options(), engine).keys is None


def test_without_a_key_nobody_may_speak_where_one_is_required(engine):
    keys = build_services(options(require_key=True), engine).keys

    assert keys is not None
    assert not keys.list()


def test_a_key_given_at_start_is_the_same_user_after_a_restart_and_bounded_by_the_engine_alone(engine):
    one, other = (build_services(options(keys=("first", "second", "first")), engine).keys for _ in range(2))

    assert one.find("first").user_id == other.find("first").user_id != one.find("second").user_id
    assert one.find("first").max_concurrent >= 256
    assert one.find("first").credit is None
    assert one.find("third") is None


def test_the_databases_keys_count_and_the_last_revoked_one_leaves_the_door_closed(engine, tmp_path):
    asked = options(store=str(tmp_path), database=f"sqlite:///{tmp_path / 'voices.db'}")
    assert build_services(asked, engine).keys is None
    store = KeyStore(Database(asked.database))
    made, key = store.add("a user")
    assert build_services(asked, engine).keys.find(key).key_id == made.key_id

    store.revoke(made.key_id)

    assert build_services(asked, engine).keys.find(key) is None


async def test_a_checkpoint_folder_becomes_an_engine_that_speaks(tmp_path):
    model, _ = write_checkpoint(tmp_path)
    built = build_engine(options(model=str(tmp_path)))
    built.start()
    try:
        stream = built.open(Speech())
        stream.say("A few words.")
        stream.end()
        num_frames = sum([chunk.num_frames async for chunk in stream])
    finally:
        built.stop()

    assert built.model.text_config == model.text_config
    assert num_frames > 0
    assert built.metrics.registry.get_sample_value("tts_model_load_seconds_count", {"source": "folder"}) == 1


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


@pytest.mark.e2e
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


@pytest.mark.e2e
def test_a_port_in_use_is_said_in_one_line_with_exit_code_2():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        ended = subprocess.run([*COMMAND, "--port", str(port)], capture_output=True, text=True, timeout=60)

    assert ended.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.e2e
def test_keys_open_the_door_and_a_standing_websocket_says_what_it_was_given_when_the_server_leaves(serve, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first\n\n second \n")
    server = serve("--pace", "40", "--slots", "1", "--key-file", str(keys), "--key", "third")
    url = server.event("ready")["url"]

    def headers(key):
        return {"authorization": f"Bearer {key}"}

    answers = [
        httpx.get(f"{url}/wallet/self/api-credit", headers=headers(k)) for k in ("no", "first", "second", "third")
    ]
    assert [answer.status_code for answer in answers] == [401, 200, 200, 200]

    with httpx_ws.connect_ws(f"{url}/v1/tts/live", headers=headers("first")) as socket:

        def send(**event):
            socket.send_bytes(ormsgpack.packb(event))

        def receive():
            return ormsgpack.unpackb(socket.receive_bytes(timeout=20))

        send(event="start", request={"text": "", "format": "pcm"})
        send(event="text", text=TEXT)
        send(event="flush")
        num_bytes = len(receive()["audio"])
        assert metric(url, 'tts_requests_running{model="tiny"}') == 1
        send(event="text", text="and a word that was not flushed")
        server.process.send_signal(signal.SIGTERM)
        while (event := receive())["event"] == "audio":
            num_bytes += len(event["audio"])

    assert event["reason"] == "error"
    assert "leaving" in event["message"]
    assert num_bytes == (45 + 29) * 2048 * 2
    assert server.process.wait(20) == 0


@pytest.mark.e2e
def test_keys_come_from_the_database_and_voices_outlive_the_server_in_it(serve, tmp_path):
    arguments = ("--store", str(tmp_path / "objects"), "--database", f"sqlite:///{tmp_path / 'voices.db'}")
    database = Database(arguments[3])
    _, key = KeyStore(database).add("a user", user_id="u1")
    headers = {"authorization": f"Bearer {key}"}
    title = {"title": "mine", "type": "tts", "train_mode": "fast", "visibility": "private"}

    server = serve(*arguments)
    url = server.event("ready")["url"]
    assert httpx.get(f"{url}/model").status_code == 401
    made = httpx.post(
        f"{url}/model", data={**title, "texts": "A short sentence."}, files={"voices": recording()}, headers=headers
    )
    assert made.status_code == 201, made.text
    voice_id = made.json()["_id"]
    spoken = httpx.post(f"{url}/v1/tts", json=body(reference_id=voice_id), headers=headers, timeout=60)
    assert spoken.status_code == 200
    assert len(spoken.content) == 44 + 45 * 2048 * 2
    server.process.kill()
    server.process.wait()

    voices = VoiceStore(database, ObjectStore(arguments[1]))
    (sample,) = [s for s in voices.get(voice_id, "u1").samples if s.text == "A short sentence."]
    assert voices.data(sample.digest) == recording()


def recording():
    """Three seconds of something that could be a voice, as a WAV file."""
    rate = 16_000
    t = np.arange(3 * rate) / rate
    wobble = 0.5 + 0.5 * np.sin(2 * np.pi * 3 * t) ** 2
    sound = 0.3 * wobble * sum(np.sin(2 * np.pi * 140 * k * t) / k for k in range(1, 12))
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, rate, 0, "NONE", ""))
        out.writeframes((sound * 20_000 / np.abs(sound).max()).astype("<i2").tobytes())
    return file.getvalue()


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--store", "/tmp/x"], "--store and --database belong together", id="store alone"),
        pytest.param(["--seed", "1", "--model", "/nowhere"], "--seed is for the embedded voice", id="seed"),
        pytest.param(["--model", "/nowhere"], "/nowhere", id="no checkpoint"),
        pytest.param(["--slots", "0"], "Invalid value for '--slots'", id="no slots"),
        pytest.param(["--key-file", "/nowhere/keys"], "cannot read the key file", id="no key file"),
        pytest.param(["--key-file", "/dev/null"], "has no key", id="no key in the file"),
    ],
)
def test_bad_options_are_refused_with_exit_code_2(arguments, words):
    ended = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=60, env={"COLUMNS": "300", "PATH": ""}
    )

    assert ended.returncode == 2
    assert words in ended.stderr
