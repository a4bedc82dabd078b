"""Goes through the corpus as the real runs do, but dies of the second case and hangs at the third.

python -m tests.lab.faultlab.dying_inputs FIRST FOLDER
"""

import json
import sys
import time
from pathlib import Path

from faultlab.bad_inputs import CORPUS


def main(first, folder):
    with open(Path(folder, "results"), "a") as file:
        for number, case in enumerate(CORPUS[int(first) :], int(first)):
            if number == 1:
                sys.exit("the second case")
            if number == 2:
                time.sleep(60)
            line = {
                "name": case.name,
                "outcome": "refused",
                "is_handled": True,
                "message": "",
                "seconds": 0.0,
            }
            file.write(json.dumps(line) + "\n")
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
