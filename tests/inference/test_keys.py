"""API keys, credit and the usage ledger, on both databases."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from sqlalchemy import text

from slackwater_inference.store.database import Database
from slackwater_inference.store.errors import CreditExhausted, NotFound
from slackwater_inference.store.keys import KeyStore, Tier, Usage

PRICE = Decimal(15)


@pytest.fixture
def database(database_url):
    database = Database(database_url)
    yield database
    database.close()


@pytest.fixture
def keys(database):
    return KeyStore(database)


def test_a_key_is_found_by_itself_alone(keys):
    made, plain = keys.add("laptop", tier=Tier.ELEVATED, requests_per_minute=30)

    assert plain.startswith("sw_")
    assert keys.find(plain) == made
    assert keys.find(plain + "x") is None
    assert keys.find(made.key_id) is None
    assert (made.max_concurrent, made.requests_per_minute, made.credit) == (15, 30, None)


def test_the_key_itself_is_kept_nowhere(keys, database):
    _, plain = keys.add("laptop")

    with database.read() as connection:
        stored = repr(connection.execute(text("SELECT * FROM keys")).all())
    assert plain not in stored
    assert plain.removeprefix("sw_") not in stored


@pytest.mark.parametrize(("tier", "at_once"), [(Tier.STARTER, 5), (Tier.ELEVATED, 15), (Tier.HIGH_VOLUME, 50)])
def test_a_tier_decides_how_many_requests_may_run_at_once(keys, tier, at_once):
    assert keys.add("laptop", tier=tier)[0].max_concurrent == at_once
    assert keys.add("laptop", tier=tier, max_concurrent=2)[0].max_concurrent == 2


def test_a_revoked_key_is_unknown_and_stays_listed(keys):
    made, plain = keys.add("laptop")

    keys.revoke(made.key_id)

    assert keys.find(plain) is None
    assert [key.revoked_at is not None for key in keys.list()] == [True]
    with pytest.raises(NotFound):
        keys.revoke(made.key_id)


def test_a_charge_takes_the_price_of_the_bytes_and_is_written_down(keys):
    made, _ = keys.add("laptop", credit=Decimal(1))

    keys.charge(made.key_id, "s2.1-pro", 1000, PRICE)
    keys.charge(made.key_id, "s2.1-pro-free", 500, Decimal(0))

    assert keys.get(made.key_id).credit == Decimal("0.985")
    assert keys.used(made.key_id) == Usage(1500, Decimal("0.015"))


def test_a_charge_that_the_credit_does_not_cover_takes_nothing(keys):
    made, _ = keys.add("laptop", credit=Decimal("0.001"))

    with pytest.raises(CreditExhausted, match=r"costs 0\.0015 US dollars"):
        keys.charge(made.key_id, "s2.1-pro", 100, PRICE)

    assert keys.get(made.key_id).credit == Decimal("0.001")
    assert keys.used(made.key_id) == Usage(0, Decimal(0))


def test_an_unmetered_key_is_written_down_and_never_exhausted(keys):
    made, _ = keys.add("laptop")

    keys.charge(made.key_id, "s2.1-pro", 10**9, PRICE)

    assert keys.get(made.key_id).credit is None
    assert keys.used(made.key_id).cost == Decimal(15_000)


def test_many_who_charge_at_once_never_get_more_than_the_credit(keys):
    made, _ = keys.add("laptop", credit=Decimal("0.00015"))  # ten bytes

    def charge(_):
        try:
            keys.charge(made.key_id, "s2.1-pro", 1, PRICE)
        except CreditExhausted:
            return False
        return True

    with ThreadPoolExecutor(6) as threads:
        paid = sum(threads.map(charge, range(24)))

    assert paid == 10
    assert keys.get(made.key_id).credit == 0
    assert keys.used(made.key_id).num_bytes == 10


def test_a_part_of_a_nano_dollar_is_rounded_up_so_that_no_text_is_free(keys):
    made, _ = keys.add("laptop", credit=Decimal(1))

    keys.charge(made.key_id, "cheap", 1, Decimal("0.0001"))

    assert keys.get(made.key_id).credit == Decimal("0.999999999")


def test_a_top_up_adds_and_is_remembered(keys):
    made, _ = keys.add("laptop", credit=Decimal("1.5"))

    after = keys.top_up(made.key_id, Decimal("2.25"))

    assert (after.credit, after.cumulative_top_up) == (Decimal("3.75"), Decimal("3.75"))


@pytest.mark.parametrize("amount", [Decimal(0), Decimal(-1), Decimal("NaN"), Decimal("Infinity"), Decimal(10**10)])
def test_a_top_up_that_is_no_sum_of_money_is_refused(keys, amount):
    made, _ = keys.add("laptop", credit=Decimal(1))

    with pytest.raises(ValueError, match=r"top-up|US dollars"):
        keys.top_up(made.key_id, amount)

    assert keys.get(made.key_id).credit == 1


def test_a_top_up_above_the_largest_credit_is_refused(keys):
    made, _ = keys.add("laptop", credit=Decimal(10**9))

    with pytest.raises(ValueError, match="would be above"):
        keys.top_up(made.key_id, Decimal(1))


def test_an_unknown_key_cannot_be_charged_or_topped_up(keys):
    with pytest.raises(NotFound):
        keys.charge("0" * 32, "s1", 1, PRICE)
    with pytest.raises(NotFound):
        keys.top_up("0" * 32, Decimal(1))


def test_times_come_back_with_their_zone(database):
    then = datetime(2026, 5, 4, 3, 2, 1, 987_654, tzinfo=UTC)
    keys = KeyStore(database, now=lambda: then)

    made, plain = keys.add("laptop")

    assert keys.find(plain).created_at == made.created_at == then
