"""A feeder as an object of this process, on an event loop in a thread of its own."""

import asyncio
from collections.abc import Generator, Iterable
from contextlib import closing
from itertools import islice

import pyarrow as pa

from raybatch.actors.executors.local_loop import LocalLoop
from raybatch.stages.ending_calls import end_calls
from raybatch.stages.feeder import CALLS_PER_FEEDER, StageFeeder


def local_results(
    tables: Iterable[pa.Table], feeder: type[StageFeeder]
) -> Generator[pa.Table, None, None]:
    """Yield what a feeder gives back for tables, as it comes; the first error ends the others.

    Args:
        tables: read as they are needed.
        feeder: class of the feeder.
    """
    left, answer = iter(tables), feeder()
    pending: set[asyncio.Task[pa.Table]] = set()

    async def turn() -> tuple[list[pa.Table], BaseException | None]:
        """Wait for some results, with as many calls in flight as there may be; none at the end."""
        try:
            for table in islice(left, CALLS_PER_FEEDER - len(pending)):
                pending.add(asyncio.ensure_future(answer(table)))
            if not pending:
                return [], None
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        except BaseException as broken:
            await end_calls(pending, broken)
            raise
        pending.difference_update(done)
        errors = [call.exception() for call in done if call.exception() is not None]
        error = next(iter(errors), None)
        if error is not None:
            await end_calls(pending, error)
        return [call.result() for call in done if call.exception() is None], error

    # the caller's thread may have a loop that runs, as in a notebook, and is to hear of Ctrl-C
    with closing(LocalLoop("raybatch-feeder")) as loop:
        while True:
            results, error = loop.begin(turn()).result()
            yield from results
            if error is not None:
                raise error
            if not results:
                return
