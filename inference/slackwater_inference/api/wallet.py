"""`/wallet`: what the caller's key may still spend.

Owns the form in which the hosted API's clients expect it.  Does not own the credit (store.keys).
"""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, Field

from slackwater_inference.api.auth import SELF, Caller, caller_of
from slackwater_inference.api.errors import ApiError, declared
from slackwater_inference.api.services import Services

# Clients stop when the credit is 0 and cannot read "unlimited", so who is not metered has this many dollars.
UNMETERED = Decimal(1_000_000_000)
_OPEN_SINCE = datetime(1970, 1, 1, tzinfo=UTC)  # there is no key whose age it could be


class ApiCredit(BaseModel):
    """What the key may spend, in US dollars."""

    id: str = Field(alias="_id")
    user_id: str
    credit: str = Field(description=f"A decimal number; {UNMETERED} if nothing is metered.")
    cumulative_top_up: str
    created_at: datetime
    updated_at: datetime
    has_phone_sha256: bool = False
    has_free_credit: bool | None = Field(
        default=None, description="Whether some model costs nothing; null unless check_free_credit was asked for."
    )


class Package(BaseModel):
    """A prepaid package.  We sell none, so this is an empty one that was finished when it began."""

    id: str = Field(alias="_id")
    user_id: str
    type: str
    total: int = 0
    balance: int = 0
    created_at: datetime
    updated_at: datetime
    finished_at: datetime


def wallet_routes(services: Services) -> APIRouter:
    """The routes, on `services`."""
    router = APIRouter(tags=["Wallet"])

    @router.get("/wallet/{user_id}/api-credit", summary="Credit", responses=declared(400, 401, 403, 500, 503))
    async def api_credit(
        user_id: str,
        caller: Annotated[Caller, Depends(caller_of)],
        check_free_credit: Annotated[bool, Query(description="Also say whether a model is free.")] = False,
    ) -> ApiCredit:
        _check_own(user_id, caller)
        key = caller.key
        has_free = any(price == 0 for price in services.settings.prices.values()) if check_free_credit else None
        return ApiCredit.model_validate(
            {
                "_id": _id(caller),
                "user_id": caller.user_id,
                "credit": _decimal(UNMETERED if key is None or key.credit is None else key.credit),
                "cumulative_top_up": _decimal(Decimal(0) if key is None else key.cumulative_top_up),
                "created_at": _OPEN_SINCE if key is None else key.created_at,
                "updated_at": _OPEN_SINCE if key is None else key.updated_at,
                "has_free_credit": has_free,
            }
        )

    @router.get("/wallet/{user_id}/package", summary="Package", responses=declared(401, 403, 500, 503))
    async def package(user_id: str, caller: Annotated[Caller, Depends(caller_of)]) -> Package:
        _check_own(user_id, caller)
        since = _OPEN_SINCE if caller.key is None else caller.key.created_at
        return Package.model_validate(
            {
                "_id": _id(caller),
                "user_id": caller.user_id,
                "type": caller.tier,
                "created_at": since,
                "updated_at": since,
                "finished_at": since,
            }
        )

    return router


def _check_own(user_id: str, caller: Caller) -> None:
    if user_id not in (SELF, caller.user_id):
        raise ApiError(403, "this is another user's wallet; ask for self")


def _id(caller: Caller) -> str:
    return SELF if caller.key is None else caller.key.key_id


def _decimal(value: Decimal) -> str:
    return format(value, "f")  # never 1E+9
