import json
import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e

PROGRAM = """
import time
from slackwater_inference.lifecycle import Lifecycle
life = Lifecycle(supervised=True)
{body}
"""
SERVING = "life.begin_serving(); life.link.say('serving')\nwhile not life.is_leaving: time.sleep(0.01)\n"


@pytest.fixture
def child():
    started = []

    def start(body):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(body=body)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def said(process):
    return json.loads(process.stdout.readline())


def test_a_process_that_still_loads_leaves_at_the_first_signal(child):
    process = child("life.link.say('loading'); time.sleep(60)")
    assert said(process) == {"event": "loading"}

    process.send_signal(signal.SIGTERM)

    assert said(process) == {"event": "leaving", "reason": "SIGTERM"}
    assert process.wait(20) == 0


def test_a_process_that_serves_finishes_first(child):
    process = child(SERVING + "life.link.say('finished')")
    said(process)

    process.send_signal(signal.SIGTERM)

    assert [said(process)["event"], said(process)["event"]] == ["leaving", "finished"]
    assert process.wait(20) == 0


def test_the_second_signal_ends_it_at_once(child):
    process = child(SERVING + "time.sleep(60)")
    said(process)
    process.send_signal(signal.SIGTERM)
    said(process)

    process.send_signal(signal.SIGTERM)

    assert process.wait(20) == 0


@pytest.mark.parametrize("body", ["life.link.say('loading'); time.sleep(60)", "life.stand_by()", SERVING])
def test_the_end_of_standard_input_ends_it_at_once(child, body):
    process = child(body)
    said(process)

    process.stdin.close()

    assert process.wait(20) == 0


def test_sigusr1_wakes_a_process_that_stands_by_also_when_it_comes_early(child):
    process = child("life.link.say('loading'); time.sleep(0.3); life.stand_by(); life.link.say('awake')")
    said(process)

    os.kill(process.pid, signal.SIGUSR1)

    assert [said(process)["event"], said(process)["event"]] == ["standby", "awake"]
    assert process.wait(20) == 0
