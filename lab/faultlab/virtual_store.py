"""A store in memory where every operation is a turn, and may fail in every way a real one can."""

import errno

from faultlab.oracle import Oracle
from faultlab.world import Process, World

_FAILURES = ((409, errno.EBUSY), (500, errno.EIO), (503, errno.EBUSY), (None, errno.ETIMEDOUT))


class StoreError(OSError):
    """What an operation raises that failed for a moment, or whose reply was lost."""

    def __init__(self, number: int, status: int | None) -> None:
        super().__init__(number, f"simulated, status {status}")
        self.status = status


class Files:
    """The files that all processes of a schedule see.

    Args:
        world: where they live.
        is_exclusive: a create is decided where the file lies.
    """

    def __init__(self, world: World, oracle: Oracle, *, is_exclusive: bool) -> None:
        self.world = world
        self.oracle = oracle
        self.is_exclusive = is_exclusive
        self.by_name: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> None:
        """Write a file at once."""
        old = self.by_name.get(name)
        self.by_name[name] = data
        self.oracle.changed(name, old, data)

    def take_away(self, name: str) -> None:
        """Remove a file at once."""
        old = self.by_name.pop(name, None)
        if old is not None:
            self.oracle.changed(name, old, None)


class VirtualStore:
    """The store as one process sees it; `folder` is below the sink, "" is the sink."""

    def __init__(self, files: Files, process: Process, folder: str = "") -> None:
        self.uri = f"sim://out/{folder}".rstrip("/")
        self._below = f"{folder}/" if folder else ""
        self._files = files
        self._by_name = files.by_name
        self._process = process
        self._world = files.world

    @property
    def is_exclusive(self) -> bool:
        return self._files.is_exclusive

    def create(self, name: str, data: bytes) -> bool:
        fault = self._before("create", name)
        name = self._below + name
        won = name not in self._by_name
        if won:
            if not self._files.is_exclusive:
                # others may write between the look and the write
                self._world.yield_turn()
            self._files.put(name, data)
        else:
            self._files.oracle.found_written(name)
        self._after(fault)
        return won

    def replace(self, name: str, data: bytes) -> None:
        fault = self._before("replace", name)
        self._files.put(self._below + name, data)
        self._after(fault)

    def read(self, name: str) -> bytes:
        fault = self._before("read", name)
        data = self._by_name.get(self._below + name)
        self._after(fault)
        if data is None:
            raise FileNotFoundError(name)
        return data

    def tail(self, name: str, num_bytes: int) -> bytes:
        return self.read(name)[-num_bytes:]

    def size(self, name: str) -> int | None:
        fault = self._before("size", name)
        data = self._by_name.get(self._below + name)
        self._after(fault)
        return None if data is None else len(data)

    def names(self, folder: str) -> list[str]:
        fault = self._before("names", folder)
        prefix, start = f"{self._below}{folder}/", len(self._below)
        names = sorted(name[start:] for name in self._by_name if name.startswith(prefix))
        # the reply of a long listing comes late, and tells of names there were
        self._after(fault or ("late reply" if self._process.is_faulty else None))
        return names

    def remove(self, name: str) -> None:
        fault = self._before("remove", name)
        self._files.take_away(self._below + name)
        self._after(fault)

    def _before(self, operation: str, name: str) -> str | None:
        """Wait for the turn of an operation; return what happens after its effect."""
        world, process = self._world, self._process
        fault = world.turn(process)
        if world.trace is not None:
            path = self._below + name
            world.note(process, f"{operation} {path}{f' ({fault})' if fault else ''}")
        if fault == "crash before":
            world.crash(process)
        elif fault == "stall before":
            world.stall(process)
        elif fault == "error before":
            self._fail()
        else:
            return fault
        return None

    def _after(self, fault: str | None) -> None:
        if fault is None:
            return
        if fault == "crash after":
            self._world.crash(self._process)
        elif fault == "stall after":
            self._world.stall(self._process)
        elif fault == "error after":
            self._fail()
        elif fault == "late reply":
            self._world.yield_turn()

    def _fail(self) -> None:
        status, number = self._world.rng.choice(_FAILURES)
        raise StoreError(number, status)
