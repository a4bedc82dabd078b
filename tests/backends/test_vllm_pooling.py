"""The vLLM backend with pooled prompts and without vLLM, over a scripted engine."""

from types import SimpleNamespace

import numpy as np
import pytest

from raybatch.backends.vllm.backend import VllmBackend, pooling_params
from raybatch.backends.vllm.frontend import Frontend, VllmAdapters
from raybatch.backends.vllm.model import form_of_scores
from raybatch.backends.vllm.requests import (
    Answer,
    Progress,
    RequestRefused,
    ScorePairs,
    pooling_task,
    similarity,
)
from raybatch.backends.vllm.versions import ADAPTERS
from raybatch.engine.weights.layer_store import WeightCounters
from raybatch.errors import ConfigError
from raybatch.records.payload import LORA
from raybatch.records.types import NO_TOKENS, Capacity
from tests.backends.pooled_requests import pooled_request as request

MAX_LEN = 10


class ScriptedPooler:
    """The vector of a request is its tokens, with NaN for `bad` ones; each step ends one request.

    A request with a `broken` token ends in an error.
    """

    def __init__(self):
        self.requested = {}
        self.params = []
        self.refuses = None
        self.bad = self.broken = None

    def capacity(self):
        return Capacity(kv_tokens=64, max_model_len=MAX_LEN, max_num_seqs=4, block_size=16)

    def vocab_size(self):
        return 50

    def eos_token_ids(self):
        return frozenset()

    def add(self, key, prompt_token_ids, params):
        if self.refuses in prompt_token_ids:
            raise RequestRefused("not this one")
        self.params.append(params)
        self.requested[key] = prompt_token_ids

    def step(self):
        key = next(iter(self.requested))
        tokens = self.requested.pop(key)
        progress = Progress(NO_TOKENS, 1, ())
        is_finite = self.bad not in tokens
        reason = "error" if self.broken in tokens else "stop"
        return [Answer(key, progress, reason, None, is_finite, np.array(tokens, np.float32))]

    def take(self, keys):
        for key in keys:
            del self.requested[key]
        return {key: Progress(NO_TOKENS, 0, ()) for key in keys}

    def progress(self, key):
        return Progress(NO_TOKENS, 0, ())

    def num_tokens(self, key):
        return 0

    def has_started(self, key):
        return False

    def generated_tokens(self):
        return 0

    def num_running(self):
        return len(self.requested)

    def num_steps(self):
        return 0

    def weight_counters(self):
        return WeightCounters()

    def num_preemptions(self):
        return 0

    def kv_used_fraction(self):
        return 0.0

    def reset(self):
        self.requested.clear()

    def close(self):
        pass


def run(backend):
    done = {}
    while backend.num_unfinished():
        done |= {completion.request_id: completion for completion in backend.poll()}
    return done


def test_a_row_ends_with_its_vector_and_no_tokens():
    backend = VllmBackend(ScriptedPooler(), "embed")
    backend.submit([request(1, [3, 4])])
    done = run(backend)[1]
    assert done.vector.tolist() == [3, 4]
    assert (done.token_ids.tolist(), done.finish_reason, done.error) == ([], "stop", "")


def test_tokens_are_counted_once():
    backend = VllmBackend(ScriptedPooler(), "embed")
    backend.submit([request(1, [3, 4]), request(2, [5])])
    run(backend)
    stats = backend.stats()
    found = (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens)
    assert found == (3, 2, 0)


def test_numbers_that_are_none_make_an_error_row():
    engine = ScriptedPooler()
    engine.bad = 4
    backend = VllmBackend(engine, "embed")
    backend.submit([request(1, [3, 4])])
    assert run(backend)[1].error.startswith("NonFiniteVector: ")


@pytest.mark.parametrize(("length", "is_good"), [(MAX_LEN, True), (MAX_LEN + 1, False)])
def test_a_prompt_may_fill_the_context(length, is_good):
    backend = VllmBackend(ScriptedPooler(), "embed")
    backend.submit([request(1, [1] * length)])
    assert is_good == (run(backend)[1].error == "")


def test_a_score_of_two_sequences_is_their_similarity():
    backend = VllmBackend(ScorePairs(ScriptedPooler()), "score")
    backend.submit([request(1, [3, 4, 4, 3], document_at=2)])
    done = run(backend)[1]
    assert done.vector.tolist() == pytest.approx([24 / 25])
    assert done.num_cached_tokens == 2


def test_each_row_of_pairs_gets_its_own_score():
    backend = VllmBackend(ScorePairs(ScriptedPooler()), "score")
    backend.submit(
        [request(1, [1, 0, 1, 0], document_at=2), request(2, [1, 0, 0, 1], document_at=2)]
    )
    assert {i: c.vector.tolist() for i, c in run(backend).items()} == {1: [1.0], 2: [0.0]}


def test_options_reach_both_sequences():
    engine = ScriptedPooler()
    backend = VllmBackend(ScorePairs(engine), "score")
    backend.submit([request(1, [1, 2], document_at=1, pooling={"dimensions": 2}, **{LORA: "a"})])
    backend.poll()
    assert engine.params == [{"dimensions": 2, LORA: "a"}] * 2


def scored(engine):
    """Return the completion of the pair of prompts 3 and 5."""
    backend = VllmBackend(ScorePairs(engine), "score")
    backend.submit([request(1, [3, 5], document_at=1)])
    return run(backend)[1]


@pytest.mark.parametrize("refused", [3, 5])
def test_a_pair_of_which_one_is_refused_leaves_nothing_behind(refused):
    engine = ScriptedPooler()
    engine.refuses = refused
    assert scored(engine).error == "RequestRefused: not this one"
    assert engine.requested == {}


@pytest.mark.parametrize("bad", [3, 5], ids=["query", "document"])
def test_a_pair_of_which_one_half_is_no_numbers_is_an_error_row(bad):
    engine = ScriptedPooler()
    engine.bad = bad
    assert scored(engine).error.startswith("NonFiniteVector: ")


@pytest.mark.parametrize("broken", [3, 5], ids=["query", "document"])
def test_a_pair_of_which_one_half_ends_in_an_error_does_so(broken):
    engine = ScriptedPooler()
    engine.broken = broken
    assert scored(engine).error == "VllmError: vLLM ended the request with 'error'"


def test_pairs_run_once_one_half_has_started():
    backend = VllmBackend(ScorePairs(ScriptedPooler()), "score")
    backend.submit([request(i, [3, 5], document_at=1) for i in range(3)])
    backend.poll()
    stats = backend.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 2)


def test_an_embedding_model_scores_no_single_text():
    backend = VllmBackend(ScorePairs(ScriptedPooler()), "score")
    backend.submit([request(1, [3, 5])])
    assert "needs a query and a document" in run(backend)[1].error


def test_a_pair_that_has_begun_is_not_given_back_and_can_be_dropped():
    engine = ScriptedPooler()
    backend = VllmBackend(ScorePairs(engine), "score")
    backend.submit([request(1, [3, 5], document_at=1), request(2, [3, 6], document_at=1)])
    backend.poll()
    assert [r.request_id for r in backend.drain()] == [2]
    (state,) = backend.export([1])
    assert (state.token_ids.tolist(), engine.requested, backend.num_unfinished()) == ([], {}, 0)
    backend.restore([state])
    assert run(backend)[1].vector.tolist() == pytest.approx([1.0])


def test_vectors_of_tokens_are_compared_token_by_token():
    query = np.array([[1, 0], [0, 2]], np.float32)
    document = np.array([[3, 0], [0, 1], [1, 1]], np.float32)
    assert similarity(query, document).tolist() == [5.0]


def test_the_place_of_types_is_what_vllm_calls_it():
    params = pooling_params(request(1, [1], types_at=3, pooling={"use_activation": False}))
    assert params == {"use_activation": False, "types_at": 3}


@pytest.mark.parametrize(("version", "types"), [("0.32", 3), ("0.33", (3, 5))])
def test_types_of_tokens_are_passed_in_the_form_of_the_version(version, types):
    frontend = object.__new__(Frontend)
    frontend._pooling_task, frontend._adapter = "classify", ADAPTERS[version]
    frontend._vllm = SimpleNamespace(PoolingParams=dict, tokens_input=list)
    frontend._adapters = VllmAdapters(None, None)
    made = frontend.make([1, 2, 3, 4, 5], {"types_at": 3})
    assert made.params == {"task": "classify", "extra_kwargs": {"compressed_token_type_ids": types}}


@pytest.mark.parametrize(
    ("task", "supported", "form", "expected"),
    [
        ("embed", ["embed", "token_embed"], "apart", "embed"),
        ("classify", ["classify"], "pair", "classify"),
        ("score", ["classify"], "pair", "classify"),
        ("score", ["embed", "token_embed"], "apart", "embed"),
        ("score", ["token_embed"], "apart", "token_embed"),
    ],
)
def test_tasks_have_names_in_vllm(task, supported, form, expected):
    assert pooling_task(task, supported, form=form, num_labels=1) == expected


@pytest.mark.parametrize(
    ("task", "supported", "num_labels", "message"),
    [
        ("embed", ["classify"], 1, "pooling task embed; this one supports: classify"),
        ("classify", [], 2, "this one supports: none"),
        ("score", ["classify"], 2, "gives one number, and this classifier gives 2"),
    ],
)
def test_a_model_that_lacks_the_task_is_refused(task, supported, num_labels, message):
    with pytest.raises(ConfigError, match=message):
        pooling_task(task, supported, form="pair", num_labels=num_labels)


@pytest.mark.parametrize(
    ("config", "kwargs", "expected"),
    [
        ('{"architectures": ["BertForSequenceClassification"]}', {}, "pair"),
        ('{"architectures": ["Qwen3ForCausalLM"]}', {}, "apart"),
        ('{"architectures": ["Qwen3ForCausalLM"]}', {"convert": "classify"}, "pair"),
        ('{"architectures": ["BertForSequenceClassification"]}', {"convert": "embed"}, "apart"),
        (
            '{"architectures": ["Qwen3ForCausalLM"]}',
            {
                "hf_overrides": {
                    "architectures": ["Qwen3ForSequenceClassification"],
                    "is_original_qwen3_reranker": True,
                }
            },
            "joined",
        ),
        ('{"architectures": ["XForSequenceClassification"], "use_sep_token": false}', {}, "joined"),
    ],
)
def test_the_config_of_a_model_says_how_it_reads_pairs(tmp_path, config, kwargs, expected):
    (tmp_path / "config.json").write_text(config)
    assert form_of_scores(tmp_path, kwargs) == expected
