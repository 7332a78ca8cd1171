"""API keys, their limits, and what was used.

Owns the keys (only their SHA-256 is kept), credit, and the append-only usage ledger.  Owns no HTTP: the API asks
`find` who calls and `charge` for each text.  Every call blocks; callers on an event loop make it in a thread.
"""

import hashlib
import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from decimal import ROUND_CEILING, Decimal
from enum import StrEnum
from typing import Any

from sqlalchemy import RowMapping, func, insert, select, update

from slackwater_inference.store import tables
from slackwater_inference.store.database import Database, from_us, to_us, utc_now
from slackwater_inference.store.errors import CreditExhausted, NotFound

_NANO = 10**9
_BYTES_PER_MILLION = 10**6
MAX_USD = Decimal(10**9)  # nine digits before the point; nano-dollars then fit 64 bits


class Tier(StrEnum):
    """How much one key may do at once; the hosted service's names."""

    STARTER = "starter"
    ELEVATED = "elevated"
    HIGH_VOLUME = "high-volume"


# Requests at once; the hosted service's numbers.
MAX_CONCURRENT = {Tier.STARTER: 5, Tier.ELEVATED: 15, Tier.HIGH_VOLUME: 50}


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, without the key.  credit: US dollars left; None = unmetered.  requests_per_minute: None = no limit.

    user_id: whose voices the key sees; several keys can be one user's.
    """

    key_id: str
    name: str
    user_id: str
    tier: Tier
    max_concurrent: int
    requests_per_minute: int | None
    credit: Decimal | None
    cumulative_top_up: Decimal
    is_admin: bool
    created_at: datetime
    updated_at: datetime
    revoked_at: datetime | None


@dataclass(frozen=True, slots=True)
class Usage:
    """What one key has used.  cost: US dollars."""

    num_bytes: int
    cost: Decimal


class KeyStore:
    """The keys of one database."""

    def __init__(self, database: Database, now: Callable[[], datetime] = utc_now) -> None:
        self._database = database
        self._now = now

    def add(
        self,
        name: str,
        *,
        tier: Tier = Tier.STARTER,
        user_id: str | None = None,
        max_concurrent: int | None = None,
        requests_per_minute: int | None = None,
        credit: Decimal | None = None,
        is_admin: bool = False,
        key: str | None = None,
    ) -> tuple[ApiKey, str]:
        """Make a key; returns it and the key itself, which is kept nowhere and cannot be shown again.

        user_id: None = a new user.  max_concurrent: None = the tier's.  credit: US dollars; None = unmetered.
        key: one that was made elsewhere; None = a new one of 256 random bits.
        Raises ValueError for a credit or limit out of range.
        """
        plain = key if key is not None else f"sw_{secrets.token_urlsafe(32)}"
        limit = MAX_CONCURRENT[tier] if max_concurrent is None else max_concurrent
        if limit < 1 or (requests_per_minute is not None and requests_per_minute < 1):
            raise ValueError("a key's limits must be at least 1")
        credit_nano = None if credit is None else _to_nano(credit)
        now_us = to_us(self._now())
        row: dict[str, Any] = {
            "key_id": uuid.uuid4().hex,
            "sha256": _sha256(plain),
            "name": name,
            "user_id": user_id or uuid.uuid4().hex,
            "tier": tier.value,
            "max_concurrent": limit,
            "requests_per_minute": requests_per_minute,
            "credit_nano": credit_nano,
            "top_up_nano": credit_nano or 0,
            "is_admin": is_admin,
            "created_us": now_us,
            "updated_us": now_us,
            "revoked_us": None,
        }
        with self._database.write() as connection:
            connection.execute(insert(tables.keys).values(row))
        return _api_key(row), plain

    def find(self, key: str) -> ApiKey | None:
        """The key that a caller showed; None if it is unknown or revoked."""
        with self._database.read() as connection:
            row = (
                connection.execute(
                    select(tables.keys).where(
                        tables.keys.c.sha256 == _sha256(key),
                        tables.keys.c.revoked_us.is_(None),
                    )
                )
                .mappings()
                .one_or_none()
            )
        return None if row is None else _api_key(row)

    def get(self, key_id: str) -> ApiKey:
        """The key with this id, revoked or not.  Raises NotFound."""
        with self._database.read() as connection:
            row = connection.execute(select(tables.keys).where(tables.keys.c.key_id == key_id)).mappings().one_or_none()
        if row is None:
            raise NotFound(f"there is no key with the id {key_id}")
        return _api_key(row)

    def list(self) -> tuple[ApiKey, ...]:
        """Every key, the oldest first, revoked ones too."""
        with self._database.read() as connection:
            rows = connection.execute(select(tables.keys).order_by(tables.keys.c.created_us, tables.keys.c.key_id))
            return tuple(_api_key(row) for row in rows.mappings())

    def revoke(self, key_id: str) -> None:
        """From now on the key is unknown.  Its usage stays.  Raises NotFound if there is no such key in force."""
        now_us = to_us(self._now())
        with self._database.write() as connection:
            changed = connection.execute(
                update(tables.keys)
                .where(tables.keys.c.key_id == key_id, tables.keys.c.revoked_us.is_(None))
                .values(revoked_us=now_us, updated_us=now_us)
            ).rowcount
        if changed != 1:
            raise NotFound(f"there is no key in force with the id {key_id}")

    def top_up(self, key_id: str, amount: Decimal) -> ApiKey:
        """Add `amount` US dollars to the key's credit; an unmetered key becomes a metered one with just that.

        Raises NotFound, and ValueError unless 0 < amount and the sum stays within `MAX_USD`.
        """
        nano = _to_nano(amount)
        if nano == 0:
            raise ValueError("a top-up must be above 0")
        credit = func.coalesce(tables.keys.c.credit_nano, 0) + nano
        with self._database.write() as connection:
            changed = connection.execute(
                update(tables.keys)
                .where(tables.keys.c.key_id == key_id, credit <= _to_nano(MAX_USD))
                .values(credit_nano=credit, top_up_nano=tables.keys.c.top_up_nano + nano, updated_us=to_us(self._now()))
            ).rowcount
        key = self.get(key_id)
        if changed != 1:
            raise ValueError(f"the key's credit would be above {MAX_USD} US dollars")
        return key

    def charge(self, key_id: str, model: str, num_bytes: int, price_per_million: Decimal) -> None:
        """Take the price of `num_bytes` UTF-8 bytes of text and write it in the ledger, both or neither.

        price_per_million: US dollars for a million bytes of `model`.  A fraction of a nano-dollar is rounded up.
        The credit never gets below zero, however many charge at once.
        Raises CreditExhausted if it does not cover the cost, NotFound if there is no such key.
        """
        price_nano = _to_nano(price_per_million)
        cost_nano = -(-num_bytes * price_nano // _BYTES_PER_MILLION)
        credit = tables.keys.c.credit_nano
        with self._database.write() as connection:
            # One statement checks and takes, so the row's lock decides between those who charge at once.
            taken = connection.execute(
                update(tables.keys)
                .where(tables.keys.c.key_id == key_id, credit.is_(None) | (credit >= cost_nano))
                .values(credit_nano=credit - cost_nano)
            ).rowcount
            if taken == 1:
                row = {"key_id": key_id, "model": model, "num_bytes": num_bytes, "price_nano": price_nano}
                created_us = to_us(self._now())
                connection.execute(insert(tables.usage).values(**row, cost_nano=cost_nano, created_us=created_us))
        if taken != 1:
            left = self.get(key_id).credit
            raise CreditExhausted(f"this text costs {_usd(cost_nano)} US dollars and the credit is {left}; top it up")

    def used(self, key_id: str) -> Usage:
        """What the key has used since it was made."""
        with self._database.read() as connection:
            num_bytes, cost = connection.execute(
                select(
                    func.coalesce(func.sum(tables.usage.c.num_bytes), 0),
                    func.coalesce(func.sum(tables.usage.c.cost_nano), 0),
                ).where(tables.usage.c.key_id == key_id)
            ).one()
        return Usage(int(num_bytes), _usd(int(cost)))


def _sha256(key: str) -> str:
    # No salt and no slow hash: a key has 256 random bits, so there is nothing to guess.
    return hashlib.sha256(key.encode()).hexdigest()


def _to_nano(usd: Decimal) -> int:
    if not usd.is_finite() or not 0 <= usd <= MAX_USD:
        raise ValueError(f"US dollars must be between 0 and {MAX_USD}, got {usd}")
    return int((usd * _NANO).to_integral_value(ROUND_CEILING))


def _usd(nano: int) -> Decimal:
    return Decimal(nano) / _NANO


def _api_key(row: RowMapping | dict[str, Any]) -> ApiKey:
    return ApiKey(
        key_id=row["key_id"],
        name=row["name"],
        user_id=row["user_id"],
        tier=Tier(row["tier"]),
        max_concurrent=row["max_concurrent"],
        requests_per_minute=row["requests_per_minute"],
        credit=None if row["credit_nano"] is None else _usd(row["credit_nano"]),
        cumulative_top_up=_usd(row["top_up_nano"]),
        is_admin=bool(row["is_admin"]),
        created_at=from_us(row["created_us"]),
        updated_at=from_us(row["updated_us"]),
        revoked_at=None if row["revoked_us"] is None else from_us(row["revoked_us"]),
    )
