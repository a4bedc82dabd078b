"""Keeps text from a dataset apart from control tokens of the model.

The escaping tokenizer is the model's own with every special token renamed to a name that no text
can hold. It gives the same ids, so text written with the new names yields control tokens, and the
old names, wherever a row has them, are ordinary text. One pass over the whole prompt stays one
pass: nothing is cut at the border of a message.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from raybatch.errors import ConfigError


class SpecialTokens:
    """Finds special tokens in text and takes their meaning away.

    Args:
        fast: the model's tokenizer, read only.
        names: text of every special token to its id.
    """

    def __init__(self, fast: FastTokenizer, names: Mapping[str, int]) -> None:
        self._fast = fast
        self._ids = dict(names)
        # unguessable, so that no row can hold the name of a renamed token; not part of any result
        nonce = secrets.token_hex(8)
        self._renamed = {
            name: f"\ue000{nonce}{idx}\ue001" for idx, name in enumerate(sorted(names))
        }
        self._marks = {name: f"\ue002{nonce}{idx}\ue003" for idx, name in enumerate(sorted(names))}
        self._pattern = _alternatives(names)
        self._swaps = {**self._renamed, **{mark: name for name, mark in self._marks.items()}}
        self._swap_pattern = _alternatives(self._swaps)
        self._normalized_pattern = self._build_normalized_pattern()
        self._escaping: FastTokenizer | None = None

    def count(self, text: str) -> int:
        """Return how many special tokens the tokenizer would find in `text`."""
        num_special = len(self._pattern.findall(text)) if self._ids else 0
        if self._normalized_pattern is None:
            return num_special
        normalized = self._fast.normalizer.normalize_str(text)
        return max(num_special, len(self._normalized_pattern.findall(normalized)))

    def mark(self, text: str) -> str:
        """Put a mark in the place of every special token of a row's text."""
        return self._pattern.sub(lambda match: self._marks[match.group()], text)

    def protect(self, text: str) -> str:
        """Give special tokens their new names, and marked text its own form back."""
        return self._swap_pattern.sub(lambda match: self._swaps[match.group()], text)

    @property
    def escaping(self) -> FastTokenizer:
        """The tokenizer with renamed special tokens, built on first use.

        Raises:
            ConfigError: the tokenizer cannot be rebuilt with the same ids.
        """
        if self._escaping is None:
            self._escaping = self._build_escaping()
        return self._escaping

    def _build_normalized_pattern(self) -> re.Pattern[str] | None:
        normalizer = self._fast.normalizer
        added = self._fast.get_added_tokens_decoder().values()
        names = {token.content for token in added if token.special and token.normalized}
        if normalizer is None or not names:
            return None
        return _alternatives(names | {normalizer.normalize_str(name) for name in names})

    def _build_escaping(self) -> FastTokenizer:
        state = json.loads(self._fast.to_str())
        for token in state["added_tokens"]:
            token["content"] = self._renamed.get(token["content"], token["content"])
        _rename_in_model(state["model"], self._renamed)
        escaping = FastTokenizer.from_str(json.dumps(state))
        for name, token_id in self._ids.items():
            if escaping.token_to_id(self._renamed[name]) != token_id:
                raise ConfigError(
                    f"special token {name!r} of this tokenizer cannot be escaped; "
                    'set special_tokens="allow" if every row can be trusted'
                )
        return escaping


def _rename_in_model(model: dict[str, Any], renamed: Mapping[str, str]) -> None:
    vocab = model["vocab"]
    if isinstance(vocab, list):
        model["vocab"] = [[renamed.get(piece, piece), score] for piece, score in vocab]
    else:
        model["vocab"] = {renamed.get(piece, piece): idx for piece, idx in vocab.items()}
    if model.get("unk_token") is not None:
        model["unk_token"] = renamed.get(model["unk_token"], model["unk_token"])
    if model.get("merges"):
        model["merges"] = [pair for pair in model["merges"] if not _makes(pair, renamed)]


def _makes(pair: str | list[str], names: Mapping[str, str]) -> bool:
    """Return whether a merge reads or writes one of the tokens."""
    left, right = pair.split(" ") if isinstance(pair, str) else pair
    return left in names or right in names or left + right in names


def _alternatives(names: Iterable[str]) -> re.Pattern[str]:
    """Match any of the names, the longest first; nothing where there are none."""
    ordered = sorted(names, key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")
