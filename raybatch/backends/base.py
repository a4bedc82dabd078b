"""The protocol that every backend follows; small enough for a fake in tests."""

from collections.abc import Collection, Sequence
from typing import Protocol

from raybatch.records.types import Capacity, Completion, ReplicaStats, Request, SequenceState


class Backend(Protocol):
    """One engine inside one replica; owned by one thread.

    Feedback flows only through `poll`, `stats` and `capacity`. A bad request comes back from
    `poll` as completions with an error, one per sample; only a broken engine raises. The suite in
    `tests/backends/test_contract.py` holds every backend to this.
    """

    def capacity(self) -> Capacity:
        """Return what the engine can hold; constant after the start."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests in this order; never blocks and never raises for a row.

        Raises:
            ValueError: a request id that is still in the backend.
        """

    def poll(self) -> list[Completion]:
        """Run at most one engine step and return the samples that finished in it."""

    def num_unfinished(self) -> int:
        """Return the number of submitted requests that have samples to come."""

    def drain(self) -> list[Request]:
        """Give back the requests that have not started, last submitted last."""

    def abort(self, request_ids: Collection[int]) -> None:
        """Drop requests and free what they hold; no completion comes for them.

        Ids that are not in the backend are ignored.
        """

    def begun(self, min_new_tokens: int) -> list[SequenceState]:
        """Return sequences that run on, as `restore` takes them.

        Args:
            min_new_tokens: that a sequence has to have beyond those returned here before.
        """

    def export(self, request_ids: Collection[int]) -> list[SequenceState]:
        """Take the unfinished sequences of these requests out as data, in order of arrival."""

    def restore(self, states: Sequence[SequenceState]) -> None:
        """Go on with sequences that another engine exported."""

    def stats(self) -> ReplicaStats:
        """Return the counters."""

    def close(self) -> None:
        """Free everything; the backend is not used again."""
