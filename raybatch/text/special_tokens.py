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
from functools import cached_property
from typing import TYPE_CHECKING

from raybatch.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer


class SpecialTokens:
    """Finds special tokens in text and takes their meaning away.

    Args:
        fast: the model's tokenizer, read only.
        names: text of every special token to its id.
    """

    def __init__(self, fast: "FastTokenizer", names: Mapping[str, int]) -> None:
        self._fast = fast
        self._ids = dict(names)
        # unguessable, so that no row can hold the name of a renamed token; not part of any result
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
        """Put a mark in the place of every special token of a row's text."""
        return self._pattern.sub(lambda match: self._marks[match.group()], text)

    def protect(self, text: str) -> str:
        """Give special tokens their new names, and marked text its own form back."""
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
            # without those that read or write one of the tokens
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
    """Match any of the names, the longest first; nothing where there are none."""
    ordered = sorted(names, key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")
