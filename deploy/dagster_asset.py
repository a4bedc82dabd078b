"""An asset for Dagster: each day's prompts are answered on a Ray cluster, and the output is proved.

The host of the code needs raybatch, raybatch-submit and RAY_API_SERVER_ADDRESS. A retry is the same
command, which goes on where the job was.
"""

import json
import subprocess

import dagster as dg

JOB_FILE = "/opt/jobs/job.yaml"
PROMPTS, ANSWERS = "s3://bucket/prompts", "s3://bucket/answers"


@dg.asset(
    partitions_def=dg.DailyPartitionsDefinition(start_date="2026-01-01"),
    retry_policy=dg.RetryPolicy(max_retries=3, delay=300),
    # days share the GPUs of the cluster
    pool="gpus",
)
def answers(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    """Answer the prompts of a day."""
    source, sink = f"{PROMPTS}/{context.partition_key}", f"{ANSWERS}/{context.partition_key}"
    files = ["--input", source, "--output", sink]
    subprocess.run(["raybatch", "submit", JOB_FILE, *files, "--allow-error-rows"], check=True)
    subprocess.run(["raybatch", "verify", sink], check=True)
    report = subprocess.run(
        ["raybatch", "report", sink, "--json"], check=True, capture_output=True, text=True
    )
    return dg.MaterializeResult(metadata={"path": sink, "report": json.loads(report.stdout)})
