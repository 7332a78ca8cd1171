"""The API's own description against its behaviour: schemathesis sends what the schema allows, and what it does not.

No answer may be a 5xx of ours, have a status or content type that is not declared, or a body that is not as described.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

MAX_EXAMPLES = 8
CHECKS = "status_code_conformance,content_type_conformance,response_headers_conformance,response_schema_conformance"


def start(
    service: Any, folder: Path, checks: str, *options: str, phases: str = "examples,coverage,fuzzing"
) -> "subprocess.Popen[str]":
    # Processes: its pytest plug-in and hooks stay out of ours, and worker threads meet a bug of Python 3.11's `ast`.
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{service.url}/openapi.json", "--checks", checks]
    command += ["--max-examples", str(MAX_EXAMPLES), "--seed", "4", "--generation-deterministic", "--no-color"]
    command += ["--header", f"Authorization: Bearer {service.keys['fuzzer']}", "--phases", phases]
    command += ["--request-timeout", "30", "--continue-on-failure", "--warnings", "off", *options]
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "140"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_no_request_finds_a_fault_or_an_undeclared_answer(service: Any, tmp_path: Path) -> None:
    without_fault = f"{CHECKS},not_a_server_error"
    running = [
        start(service, tmp_path, without_fault, "--include-path", "/v1/tts"),
        # The same body again: a few requests are enough for its answers.
        start(service, tmp_path, without_fault, "--include-path", "/v1/tts/stream/with-timestamp", phases="fuzzing"),
        start(service, tmp_path, without_fault, "--include-path", "/model"),
        start(service, tmp_path, without_fault, "--exclude-path-regex", "^/v1/|^/model$"),
        # Its 503 is right here, since this server has no transcriber.
        start(service, tmp_path, CHECKS, "--include-path", "/v1/asr"),
    ]
    try:
        for process in running:
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0, output[-6000:]
    finally:
        for process in running:
            process.kill()
            process.wait()

    assert httpx.get(f"{service.url}/readyz").status_code == 200
    assert "Traceback" not in service.engine.log


def test_every_route_of_the_contract_is_described(service: Any) -> None:
    described = httpx.get(f"{service.url}/openapi.json").json()["paths"]

    named = {re.sub(r"\{.*?\}", "{}", path): methods for path, methods in described.items()}
    operations = {(method.upper(), path) for path, methods in named.items() for method in methods}
    assert operations >= {
        ("POST", "/v1/tts"),
        ("POST", "/v1/tts/stream/with-timestamp"),
        ("POST", "/v1/asr"),
        ("GET", "/model"),
        ("POST", "/model"),
        ("GET", "/model/{}"),
        ("PATCH", "/model/{}"),
        ("DELETE", "/model/{}"),
        ("GET", "/wallet/{}/package"),
        ("GET", "/wallet/{}/api-credit"),
    }
