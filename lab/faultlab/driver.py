"""Runs one job as `raybatch run` does, with its own Ray cluster or in one that is named.

python -m faultlab.driver JOB.yaml TEMP_DIR
"""

import logging
import os
import sys
import time
from pathlib import Path

import ray

from raybatch.errors import RaybatchError
from raybatch.job.job import Job
from raybatch.outputs import joined
from raybatch.planning import head

# more than the host may have: the engines of these jobs wait, they do not compute
_NUM_CPUS = 4
_OBJECT_STORE_BYTES = 100 << 20
# jobs of seconds: parts must be joined while they run
_LOOK_EVERY_S = 0.2
# of the rows of a large job, those that run while the others are planned
_HEAD_SHARE = 1 / 4


def main(job_file: str, temp_dir: str) -> int:
    """Run a job and return the exit code of `raybatch run`.

    Args:
        job_file: of the job.
        temp_dir: for the files of Ray; an address in RAY_ADDRESS is joined instead.
    """
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("raybatch").setLevel(logging.INFO)
    joined._LOOK_EVERY_S = _LOOK_EVERY_S
    head._SHARE, head._LEAST_ROWS = _HEAD_SHARE, 1
    job = Job.from_yaml(job_file)
    if job.config.executor != "local":
        start_ray(temp_dir)
    began = time.monotonic()
    try:
        report = job.run(progress=lambda *_: None)
    except RaybatchError as error:
        logging.getLogger("raybatch").error("%s", error)
        return 1
    Path(temp_dir, "seconds").write_text(f"{time.monotonic() - began:.3f}")
    return report.exit_code()


def start_ray(temp_dir: str) -> None:
    """Start a cluster of this process, or join the one that RAY_ADDRESS names."""
    if os.environ.get("RAY_ADDRESS"):
        ray.init(logging_level=logging.ERROR, log_to_driver=False)
    else:
        ray.init(
            "local",
            num_cpus=_NUM_CPUS,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            logging_level=logging.ERROR,
            log_to_driver=False,
            _temp_dir=temp_dir,
        )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
