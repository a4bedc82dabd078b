"""Log probabilities of tokens in the two forms in which OpenAI's answers tell them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

# what OpenAI tells of tokens that are next to impossible; JSON has no infinity
_LEAST = -9999.0


class Decoder(Protocol):
    """What is asked of a tokenizer."""

    special_ids: frozenset[int]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""


class _Position(NamedTuple):
    token: str
    logprob: float
    top: tuple[tuple[str, float], ...]


class LogprobTexts:
    """Makes texts of the tokens of one tokenizer.

    Args:
        decoder: of the model; None where no request asks for log probabilities.
    """

    def __init__(self, decoder: Decoder | None) -> None:
        self._decoder = decoder
        self._texts: dict[int, str] = {}

    def of_chat(
        self, found: Sequence[Mapping[str, Any]], num_top: int, *, is_stopped: bool
    ) -> dict[str, Any]:
        """Return the object `logprobs` of a choice of a chat.

        Args:
            found: per generated token its id and those of the most likely ones, with their log
                probabilities, the generated one first.
            num_top: most likely ones to tell.
            is_stopped: the model ended by itself, so that its end token comes last.
        """
        return {
            "content": [
                {
                    **_of_token(place.token, place.logprob),
                    "top_logprobs": [_of_token(*top) for top in place.top],
                }
                for place in self._positions(found, num_top, is_stopped)
            ],
            "refusal": None,
        }

    def of_completion(
        self, found: Sequence[Mapping[str, Any]], num_top: int, *, is_stopped: bool
    ) -> dict[str, Any]:
        """Return the object `logprobs` of a choice of a completion; see `of_chat`."""
        places = self._positions(found, num_top, is_stopped)
        offsets, offset = [], 0
        for place in places:
            offsets.append(offset)
            offset += len(place.token)
        return {
            "tokens": [place.token for place in places],
            "token_logprobs": [place.logprob for place in places],
            "top_logprobs": [dict(place.top) for place in places] if num_top else None,
            "text_offset": offsets,
        }

    def _positions(
        self, found: Sequence[Mapping[str, Any]], num_top: int, is_stopped: bool
    ) -> list[_Position]:
        if is_stopped and found and self._is_special(found[-1]["token_ids"][0]):
            found = found[:-1]
        places = []
        for place in found:
            values = [max(value, _LEAST) for value in place["logprobs"]]
            pairs = list(zip(place["token_ids"], values, strict=True))
            ranked = sorted(pairs, key=lambda pair: -pair[1])[:num_top]
            top = tuple((self._text(token_id), logprob) for token_id, logprob in ranked)
            token_id, logprob = pairs[0]
            places.append(_Position(self._text(token_id), logprob, top))
        return places

    def _is_special(self, token_id: int) -> bool:
        return self._decoder is not None and token_id in self._decoder.special_ids

    def _text(self, token_id: int) -> str:
        if token_id not in self._texts:
            decoder = self._decoder
            text = "" if decoder is None else decoder.decode([token_id], skip_special_tokens=False)
            self._texts[token_id] = text
        return self._texts[token_id]


def _of_token(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
