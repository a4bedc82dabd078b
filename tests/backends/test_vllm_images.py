"""Rows with images on vLLM itself: the tokens that its own calls give, caches, bad files, jobs."""

import json
from contextlib import closing
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch import Job, LLMStage
from raybatch.backends.registry import create_backend
from raybatch.backends.vllm.model import model_length
from raybatch.config import BackendConfig, EngineConfig
from raybatch.records.payload import IMAGES, LORA, with_images
from raybatch.records.types import Request, Sampling, SequenceState
from raybatch.rows.render import PromptReader
from raybatch.text.tokenizer import Tokenizer
from tests.backends.image_models import asking, data_url, png, save_image_model
from tests.backends.vllm_engines import BLOCK_TOKENS, save_text_model
from tests.stages.support import write_parquet

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = pytest.mark.vllm

CAT, DOG, WIDE = png(1), png(2), png(3, width=90, height=20)
# the place of an image in a prompt, which an answer may hold as well
IMAGE_ID = 260
ENGINE = {"dtype": "float32", "device": "cpu", "kv_cache_bytes": 8 << 20, "max_num_seqs": 8}
ROWS = [
    asking("what is it?", CAT),
    asking("what is it?", DOG),
    asking("which is wider?", CAT, WIDE),
    asking("say nothing"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_image_model(tmp_path_factory.mktemp("images") / "model")


@pytest.fixture(scope="module")
def engine(folder):
    config = EngineConfig(block_size_tokens=BLOCK_TOKENS, **ENGINE)
    with closing(create_backend(str(folder), BackendConfig(kind="vllm"), config)) as made:
        yield made


@pytest.fixture
def backend(engine):
    engine._engine._engine.reset_prefix_cache()
    return engine


@pytest.fixture(scope="module")
def reader(folder):
    config = LLMStage(str(folder), messages="messages", backend="vllm").config
    return PromptReader(config, Tokenizer.load(folder))


@pytest.fixture(scope="module")
def vllm_itself(folder, engine):
    """vLLM's own offline engine; beside ours, which is started first."""
    from vllm import LLM

    return LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=8 << 20,
        block_size=BLOCK_TOKENS,
        max_num_seqs=8,
    )


def requests(reader, rows, **sampling):
    table = pa.table({"messages": [json.dumps(row) for row in rows]})
    return [
        Request(
            request_id=i,
            row_id=str(i),
            prompt_token_ids=prompt.token_ids,
            sampling=Sampling(**({"max_tokens": 12, "ignore_eos": True} | sampling)),
            payload={} if prompt.payload is None else json.loads(prompt.payload),
        )
        for i, prompt in enumerate(reader.read(table))
    ]


def run(backend, requested=()):
    backend.submit(requested)
    done = []
    while backend.num_unfinished():
        done += backend.poll()
    return sorted(done, key=lambda completion: (completion.request_id, completion.sample_idx))


def tokens(completions):
    return [completion.token_ids.tolist() for completion in completions]


def own_params():
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_rows_get_the_tokens_that_chat_gives(backend, reader, vllm_itself):
    expected = vllm_itself.chat(ROWS, own_params(), use_tqdm=False)
    found = run(backend, requests(reader, ROWS))
    assert tokens(found) == [list(output.outputs[0].token_ids) for output in expected]
    assert len({tuple(ids) for ids in tokens(found)}) == len(ROWS)


def test_rows_get_the_tokens_that_generate_gives(backend, reader, vllm_itself):
    from io import BytesIO

    from PIL import Image

    image = Image.open(BytesIO(DOG)).convert("RGB")
    prompt = {
        "prompt": "<|user|><image>what is it?<|assistant|>",
        "multi_modal_data": {"image": image},
    }
    (expected,) = vllm_itself.generate([prompt], own_params(), use_tqdm=False)
    found = run(backend, requests(reader, ROWS[1:2]))
    assert tokens(found) == [list(expected.outputs[0].token_ids)]


def test_the_prompt_counts_as_the_model_reads_it_and_as_it_was_planned(
    backend, reader, vllm_itself
):
    expected = vllm_itself.chat(ROWS, own_params(), use_tqdm=False)
    requested = requests(reader, ROWS[:3])
    lengths = [len(output.prompt_token_ids) for output in expected[:3]]
    assert [completion.num_input_tokens for completion in run(backend, requested)] == lengths
    assert [len(request.prompt_token_ids) for request in requested] == lengths


def test_a_prefix_is_shared_with_the_same_image_and_with_no_other(backend, reader):
    rows = [asking("a" * 40, CAT), asking("a" * 40, DOG), asking("a" * 40 + "b", CAT)]
    requested = requests(reader, rows, max_tokens=1)
    cached = [run(backend, [request])[0].num_cached_tokens for request in requested]
    assert cached == [0, 0, 2 * BLOCK_TOKENS]


def test_samples_of_a_row_see_its_image(backend, reader):
    found = run(backend, requests(reader, ROWS[:1], n=2))
    assert tokens(found)[0] == tokens(found)[1] == tokens(run(backend, requests(reader, ROWS)))[0]
    assert [completion.num_input_tokens is None for completion in found] == [False, True]


def test_a_row_that_moves_begins_anew(backend, reader):
    (requested,) = requests(reader, ROWS[:1])
    expected = tokens(run(backend, [requested]))
    place = np.array([IMAGE_ID], np.int32)
    backend.restore([SequenceState(request=requested, sample_idx=0, token_ids=place)])
    assert tokens(run(backend)) == expected


@pytest.mark.parametrize("image", [b"no image", CAT[:-40], CAT[:60]], ids=["text", "cut", "head"])
def test_a_file_that_is_no_image_is_an_error_row(backend, reader, image):
    requested = requests(reader, ROWS[:2])
    payload = json.loads(with_images(None, np.array(requested[0].payload["prompt_ids"]), [image]))
    bad = replace(requested[0], request_id=7, payload=payload)
    found = run(backend, [bad, requested[1]])
    assert [completion.error[:16] for completion in found] == ["", "RequestRefused: "]


def test_a_prompt_without_places_for_its_images_is_an_error_row(backend, reader):
    (requested,) = requests(reader, ROWS[:1])
    payload = {**requested.payload, "images": requested.payload["images"] * 2}
    (completion,) = run(backend, [replace(requested, payload=payload)])
    assert completion.error.startswith("RequestRefused: ")


def bad_regex(requested):
    options = {"structured_outputs": {"regex": "(("}, "ignore_eos": False}
    return replace(requested, sampling=replace(requested.sampling, **options))


def too_many_logprobs(requested):
    return replace(requested, sampling=replace(requested.sampling, logprobs=21))


def broken_adapter(requested):
    return replace(requested, payload={**requested.payload, LORA: "/no/such/adapter"})


def too_many_images(requested):
    return replace(requested, payload={**requested.payload, IMAGES: requested.payload[IMAGES] * 2})


@pytest.mark.parametrize(
    ("spoil", "seed"),
    [(bad_regex, 11), (too_many_logprobs, 12), (broken_adapter, 13), (too_many_images, 14)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_good_row_has_the_image_of_a_row_that_was_refused(backend, reader, spoil, seed):
    # an image that this engine has not seen
    (requested,) = requests(reader, [asking("what is it?", png(seed))])
    bad, good = run(backend, [spoil(requested), replace(requested, request_id=1)])
    again = run(backend, [replace(requested, request_id=2)])
    assert bad.error.startswith("RequestRefused: ")
    assert (good.error, tokens([good])) == ("", tokens(again))


def test_the_length_of_the_context_is_that_of_vllm(folder, backend):
    assert model_length(folder) == backend.capacity().max_model_len


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_job_reads_images_of_a_column(folder, backend, reader, tmp_path):
    expected = tokens(run(backend, requests(reader, ROWS[:2])))
    images = pa.array([CAT, DOG, b"no image"], pa.binary())
    table = pa.table({"id": ["a", "b", "c"], "image": images, "text": ["what is it?"] * 3})
    write_parquet(tmp_path / "in" / "a.parquet", table)
    engine = {**ENGINE, "block_size_tokens": BLOCK_TOKENS}
    columns = {"prompt": "{text}", "images": "image", "id_column": "id"}
    sampling = {"max_tokens": 12, "ignore_eos": True}
    run_by = {"backend": "vllm", "engine": engine, "pool": {"replicas": 1}}
    stage = LLMStage(str(folder), sampling=sampling, **columns, **run_by)
    Job(tmp_path / "in", tmp_path / "out", stage).run()
    rows = {row["id"]: row for row in pq.read_table(tmp_path / "out" / "data").to_pylist()}
    assert [rows[name]["generated_tokens"] for name in "ab"] == expected
    assert [rows[name]["image"] for name in "abc"] == [CAT, DOG, b"no image"]
    assert "cannot be read" in rows["c"]["__inference_error__"]


@pytest.mark.slow
def test_a_model_of_text_refuses_rows_with_images(tmp_path, reader):
    config = EngineConfig(block_size_tokens=BLOCK_TOKENS, **ENGINE)
    folder = save_text_model(tmp_path / "model")
    (requested,) = requests(reader, ROWS[:1])
    requested = replace(requested, prompt_token_ids=np.zeros(8, np.int32))
    with closing(create_backend(str(folder), BackendConfig(kind="vllm"), config)) as made:
        found = run(made, [requested])
    assert "reads only text" in found[0].error


def test_urls_of_data_are_what_the_column_of_bytes_is(reader):
    (from_message,) = requests(reader, [asking("a", CAT)])
    part = {"type": "image", "image": data_url(CAT)}
    text = {"type": "text", "text": "a"}
    (other,) = requests(reader, [[{"role": "user", "content": [part, text]}]])
    assert from_message.payload == other.payload
