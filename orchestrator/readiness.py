"""The last step of a start: the API process itself says that it reaches every rank."""

import asyncio

import httpx
import msgspec

_PAUSE_S = 0.05


class Readiness(msgspec.Struct):
    """The part of the answer of ``/ready`` that is looked at."""

    ready_ranks: int


async def wait_reachable(url: str, num_ranks: int) -> None:
    """Ask ``/ready`` until every rank is there: engines are up a moment before their lines to the client are."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        while True:
            if await _ready_ranks(client) >= num_ranks:
                return
            await asyncio.sleep(_PAUSE_S)


async def _ready_ranks(client: httpx.AsyncClient) -> int:
    answer = await client.get("/ready")
    return msgspec.json.decode(answer.content, type=Readiness).ready_ranks
