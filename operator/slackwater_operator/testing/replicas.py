"""One replica of the operator inside a test's own event loop, with a Lease that is short."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from slackwater_operator.kube.connection import Connection
from slackwater_operator.operate.process import Operator
from slackwater_operator.operate.settings import Settings
from slackwater_operator.operate.sides import Side
from slackwater_operator.testing.processes import free_port


@asynccontextmanager
async def replica(connection: Connection, name: str, sides: Mapping[str, Side]) -> AsyncIterator[Operator]:
    """It runs for as long as the block lasts, and has released its Lease afterwards."""
    settings = Settings(
        identity=name,
        host="127.0.0.1",
        metrics_port=0,
        probes_port=free_port(),
        lease_s=1.5,
        renew_s=1.0,
        retry_s=0.2,
    )
    one = Operator(connection, settings, sides)
    running = asyncio.create_task(one.run(lambda _: None))
    try:
        yield one
    finally:
        one.stop()
        await running
