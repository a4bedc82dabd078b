"""Records a run on disk: one JSON line per result, so that an interrupted run can continue."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

Kind = Literal["load", "facts", "reference", "warm_up", "measure", "failure"]
Record = dict[str, Any]


class RunLog:
    """Appends results under their keys, and finds them; opening reads those of an earlier run.

    Raises:
        ValueError: the earlier run had other settings.
    """

    def __init__(self, path: Path, settings: Record) -> None:
        self._path = path
        self._records: list[Record] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            self._append({"settings": settings})
            return
        # an interrupted run can leave an incomplete line at the end
        text = path.read_text(encoding="utf-8")
        lines = text[: text.rfind("\n") + 1].splitlines()
        head, *self._records = [json.loads(line) for line in lines] or [{}]
        if head.get("settings") != settings:
            raise ValueError(
                f"{path.parent}: the earlier run has other settings or another commit; start again "
                "with --fresh, or give this run another name with --run"
            )
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    def add(
        self, kind: Kind, model: str, workload: str, peer: str, values: Mapping[str, Any]
    ) -> Record:
        """Append one record and return it."""
        record = {"kind": kind, "model": model, "workload": workload, "peer": peer, **values}
        self._records.append(record)
        self._append(record)
        return record

    def find(self, kind: Kind, model: str, workload: str, peer: str) -> list[Record]:
        """Return the records of one cell in the order in which they were added."""
        key = (kind, model, workload, peer)
        return [r for r in self if (r["kind"], r["model"], r["workload"], r["peer"]) == key]

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def _append(self, record: Record) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
