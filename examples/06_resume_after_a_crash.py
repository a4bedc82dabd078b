"""Kill a run in the middle, start it again, and prove that the output has every row once.

Rows are written in units; each unit is a file that is created once and never changed. Finished rows
of open units are in a journal. So you need not clean up or configure anything: the same command
resumes. This script starts itself as a second process, kills that with SIGKILL once some units are
written, runs the job again, and verifies the output.

    python examples/06_resume_after_a_crash.py
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from raybatch import Job, LLMStage, verify
from raybatch.demo.run import write_dataset

MODEL = os.environ.get("MODEL", "demo")  # or a hub id, a checkpoint folder, a URI
SOURCE = "examples-out/resume/prompts"
SINK = "examples-out/resume/answers"
PROMPT = "{document}\n\nQuestion: {question}"
SAMPLING = {"temperature": 0, "max_tokens": 64}
UNIT_ROWS = 64  # rows of a unit; the default of 1,024 suits larger inputs
KILL_AFTER_FILES = 3

stage = LLMStage(MODEL, prompt=PROMPT, sampling=SAMPLING)
job = Job(SOURCE, SINK, stage, plan={"unit_rows": UNIT_ROWS})

if sys.argv[1:] == ["run"]:  # the process that is killed
    job.run()
    sys.exit()

# leave this out for your own files; equal arguments write equal bytes
write_dataset(
    SOURCE, num_documents=64, questions_per_document=16, seed=1, num_files=2, include_bad_rows=False
)
victim = subprocess.Popen([sys.executable, __file__, "run"])
while len(list(Path(SINK).glob("data/*.parquet"))) < KILL_AFTER_FILES and victim.poll() is None:
    time.sleep(0.02)
victim.send_signal(signal.SIGKILL)
print(f"first run: ended by signal {-victim.wait()}")
print(f"  it left {len(list(Path(SINK).glob('data/*.parquet')))} files")

report = job.run()
print(f"second run: {report.rows_in} rows in, {report.rows_out} out, {report.rows_lost} lost")
print(f"  {report.rows_resumed} of them from the first run")

print(str(verify(SINK, deep=True)).splitlines()[-1])

# Output:
# first run: ended by signal 9
#   it left 3 files
# second run: 1024 rows in, 1024 out, 0 lost
#   192 of them from the first run
# verdict: complete, every row exactly once
