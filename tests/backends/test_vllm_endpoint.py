"""The endpoint backend against a real server: vLLM on a CPU with the embedded model."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from raybatch.backends.registry import create_backend
from raybatch.config import BackendConfig, EngineConfig
from raybatch.errors import EndpointError
from raybatch.models.source import resolve_model
from raybatch.records.types import Request, Sampling
from raybatch.text.tokenizer import Tokenizer

START_S = 240

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(START_S + 120)]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The address of a server that runs for this module."""
    with serving(tmp_path_factory.mktemp("vllm") / "log", "--enable-prompt-tokens-details") as url:
        yield url


@contextmanager
def serving(log, *flags):
    """The address of a server of the embedded model."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [
        # the command `vllm` looks for a package of this name, and the build for CPUs has another
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(resolve_model("demo"))),
        *("--served-model-name", "served", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512"),
        *flags,
    ]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with log.open("wb") as file:
        server = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        try:
            address = f"http://127.0.0.1:{port}"
            wait_for(f"{address}/health", server, log)
            yield f"{address}/v1"
        finally:
            server.terminate()
            server.wait(60)


def wait_for(address, server, log):
    for _ in range(START_S):
        assert server.poll() is None, log.read_text()[-2000:]
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-2000:])


def ask(url, *requests, task="generate", **options):
    """The completions of requests by request and sample."""
    config = BackendConfig(kind="openai", options={"base_url": url, **options}, task=task)
    return run(create_backend("served", config, EngineConfig()), requests)


def run(backend, requests):
    done = {}
    try:
        backend.submit(requests)
        deadline = time.monotonic() + 100
        while backend.num_unfinished():
            assert time.monotonic() < deadline
            done |= {(c.request_id, c.sample_idx): c for c in backend.poll()}
        return done
    finally:
        backend.close()


def request(request_id, *, payload=None, ids=(1, 2), **sampling):
    return Request(
        request_id=request_id,
        row_id=str(request_id),
        prompt_token_ids=np.array(ids, np.int32),
        sampling=Sampling(**({"max_tokens": 12} | sampling)),
        payload={} if payload is None else payload,
        seed=request_id,
    )


@pytest.fixture(scope="module")
def prompts():
    """Messages and a text, each with its token ids."""
    tokenizer = Tokenizer.load(resolve_model("demo"))
    messages = [{"role": "user", "content": "Alice bought a red kite. What did Alice buy?"}]
    text = "Alice bought a red kite. Bob bought"
    return [
        ({"messages": messages}, tokenizer.read_chat(messages).token_ids),
        ({"prompt": text}, tokenizer.encode(text)),
        ({}, tokenizer.encode(text)),
    ]


def test_answers_and_counts_are_those_of_the_native_engine(url, prompts):
    requests = [request(i, payload=payload, ids=ids) for i, (payload, ids) in enumerate(prompts)]
    requested = ask(url, *requests, extra_body={"return_token_ids": True})
    engine = EngineConfig(dtype="float32", device="cpu", max_model_len=512)
    native = run(create_backend("demo", BackendConfig(kind="native"), engine), requests)
    for key, completion in requested.items():
        expected = native[key]
        assert completion.token_ids.tolist() == expected.token_ids.tolist()
        assert completion.finish_reason == expected.finish_reason
        assert completion.num_input_tokens == len(requests[key[0]].prompt_token_ids)
        assert completion.num_generated_tokens == len(expected.token_ids)


def test_sampling_options_are_understood(url):
    options = {"temperature": 2.0, "top_k": 200, "min_p": 1e-6, "n": 3, "logprobs": 2}
    options |= {"stop": ("xyz",), "min_tokens": 2, "repetition_penalty": 1.1}
    requested = request(1, payload={"messages": [{"role": "user", "content": "Hi"}]}, **options)
    extra = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    first, second = (ask(url, requested, extra_body=extra) for _ in range(2))
    assert [c.text for c in first.values()] == [c.text for c in second.values()]
    assert len({c.text for c in first.values()}) > 1
    for completion in first.values():
        sampled = [int(ids[0]) for ids, _ in completion.logprobs]
        assert sampled == completion.token_ids.tolist()


def test_a_shared_prefix_is_told_as_cached(url):
    prefix = list(range(10, 266))
    ask(url, request(1, ids=[*prefix, 7]))
    (completion,) = ask(url, request(2, ids=[*prefix, 8])).values()
    assert completion.num_cached_tokens >= 128


def test_a_prompt_that_is_too_long_is_an_error_row_and_harms_no_other(url):
    done = ask(url, request(1, ids=[5] * 600), request(2))
    assert done[1, 0].error.startswith("BadRequest: 400 ")
    assert done[2, 0].error == ""


def test_a_choice_is_kept_to(url):
    requested = request(
        1,
        payload={"messages": [{"role": "user", "content": "Yes or no?"}]},
        structured_outputs={"choice": ["yes", "no"]},
    )
    (completion,) = ask(url, requested).values()
    assert completion.text in ("yes", "no")


def test_a_model_that_the_server_has_not_ends_the_backend(url):
    with pytest.raises(EndpointError, match="refuses all requests: 404 "):
        ask(url, request(1), model="another")


def test_embeddings_are_the_states_of_the_last_tokens_in_transformers(prompts, tmp_path):
    from transformers import AutoModelForCausalLM

    (_, ids) = prompts[1]
    requests = [request(i, payload=payload, ids=ids) for i, (payload, _) in enumerate(prompts[1:])]
    with serving(tmp_path / "log", "--runner", "pooling", "--convert", "embed") as url:
        requested = ask(url, *requests, task="embed")
        lists = ask(url, requests[0], task="embed", extra_body={"encoding_format": "float"})
    model = AutoModelForCausalLM.from_pretrained(resolve_model("demo"), dtype=torch.float32).model
    with torch.no_grad():
        state = model(torch.tensor([ids.tolist()])).last_hidden_state[0, -1]
    expected = torch.nn.functional.normalize(state, dim=0).numpy()
    for completion in (requested[0, 0], requested[1, 0], lists[0, 0]):
        assert (completion.error, completion.num_input_tokens) == ("", len(ids))
        np.testing.assert_allclose(completion.vector, expected, rtol=1e-3, atol=1e-4)
