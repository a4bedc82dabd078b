"""The same rows end at the same token, for the same reason and with the same text, on all engines.

The checkpoints have a different end token in each file that may name one, a begin token, added
tokens, and ids that are unknown to the tokenizer.
"""

import json
import logging
from contextlib import closing

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from raybatch.backends.registry import create_backend
from raybatch.config import BackendConfig, EngineConfig
from raybatch.errors import ConfigError
from raybatch.models.config import end_tokens, read_model_spec, warn_of_end_tokens
from raybatch.records.types import Request, Sampling
from raybatch.rows.options import StageConfig
from raybatch.rows.render import PromptReader
from raybatch.text.detokenizer import completion_text
from raybatch.text.tokenizer import Tokenizer
from tests.engine.tiny_models import build
from tests.engine.tiny_tokenizers import byte_level_bpe, llama_bpe, unigram

NUM_ROWS, MAX_TOKENS, NUM_UNKNOWN = 24, 20, 24
MADE = {"bpe": byte_level_bpe, "llama": llama_bpe}
ENGINE = EngineConfig(dtype="float32", device="cpu", max_num_seqs=8)
OPTIONS = (
    {},
    {"include_stop_str_in_output": True},
    {"skip_special_tokens": False},
    {"min_tokens": 9},
    {"ignore_eos": True},
    {"stop": ["@"]},
)


class Checkpoint:
    """A random model, its output for random prompts, and the tokens that end it."""

    def __init__(self, folder, make):
        self.folder = folder
        hub = make()
        self.vocab_size = len(hub) + NUM_UNKNOWN
        model = build("qwen3", vocab_size=self.vocab_size)
        chance = np.random.default_rng(7)
        self.prompts = [chance.integers(3, self.vocab_size, 12).tolist() for _ in range(NUM_ROWS)]
        self.message = []
        with torch.no_grad():
            for ids in self.prompts:
                made = model.generate(
                    torch.tensor([ids]), max_new_tokens=MAX_TOKENS, eos_token_id=None
                )
                self.message.append(made[0, len(ids) :].tolist())
        self.of_tokenizer, self.of_config, *self.of_generation, special = self._choose(hub, chance)
        self.special = hub.convert_ids_to_tokens(special)
        hub.add_special_tokens({"eos_token": hub.convert_ids_to_tokens(self.of_tokenizer)})
        hub.add_special_tokens({"additional_special_tokens": [self.special]})
        hub.save_pretrained(folder)
        model.config.eos_token_id = self.of_config
        model.save_pretrained(folder)
        ends_of = {"eos_token_id": self.of_generation}
        (folder / "generation_config.json").write_text(json.dumps(ends_of))
        self.tokenizer = Tokenizer.load(folder)
        self.special_id = special

    def _choose(self, hub, chance):
        """Return five tokens that each end a row; the last one only rows with it as stop token."""
        plain = [row for row in range(NUM_ROWS) if row % len(OPTIONS) in (0, 1)]
        message = {i for row in plain for i in self.message[row][2:] if i < len(hub)}
        known = sorted(message - set(hub.all_special_ids))
        for _ in range(10_000):
            five = chance.choice(known, 5, replace=False).tolist()
            ends = [five if row % 2 else five[:4] for row in plain]
            rows = zip(plain, ends, strict=True)
            firsts = {next((i for i in self.message[row] if i in some), None) for row, some in rows}
            if firsts >= set(five):
                return five
        raise AssertionError("the model generates too few tokens")

    @property
    def ends(self):
        return {self.of_tokenizer, self.of_config, *self.of_generation}

    def requests(self):
        requests = []
        for row, ids in enumerate(self.prompts):
            options = dict(OPTIONS[row % len(OPTIONS)])
            if row % 2:
                options["stop"] = [*options.get("stop", ()), self.special]
            config = StageConfig(
                model=str(self.folder),
                prompt="{x}",
                sampling=Sampling(**{"max_tokens": MAX_TOKENS} | options),
            )
            sampling = PromptReader(config, self.tokenizer).with_ends(config.sampling)
            prompt = np.array(ids, np.int32)
            requests.append(
                Request(request_id=row, row_id=str(row), prompt_token_ids=prompt, sampling=sampling)
            )
        return requests

    def answers(self, kind, engine=ENGINE, **options):
        """Return tokens, reasons and text of each row."""
        with closing(
            create_backend(str(self.folder), BackendConfig(kind=kind, options=options), engine)
        ) as backend:
            requests = self.requests()
            backend.submit(requests)
            done = {}
            while backend.num_unfinished():
                done |= {c.request_id: c for c in backend.poll()}
        found = []
        for request in requests:
            one = done[request.request_id]
            text = completion_text(one, request.sampling, self.tokenizer, request.prompt_token_ids)
            found.append(
                (one.error, one.token_ids.tolist(), one.finish_reason, one.stop_reason, text)
            )
        return found


@pytest.fixture(scope="module", params=sorted(MADE))
def checkpoint(request, tmp_path_factory):
    return Checkpoint(tmp_path_factory.mktemp(request.param), MADE[request.param])


@pytest.mark.parametrize("kind", ["native", "transformers"])
def test_answers_end_at_the_first_of_all_end_tokens(checkpoint, kind):
    seen = set()
    for request, message, found in zip(
        checkpoint.requests(), checkpoint.message, checkpoint.answers(kind), strict=True
    ):
        error, tokens, reason, _, text = found
        assert error == ""
        sampling = request.sampling
        ends = {*sampling.stop_token_ids, *(set() if sampling.ignore_eos else checkpoint.ends)}
        if reason == "stop" and tokens[-1] in ends:
            seen.add(tokens[-1])
        # the tokens themselves are compared between engines
        if sampling.min_tokens or "@" in sampling.stop:
            continue
        place = next((i + 1 for i, token in enumerate(message) if token in ends), MAX_TOKENS)
        assert tokens == message[:place]
        assert reason == ("stop" if message[place - 1] in ends else "length")
        prompt = request.prompt_token_ids.tolist()
        decode = checkpoint.tokenizer.hugging_face.backend_tokenizer.decode
        hidden = reason == "stop" and not sampling.include_stop_str_in_output
        whole = decode(prompt + tokens[: len(tokens) - hidden], sampling.skip_special_tokens)
        if "\ufffd" not in whole:
            assert decode(prompt, sampling.skip_special_tokens) + text == whole
    assert {*checkpoint.ends, checkpoint.special_id} <= seen


def test_transformers_ends_as_the_native_engine(checkpoint):
    assert checkpoint.answers("transformers") == checkpoint.answers("native")


@pytest.mark.vllm
def test_vllm_ends_as_the_native_engine(tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    checkpoint = Checkpoint(tmp_path, llama_bpe)
    kwargs = {"num_gpu_blocks_override": 64, "seed": 0}
    engine = EngineConfig(block_size_tokens=32, dtype="float32", max_num_seqs=8)
    assert checkpoint.answers("vllm", engine, engine_kwargs=kwargs) == checkpoint.answers("native")


def rewritten(folder, form):
    """Write the files of a tokenizer in an older form."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    name = config["eos_token"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if form == "dict":
        config["eos_token"] = {"__type": "AddedToken", "content": name, "special": True}
    if form == "map":
        config["eos_token"] = "<unk>" if "<unk>" in tokenizer.get_vocab() else "a"
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": name}))
    if form == "listed":
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        config["added_tokens_decoder"] = {
            str(i): {"content": token.content, "special": token.special}
            for i, token in added.items()
        }
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "a"}))
    if form == "none":
        del config["eos_token"]
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("form", ["as saved", "dict", "map", "listed", "none"])
@pytest.mark.parametrize("make", [byte_level_bpe, llama_bpe, unigram])
@pytest.mark.parametrize("place", ["added", "of the vocabulary"])
def test_the_end_token_is_the_one_that_transformers_reads(make, form, place, tmp_path):
    hub = make()
    if place == "added":
        hub.add_special_tokens({"eos_token": "<|done|>"})
    hub.save_pretrained(tmp_path)
    rewritten(tmp_path, form)
    token_id = AutoTokenizer.from_pretrained(tmp_path).eos_token_id
    expected = () if token_id is None else (token_id,)
    assert end_tokens(tmp_path, None, below=10**6) == expected


@pytest.mark.parametrize(
    ("of_config", "of_generation", "is_reported"),
    [
        (2, [2, 0], False),
        (None, None, False),
        (0, 0, True),
        (None, [0, 1], True),
        ([0, 2], 2, False),
    ],
)
def test_files_that_do_not_agree_are_warned_of(
    of_config, of_generation, is_reported, tmp_path, caplog
):
    llama_bpe().save_pretrained(tmp_path)
    for name, ids in (("config.json", of_config), ("generation_config.json", of_generation)):
        (tmp_path / name).write_text(json.dumps({"eos_token_id": ids}))
    with caplog.at_level(logging.WARNING):
        warn_of_end_tokens(tmp_path)
    message = [
        r.getMessage() for r in caplog.records if "disagree on the end token" in r.getMessage()
    ]
    assert len(message) == is_reported
    assert all("2 by tokenizer_config.json" in text for text in message)


def test_an_end_token_that_the_model_does_not_know_is_none(tmp_path):
    build("qwen3", vocab_size=260).save_pretrained(tmp_path)
    byte_level_bpe().save_pretrained(tmp_path)
    assert read_model_spec(tmp_path).eos_token_ids == ()


@pytest.mark.parametrize("value", ["2", [2, "</s>"], 1.5, True])
def test_an_end_token_that_is_no_id_is_refused_with_its_file(value, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id must be a"):
        end_tokens(tmp_path, None, below=10)
