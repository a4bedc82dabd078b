"""Text to token ids and back: one rendering, one tokenization, no control tokens from data.

Wraps the tokenizer of a checkpoint. A value of a row is never a template.
"""

import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from raybatch.config import SpecialTokens as SpecialTokensMode
from raybatch.errors import ConfigError, MissingDependency
from raybatch.installation import install_command
from raybatch.models.json_files import read_json
from raybatch.records.types import TokenIds
from raybatch.text.chat import (
    INSTRUCTING,
    LONGEST,
    ROLES,
    InvalidPrompt,
    Message,
    RenderError,
    TokenizeError,
    as_shown,
    check_messages,
    for_template,
    map_texts,
    mark_longest,
    texts,
)
from raybatch.text.chat_template import ChatTemplate
from raybatch.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as FastTokenizer
    from transformers import PreTrainedTokenizerFast

# transformers imports its modules when they are first used, which two threads must not do at once
_IMPORTING = threading.Lock()
# tokenizer.json defines a tokenizer of these classes completely, without code of a model family
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")

# the user message in trial renderings of a template
_PLAIN: Message = {"role": "user", "content": "plain"}
_RESERVED_OPTIONS = (
    *("conversation", "tokenize", "return_dict", "return_tensors", "padding", "truncation"),
    *("max_length", "tokenizer_kwargs", "return_assistant_tokens_mask", "chat_template"),
)


class Prompt(NamedTuple):
    """The prompt of one row in tokens, or why it has none.

    Args:
        token_ids: int32; set even if the prompt is too long.
        error: "" or "Type: message".
        is_filtered: the row is dropped on purpose (`on_too_long="drop"`) but keeps its place.
        num_special: number of special tokens of the model in the texts of the row.
        payload: JSON for the backend, with the ids or instead of them; None sends only the ids.
        cuttable: start and end of the tokens that may be cut: between those that the tokenizer
            adds around a text, or in the longest message; None if all may be cut.
        engine_ids: `token_ids` before stand-ins for images were put in; None if equal.
    """

    token_ids: TokenIds | None
    error: str = ""
    is_filtered: bool = False
    num_special: int = 0
    payload: str | None = None
    cuttable: tuple[int, int] | None = None
    num_images: int = 0
    engine_ids: TokenIds | None = None

    @property
    def is_requested(self) -> bool:
        """Whether the row is sent to an engine."""
        return not self.error and not self.is_filtered

    @property
    def known_ids(self) -> TokenIds:
        """The tokens of a prompt that has some."""
        assert self.token_ids is not None, "a prompt without tokens has an error"
        return self.token_ids

    def without(self, num_special: int) -> Self:
        """Return the same prompt, its count of special tokens lowered by `num_special`."""
        return self._replace(num_special=max(0, self.num_special - num_special))


class SpecialTokens:
    """Finds special tokens in text and escapes them.

    The escaping tokenizer is the model's, with every special token renamed to a name that no text
    contains. It gives the same ids, so the new names yield control tokens, and the old names in a
    row are ordinary text. The whole prompt is tokenized in one pass, not message by message.

    Args:
        fast: the model's tokenizer, read only.
        names: text of every special token to its id.
    """

    def __init__(self, fast: "FastTokenizer", names: Mapping[str, int]) -> None:
        self._fast = fast
        self._ids = dict(names)
        # random, so that no row contains the name of a renamed token; not part of any result
        nonce = secrets.token_hex(8)
        numbered = list(enumerate(sorted(names)))
        self._renamed = {name: f"\ue000{nonce}{idx}\ue001" for idx, name in numbered}
        self._marks = {name: f"\ue002{nonce}{idx}\ue003" for idx, name in numbered}
        self._pattern = _alternatives(names)
        self._swaps = {**self._renamed, **{mark: name for name, mark in self._marks.items()}}
        self._swap_pattern = _alternatives(self._swaps)
        normalizer, added = fast.normalizer, fast.get_added_tokens_decoder().values()
        others = {token.content for token in added if token.special and token.normalized}
        self._normalized_pattern = None
        if normalizer is not None and others:
            others |= {normalizer.normalize_str(name) for name in others}
            self._normalized_pattern = _alternatives(others)

    def count(self, text: str) -> int:
        """Return how many special tokens the tokenizer would find in `text`."""
        num_special = len(self._pattern.findall(text)) if self._ids else 0
        if self._normalized_pattern is None:
            return num_special
        normalized = self._fast.normalizer.normalize_str(text)
        return max(num_special, len(self._normalized_pattern.findall(normalized)))

    def mark(self, text: str) -> str:
        """Replace every special token in a row's text by a mark."""
        return self._pattern.sub(lambda match: self._marks[match.group()], text)

    def protect(self, text: str) -> str:
        """Rename the special tokens of a rendered prompt, and turn marks back into text."""
        return self._swap_pattern.sub(lambda match: self._swaps[match.group()], text)

    @cached_property
    def escaping(self) -> "FastTokenizer":
        """The tokenizer with renamed special tokens, built on first use.

        Raises:
            ConfigError: the tokenizer cannot be rebuilt with the same ids.
        """
        renamed = self._renamed
        state = json.loads(self._fast.to_str())
        for token in state["added_tokens"]:
            token["content"] = renamed.get(token["content"], token["content"])
        model = state["model"]
        vocab = model["vocab"]
        if isinstance(vocab, list):
            model["vocab"] = [[renamed.get(piece, piece), score] for piece, score in vocab]
        else:
            model["vocab"] = {renamed.get(piece, piece): idx for piece, idx in vocab.items()}
        if model.get("unk_token") is not None:
            model["unk_token"] = renamed.get(model["unk_token"], model["unk_token"])
        if model.get("merges"):
            # without merges that read or write one of the tokens
            pairs = ((p, p.split(" ") if isinstance(p, str) else p) for p in model["merges"])
            model["merges"] = [
                pair for pair, parts in pairs if renamed.keys().isdisjoint((*parts, "".join(parts)))
            ]
        escaping = type(self._fast).from_str(json.dumps(state))
        for name, token_id in self._ids.items():
            if escaping.token_to_id(renamed[name]) != token_id:
                raise ConfigError(
                    f"special token {name!r} of this tokenizer cannot be escaped; "
                    'set special_tokens="allow" if every row can be trusted'
                )
        return escaping


def _alternatives(names: Iterable[str]) -> re.Pattern[str]:
    """Match any of the names, the longest first; without names, nothing."""
    ordered = sorted(names, key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")


class Tokenizer:
    """The tokenizer of one model; build it with `Tokenizer.load`.

    Args:
        tokenizer: a fast tokenizer of transformers; owned by this object.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        fast = getattr(tokenizer, "backend_tokenizer", None)
        if fast is None:
            raise ConfigError(
                f"{type(tokenizer).__name__} has no tokenizer.json; convert it with transformers "
                "(save_pretrained of a fast tokenizer) and try again"
            )
        fast.no_truncation()
        fast.no_padding()
        self._tokenizer = tokenizer
        self._fast = fast
        added = fast.get_added_tokens_decoder().items()
        names = {token.content: int(token_id) for token_id, token in added if token.special}
        more = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        names |= {str(name): int(token_id) for name, token_id in more}
        self.special_token_ids: Mapping[str, int] = names
        self.special_ids = frozenset(names.values())
        self.vocab_size = int(fast.get_vocab_size(with_added_tokens=True))
        self._special = SpecialTokens(fast, names)
        self.decode_batch = Detokenizer(tokenizer, special_ids=self.special_ids).decode_batch
        self._probes: dict[tuple[str, str], bool] = {}
        self._templates: dict[str, ChatTemplate] = {}

    @classmethod
    def load(cls, model_path: str | os.PathLike[str]) -> "Tokenizer":
        """Load the tokenizer of a checkpoint directory or hub id; never runs its code.

        Raises:
            ConfigError: there is no tokenizer that can be used.
            MissingDependency: transformers is not installed.
        """
        try:
            with _IMPORTING:
                loader = _loader(Path(model_path))
        except ModuleNotFoundError as error:
            raise MissingDependency(
                f"tokenizers need transformers: {install_command('cpu')}"
            ) from error
        try:
            tokenizer = loader.from_pretrained(os.fspath(model_path), trust_remote_code=False)
        except Exception as error:  # a damaged file raises a bare exception in the library
            raise ConfigError(f"no usable tokenizer in {model_path}: {error}") from error
        loaded = cls(tokenizer)
        config = read_json(Path(model_path) / "config.json") or {}
        of_model = (config.get("text_config") or config).get("vocab_size")
        # prompts in tokens may have ids that the model knows and its tokenizer does not
        if isinstance(of_model, int):
            loaded.vocab_size = max(loaded.vocab_size, of_model)
        return loaded

    @property
    def bos_id(self) -> int | None:
        """Id of the begin token, which starts a text; None if the model has none."""
        return None if (found := self._tokenizer.bos_token_id) is None else int(found)

    @property
    def hugging_face(self) -> "PreTrainedTokenizerFast":
        """The tokenizer of transformers; read-only."""
        return self._tokenizer

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def template_reads(self, name: str, *, chat_template: str | None = None) -> bool:
        """Return whether the chat template mentions `name`, and so may read it."""
        if chat_template is None and not self.has_chat_template:
            return False
        tools: list[dict[str, Any]] | None = [{}] if name == "tools" else None
        return name in str(self._tokenizer.get_chat_template(chat_template, tools))

    @cached_property
    def frame(self) -> tuple[int, int]:
        """(before, after): the numbers of tokens that the tokenizer adds around a plain text."""
        places = self._fast.encode("a").sequence_ids
        text_places = [i for i, sequence in enumerate(places) if sequence is not None]
        return (text_places[0], len(places) - 1 - text_places[-1]) if text_places else (0, 0)

    @property
    def has_types(self) -> bool:
        """Whether the model reads token type ids, which tell the texts of a pair apart."""
        return "token_type_ids" in self._tokenizer.model_input_names

    def fast_for(self, text: str, special_tokens: SpecialTokensMode) -> "tuple[FastTokenizer, int]":
        """Return (the tokenizer to use for a text, the number of special tokens in the text)."""
        num_special = self._special.count(text)
        is_escaped = special_tokens == "escape" and num_special > 0
        return (self._special.escaping if is_escaped else self._fast), num_special

    def count_special(self, text: str) -> int:
        """Return how many special tokens are written out in `text`."""
        return self._special.count(text)

    def encode(self, text: str, *, special_tokens: SpecialTokensMode = "escape") -> TokenIds:
        """Return the ids of a plain prompt, see `read`."""
        return self.read(text, special_tokens=special_tokens).known_ids

    def read(self, text: str, *, special_tokens: SpecialTokensMode = "escape") -> Prompt:
        """Return a plain prompt in tokens, with the begin token if the model uses one.

        With "escape", special tokens in `text` are ordinary text; "allow" lets them be control
        tokens, and a begin token at the start of `text` is not doubled.

        Raises:
            InvalidPrompt: not a string, or no tokens.
            TokenizeError: the tokenizer failed.
        """
        if not isinstance(text, str):
            raise InvalidPrompt(f"prompt must be a string, got {type(text).__name__}")
        fast, num_special = self.fast_for(text, special_tokens)
        ids = _encode(fast, text, add_special_tokens=True)
        bos_id = self._tokenizer.bos_token_id
        if fast is self._fast and bos_id is not None and [bos_id] * 2 == ids[:2].tolist():
            ids = ids[1:]
        before, behind = self.frame
        before = max(before, int(ids[0] == bos_id))
        return Prompt(ids, num_special=num_special, cuttable=(before, len(ids) - behind))

    def read_chat(
        self,
        messages: object,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        row_options: Mapping[str, Any] | None = None,
        special_tokens: SpecialTokensMode = "escape",
        has_images: bool = False,
        cut_from: int | None = None,
    ) -> Prompt:
        """Render messages with the chat template and tokenize the result once.

        The prompt ends with the start of a new message, or inside a last one of the assistant.

        Args:
            messages: of one row, see `check_messages`.
            chat_template: replaces the model's; part of the job, never of a row.
            chat_template_kwargs: options of the template, such as `enable_thinking`.
            row_options: options of the row, such as its tools; they override the others, and their
                texts are read like those of messages.
            special_tokens: with "escape", special tokens in messages are ordinary text, and only
                the template writes control tokens; with "allow", messages may as well.
            has_images: parts of the type "image" are placeholders; else all parts are text.
            cut_from: number of tokens from which the result has `cuttable`; None for never.

        Raises:
            ConfigError: no template, or an option that a template cannot have.
            InvalidPrompt: the messages are malformed.
            RenderError: the template failed.
            TokenizeError: the tokenizer failed.
        """
        if chat_template is None and not self.has_chat_template:
            raise ConfigError(
                "the model has no chat template; give chat_template or use prompt= for plain text"
            )
        options = dict(chat_template_kwargs or {})
        _check_options(options, row_options or {})
        template = self._template(chat_template, {**options, **(row_options or {})}.get("tools"))
        checked = self._shown(messages, template, has_images=has_images)
        # last, as a message, so that nothing is done with the one that is not with the other
        checked = [*checked, {"role": "", **(row_options or {})}]
        strings = texts(checked)
        num_special = sum(map(self._special.count, strings))
        # a template that joins neighbouring texts would make a token whole that is spread over them
        if special_tokens == "escape" and self._special.count("".join(strings)) > num_special:
            raise InvalidPrompt("a special token is spread over several messages; remove it")
        for role in {message["role"] for message in checked} - {*ROLES, ""}:
            if special_tokens == "escape" and self._special.count(role):
                raise InvalidPrompt(
                    f"the role {role!r} is a special token of the model; use another"
                )
        is_escaped = special_tokens == "escape" and num_special > 0
        if is_escaped:
            checked = map_texts(checked, self._special.mark)
        *checked, of_row = checked
        options |= {name: value for name, value in of_row.items() if name != "role"}
        protect = self._special.protect if is_escaped else str
        fast = self._special.escaping if is_escaped else self._fast
        rendered = protect(self._render(template, checked, dict(options)))
        ids, cuttable = _encode(fast, rendered, add_special_tokens=False), None
        if cut_from is not None and len(ids) >= cut_from:

            def place_of(*among: int) -> tuple[int, int]:
                marked = mark_longest(checked, among)
                frame = protect(self._render(template, marked, dict(options)))
                return _between(fast, rendered, frame.split(LONGEST))

            cuttable = _cuttable(checked, place_of, len(ids) - cut_from if cut_from else None)
        return Prompt(ids, num_special=num_special, cuttable=cuttable)

    def _shown(
        self, messages: object, template: ChatTemplate, *, has_images: bool
    ) -> list[Message]:
        """Return checked messages in the form for templates."""
        checked = check_messages(messages, kinds=("text", "image") if has_images else ("text",))
        takes_parts = partial(self._can_take_parts, template)
        has_calls = any("tool_calls" in message for message in checked)
        checked = for_template(
            checked,
            takes_parts=takes_parts,
            knows_developer=template.knows_developer,
            wants_texts=has_calls and self._wants_texts(template),
        )
        if has_images and not all(
            takes_parts(message["role"])
            for message in checked
            if isinstance(message["content"], list)
        ):
            raise InvalidPrompt("the chat template does not render image parts")
        return checked

    def decode(
        self,
        token_ids: npt.ArrayLike,
        skip_special_tokens: bool = True,
        *,
        after: npt.ArrayLike | None = None,
    ) -> str:
        """Return the text of token ids, see `Detokenizer.decode_batch`."""
        return self.decode_batch([token_ids], skip_special_tokens, after=[after])[0]

    def _template(self, chat_template: str | None, tools: object) -> ChatTemplate:
        try:
            # by name if the model has several
            text = str(self._tokenizer.get_chat_template(chat_template, tools))
            if text not in self._templates:
                self._templates[text] = ChatTemplate(text)
            return self._templates[text]
        except Exception as error:  # a template is a program and may raise anything
            raise RenderError(f"chat template: {type(error).__name__}: {error}") from error

    def _render(
        self, template: ChatTemplate, messages: list[Message], options: dict[str, Any]
    ) -> str:
        is_continued = messages[-1]["role"] == "assistant"
        if "continue_final_message" not in options:
            is_continued = is_continued and not options.get("add_generation_prompt", False)
            options["continue_final_message"] = is_continued
        options.setdefault("add_generation_prompt", not options["continue_final_message"])
        options = {**self._tokenizer.special_tokens_map, **options}
        # a null at the end cannot be continued
        kept = messages[-1:] if options["continue_final_message"] else []
        shown = as_shown(messages[: len(messages) - len(kept)], keeps_null=template.asks_for_null)
        shown += as_shown(kept, keeps_null=True)
        try:
            if options.get("tools"):
                options["tools"] = [_tool_schema(tool) for tool in options["tools"]]
            return template.render(shown, **options)
        except Exception as error:  # as above
            raise RenderError(f"chat template: {type(error).__name__}: {error}") from error

    def _can_take_parts(self, template: ChatTemplate, role: str) -> bool:
        """Return whether the template renders all parts of a content that is a list."""
        key = (template.text, role)
        if key not in self._probes:
            parts = [{"type": "text", "text": text} for text in ("first probe", "other probe")]
            probe: Message = {"role": role, "content": parts}
            messages = [probe] if role == "user" else [_PLAIN, probe]
            if role in ("system", "developer"):
                messages.reverse()
            shown = self._probed(template, messages)
            # some render only the first part, and some the repr of the list
            is_whole = all(part["text"] in shown for part in parts)
            self._probes[key] = is_whole and "'type'" not in shown
        return self._probes[key]

    def _wants_texts(self, template: ChatTemplate) -> bool:
        """Return whether the template fails if arguments of calls are no strings."""
        key = (template.text, "arguments")
        if key not in self._probes:
            call: dict[str, Any] = {
                "id": "call00000",
                "type": "function",
                "function": {"name": "probe"},
            }
            asking: Message = {"role": "assistant", "content": None, "tool_calls": [call]}
            shown = []
            forms: tuple[object, ...] = ({}, "{}")
            for arguments in forms:
                call["function"] = {"name": "probe", "arguments": arguments}
                shown.append(self._probed(template, [_PLAIN, asking]))
            self._probes[key] = not shown[0] and bool(shown[1])
        return self._probes[key]

    def _probed(self, template: ChatTemplate, messages: list[Message]) -> str:
        """Return the rendered messages; "" if the template refuses them."""
        try:
            return self._render(template, messages, {"add_generation_prompt": True})
        except RenderError:
            return ""


def _tool_schema(tool: Any) -> Any:  # noqa: ANN401 - of OpenAI, or a function
    """Return a tool in the form for templates."""
    if not callable(tool):
        return tool
    from transformers.utils import get_json_schema

    return get_json_schema(tool)


def _loader(model_path: Path) -> Any:  # noqa: ANN401 - a class of transformers
    """Return the class that loads this tokenizer; the general one imports all of torch."""
    config = model_path / "tokenizer_config.json"
    try:
        name = json.loads(config.read_text(encoding="utf-8")).get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        name = None
    if name in _PLAIN_CLASSES and (model_path / "tokenizer.json").exists():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def encoding_of(
    fast: "FastTokenizer", text: str, other: str | None = None, *, add_special_tokens: bool = True
) -> "Encoding":
    """Return the encoding of a text, or of a pair of texts, as the tokenizers library makes it.

    Raises:
        TokenizeError: the tokenizer failed.
    """
    with _as_tokenize_error():
        return fast.encode(text, other, add_special_tokens=add_special_tokens)


@contextmanager
def _as_tokenize_error() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the tokenizer's library raises bare exceptions of any kind
        raise TokenizeError(f"{type(error).__name__}: {error}") from error


def _encode(fast: "FastTokenizer", text: str, *, add_special_tokens: bool) -> TokenIds:
    with _as_tokenize_error():
        # without token offsets, which are not used
        ids = fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    if not ids:
        raise InvalidPrompt("prompt is empty")
    return np.asarray(ids, np.int32)


def _check_options(options: Mapping[str, Any], row_options: Mapping[str, Any]) -> None:
    """Raise ConfigError or InvalidPrompt for names that are no options of a template."""
    for name in _RESERVED_OPTIONS:
        if name in options:
            raise ConfigError(
                f"chat_template_kwargs: {name!r} is set by raybatch and cannot be changed"
            )
        if name in row_options:
            raise InvalidPrompt(f"{name!r} is no chat template option of a row; leave it out")


def _cuttable(
    messages: Sequence[Message], place_of: Callable[..., tuple[int, int]], excess: int | None
) -> tuple[int, int]:
    """Return the tokens that may be cut: of the longest message, or of all turns if that is short.

    A history of many messages loses whole ones, never its instructions or its end.

    Args:
        place_of: the longest text of messages at some places, of all without any.
        excess: tokens beyond the context; None takes the longest message in any case.
    """
    start, stop = longest = place_of()
    turns = [i for i, one in enumerate(messages) if one["role"] not in INSTRUCTING]
    if excess is None or stop - start > excess + 1 or not turns:
        return longest
    start, stop = place_of(turns[0])[0], place_of(turns[-1])[1]
    return (start, stop) if start < stop else longest


def _between(fast: "FastTokenizer", text: str, frame: Sequence[str]) -> tuple[int, int]:
    """Return the tokens of a text between the two parts of its frame; (0, 0) without such."""
    start, stop = len(frame[0]), len(text) - len(frame[-1])
    is_framed = text.startswith(frame[0]) and text.endswith(frame[-1])
    if len(frame) != 2 or not is_framed or start >= stop:
        return 0, 0
    offsets = encoding_of(fast, text, add_special_tokens=False).offsets
    inside = [i for i, (a, b) in enumerate(offsets) if start <= a and b <= stop]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)
