"""The official client library's own integration tests, as its release has them, against our server.

Their files are not changed.  Only their conftest is replaced: it makes clients without an address, and has every test
repeated up to nine times, which would hide what fails now and then.
"""

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

# Beside the recordings: `.setup/sdk-tests` brings them, and `make test` calls it.
CACHE = Path(os.environ.get("SLACKWATER_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "slackwater")
THEIRS = CACHE.expanduser() / "sdk-tests" / "tests" / "integration"
FILES = [
    "test_account_integration.py",
    "test_tts_integration.py",
    "test_tts_websocket_integration.py",
    "test_voices_integration.py",
]
NUM_TESTS = 42

# Every test of theirs that is not run here, and why.
LEFT_OUT = {
    "test_asr_integration.py": "its eight tests want a transcriber; the server under test has none, and its 503 is "
    "tested in test_sdk_errors.py",
}

CONFTEST = """
import os
from pathlib import Path

import pytest
from fishaudio import AsyncFishAudio, FishAudio

TEST_REFERENCE_ID = "ca3007f96ae7499ab87d27ea3599956a"
KEY, URL = os.environ["FISH_API_KEY"], os.environ["TEST_BASE_URL"]


@pytest.fixture
def client():
    with FishAudio(api_key=KEY, base_url=URL) as made:
        yield made


@pytest.fixture
async def async_client():
    async with AsyncFishAudio(api_key=KEY, base_url=URL) as made:
        yield made


@pytest.fixture
def save_audio(tmp_path):
    def save(audio, filename):
        path = tmp_path / filename
        path.write_bytes(audio if isinstance(audio, bytes) else b"".join(audio))
        return path

    return save
"""


@pytest.mark.skipif(not THEIRS.is_dir(), reason=f"no {THEIRS}; .setup/sdk-tests brings it")
def test_all_pass_the_first_time(service: Any, tmp_path: Path) -> None:
    assert {path.name for path in THEIRS.glob("test_*.py")} == {*FILES, *LEFT_OUT}, "each test is run or listed"
    folder = tmp_path / "tests" / "integration"
    folder.mkdir(parents=True)
    for name in ("__init__.py", *FILES):
        shutil.copy(THEIRS / name, folder / name)
    (folder / "conftest.py").write_text(CONFTEST)
    # The plug-ins are named: whatever else is installed must not take part in their tests.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "pytest_asyncio.plugin",
        "-p",
        "pytest_timeout",
        "--timeout=120",
    ]
    command += ["-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "--junitxml=report.xml", "tests"]
    environment = os.environ | {
        "FISH_API_KEY": service.owner,
        "TEST_BASE_URL": service.gateway.url,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }

    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)

    suite = ElementTree.parse(tmp_path / "report.xml").find("testsuite")
    assert suite is not None
    passed = [case.get("name") for case in suite.iter("testcase") if len(case) == 0]
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert len(passed) == len(list(suite.iter("testcase"))) == NUM_TESTS, ended.stdout[-4000:]
