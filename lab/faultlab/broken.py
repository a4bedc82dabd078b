"""Jobs whose engines break by themselves, on steps or on rows, and are run again once repaired."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.parquet as pq

from faultlab.rig import Answers, Checked, Rig
from raybatch.actors.queue.quarantine import MAX_GIVEN_UP
from raybatch.demo import CHECKPOINT_PATH
from raybatch.text.tokenizer import Tokenizer

# of a row that is known to end engines only once others were cleared, by halves
_MOST_DEATHS_OF_ROW = 12
_NUM_ROWS, _UNIT_ROWS, _REPLICAS = 480, 120, 2
_KIND_SHARE = 0.05

BREAKS: Mapping[str, int | None] = {"every step": 1, "every third step": 3, "a kind of row": None}
"""At which step engines break; None: by rows that have a token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenResult:
    """What became of a job whose engines break.

    Args:
        kind: of `BREAKS`.
        num_deaths: engines that died.
        seconds: until the first run ended, as a failure or complete.
        has_failed: the first run did.
        num_errors: error rows of the output, once engines work again.
        num_of_kind: rows that end engines.
    """

    kind: str
    num_deaths: int
    seconds: float
    has_failed: bool
    num_errors: int
    num_of_kind: int
    checked: Checked

    @property
    def is_right(self) -> bool:
        """Return whether the job ended soon where it had to, and no row is lost or doubled."""
        checked = self.checked
        # rows that ended engines have no text
        is_whole = checked.is_clean and checked.wrong == self.num_errors
        is_whole = is_whole and not (checked.lost or checked.duplicated)
        if self.kind == "a kind of row":
            return is_whole and not self.has_failed and self.num_errors == self.num_of_kind
        most = _REPLICAS + 2 if self.kind == "every step" else _MOST_DEATHS_OF_ROW * MAX_GIVEN_UP
        return is_whole and self.has_failed and self.num_deaths <= most


def run_broken(folder: Path, kind: str) -> BrokenResult:
    """Run a job with engines that break, then again with engines that work."""
    rig = _rig(folder)
    rig.prepare()
    token, num_of_kind = _token_of_few(rig)
    every, is_broken = BREAKS[kind], folder / "broken"
    is_broken.touch()
    breaks = {"raise_every": every} if every else {"raise_on": int(token)}
    rig = replace(rig, fake={**breaks, "raise_file": str(is_broken)})
    rig.write_job()
    code, seconds = rig.finish(timeout_s=1800.0)
    log = (folder / "a" / "driver.log").read_text()
    is_broken.unlink()
    rig.finish()
    return BrokenResult(
        kind=kind,
        num_deaths=log.count("restarting replica "),
        seconds=seconds,
        has_failed=code == 1,
        num_errors=rig.num_errors(),
        num_of_kind=0 if every else num_of_kind,
        checked=rig.check(_answers(folder / "whole")),
    )


def _rig(folder: Path) -> Rig:
    return Rig(
        folder=folder,
        num_rows=_NUM_ROWS,
        unit_rows=_UNIT_ROWS,
        replicas=_REPLICAS,
        executor="local",
        step_s=0.0,
        stage={"chat": False},
    )


def _answers(folder: Path) -> Answers:
    """Return the texts of a run whose engines work."""
    rig = _rig(folder)
    rig.prepare()
    rig.finish()
    return rig.answers()


def _token_of_few(rig: Rig) -> tuple[int, int]:
    """Return a token that few prompts have, and how many rows have it."""
    tokenizer = Tokenizer.load(CHECKPOINT_PATH)
    prompts = pq.read_table(rig.source_uri)["prompt"].to_pylist()
    rows = Counter(token for prompt in prompts for token in set(tokenizer.encode(prompt)))
    wanted = _KIND_SHARE * len(prompts)
    return min(rows.items(), key=lambda pair: (abs(pair[1] - wanted), pair[0]))
