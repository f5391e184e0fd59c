"""The last step of a start: each API process itself says that it reaches every rank."""

import asyncio
from collections.abc import Sequence

from metrics.shared_status import StatusRow

_PAUSE_S = 0.02


async def wait_reachable(rows: Sequence[StatusRow], num_ranks: int) -> None:
    """Wait until all rows say so: engines are up a moment before their connections to the clients are."""
    while not all(row.num_ready >= num_ranks for row in rows):  # noqa: ASYNC110 - other processes set no event
        await asyncio.sleep(_PAUSE_S)
