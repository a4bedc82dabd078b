"""The event loop of the pools of one process, in a thread of its own, and calls into it."""

import asyncio
import threading
from collections.abc import Coroutine, Generator
from concurrent.futures import Future, wait
from typing import Any

from raybatch.actors.replicas.site import CallHandle

_WAKE_S = 0.1


class LocalLoop:
    """Runs coroutines in a thread, which starts with the first of them.

    Without `close` it ends with the process. Nothing is lost when that happens in the middle: what
    the loop holds is of that process.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._starting = threading.Lock()
        self._has_started = False

    def begin(self, work: Coroutine[Any, Any, Any]) -> "LocalCall":
        """Begin a coroutine, from any thread."""
        with self._starting:
            if not self._has_started:
                # first: Ctrl-C may arrive while it starts
                self._has_started = True
                self._thread.start()
        return LocalCall(asyncio.run_coroutine_threadsafe(work, self._loop))

    def handle(self, target: object) -> CallHandle:
        """Return what stands for an object whose coroutine functions run here."""
        return CallHandle(lambda name, *args: self.begin(getattr(target, name)(*args)))

    def close(self) -> None:
        """Cancel what still runs, wait until it has ended, and end the thread."""
        if self._has_started:
            self.begin(_end_others()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


class LocalCall:
    """A call that has begun; awaited on any event loop, or waited for in a thread without one.

    Whoever stops to wait does not stop the call, as with actors of Ray.
    """

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()

    def result(self) -> Any:  # noqa: ANN401 - what the method returns
        # what interrupts a thread need not wake it
        while not wait((self._future,), timeout=_WAKE_S).done:
            pass
        return self._future.result()


async def _end_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()
