"""What kopf hears, on its way to the copies that plans are made from."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from slackwater_operator.kube.cache import Cache
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.types import Object
from slackwater_operator.operate.intake import hand_over
from slackwater_operator.testing.kube import FakeKube
from slackwater_operator.testing.kube_operator import JOBS, SERVICES
from slackwater_operator.testing.resources import a_service


@pytest.fixture
async def copies() -> AsyncIterator[tuple[Cache, Cache]]:
    """Copies whose own watches are not there yet."""
    async with FakeKube() as fake, Kube(fake.connection()) as kube:
        yield Cache(kube, SERVICES), Cache(kube, JOBS)


def seen(generation: int, version: int, **spec: Any) -> Object:
    obj = a_service("tts", **spec)
    obj["metadata"] |= {"uid": "u1", "generation": generation, "resourceVersion": str(version)}
    return obj


async def from_a_thread(heard: Any, *what: Any) -> None:
    await asyncio.to_thread(heard, *what)
    await asyncio.sleep(0)


async def test_what_is_new_is_in_the_copy_of_its_kind_at_once_and_told(copies: tuple[Cache, Cache]) -> None:
    services, jobs = copies
    told: list[str] = []
    services.on_change(lambda change, _obj: told.append(change))
    heard = hand_over(asyncio.get_running_loop(), copies)

    await from_a_thread(heard, "InferenceDeployment", "ADDED", seen(1, 5))
    await from_a_thread(heard, "InferenceDeployment", "MODIFIED", seen(2, 7, minReplicas=1))

    found = services.get("default", "tts")
    assert found is not None
    assert found["spec"]["minReplicas"] == 1
    assert told == ["ADDED", "MODIFIED"]
    assert len(jobs) == 0


async def test_a_status_is_no_news_and_an_older_object_never_replaces_a_newer(copies: tuple[Cache, Cache]) -> None:
    services, _ = copies
    heard = hand_over(asyncio.get_running_loop(), copies)
    services.remember(seen(3, 9))

    await from_a_thread(heard, "InferenceDeployment", "LISTED", seen(2, 7))
    await from_a_thread(heard, "InferenceDeployment", "MODIFIED", seen(3, 9))
    await from_a_thread(heard, "InferenceDeployment", "MODIFIED", seen(3, 11) | {"status": {"replicas": 1}})

    found = services.get("default", "tts")
    assert found is not None
    assert found["metadata"]["resourceVersion"] == "9"
    assert not found.get("status")


async def test_an_end_is_left_to_the_copy_s_own_watch(copies: tuple[Cache, Cache]) -> None:
    services, _ = copies
    heard = hand_over(asyncio.get_running_loop(), copies)
    await from_a_thread(heard, "InferenceDeployment", "ADDED", seen(1, 5))

    await from_a_thread(heard, "InferenceDeployment", "DELETED", seen(1, 6))

    assert services.get("default", "tts") is not None


async def test_what_is_heard_when_the_loop_has_ended_is_dropped(copies: tuple[Cache, Cache]) -> None:
    ended = asyncio.new_event_loop()
    ended.close()

    hand_over(ended, copies)("InferenceDeployment", "ADDED", seen(1, 5))

    assert len(copies[0]) == 0
