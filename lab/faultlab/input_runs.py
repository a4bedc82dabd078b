"""Runs a job over every bad input, in a process that may die or hang of it.

python -m faultlab.input_runs FIRST FOLDER    runs the corpus from its case FIRST on
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from faultlab.bad_inputs import CORPUS, BadInput
from faultlab.driver import start_ray
from faultlab.drivers import Driver, wait_until
from raybatch.actors.pool import release_pools
from raybatch.errors import RaybatchError, error_text
from raybatch.job.job import Job
from raybatch.outputs.verify import verify

Outcome = Literal["refused", "rows", "crashed", "hung"]

_HANG_S = 120.0
_POLL_S = 0.2
_MAX_WORDS = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class InputResult:
    """Result of a bad input.

    Args:
        outcome: refused with an error of ours, every row in the output, crashed with another
            error or with the process, or hung.
        is_handled: as the case requires, no payload ran and no file lies elsewhere.
        message: of the error, or the rows of each status.
    """

    name: str
    outcome: Outcome
    is_handled: bool
    message: str
    seconds: float


def try_inputs(
    folder: Path, *, hang_s: float = _HANG_S, module: str = "faultlab.input_runs"
) -> tuple[InputResult, ...]:
    """Run the whole corpus; what ends the process that runs it costs one case.

    Args:
        folder: short, because Ray keeps sockets below it.
        hang_s: after which a case counts as hanging, and as long again for the start of Ray.
        module: that runs cases, as this one does.
    """
    variables = {**os.environ}
    for name in ("RAY_ADDRESS", "RAYBATCH_FAULT"):
        variables.pop(name, None)
    results: list[InputResult] = []
    while len(results) < len(CORPUS):
        first = len(results)
        driver = Driver.start(str(first), folder / f"{first}", variables, module=module)
        outcome: Outcome = "crashed"
        try:
            _wait(driver, hang_s)
        except TimeoutError:
            outcome = "hung"
        finally:
            driver.kill_tree()
        results += _results(driver.folder)
        if len(results) < len(CORPUS):
            name, words = CORPUS[len(results)].name, driver.last_words()[-_MAX_WORDS:]
            lost = InputResult(
                name=name, outcome=outcome, is_handled=False, message=words, seconds=0.0
            )
            results.append(lost)
    return tuple(results)


def run_input(case: BadInput, folder: Path) -> InputResult:
    """Run the job of one case; Ray runs already."""
    (folder / "in").mkdir(parents=True)
    case.write(folder)
    began = time.monotonic()
    outcome: Outcome
    try:
        outcome, message, is_handled = _run(case, folder)
    except RaybatchError as error:
        outcome, message = "refused", str(error)
        is_handled = bool(case.refusal) and case.refusal in message
    except Exception as error:  # errors that no code expects are what is looked for
        outcome, message, is_handled = "crashed", error_text(error), False
    finally:
        release_pools()
    is_tidy = {path.name for path in folder.iterdir()} <= {"in", "out"}
    return InputResult(
        name=case.name,
        outcome=outcome,
        is_handled=is_handled and is_tidy,
        # paths of this host are not recorded
        message=message.replace(f"{folder}/", "")[:_MAX_WORDS],
        seconds=round(time.monotonic() - began, 3),
    )


def _run(case: BadInput, folder: Path) -> tuple[Outcome, str, bool]:
    """Run a job to its end; return that it wrote rows, which, and whether these are right."""
    Job.from_mapping(case.job_in(folder)).run(progress=lambda *_: None)
    seen = verify(folder / "out", deep=True)
    bad = {name: n for name, n in seen.statuses.items() if name not in ("ok", "truncated")}
    is_whole = seen.is_complete and sum(seen.statuses.values()) == case.num_rows
    is_handled = not case.refusal and is_whole and bad == dict(case.bad)
    return "rows", json.dumps(dict(seen.statuses)), is_handled


def _wait(driver: Driver, hang_s: float) -> None:
    """Wait for the end of a process that goes through cases."""
    num_done, timeout_s = 0, 2 * hang_s

    def is_further() -> bool:
        return len(_results(driver.folder)) > num_done

    while wait_until(is_further, driver, timeout_s=timeout_s, poll_s=_POLL_S):
        num_done, timeout_s = len(_results(driver.folder)), hang_s
        if not driver.is_running:
            return


def _results(folder: Path) -> Sequence[InputResult]:
    """Return the results that are written in full."""
    path = folder / "results"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [InputResult(**json.loads(line)) for line in lines if line.endswith("\n")]


def main(first: str, folder: str) -> None:
    """Run the cases from one on, and write a line for each."""
    start_ray(folder)
    for number, case in enumerate(CORPUS[int(first) :]):
        result = run_input(case, Path(folder, f"case-{number}"))
        with open(Path(folder, "results"), "a") as file:
            file.write(json.dumps(asdict(result)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
