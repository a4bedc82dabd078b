"""What a RayJob has besides the job: pods of several GPUs, secrets, volumes, queues, hosts."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from raybatch.errors import ConfigError
from raybatch.job.job import Job
from raybatch_submit.manifest import render_manifest, source_bytes, spill_gib_of
from raybatch_submit.options import (
    ManifestOptions,
    ModelVolume,
    SecretKey,
    WorkerShape,
    read_model_volume,
    read_node_selector,
    read_secrets,
    read_tolerations,
    worker_shape,
)

GIB = 1 << 30
# two engines on a GPU
SHARED = {"pool": {"num_gpus_per_replica": 0.5}, "engine": {"kv_cache_bytes": 1 << 30}}
# a tensor parallel engine of vLLM
WIDE = {"kind": "vllm", "options": {"engine_kwargs": {"tensor_parallel_size": 4}}}
# and one whose ranks may lie on several hosts
ACROSS = {
    "kind": "vllm",
    "options": {
        "engine_kwargs": {"tensor_parallel_size": 16, "distributed_executor_backend": "ray"}
    },
}


def mapping(**stage):
    stage = {"model": "Qwen/Qwen3-8B", "prompt": "{text}", **stage}
    return {"source": "s3://bucket/prompts", "sink": "s3://bucket/answers", "stage": stage}


def render(tmp_path, *, job=None, notes=None, **options):
    """Return the RayJob of a manifest."""
    file = tmp_path / "oak.yaml"
    file.write_text(yaml.safe_dump(job or mapping()))
    options = ManifestOptions(**{"image": "registry/oak:1", "spill_size": "100Gi", **options})
    text, warnings = render_manifest("kuberay", str(file), options)
    if notes is not None:
        notes.extend(warnings)
    return list(yaml.safe_load_all(text))[1]


def head_of(document):
    return document["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]


def workers_of(document):
    (group,) = document["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    return group


def worker_of(document):
    return workers_of(document)["template"]["spec"]


def env_of(pod):
    return {each["name"]: each for each in pod["containers"][0].get("env", [])}


def mounts_of(pod):
    return {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}


def shape(stage, **options):
    job = Job.from_mapping(mapping(**stage)).config
    return worker_shape(job, ManifestOptions(ray_version="2", **options))


@pytest.mark.parametrize(
    ("stage", "options", "engines", "hosts", "gpus"),
    [
        ({}, {}, 1, 1, 1),
        ({}, {"replicas": 3}, 3, 3, 1),
        ({}, {"gpus_per_pod": 8}, 8, 1, 8),
        ({}, {"gpus_per_pod": 8, "replicas": 16}, 16, 2, 8),
        ({"pool": {"replicas": 24}}, {"gpus_per_pod": 8}, 24, 3, 8),
        ({"backend": WIDE}, {}, 1, 1, 4),
        ({"backend": WIDE}, {"gpus_per_pod": 8}, 2, 1, 8),
        ({"backend": WIDE}, {"gpus_per_pod": 8, "replicas": 6}, 6, 3, 8),
        ({"backend": ACROSS}, {"gpus_per_pod": 8, "replicas": 2}, 2, 4, 8),
        (SHARED, {"gpus_per_pod": 2}, 4, 1, 2),
        ({"engine": {"device": "cpu"}}, {"replicas": 2}, 2, 2, 0),
    ],
)
def test_engines_fill_pods(stage, options, engines, hosts, gpus):
    assert shape(stage, **options)[:3] == (engines, hosts, gpus)


@pytest.mark.parametrize(
    ("stage", "options", "message"),
    [
        ({}, {"gpus_per_pod": 8, "replicas": 12}, "12 engines leave GPUs idle; .* multiple of 8"),
        ({}, {"gpus_per_pod": 8, "replicas": 3}, "3 engines leave GPUs idle"),
        ({"backend": WIDE}, {"gpus_per_pod": 6}, "engines of 4 GPUs do not fill such a pod"),
        ({"backend": WIDE}, {"gpus_per_pod": 2}, "engines of 4 GPUs do not fill such a pod"),
        ({"backend": ACROSS}, {"gpus_per_pod": 6}, "an engine of 16 GPUs"),
        ({"engine": {"device": "cpu"}}, {"gpus_per_pod": 8}, "the job runs on CPUs; leave it out"),
    ],
)
def test_pods_with_idle_gpus_are_refused(stage, options, message):
    with pytest.raises(ConfigError, match=f"^--gpus-per-pod.*{message}"):
        shape(stage, **options)


def test_command_starts_all_engines_of_all_pods(tmp_path):
    document = render(tmp_path, gpus_per_pod=8, replicas=16)
    limits = worker_of(document)["containers"][0]["resources"]["limits"]
    assert (workers_of(document)["replicas"], limits["nvidia.com/gpu"]) == (2, "8")
    assert "--replicas 16 " in document["spec"]["entrypoint"]


def test_pods_have_the_cpus_and_memory_that_are_asked_for(tmp_path):
    document = render(
        tmp_path, cpus_per_pod=48, memory_per_pod="320Gi", head_cpus=8, head_memory="64Gi"
    )
    limits = worker_of(document)["containers"][0]["resources"]["limits"]
    assert (limits["cpu"], limits["memory"]) == ("48", "320Gi")
    assert worker_of(document)["volumes"][0]["emptyDir"]["sizeLimit"] == "100Gi"
    head = head_of(document)["containers"][0]["resources"]["requests"]
    assert head == {"cpu": "8", "memory": "64Gi"}


def test_secrets_are_references_in_every_pod(tmp_path):
    document = render(tmp_path, secrets=read_secrets(["HF_TOKEN=hub:token", "AWS_KEY=s3.keys:id"]))
    expected = {"secretKeyRef": {"name": "hub", "key": "token"}}
    for pod in (head_of(document), worker_of(document)):
        assert env_of(pod)["HF_TOKEN"] == {"name": "HF_TOKEN", "valueFrom": expected}
        assert env_of(pod)["AWS_KEY"]["valueFrom"]["secretKeyRef"]["name"] == "s3.keys"


@pytest.mark.parametrize(
    "setting", ["plain_hf_abc", "HF_TOKEN=hf_abc", "HF_TOKEN=:token", "=hub:token", "A B=hub:token"]
)
def test_malformed_secret_is_refused_and_not_repeated(setting):
    with pytest.raises(ConfigError, match=r"^--secret .*expected VARIABLE=NAME:KEY") as caught:
        read_secrets([setting])
    assert "hf_abc" not in str(caught.value)


def test_variable_is_given_in_one_way_alone():
    with pytest.raises(ConfigError, match="--secret A: also set with --env"):
        ManifestOptions(env_vars={"A": "1"}, secrets={"A": SecretKey("b", "c")})


def test_model_volume_keeps_what_is_downloaded(tmp_path):
    document = render(tmp_path, model_volume=read_model_volume("weights"))
    for pod in (head_of(document), worker_of(document)):
        claim = {"persistentVolumeClaim": {"claimName": "weights"}}
        assert {"name": "models", **claim} in pod["volumes"]
        assert mounts_of(pod)["models"] == "/models"
        assert env_of(pod)["HF_HUB_CACHE"]["value"] == "/models/hub"
        assert env_of(pod)["RAYBATCH_CACHE_DIR"]["value"] == "/models/raybatch"
        # any user of the container may write to it
        assert pod["securityContext"]["fsGroup"] == 1000


def test_own_cache_folder_is_left_alone(tmp_path):
    document = render(
        tmp_path,
        model_volume=ModelVolume("weights", "/models"),
        env_vars={"HF_HUB_CACHE": "/models/mine"},
    )
    names = [each["name"] for each in worker_of(document)["containers"][0]["env"]]
    assert names == ["HF_HUB_CACHE", "RAYBATCH_CACHE_DIR"]


def test_model_on_the_volume_is_not_noted(tmp_path):
    notes = []
    volume = read_model_volume("weights:/weights/")
    render(tmp_path, job=mapping(model="/weights/oak"), model_volume=volume, notes=notes)
    assert notes == []
    render(tmp_path, job=mapping(model="/weights2/oak"), model_volume=volume, notes=notes)
    assert notes == ["note: model /weights2/oak must exist on every host"]


@pytest.mark.parametrize("setting", ["", ":/models", "claim:models", "A_B"])
def test_malformed_model_volume_is_refused(setting):
    with pytest.raises(ConfigError, match=r"--model-volume .*expected CLAIM or CLAIM:/path"):
        read_model_volume(setting)


@pytest.mark.parametrize(
    "path", ["/tmp", "//tmp/", "/", "/usr/../etc", "/proc/models", "/home/ray"]
)
def test_a_volume_over_a_folder_of_the_system_is_refused(path):
    with pytest.raises(ConfigError, match=f"--model-volume models:{path}: a volume over /"):
        read_model_volume(f"models:{path}")


def test_spilled_objects_have_a_disk_of_their_own(tmp_path):
    document = render(tmp_path, spill_size="2Ti")
    pod = worker_of(document)
    assert {"name": "spill", "emptyDir": {"sizeLimit": "2048Gi"}} in pod["volumes"]
    resources = pod["containers"][0]["resources"]
    # downloaded weights would count against a limit
    assert resources["requests"] == {**resources["limits"], "ephemeral-storage": "2048Gi"}
    assert "ephemeral-storage" not in resources["limits"]
    # Ray writes where it is mounted
    expected = {"object-spilling-directory": mounts_of(pod)["spill"]}
    assert workers_of(document)["rayStartParams"] == expected


@pytest.mark.parametrize("size", ["400", "400G", "0Gi", "-1Gi", "1.5Ti"])
def test_size_without_a_known_unit_is_refused(size):
    with pytest.raises(ConfigError, match=f"--spill-size {size}: expected a size such as 400Gi"):
        ManifestOptions(spill_size=size)


@pytest.mark.parametrize(
    ("num_bytes", "num_hosts", "gib"), [(GIB, 1, None), (8 * GIB, 1, 36), (200 * GIB, 2, 450)]
)
def test_disk_for_spilled_objects_follows_from_the_source(num_bytes, num_hosts, gib):
    assert gib == spill_gib_of(num_bytes, WorkerShape(num_hosts, num_hosts, 1, 12, 96, 30))


def test_rows_in_memory_count_not_those_in_files(tmp_path):
    table = pa.table({"text": ["x" * 10_000] * 1000, "other": ["y" * 1000] * 1000})
    for i in range(3):
        pq.write_table(table, tmp_path / f"{i}.parquet")
    (tmp_path / "more.jsonl").write_text('{"text": "' + "z" * 500_000 + '"}\n')
    # of what is compressed, five times its size
    (tmp_path / "most.jsonl.gz").write_bytes(b"z" * 2_000_000)
    job = Job.from_mapping({**mapping(), "source": str(tmp_path)}).config
    assert source_bytes(job) == pytest.approx(3 * 11e6 + 5e5 + 1e7, rel=0.05)


def test_source_that_cannot_be_read_is_told_with_the_flag(tmp_path):
    notes = []
    job = {**mapping(), "source": str(tmp_path / "nothing")}
    document = render(tmp_path, job=job, spill_size=None, notes=notes)
    assert [volume["name"] for volume in worker_of(document)["volumes"]] == ["shm"]
    assert "set --spill-size" in notes[1]


def test_rows_that_are_not_sorted_need_no_disk(tmp_path):
    notes = []
    document = render(
        tmp_path, job={**mapping(), "plan": {"mode": "off"}}, spill_size=None, notes=notes
    )
    assert (workers_of(document)["rayStartParams"], notes) == ({}, [])


def test_queue_of_kueue_starts_the_job(tmp_path):
    document = render(tmp_path, queue="nights")
    assert document["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "nights"
    # KubeRay suspends no job whose cluster stays behind
    assert (document["spec"]["suspend"], document["spec"]["shutdownAfterJobFinishes"]) == (
        True,
        True,
    )
    assert "suspend" not in render(tmp_path)["spec"]


def test_private_images_are_pulled_with_their_secret(tmp_path):
    document = render(tmp_path, image_pull_secret="registry")
    for pod in (head_of(document), worker_of(document)):
        assert pod["imagePullSecrets"] == [{"name": "registry"}]


def test_workers_go_to_the_hosts_that_are_named(tmp_path):
    document = render(
        tmp_path,
        gpu_type="NVIDIA-L4",
        node_selector=read_node_selector(["pool=spot"]),
        tolerations=read_tolerations(["spot=true:NoExecute", "any", "dev=x"]),
    )
    pod = worker_of(document)
    assert pod["nodeSelector"] == {"pool": "spot", "nvidia.com/gpu.product": "NVIDIA-L4"}
    assert pod["tolerations"] == [
        {"key": "spot", "operator": "Equal", "value": "true", "effect": "NoExecute"},
        {"key": "any", "operator": "Exists"},
        {"key": "dev", "operator": "Equal", "value": "x"},
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
    ]
    assert {"nodeSelector", "tolerations"}.isdisjoint(head_of(document))


@pytest.mark.parametrize("setting", ["", "=x", "a:Never", "a=b:"])
def test_malformed_toleration_is_refused(setting):
    with pytest.raises(ConfigError, match=r"--toleration .*expected KEY, KEY=VALUE or"):
        read_tolerations([setting])


@pytest.mark.parametrize("setting", ["a", "=b", "a=b=c", "a=b c", "a/b/c=d", "-a=b"])
def test_malformed_label_is_refused(setting, tmp_path):
    with pytest.raises(ConfigError, match=f"--node-selector {setting}: expected LABEL=VALUE"):
        read_node_selector([setting])
    with pytest.raises(ConfigError, match=r"--gpu-type .*: expected LABEL=VALUE"):
        render(tmp_path, gpu_type=setting if "=" in setting else "NVIDIA H100")


def test_label_without_a_value_is_one():
    expected = {"node-role.kubernetes.io/gpu": ""}
    assert expected == read_node_selector(["node-role.kubernetes.io/gpu="])


def test_what_is_given_twice_is_refused():
    with pytest.raises(ConfigError, match="--node-selector a=2: the label is set twice"):
        read_node_selector(["a=1", "a=2"])
    with pytest.raises(ConfigError, match="--secret A: set twice"):
        read_secrets(["A=b:c", "A=b:d"])


@pytest.mark.parametrize("name", ["queue", "image_pull_secret", "service_account"])
@pytest.mark.parametrize("value", ["", "Big", "a_b", "a/b", "a-"])
def test_malformed_name_of_an_object_is_refused(name, value):
    with pytest.raises(
        ConfigError, match=f"--{name.replace('_', '-')} {value}: not a Kubernetes object name"
    ):
        ManifestOptions(**{name: value})
