"""JavaScript under Node: fetch with a streaming reader, as the announcement shows it, and Node's own websocket."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

NODE = shutil.which("node")
HERE = Path(__file__).parent
TEXT = "A long text takes a while to be spoken, and nobody should wait for its end. " * 4

pytestmark = pytest.mark.skipif(NODE is None, reason="no node on this machine; it runs the JavaScript examples")


def run(script: str, url: str, key: str, *options: str) -> dict[str, Any]:
    """What a script of this folder prints."""
    assert NODE is not None
    ended = subprocess.run([NODE, *options, HERE / script, url, key, TEXT], capture_output=True, text=True, timeout=90)
    assert ended.returncode == 0, ended.stderr[-2000:]
    said: dict[str, Any] = json.loads(ended.stdout)
    return said


def test_fetch_reads_the_audio_as_it_is_made(url: str, service: Any, spoken_s: Any) -> None:
    said = run("speak.mjs", url, service.owner)

    assert (said["status"], said["type"]) == (200, "audio/pcm")
    assert said["bytes"] / 2 / 44_100 == pytest.approx(spoken_s(TEXT), rel=0.2)
    assert said["pieces"] > 5
    assert said["first_ms"] < 0.5 * said["last_ms"]


def test_fetch_sees_a_refusal_as_json(url: str) -> None:
    said = run("speak.mjs", url, "sw_nobody")

    assert said["status"] == 401
    assert set(said["error"]) == {"status", "message"}


def test_the_websocket_speaks(url: str, service: Any, spoken_s: Any) -> None:
    assert NODE is not None
    flag = "--experimental-websocket"  # Node 20 has it behind this; 22 has it anyway, and still knows the flag
    has = subprocess.run([NODE, flag, "-p", "typeof WebSocket"], capture_output=True, text=True, timeout=30)
    if has.stdout.strip() != "function":
        pytest.skip("this Node has no WebSocket; 20.10 and later have")

    said = run("live.mjs", url, service.owner, flag)

    assert (said["finish"], said["code"]) == ("stop", 1000)
    assert said["audio"] > 5
    assert said["bytes"] / 2 / 44_100 == pytest.approx(spoken_s(TEXT), rel=0.2)
