"""Images of rows: which are read and which refused, and what plan, engine and endpoint see."""

import json
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from raybatch.compat.processor import INPUT_ERROR_COLUMN, Preprocess, add_prompts
from raybatch.errors import ConfigError
from raybatch.records.payload import images_of, prompt_ids_of
from raybatch.records.types import Request, Sampling
from raybatch.rows.prepare import fit_prompt
from raybatch.rows.render import PromptReader
from raybatch.rows.stage_model import find_model, load_tokenizer
from raybatch.stages.feeder import LLMStage
from raybatch.text.tokenizer import Tokenizer
from raybatch_openai.endpoint.body import body_of
from raybatch_openai.endpoint.options import openai_options
from tests.backends.image_models import IMAGE, asking, data_url, png, save_image_tokenizer

CAT, DOG = png(1), png(2)
URL = {"base_url": "http://localhost/v1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = save_image_tokenizer(tmp_path_factory.mktemp("images") / "model")
    place = Tokenizer.load(folder).encode(IMAGE, special_tokens="allow")
    (folder / "config.json").write_text(json.dumps({"image_token_id": int(place[0])}))
    (folder / "model.safetensors").touch()
    return folder


def read(model, table, *, allowed=None, **stage):
    options = {"engine_kwargs": {"allowed_local_media_path": str(allowed)}} if allowed else {}
    backend = {"kind": "vllm", "options": options}
    config = LLMStage(str(model), **{"backend": backend, **stage}).config
    return PromptReader(config, Tokenizer.load(model)).read(pa.table(table))


def read_one(model, messages, **options):
    (prompt,) = read(model, {"messages": [json.dumps(messages)]}, messages="messages", **options)
    return prompt


def request_of(prompt):
    return Request(
        request_id=0,
        row_id="r",
        prompt_token_ids=prompt.token_ids,
        sampling=Sampling(),
        payload=json.loads(prompt.payload),
    )


def sent(model, prompt):
    """What vLLM is given: a text, and images."""
    request = request_of(prompt)
    text = Tokenizer.load(model).decode(prompt_ids_of(request), skip_special_tokens=False)
    return text, images_of(request.payload)


def parts(*found):
    return [{"role": "user", "content": list(found)}]


def test_a_processor_tells_the_prompt_that_was_asked_and_not_its_stand_ins(model):
    image = {"type": "image_url", "image_url": {"url": data_url(CAT)}}
    prompt = read_one(model, parts({"type": "text", "text": "a"}, image))
    rows = pa.table({"id": [1]})
    (row,) = add_prompts(rows, [prompt], Tokenizer.load(model)).to_pylist()
    expected = prompt_ids_of(request_of(prompt)).tolist()
    assert row["prompt_token_ids"] == expected != prompt.token_ids.tolist()
    assert row["prompt"] == "<|user|>a<image><|assistant|>"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": data_url(CAT)}},
        {"type": "image_url", "image_url": data_url(CAT)},
        {"type": "image", "image": data_url(CAT), "text": None},
    ],
    ids=["openai", "text", "image"],
)
def test_an_image_of_a_message_stands_where_the_template_writes_it(model, part):
    prompt = read_one(model, parts({"type": "text", "text": "a"}, part))
    assert sent(model, prompt) == ("<|user|>a<image><|assistant|>", [CAT])


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (CAT, pa.binary(), [CAT]),
        ([CAT, DOG], pa.list_(pa.binary()), [CAT, DOG]),
        (data_url(CAT), pa.string(), [CAT]),
        ({"bytes": CAT, "path": None}, None, [CAT]),
    ],
    ids=["bytes", "list", "url", "struct"],
)
def test_images_of_a_column_come_before_the_text(model, value, kind, expected):
    table = {"text": ["what"], "image": pa.array([value], kind)}
    (prompt,) = read(model, table, prompt="{text}", images="image")
    assert sent(model, prompt) == (f"<|user|>{IMAGE * len(expected)}what<|assistant|>", expected)


@pytest.mark.parametrize(
    ("media", "expected"),
    [({"image": [CAT, DOG]}, [CAT, DOG]), ({"image": CAT, "video": None}, [CAT])],
    ids=["list", "one"],
)
def test_media_of_ray_data_llm_are_images(model, media, expected):
    options = {"messages": "messages", "conventional_images": "multimodal_data"}
    table = {"messages": [json.dumps(parts({"type": "text", "text": "a"}))]}
    (prompt,) = read(model, {**table, "multimodal_data": [media]}, **options)
    assert sent(model, prompt) == (f"<|user|>{IMAGE * len(expected)}a<|assistant|>", expected)
    (without,) = read(model, table, **options)
    assert without.payload is None


def test_media_that_a_function_returns_in_any_form_are_read(model):
    media = [{"image": CAT}, {"image": [CAT, DOG]}, {"image": data_url(DOG)}, None]
    table = pa.table(
        {"id": range(4), "messages": [json.dumps(parts({"type": "text", "text": "a"}))] * 4}
    )
    out = Preprocess(lambda row: {"multimodal_data": media[row["id"]]}, has_images=True)(table)
    assert out[INPUT_ERROR_COLUMN].to_pylist() == [""] * 4
    found = read(model, out, messages="messages", conventional_images="multimodal_data")
    assert [sent(model, prompt)[1] for prompt in found[:3]] == [[CAT], [CAT, DOG], [DOG]]
    assert found[3].payload is None


def test_media_that_are_no_images_make_an_error_row(model):
    table = {"messages": [json.dumps(parts())], "media": [{"video": CAT, "image": None}]}
    (prompt,) = read(model, table, messages="messages", images="media")
    assert "only images are supported, got video" in prompt.error


def test_a_row_without_an_image_is_text_alone(model):
    table = {"text": ["what"], "image": pa.array([None], pa.binary())}
    (prompt,) = read(model, table, prompt="{text}", images="image")
    assert (prompt.payload, prompt.num_images) == (None, 0)


def test_bare_parts_of_messages_are_places_for_images_of_the_column(model):
    text, place = {"type": "text", "text": "a"}, {"type": "image"}
    table = {"messages": [json.dumps(parts(place, text, place))], "image": [[CAT, DOG]]}
    (prompt,) = read(model, table, messages="messages", images="image")
    assert sent(model, prompt) == ("<|user|><image>a<image><|assistant|>", [CAT, DOG])


def test_images_beside_token_ids_go_along(model):
    ids = Tokenizer.load(model).encode("a<image>b", special_tokens="allow").tolist()
    table = {"ids": [ids], "image": [CAT]}
    (prompt,) = read(model, table, tokenized_prompt="ids", images="image")
    assert sent(model, prompt) == ("a<image>b", [CAT])


def test_token_ids_without_an_image_are_as_they_were(model):
    table = {"ids": [[97, 98]], "image": pa.array([None], pa.binary())}
    (prompt,) = read(model, table, tokenized_prompt="ids", images="image")
    assert (prompt.token_ids.tolist(), prompt.payload) == ([97, 98], None)


def test_the_name_of_the_place_in_a_text_is_no_place(model):
    prompt = read_one(model, asking("<image>", CAT))
    place = Tokenizer.load(model).encode(IMAGE, special_tokens="allow")[0]
    assert prompt_ids_of(request_of(prompt)).tolist().count(place) == 1


def shared(one, other):
    """Tokens that two prompts have in common at their beginnings."""
    num = min(len(one.token_ids), len(other.token_ids))
    differs = one.token_ids[:num] != other.token_ids[:num]
    return int(np.argmax(differs)) if differs.any() else num


def test_a_plan_shares_the_text_before_different_images_and_nothing_after(model):
    text = {"type": "text", "text": "look at this: "}
    cat, dog = (
        read_one(model, parts(text, {"type": "image", "image": data_url(image)}, text))
        for image in (CAT, DOG)
    )
    before = len(Tokenizer.load(model).encode("<|user|>look at this: ", special_tokens="allow"))
    assert before <= shared(cat, dog) <= before + 1
    assert cat.token_ids[-8:].tolist() == dog.token_ids[-8:].tolist()


def test_a_plan_shares_equal_images_with_all_that_is_before_them(model):
    first, other = (read_one(model, asking(text, CAT)) for text in ("a?", "b?"))
    after = len(Tokenizer.load(model).encode("a?<|assistant|>", special_tokens="allow"))
    assert shared(first, other) == len(first.token_ids) - after


def test_where_nobody_knows_the_place_nothing_is_shared(model, tmp_path):
    folder = save_image_tokenizer(tmp_path / "model")
    first, other = (read_one(folder, asking("a?", image)) for image in (CAT, DOG))
    assert shared(first, other) <= 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("https://a.example/cat.png", "not fetched"),
        ("/etc/hostname", "allowed_local_media_path, which is not set"),
        ("file:///etc/hostname", "allowed_local_media_path, which is not set"),
        ("data:image/png;base64,%%%", "not base64"),
        ("data:image/png,abc", "must be base64"),
        ("data:image/png;base64,", "is empty"),
        (7, "bytes or a data: URL"),
    ],
    ids=["http", "path", "file", "no-base64", "plain", "empty", "number"],
)
def test_an_image_that_is_not_taken_makes_an_error_row(model, source, message):
    prompt = read_one(model, parts({"type": "image", "image": source}))
    assert prompt.error.startswith("InvalidPrompt: ")
    assert message in prompt.error


def test_files_are_read_below_the_allowed_folder_alone(model, tmp_path):
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "cat.png").write_bytes(CAT)
    (tmp_path / "dog.png").write_bytes(DOG)
    (allowed / "link.png").symlink_to(tmp_path / "dog.png")
    found = {
        path: read_one(model, parts({"type": "image", "image": path}), allowed=allowed)
        for path in (
            str(allowed / "cat.png"),
            (allowed / "cat.png").as_uri(),
            str(allowed / ".." / "dog.png"),
            str(allowed / "link.png"),
            str(allowed / "none.png"),
        )
    }
    errors = [prompt.error for prompt in found.values()]
    assert errors[:2] == ["", ""]
    assert ["outside of" in error for error in errors[2:]] == [True, True, False]
    assert "cannot be read" in errors[4]


def test_an_image_of_too_many_pixels_is_never_unpacked(model):
    pytest.importorskip("PIL", reason="PIL is not installed here")
    header = bytearray(CAT)
    header[16:24] = (20_000).to_bytes(4, "big") * 2
    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    prompt = read_one(model, asking("a", bytes(header)))
    assert "DecompressionBombError" in prompt.error


def test_the_error_of_what_is_no_image_is_the_same_in_each_run(model):
    pytest.importorskip("PIL", reason="PIL is not installed here")
    assert (
        "cannot be read: PIL does not know its format"
        in read_one(model, asking("a", b"text")).error
    )


def test_a_file_over_the_size_of_a_row_is_not_read(model, tmp_path):
    (tmp_path / "cat.png").write_bytes(CAT)
    part = {"type": "image", "image": str(tmp_path / "cat.png")}
    prompt = read_one(model, parts(part), allowed=tmp_path, max_row_bytes=len(CAT) - 1)
    assert "larger than max_row_bytes" in prompt.error


@pytest.mark.parametrize(
    ("content", "images", "message"),
    [
        ([{"type": "image"}], [CAT, DOG], "fewer image parts"),
        ([{"type": "image"}, {"type": "image"}], [CAT], "more image parts than"),
        (asking("a", CAT)[0]["content"], [DOG], "in its messages and in its column"),
    ],
    ids=["many", "few", "both"],
)
def test_images_and_places_that_do_not_match_make_an_error_row(model, content, images, message):
    table = {"messages": [json.dumps(parts(*content))], "image": [images]}
    (prompt,) = read(model, table, messages="messages", images="image")
    assert message in prompt.error


def test_a_template_without_a_place_for_images_makes_error_rows(model):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    prompt = read_one(model, asking("a", CAT), chat_template=template)
    assert "does not render image parts" in prompt.error


def test_a_prompt_with_images_is_never_cut(model):
    prompt = read_one(model, asking("a" * 90, CAT))
    fitted = fit_prompt(prompt, max_tokens=4, max_model_len=64, on_too_long="truncate_left")
    assert fitted.error.startswith("PromptTooLong: ")
    assert fitted.error.endswith("set on_too_long='drop' to drop such rows")


def endpoint_body(table, **stage):
    backend = {"kind": "openai", "options": URL}
    config = LLMStage("served", backend=backend, **stage).config
    reader = PromptReader(config, load_tokenizer(config, find_model(config)))
    (prompt,) = reader.read(pa.table(table))
    assert prompt.error == ""
    return prompt, body_of(request_of(prompt), openai_options(URL), "m")[1]


def test_an_endpoint_is_sent_the_parts_of_messages_as_they_are():
    remote = {"type": "image_url", "image_url": {"url": "https://a.example/cat.png"}}
    content = [{"type": "text", "text": "a"}, remote, *asking("b", CAT)[0]["content"]]
    table = {"messages": [json.dumps(parts(*content))]}
    assert endpoint_body(table)[1]["messages"] == parts(*content)


def test_an_endpoint_is_sent_images_of_a_column_as_urls():
    _, body = endpoint_body({"text": ["a"], "image": [CAT]}, prompt="{text}", images="image")
    assert body["messages"] == asking("a", CAT)


def test_an_endpoint_takes_images_in_messages_alone():
    backend = {"kind": "openai", "options": URL}
    config = LLMStage("m", backend=backend, prompt="{text}", chat=False, images="image").config
    reader = PromptReader(config, load_tokenizer(config, find_model(config)))
    (prompt,) = reader.read(pa.table({"text": ["a"], "image": [CAT]}))
    assert "takes images in messages" in prompt.error


def test_an_image_for_an_endpoint_is_planned_as_a_few_tokens():
    cat, _ = endpoint_body({"messages": [json.dumps(asking("a", CAT))]})
    dog, _ = endpoint_body({"messages": [json.dumps(asking("a", DOG))]})
    assert len(cat.token_ids) < 200 < len(CAT)
    assert shared(cat, dog) < len(cat.token_ids) - 8


@pytest.mark.parametrize("kind", ["native", "fake", "transformers"])
def test_backends_that_read_text_refuse_images(kind, model):
    with pytest.raises(ConfigError, match="only reads text"):
        LLMStage("m", prompt="{text}", images="image", backend={"kind": kind})
    prompt = read_one(Path(model), asking("a", CAT), backend={"kind": kind})
    assert "must be a part of type 'text', got 'image_url'" in prompt.error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "{text}", "task": "embed"}, "task 'embed' only reads text"),
        ({"messages": lambda row: asking("a", CAT)}, "function must return"),
        ({"messages": [{"role": "user", "content": "{text}"}]}, "function must return"),
    ],
    ids=["task", "function", "templates"],
)
def test_images_that_would_be_left_out_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LLMStage("m", images="image", backend="vllm", **options)


def test_a_function_puts_images_into_its_messages(model):
    found = read(model, {"image": [CAT]}, messages=lambda row: asking("a", row["image"]))
    assert sent(model, found[0]) == ("<|user|><image>a<|assistant|>", [CAT])
