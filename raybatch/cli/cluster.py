"""The commands of the command line that speak to a cluster: submit, manifest, check."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from raybatch.cli.flags import JobFlags, check_path, with_job_flags, with_model
from raybatch.config import environment
from raybatch.errors import ConfigError

AllowErrorRows = Annotated[
    bool, Option("--allow-error-rows", help="Exit with 0, not 2, when rows failed.")
]
_write = partial(typer.echo, nl=False)
_note = partial(typer.echo, err=True)
_ENV = Option("--env", metavar="NAME[=VALUE]", help="For the job; no secrets.")


@with_job_flags()
def submit(
    flags: JobFlags,
    address: Annotated[
        str | None, Option(help="Address of the dashboard; default: RAY_API_SERVER_ADDRESS.")
    ] = None,
    submission_id: Annotated[
        str | None, Option(help="Job id; default: from file name and time.")
    ] = None,
    no_wait: Annotated[
        bool, Option("--no-wait", help="Print the id and exit, without following the log.")
    ] = False,
    working_dir: Annotated[
        Path | None, Option(help="Folder to upload; default: the job file alone.")
    ] = None,
    wheel: Annotated[
        str, Option(help="auto uploads this raybatch, none uses the image's; or a path.")
    ] = "auto",
    env: Annotated[list[str] | None, _ENV] = None,
    yes: Annotated[bool, Option("--yes", help="Ask nothing.")] = False,
    allow_error_rows: AllowErrorRows = False,
) -> None:
    """Run one job on a Ray cluster and follow its log; the exit codes are those of run."""
    from raybatch.submission.submit import Console
    from raybatch.submission.submit import submit as send  # Ray is slow to load

    if note := with_model(flags.mapping):
        _note(note)
    can_ask = sys.stdin.isatty() and not yes
    code = send(
        flags.mapping,
        Console(write=_write, note=_note, confirm=typer.confirm if can_ask else None),
        where=flags.where,
        environment=environment(),
        address=address,
        submission_id=submission_id,
        is_followed=not no_wait,
        working_dir=working_dir,
        wheel=wheel,
        env=env or (),
        allow_error_rows=allow_error_rows,
    )
    raise typer.Exit(code)


_Image = Annotated[str | None, Option(help="Container image with Ray, raybatch and its engine.")]
_Replicas = Annotated[
    int | None, Option(min=1, help="Engines, each in its own pod or --gpus-per-pod.")
]
_GpuType = Annotated[
    str | None, Option(help="NVIDIA-L4 or LABEL=VALUE for KubeRay, L4 for Anyscale.")
]
_ComputeConfig = Annotated[str | None, Option(help="Compute config of Anyscale, by name.")]
_ServiceAccount = Annotated[
    str | None, Option(help="Kubernetes service account with access to the data.")
]
_GpusPerPod = Annotated[
    int | None, Option(min=1, help="GPUs of a worker pod; its engines share the model files.")
]
_CpusPerPod = Annotated[int | None, Option(min=1, help="CPUs of a worker pod; default: 12 a GPU.")]
_MemoryPerPod = Annotated[
    str | None, Option(metavar="SIZE", help="Of a worker pod; default: 96Gi a GPU.")
]
_HeadCpus = Annotated[int, Option(min=1, help="CPUs of the head pod.")]
_HeadMemory = Annotated[str, Option(metavar="SIZE", help="Memory of the head pod.")]
_Secret = Annotated[
    list[str] | None,
    Option(metavar="VARIABLE=NAME:KEY", help="Variable from a Kubernetes secret; repeatable."),
]
_ModelVolume = Annotated[
    str | None, Option(metavar="CLAIM[:PATH]", help="Volume claim that keeps models.")
]
_SpillSize = Annotated[
    str | None, Option(metavar="SIZE", help="Disk of a worker; default: from the input.")
]
_ImagePullSecret = Annotated[
    str | None, Option(help="Kubernetes secret of a private image registry.")
]
_Queue = Annotated[str | None, Option(help="Queue of Kueue that starts the job.")]
_NodeSelector = Annotated[
    list[str] | None, Option(metavar="LABEL=VALUE", help="Of worker hosts; repeatable.")
]
_Toleration = Annotated[
    list[str] | None, Option(metavar="KEY[=VALUE][:EFFECT]", help="Of worker pods; repeatable.")
]
_MaxRetries = Annotated[int, Option(min=0, help="Most retries of the whole job.")]
_TimeoutS = Annotated[int, Option(min=1, help="Seconds until it is stopped.")]


def manifest(
    kind: Annotated[Literal["anyscale", "kuberay", "ray"], Argument(help="The job system.")],
    job_file: Annotated[str, Argument(help="YAML job file.", callback=check_path)],
    image: _Image = None,
    replicas: _Replicas = None,
    gpu_type: _GpuType = None,
    compute_config: _ComputeConfig = None,
    service_account: _ServiceAccount = None,
    gpus_per_pod: _GpusPerPod = None,
    cpus_per_pod: _CpusPerPod = None,
    memory_per_pod: _MemoryPerPod = None,
    head_cpus: _HeadCpus = 4,
    head_memory: _HeadMemory = "16Gi",
    secret: _Secret = None,
    model_volume: _ModelVolume = None,
    spill_size: _SpillSize = None,
    image_pull_secret: _ImagePullSecret = None,
    queue: _Queue = None,
    node_selector: _NodeSelector = None,
    toleration: _Toleration = None,
    max_retries: _MaxRetries = 3,
    timeout_s: _TimeoutS = 172_800,
    env: Annotated[list[str] | None, _ENV] = None,
    output: Annotated[Path | None, Option(help="Write to this file.")] = None,
) -> None:
    """Print a complete file that runs a job file on a job system, with retries that resume."""
    from raybatch.submission.checks import read_env_vars
    from raybatch.submission.manifest import render_manifest  # Ray is slow to load
    from raybatch.submission.options import (
        ManifestOptions,
        read_model_volume,
        read_node_selector,
        read_secrets,
        read_tolerations,
    )

    options = ManifestOptions(
        image=image,
        replicas=replicas,
        gpu_type=gpu_type,
        compute_config=compute_config,
        service_account=service_account,
        gpus_per_pod=gpus_per_pod,
        cpus_per_pod=cpus_per_pod,
        memory_per_pod=memory_per_pod,
        head_cpus=head_cpus,
        head_memory=head_memory,
        secrets=read_secrets(secret or ()),
        model_volume=read_model_volume(model_volume),
        spill_size=spill_size,
        image_pull_secret=image_pull_secret,
        queue=queue,
        node_selector=read_node_selector(node_selector or ()),
        tolerations=read_tolerations(toleration or ()),
        max_retries=max_retries,
        timeout_s=timeout_s,
        env_vars=read_env_vars(env or (), environment()),
    )
    text, notes = render_manifest(kind, job_file, options)
    for note in notes:
        _note(note)
    _write_file(text, output)


def _write_file(text: str, output: Path | None) -> None:
    if output is None:
        _write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written: {error}") from error


def check(
    address: Annotated[
        str | None, Option(help="Address of the dashboard; default: RAY_API_SERVER_ADDRESS.")
    ] = None,
) -> None:
    """Warn about what of a cluster is open to others; exit code 1 if there is anything."""
    from raybatch.submission.cluster_check import find_warnings, probe_cluster
    from raybatch.submission.probe import read_address

    facts = probe_cluster(read_address(address, environment()), environment(), Path.home())
    warnings = find_warnings(facts)
    for warning in warnings:
        _write(f"warning: {warning}\n")
    if warnings:
        raise typer.Exit(1)
    _write(f"{facts.address}: nothing to warn about\n")
