import asyncio
from decimal import Decimal

import pytest

from slackwater_inference.api.app import create_app
from slackwater_inference.api.auth import Caller
from slackwater_inference.api.errors import ApiError
from slackwater_inference.api.limits import Limits
from slackwater_inference.api.testing import assert_error, client_of, micro_services, running
from slackwater_inference.metrics import EngineMetrics

TEXT = "forty bytes of text to speak, and a bit."


@pytest.fixture(scope="module")
def services():
    made = micro_services(needs_keys=True)
    made.engine.start()
    yield made
    made.engine.stop()
    made.cloner.close()


@pytest.fixture(scope="module")
def app(services):
    return create_app(services)


async def speak(served, authorization, **headers):
    async with client_of(served) as client:
        if authorization is not None:
            headers["authorization"] = authorization
        body = {"text": TEXT, "format": "pcm", "max_new_tokens": 4}
        return await client.post("/v1/tts", json=body, headers=headers)


@pytest.mark.parametrize(
    "authorization",
    [
        *(None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic one", "one", "Bearer one two"),
        *("Bearer " + "x" * 5000, "Bearer ключ".encode(), b"Bearer \xff\xfe"),
    ],
)
async def test_refuses_everybody_without_a_known_key(app, authorization):
    answer = await speak(app, authorization)

    assert_error(answer, 401, "API key")
    assert answer.headers["www-authenticate"] == "Bearer"


async def test_a_known_key_may_speak_and_a_revoked_one_may_not(app, services):
    made, key = services.keys.add("one")

    assert (await speak(app, f"Bearer {key}")).status_code == 200
    assert (await speak(app, f"bearer  {key} ")).status_code == 200
    services.keys.revoke(made.key_id)
    assert_error(await speak(app, f"Bearer {key}"), 401, "revoked")


async def test_a_key_store_without_a_key_lets_nobody_in():
    assert_error(await speak(micro_services(needs_keys=True), None), 401)


async def test_the_requests_of_a_key_carry_its_tier_in_the_metrics(app, services):
    _, key = services.keys.add("one")

    await speak(app, f"Bearer {key}")

    labels = {"model": "micro", "tier": "starter", "code": "200", "transport": "http"}
    assert services.engine.metrics.registry.get_sample_value("tts_requests_total", labels) >= 1


async def test_a_key_may_send_so_many_requests_a_minute(services):
    _, key = services.keys.add("one", requests_per_minute=2)
    async with client_of(services) as client:
        body, headers = {"text": TEXT, "format": "pcm", "max_new_tokens": 4}, {"authorization": f"Bearer {key}"}
        answers = [await client.post("/v1/tts", json=body, headers=headers) for _ in range(3)]

    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert_error(answers[2], 429, "2 requests a minute")
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30


async def test_a_text_that_the_credit_does_not_cover_is_refused_and_costs_nothing(app, services):
    made, key = services.keys.add("one", credit=Decimal("0.0005"))  # 40 bytes at 15 dollars a million are 0.0006

    assert_error(await speak(app, f"Bearer {key}", model="s1"), 402, "credit")
    assert services.keys.used(made.key_id).num_bytes == 0


async def test_a_spoken_text_is_paid_by_its_bytes_at_its_models_price(app, services):
    made, key = services.keys.add("one", credit=Decimal(1))

    await speak(app, f"Bearer {key}", model="s2-pro")
    await speak(app, f"Bearer {key}", model="s2.1-pro-free")
    await speak(app, f"Bearer {key}", model="no-such-model")  # the default, which is paid

    used = services.keys.used(made.key_id)
    assert used.num_bytes == 3 * len(TEXT)
    assert used.cost == 2 * len(TEXT) * Decimal(15) / 1_000_000
    assert services.keys.get(made.key_id).credit == 1 - used.cost


async def test_a_text_that_the_engine_refuses_is_not_paid():
    services = micro_services(needs_keys=True)
    made, key = services.keys.add("one", credit=Decimal(1))
    async with running(services):
        services.engine.drain()
        assert_error(await speak(services, f"Bearer {key}", model="s1"), 503)

    assert services.keys.used(made.key_id).num_bytes == 0


async def test_a_request_holds_its_keys_place_until_its_audio_is_sent():
    # After its first ten frames a stream gets one frame in ten seconds: the first request does not end by itself.
    services = micro_services(needs_keys=True, pace_frames_per_s=0.1)
    _, key = services.keys.add("one", max_concurrent=1)
    headers = {"authorization": f"Bearer {key}"}
    async with running(services), client_of(services) as client:
        first = asyncio.ensure_future(client.post("/v1/tts", json={"text": TEXT, "format": "pcm"}, headers=headers))
        while services.engine.status().running == 0:
            await asyncio.sleep(0.005)

        refused = await client.post("/v1/tts", json={"text": TEXT}, headers=headers)
        first.cancel()
        await asyncio.wait({first})
        again = await client.post("/v1/tts", json={"text": TEXT, "max_new_tokens": 8}, headers=headers)

    assert_error(refused, 429, "1 requests at once")
    assert again.status_code == 200


class Clock:
    """Time that a test moves."""

    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def keys(services):
    def make(**limits):
        key, _ = services.keys.add("one", **limits)
        return Caller(key, key.user_id)

    return make


def limits_of(max_open=100, clock=None):
    return Limits(max_open, EngineMetrics("micro", 1), clock or Clock())


def test_a_key_may_have_so_many_requests_open_and_another_key_its_own(keys):
    limits, one, other = limits_of(), keys(max_concurrent=2), keys(max_concurrent=1)

    with limits.slot(one), limits.slot(one), limits.slot(other):
        with pytest.raises(ApiError, match="2 requests at once") as refused, limits.slot(one):
            pass
        assert refused.value.status == 429
        assert refused.value.headers == {"Retry-After": "1"}
    with limits.slot(one):
        pass


def test_a_request_that_fails_gives_its_place_back(keys):
    limits, one = limits_of(), keys(max_concurrent=1)

    for _ in range(3):
        with pytest.raises(ZeroDivisionError), limits.slot(one):
            raise ZeroDivisionError


def test_the_server_has_a_bound_over_all_callers(keys):
    limits = limits_of(max_open=2)

    with (
        limits.slot(Caller(None, "self")),
        limits.slot(keys()),
        pytest.raises(ApiError, match="2 requests open"),
        limits.slot(keys()),
    ):
        pass


def test_a_minutes_requests_come_back_evenly_and_no_further_than_the_limit(keys):
    clock = Clock()
    limits, one = limits_of(clock=clock), keys(requests_per_minute=6)

    def taken():
        count = 0
        while True:
            try:
                with limits.slot(one):
                    count += 1
            except ApiError as error:
                return count, int(error.headers["Retry-After"])

    assert taken() == (6, 10)
    clock.now_s += 20
    assert taken() == (2, 10)
    clock.now_s += 5
    assert taken() == (0, 5)
    clock.now_s += 3600
    assert taken() == (6, 10)
