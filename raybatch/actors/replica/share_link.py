"""How an engine that loads reaches the others of its group: by the coordinator; no Ray."""

import asyncio

from raybatch.actors.wire.api import PoolApi
from raybatch.errors import TeamError
from raybatch.records.share import ShareLink, ShareSeat


def link_of(
    seat: ShareSeat, coordinator: PoolApi, replica_id: int, loop: asyncio.AbstractEventLoop
) -> ShareLink:
    """Return the link of a replica that runs on this loop, for the thread of its engine."""

    async def ask(text: str) -> list[str] | None:
        return await coordinator.exchange(replica_id, text)

    def exchange(text: str) -> list[str]:
        texts = asyncio.run_coroutine_threadsafe(ask(text), loop).result()
        if texts is None:
            raise TeamError("another replica of the group has ended")
        return texts

    return ShareLink(seat, exchange)
