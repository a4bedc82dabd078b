"""Checks the tokenizer files and chat template of a checkpoint without loading a tokenizer."""

from pathlib import Path
from typing import NamedTuple

from jinja2 import TemplateError

from raybatch.errors import ConfigError
from raybatch.models.json_files import read_json
from raybatch.text.chat_template import ChatTemplate

_CONFIG, _FAST = "tokenizer_config.json", "tokenizer.json"
# files that transformers may convert to a fast tokenizer if there is no tokenizer.json
_VOCABULARIES = ("*.model", "*.spm", "*.tiktoken", "*.txt", "*.codes", "*vocab*", "tekken.json")
_TEMPLATE, _MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
_DEFAULT, _WITH_TOOLS = "default", "tool_use"


class TemplateText(NamedTuple):
    """A chat template and its file."""

    file: Path
    text: str


def check_tokenizer(folder: Path) -> None:
    """Raise ConfigError if tokenizer files are missing or corrupt.

    Raises:
        ConfigError: names the file.
    """
    from tokenizers import Tokenizer as FastTokenizer  # slow to load

    read_json(folder / _CONFIG)
    fast = folder / _FAST
    if fast.is_file():
        try:
            FastTokenizer.from_file(str(fast))
        except Exception as error:  # the library raises bare exceptions
            raise ConfigError(
                f"{fast} is not a tokenizer ({error}); download it again, in a clone with "
                "`git lfs pull`"
            ) from error
    elif not any(next(folder.glob(pattern), None) for pattern in _VOCABULARIES):
        raise ConfigError(
            f"{folder} has no {_FAST}, so no prompt can be tokenized; put the tokenizer of the "
            "model next to its weights (save_pretrained of a fast tokenizer in transformers)"
        )


def check_template(folder: Path, *, has_tools: bool) -> None:
    """Raise ConfigError if the chat template of a checkpoint cannot be parsed.

    A folder without a template is fine; there may be a separate template for tools.

    Raises:
        ConfigError: names the file and the place in it.
    """
    template = template_of(folder, has_tools=has_tools)
    if template is None:
        return
    try:
        ChatTemplate(template.text)
    except (TemplateError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        where = f", line {line}" if line else ""
        raise ConfigError(
            f"{template.file}{where}: the chat template cannot be parsed: {error}; mend it, give "
            "another as chat_template, or send plain text with chat=False"
        ) from error


def template_of(folder: Path, *, has_tools: bool) -> TemplateText | None:
    """Return the chat template of a checkpoint; None if it has none.

    Raises:
        ConfigError: a file cannot be read.
    """
    # template files take precedence over the config's template
    paths = {path.stem: path for path in sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))}
    if (folder / _TEMPLATE).is_file():
        paths = {_DEFAULT: folder / _TEMPLATE, **paths}
    templates = {name: TemplateText(path, _read(path)) for name, path in paths.items()}
    if not templates:
        path = folder / _CONFIG
        value = (read_json(path) or {}).get("chat_template")
        if isinstance(value, str):
            value = [{"name": _DEFAULT, "template": value}]
        templates = {
            str(one["name"]): TemplateText(path, str(one["template"]))
            for one in (value if isinstance(value, list) else [])
            if isinstance(one, dict) and {"name", "template"} <= set(one)
        }
    if has_tools and _WITH_TOOLS in templates:
        return templates[_WITH_TOOLS]
    return templates.get(_DEFAULT)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
