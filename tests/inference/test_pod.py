"""The gateway and an engine as a pod runs them."""

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.e2e


def url_in(process: Any, before: str, after: str = "") -> str:
    """What the process says between two words, on its first line that has the one before."""
    for line in process.stderr if after else process.stdout:
        if before in line:
            return str(line.split(before)[1].split(after or ",")[0].strip())
    raise AssertionError(f"it ended with {process.wait()}")


def test_a_gateway_on_every_address_is_told_its_replicas_and_leaves_with_0(pod: Any) -> None:
    gateway = pod("gateway", "--host", "0.0.0.0", "--port", 0, "--control-port", 0)
    with httpx.Client(base_url=url_in(gateway.process, "control on "), trust_env=False, timeout=20) as control:
        assert control.get("/ready").status_code == 503
        assert control.put("/replicas", json={"replicas": []}).status_code == 204
        assert control.get("/ready").status_code == 200

        gateway.terminate()

        assert gateway.process.wait(60) == 0


def test_an_engine_finishes_its_streams_and_leaves_with_0(pod: Any, pod_folder: Path) -> None:
    engine = pod("engine", "serve", "--host", "0.0.0.0", "--port", 0, "--slots", 2, "--pace", 20)
    url = url_in(engine.process, "serving url=", " ").replace("0.0.0.0", "127.0.0.1")
    probes = [httpx.get(f"{url}{path}", trust_env=False, timeout=20).status_code for path in ("/healthz", "/readyz")]
    # Its standard error must be read on, or the process waits for us.
    threading.Thread(target=engine.process.stderr.read, daemon=True).start()
    body = {"text": "A text of a few words, which takes a second or two to say.", "format": "pcm"}
    with httpx.stream("POST", f"{url}/v1/tts", json=body, trust_env=False, timeout=60) as stream:
        chunks = stream.iter_bytes()
        num_bytes = len(next(chunks))

        engine.terminate()
        while httpx.get(f"{url}/readyz", trust_env=False, timeout=20).status_code == 200:
            time.sleep(0.02)
        num_later = sum(map(len, chunks))

    assert probes == [200, 200]
    assert num_bytes > 0
    assert num_later > 0
    assert engine.process.wait(60) == 0
