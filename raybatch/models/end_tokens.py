"""Where an answer ends: the end tokens that the files of a checkpoint name, all together."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from raybatch.errors import ConfigError
from raybatch.models.json_files import read_json

_logger = logging.getLogger(__name__)

_TOKENIZER, _CONFIG, _GENERATION = "tokenizer_config.json", "config.json", "generation_config.json"


def end_tokens(folder: Path, of_config: int | list[int] | None, *, below: int) -> tuple[int, ...]:
    """Return the tokens that end a sequence, ascending; `of_config` are those of config.json.

    As in vLLM, the tokenizer's and those of generation_config.json are among them. A model knows
    the ids `below` the size of its vocabulary.
    """
    named = {token_id for ids in _named(folder, of_config).values() for token_id in ids}
    return tuple(sorted(token_id for token_id in named if 0 <= token_id < below))


def warn_of_end_tokens(folder: Path) -> None:
    """Log a warning where none of the files names all end tokens."""
    config = read_json(folder / _CONFIG) or {}
    text_config = config.get("text_config") or config
    named = {
        file: ids for file, ids in _named(folder, text_config.get("eos_token_id")).items() if ids
    }
    if not named or set().union(*named.values()) in named.values():
        return
    files = ", ".join(
        f"{', '.join(map(str, sorted(ids)))} by {file}" for file, ids in named.items()
    )
    _logger.warning(
        "the files of %s do not agree on the end token (%s): answers end at any of them; set "
        "sampling.ignore_eos and sampling.stop_token_ids where that is wrong",
        folder,
        files,
    )


def _named(folder: Path, of_config: int | list[int] | None) -> dict[str, set[int]]:
    generation = read_json(folder / _GENERATION) or {}
    named = {
        _TOKENIZER: _of_tokenizer(folder),
        _CONFIG: of_config,
        _GENERATION: generation.get("eos_token_id"),
    }
    return {file: _ids(value, folder / file) for file, value in named.items()}


def _ids(value: int | list[int] | None, file: Path) -> set[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in ids):
        raise ConfigError(f"{file}: eos_token_id must be a token id or a list of them: {value!r}")
    return set(ids)


def _of_tokenizer(folder: Path) -> int | None:
    """Return the tokenizer's end token, as transformers reads it; None where no file names one."""
    config = read_json(folder / _TOKENIZER) or {}
    added: Mapping[str, Any] | None = config.get("added_tokens_decoder")
    name = config.get("eos_token")
    if added is None:
        name = (read_json(folder / "special_tokens_map.json") or {}).get("eos_token", name)
    name = name.get("content") if isinstance(name, dict) else name
    if name is None:
        return None
    found = [int(token_id) for token_id, token in (added or {}).items() if token["content"] == name]
    if found:
        return found[0]
    state = read_json(folder / "tokenizer.json") or {}
    found = [
        int(token["id"]) for token in state.get("added_tokens") or () if token["content"] == name
    ]
    return found[0] if found else _place(name, (state.get("model") or {}).get("vocab") or {})


def _place(name: str, vocab: Mapping[str, int] | Iterable[tuple[str, float]]) -> int | None:
    if isinstance(vocab, Mapping):
        return vocab.get(name)
    return next((place for place, (piece, _) in enumerate(vocab) if piece == name), None)
