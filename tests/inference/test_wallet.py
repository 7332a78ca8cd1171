"""`/wallet`: what a key may still spend, as both official clients read it."""

from dataclasses import replace
from decimal import Decimal

import pytest
from fish_audio_sdk.schemas import APICreditEntity, PackageEntity
from fishaudio.types import Credits, Package

from slackwater_inference.api.testing import client_of, micro_services


@pytest.fixture(scope="module")
def locked():
    services = micro_services(needs_keys=True)
    yield services
    services.cloner.close()


async def answer_to(services, path, key=None):
    async with client_of(services) as client:
        return await client.get(path, headers={"Authorization": f"Bearer {key}"} if key else None)


async def test_credit_is_what_is_left_of_all_that_was_added(locked):
    made, key = locked.keys.add("laptop", credit=Decimal("12.5"))
    locked.keys.charge(made.key_id, "s2.1-pro", 100_000, Decimal(15))

    body = (await answer_to(locked, "/wallet/self/api-credit", key)).json()

    credit = Credits.model_validate(body)
    assert credit.credit == APICreditEntity.model_validate(body).credit == Decimal("11")
    assert (credit.id, credit.user_id) == (made.key_id, made.user_id)
    assert body["cumulative_top_up"] == "12.5"
    assert credit.has_free_credit is None


async def test_whether_a_model_is_free_is_said_to_who_asks(locked):
    _, key = locked.keys.add("laptop", credit=Decimal(1))

    body = (await answer_to(locked, "/wallet/self/api-credit?check_free_credit=true", key)).json()

    assert body["has_free_credit"] is True


@pytest.mark.parametrize("needs_keys", [True, False])
async def test_who_is_not_metered_has_credit_that_every_client_can_read(locked, needs_keys):
    services = locked if needs_keys else replace(locked, keys=None)
    key = locked.keys.add("laptop")[1]

    body = (await answer_to(services, "/wallet/self/api-credit", key)).json()

    assert Credits.model_validate(body).credit == 1_000_000_000
    assert body["credit"] == "1000000000"


async def test_a_small_credit_is_a_plain_decimal(locked):
    _, key = locked.keys.add("laptop", credit=Decimal("0.000000001"))

    assert (await answer_to(locked, "/wallet/self/api-credit", key)).json()["credit"] == "0.000000001"


async def test_a_package_is_an_empty_finished_one_for_both_clients(locked):
    made, key = locked.keys.add("laptop")

    body = (await answer_to(locked, f"/wallet/{made.user_id}/package", key)).json()

    package = Package.model_validate(body)
    assert (package.total, package.balance, package.type) == (0, 0, "starter")
    assert PackageEntity.model_validate(body).finished_at == package.finished_at == package.created_at


@pytest.mark.parametrize("path", ["api-credit", "package"])
async def test_a_wallet_is_its_owners(locked, path):
    _, key = locked.keys.add("laptop")
    other, _ = locked.keys.add("phone")

    assert (await answer_to(locked, f"/wallet/{other.user_id}/{path}", key)).status_code == 403
    assert (await answer_to(locked, f"/wallet/self/{path}")).status_code == 401
