"""Files for job systems: complete, of the right form, resumable, without secrets."""

import dataclasses
import json
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from raybatch.errors import ConfigError
from raybatch.job.job import Job
from raybatch_submit.manifest import manifest_name, render_anyscale, render_manifest
from raybatch_submit.options import ManifestOptions, ModelVolume, SecretKey, read_tolerations

SCHEMA = json.loads((Path(__file__).parent.parent / "data/kuberay_rayjob.schema.json").read_text())
# fields of JobConfig and of ComputeConfig in the package anyscale 0.26.112
ANYSCALE_FIELDS = {
    *("name", "image_uri", "containerfile", "compute_config", "working_dir", "excludes"),
    *("requirements", "env_vars", "py_modules", "py_executable", "cloud", "project"),
    *("registry_login_secret", "ray_version", "connections", "priority", "entrypoint"),
    *("max_retries", "job_queue_config", "timeout_s", "tags"),
}
JOB = """\
# the oaks
source: s3://bucket/prompts
sink: s3://bucket/answers
stage:
  model: Qwen/Qwen3-8B
  prompt: "{text}\\n\\nWhat colour?"
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def render(here, kind, *, job=JOB, name="oak.yaml", **options):
    """Return the parsed documents of a manifest."""
    (here / name).write_text(job)
    image = None if kind == "ray" else "registry/oak:1"
    # else the size of a bucket would be asked for
    known = {"spill_size": "100Gi"} if kind == "kuberay" else {}
    options = ManifestOptions(**{"image": image, **known, **options})
    text, _ = render_manifest(kind, name, options)
    return list(yaml.safe_load_all(text))


def spec_of(documents):
    return documents[1]["spec"]


def pods_of(documents):
    cluster = spec_of(documents)["rayClusterSpec"]
    return [
        group["template"]["spec"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    ]


VARIANTS = {
    "plain": {},
    "gpu": {"gpu_type": "NVIDIA-L4", "replicas": 4},
    "label": {"gpu_type": "cloud.google.com/gke-accelerator=nvidia-l4"},
    "account": {"service_account": "oak", "env_vars": {"HF_HUB_OFFLINE": "1"}},
    "cpu": {"job": JOB + "  engine: {device: cpu}\n"},
    "large": {
        "gpus_per_pod": 8,
        "replicas": 16,
        "memory_per_pod": "1Ti",
        "head_cpus": 8,
        "secrets": {"HF_TOKEN": SecretKey("hub", "token")},
        "model_volume": ModelVolume("weights", "/models"),
        "image_pull_secret": "registry",
        "queue": "nights",
        "node_selector": {"pool": "spot"},
        "tolerations": read_tolerations(["spot=true:NoExecute", "any"]),
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_ray_job_has_the_form_of_kuberay(here, variant):
    jsonschema.validate(render(here, "kuberay", **VARIANTS[variant])[1], SCHEMA)


def test_schema_forbids_unknown_fields(here):
    document = render(here, "kuberay")[1]
    document["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["gpu"] = 1
    with pytest.raises(jsonschema.ValidationError, match="'gpu' was unexpected"):
        jsonschema.validate(document, SCHEMA)


def test_schema_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_config_map_holds_the_job_file_as_it_is(here):
    config_map = render(here, "kuberay")[0]
    assert config_map["data"] == {"job.yaml": JOB}


def test_head_mounts_the_job_file_where_the_command_looks(here):
    documents = render(here, "kuberay")
    head = pods_of(documents)[0]
    assert head["containers"][0]["volumeMounts"][0]["mountPath"] == "/etc/raybatch"
    assert head["volumes"] == [
        {"name": "job", "configMap": {"name": documents[0]["metadata"]["name"]}}
    ]


def test_command_names_the_engines_and_takes_error_rows_for_finished(here):
    expected = "python -m raybatch run /etc/raybatch/job.yaml --replicas 3 --allow-error-rows"
    assert spec_of(render(here, "kuberay", replicas=3))["entrypoint"] == expected


def test_retries_and_token_are_set(here):
    spec = spec_of(render(here, "kuberay", max_retries=7))
    auth = spec["rayClusterSpec"]["authOptions"]
    assert (spec["backoffLimit"], auth) == (7, {"mode": "token"})


def test_one_engine_is_one_host_with_its_gpus(here):
    job = JOB + "  pool: {replicas: 2, num_gpus_per_replica: 4}\n"
    workers = spec_of(render(here, "kuberay", job=job))["rayClusterSpec"]["workerGroupSpecs"][0]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert (workers["replicas"], limits["nvidia.com/gpu"]) == (2, "4")


def test_job_for_cpus_asks_for_no_gpu(here):
    worker = pods_of(render(here, "kuberay", job=JOB + "  engine: {device: cpu}\n"))[1]
    assert "nvidia.com/gpu" not in worker["containers"][0]["resources"]["limits"]


def test_job_whose_model_is_elsewhere_asks_for_no_gpu(here):
    backend = "  backend: {kind: openai, options: {base_url: 'http://host/v1'}}\n"
    worker = pods_of(render(here, "kuberay", job=JOB + backend))[1]
    assert "nvidia.com/gpu" not in worker["containers"][0]["resources"]["limits"]


@pytest.mark.parametrize(
    ("gpu_type", "selector"),
    [("NVIDIA-L4", {"nvidia.com/gpu.product": "NVIDIA-L4"}), ("a/b=c", {"a/b": "c"})],
)
def test_kind_of_gpu_selects_hosts(here, gpu_type, selector):
    worker = pods_of(render(here, "kuberay", gpu_type=gpu_type))[1]
    assert worker["nodeSelector"] == selector


def test_anyscale_fields_are_those_of_its_job_config(here):
    (config,) = render(here, "anyscale", gpu_type="L4", env_vars={"A": "1"})
    assert set(config) <= ANYSCALE_FIELDS


@pytest.mark.parametrize(
    "options", [{}, {"gpu_type": "L4", "env_vars": {"A": "1"}}, {"compute_config": "oak:1"}]
)
def test_anyscale_takes_the_file(here, options):
    models = pytest.importorskip("anyscale.job.models")
    (config,) = render(here, "anyscale", **options)
    taken = models.JobConfig.from_dict(config)
    assert taken.max_retries == 3


def test_stored_fields_are_those_of_the_package():
    models = pytest.importorskip("anyscale.job.models")
    assert {field.name for field in dataclasses.fields(models.JobConfig)} >= ANYSCALE_FIELDS


def test_anyscale_runs_the_job_file_of_the_folder_that_it_gets(here):
    (here / "jobs").mkdir()
    (config,) = render(here, "anyscale", name="jobs/oak.yaml", replicas=2)
    assert (config["working_dir"], config["entrypoint"]) == (
        ".",
        "python -m raybatch run jobs/oak.yaml --replicas 2 --allow-error-rows",
    )


def test_anyscale_leaves_data_at_home(here):
    (config,) = render(here, "anyscale")
    assert {".git", ".env", "**/*.parquet", "**/*.safetensors"} <= set(config["excludes"])


@pytest.mark.parametrize("name", ["/jobs/oak.yaml", "../oak.yaml", "jobs/../../oak.yaml"])
def test_anyscale_refuses_a_job_file_elsewhere(name):
    job = Job.from_mapping(yaml.safe_load(JOB)).config
    with pytest.raises(ConfigError, match="change to the folder of the job file"):
        render_anyscale(job, name, ManifestOptions(image="oak:1"))


def test_ray_script_is_a_script_with_the_job_file(here):
    (here / "oak.yaml").write_text(JOB)
    text, _ = render_manifest("ray", "oak.yaml", ManifestOptions())
    done = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True)
    assert (done.returncode, JOB in text) == (0, True), done.stderr


def test_ray_script_needs_an_address(here):
    (here / "oak.yaml").write_text(JOB)
    text, _ = render_manifest("ray", "oak.yaml", ManifestOptions())
    done = subprocess.run(["sh"], input=text, env={}, capture_output=True, text=True)
    assert (done.returncode != 0, "http://HEAD:8265" in done.stderr) == (True, True)


def test_job_file_cannot_end_the_text_of_the_script(here):
    (here / "oak.yaml").write_text(
        JOB + "# x\nend-of-job\n# touch planted\n".replace("\nend", "\n# end")
    )
    text, _ = render_manifest("ray", "oak.yaml", ManifestOptions())
    assert "<<'end-of-job-'" in text


@pytest.mark.parametrize("kind", ["kuberay", "anyscale"])
def test_missing_image_says_what_it_must_hold(here, kind):
    with pytest.raises(ConfigError, match="needs --image with Ray, raybatch and its engine"):
        render(here, kind, image=None)


@pytest.mark.parametrize("kind", ["kuberay", "anyscale", "ray"])
def test_job_whose_retry_would_start_over_is_refused(here, kind):
    with pytest.raises(ConfigError, match="overwrite: true would remove the output at each retry"):
        render(here, kind, job=JOB + "overwrite: true\n")


@pytest.mark.parametrize("kind", ["kuberay", "anyscale", "ray"])
def test_relative_sink_is_refused(here, kind):
    with pytest.raises(ConfigError, match="sink 'answers' is relative"):
        render(here, kind, job=JOB.replace("s3://bucket/answers", "answers"))


def test_wrong_option_of_the_job_is_told_as_by_run(here):
    with pytest.raises(ConfigError, match=r"oak\.yaml: stage: unknown option 'promt'"):
        render(here, "ray", job=JOB.replace("prompt:", "promt:"))


@pytest.mark.parametrize(
    ("kind", "options", "flag"),
    [
        ("kuberay", {"compute_config": "a"}, "--compute-config"),
        ("anyscale", {"service_account": "a"}, "--service-account"),
        ("anyscale", {"gpus_per_pod": 8}, "--gpus-per-pod"),
        ("anyscale", {"secrets": {"HF_TOKEN": SecretKey("hub", "token")}}, "--secret"),
        ("ray", {"image": None, "model_volume": ModelVolume("a", "/b")}, "--model-volume"),
        ("ray", {"image": None, "tolerations": read_tolerations(["a"])}, "--toleration"),
        ("ray", {"image": "a"}, "--image"),
        ("ray", {"image": None, "max_retries": 5}, "--max-retries"),
    ],
)
def test_option_without_effect_is_refused(here, kind, options, flag):
    with pytest.raises(ConfigError, match=f"^{flag} has no effect on a manifest for {kind}"):
        render(here, kind, **options)


@pytest.mark.parametrize("kind", ["kuberay", "anyscale"])
def test_kind_of_gpu_for_a_job_on_cpus_is_refused(here, kind):
    with pytest.raises(ConfigError, match="leave --gpu-type out"):
        render(here, kind, job=JOB + "  engine: {device: cpu}\n", gpu_type="L4")


def test_paths_to_mount_are_noted(here):
    (here / "oak.yaml").write_text(JOB.replace("s3://bucket/prompts", "/data/prompts"))
    _, notes = render_manifest("ray", "oak.yaml", ManifestOptions())
    assert notes == ["note: source /data/prompts must exist on every host"]


@pytest.mark.parametrize(
    ("job_file", "name"),
    [
        ("jobs/Oak_Trees.v2.yaml", "raybatch-oak-trees-v2"),
        ("s3://b/oak.yaml", "raybatch-oak"),
        (f"{'x' * 90}.yaml", f"raybatch-{'x' * 38}"),
    ],
)
def test_name_is_made_of_the_job_file(job_file, name):
    assert manifest_name(job_file) == name


def test_file_without_a_usable_name_is_refused():
    with pytest.raises(ConfigError, match="rename it"):
        manifest_name("___.yaml")
