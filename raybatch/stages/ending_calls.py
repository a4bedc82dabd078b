"""How calls of a feeder end where one of them has failed."""

import asyncio
from collections.abc import Collection
from typing import Any

from raybatch.errors import ReplicaError

# for the journals of units that fail together
_KEEP_S = 10.0


async def end_calls(calls: Collection[asyncio.Future[Any]], error: BaseException) -> None:
    """Cancel calls, and wait until they have ended.

    Where no engine is left all of them fail, and have time to keep what is finished.

    Args:
        calls: that may still run.
        error: of another one.
    """
    if calls and isinstance(error, ReplicaError):
        await asyncio.wait(calls, timeout=_KEEP_S)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
