"""A shell script that sends a job with Ray's own command line, where raybatch is not at hand."""

import json
import shlex

from raybatch.job.config import JobConfig
from raybatch.submission.manifest import (
    ManifestOptions,
    check_retries,
    job_command,
    manifest_name,
)


def render_ray(job: JobConfig, job_text: str, job_file: str, options: ManifestOptions) -> str:
    """Return a script with the job file in it; run again, it goes on where the job has ended.

    Raises:
        ConfigError: a second run would start over.
    """
    check_retries(job)
    runtime_env = {"env_vars": dict(options.env_vars)} if options.env_vars else {}
    command = job_command("job.yaml", options.replicas)
    end = "end-of-job"
    while end in job_text:
        end += "-"
    return f"""#!/bin/sh
# Sends {manifest_name(job_file)} to the cluster in RAY_API_SERVER_ADDRESS and follows it.
# Needs 'ray[default]' here, and an image with raybatch on the hosts.
set -eu
: "${{RAY_API_SERVER_ADDRESS:?set it to the address of the dashboard, such as http://HEAD:8265}}"
# the client sends the token of the cluster only with this set
export RAY_AUTH_MODE="${{RAY_AUTH_MODE:-token}}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/job.yaml" <<'{end}'
{job_text.rstrip()}
{end}
ray job submit --working-dir "$work" --entrypoint-num-cpus 0 \\
    --runtime-env-json {shlex.quote(json.dumps(runtime_env))} -- \\
    {command}
"""
