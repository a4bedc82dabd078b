"""Grammar-constrained decoding with XGrammar.

Each running sequence has a matcher; before a token is sampled, the logits of tokens that the
grammar does not allow are set to -inf. Compiled grammars are cached by their text.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch

from raybatch.errors import MissingDependency
from raybatch.installation import install_command
from raybatch.records.structured_outputs import StructuredOutputs
from raybatch.text.json_schemas import completed, gaps

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# bounds the memory if every row has another grammar
_MAX_COMPILED = 256
# most whitespace between two JSON tokens: small models fill max_tokens with newlines
_MAX_WHITESPACE = 32
# source location in XGrammar's error messages
_SOURCE = re.compile(r"^\[[\d:]+\] \S+: ")


def check_grammar(text: str) -> str:
    """Return why the constraint in `text` is invalid; "" if it is valid. Needs no tokenizer.

    Raises MissingDependency: XGrammar is not installed.
    """
    try:
        grammar = _grammar(text)
        from xgrammar import TokenizerInfo, VocabType

        # a vocabulary of single bytes can produce any text
        vocab = [*(bytes([byte]) for byte in range(256)), b"</s>"]
        info = TokenizerInfo(vocab, vocab_type=VocabType.RAW, stop_token_ids=[256])
        _compiled(_compiler(info), grammar, vocab_size=len(vocab))
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:  # of odd schemas too
        return _message(error)
    return ""


@dataclass(slots=True)
class GrammarSlots:
    """The states of the grammars that constrain the tokens of running sequences, by slot."""

    # returns the tokenizer of the model; called for the first grammar
    _load_tokenizer: Callable[[], PreTrainedTokenizerFast]
    _vocab_size: int
    # end tokens of the model, allowed where an answer may end
    _eos_token_ids: tuple[int, ...]
    _compiler: Any = None
    _compiled: OrderedDict[str, Any] = field(default_factory=OrderedDict)
    _matchers: dict[int, Any] = field(default_factory=dict)

    def refusal(self, text: str | None) -> str:
        """Return why a sequence cannot run with this constraint; "" if it can.

        `text` is None for a sequence without a constraint.
        """
        if text is None:
            return ""
        if not self._eos_token_ids:
            return "structured_outputs need a model with an end token, but this one has none"
        try:
            self._compile(text)
        except (RuntimeError, ValueError, TypeError, AttributeError, MissingDependency) as error:
            return _message(error)
        return ""

    def add(self, slot: int, text: str | None, generated: npt.ArrayLike = ()) -> None:
        """Add a sequence in an empty slot; `generated` are its tokens so far."""
        self._matchers.pop(slot, None)
        if text is None:
            return
        import xgrammar

        matcher = xgrammar.GrammarMatcher(self._compile(text))
        for token_id in torch.as_tensor(generated).tolist():
            matcher.accept_token(token_id)
        self._matchers[slot] = matcher

    def remove(self, slot: int) -> None:
        self._matchers.pop(slot, None)

    def mask(self, logits: torch.Tensor, rows: list[int], slots: list[int]) -> None:
        """Set the logits of forbidden tokens to -inf.

        Row `rows[i]` of `logits` is that of the sequence in `slots[i]`; `logits`, float32 [S, V],
        are modified in place.
        """
        import xgrammar

        masks = xgrammar.allocate_token_bitmask(logits.shape[0], self._vocab_size)
        for row, slot in zip(rows, slots, strict=True):
            self._matchers[slot].fill_next_token_bitmask(masks, row)
        xgrammar.apply_token_bitmask_inplace(logits, masks.to(logits.device), indices=rows)

    def accept(self, slot: int, token_id: int) -> None:
        """Advance the grammar of `slot` by a sampled token; an end token ends it."""
        self._matchers[slot].accept_token(token_id)

    def _compile(self, text: str) -> Any:  # noqa: ANN401 - XGrammar is loaded where it is used
        compiled = self._compiled.get(text)
        if compiled is None:
            grammar = _grammar(text)
            import xgrammar

            if self._compiler is None:
                info = xgrammar.TokenizerInfo.from_huggingface(
                    self._load_tokenizer(),
                    vocab_size=self._vocab_size,
                    stop_token_ids=list(self._eos_token_ids),
                )
                self._compiler = _compiler(info)
            compiled = _compiled(self._compiler, grammar, vocab_size=self._vocab_size)
            self._compiled[text] = compiled
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(text)
        return compiled


def _compiler(info: Any) -> Any:  # noqa: ANN401 - XGrammar is loaded where it is used
    from xgrammar import GrammarCompiler

    return GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _compiled(compiler: Any, grammar: Any, *, vocab_size: int) -> Any:  # noqa: ANN401
    """Compile a grammar; raises ValueError if no token may be the first one."""
    import xgrammar

    compiled = compiler.compile_grammar(grammar)
    first = xgrammar.allocate_token_bitmask(1, vocab_size)
    xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(first)
    if not first.any():
        raise ValueError("no answer can match it")
    return compiled


def _grammar(text: str) -> Any:  # noqa: ANN401
    try:
        from xgrammar import Grammar
    except ImportError as error:
        raise MissingDependency(
            "structured_outputs need XGrammar, which is not installed here: "
            + install_command("structured")
        ) from error
    wanted = StructuredOutputs.parse(text)
    if wanted.json is not None:
        schema = completed(json.loads(wanted.json))
        allowed = ("check", "refuse or check") if wanted.on_unsupported == "check" else ("check",)
        for gap in gaps(schema):
            if gap.remedy not in allowed:
                raise ValueError(gap.message())
        return Grammar.from_json_schema(json.dumps(schema), max_whitespace_cnt=_MAX_WHITESPACE)
    if wanted.json_object:
        return Grammar.from_json_schema(
            '{"type": "object"}', strict_mode=False, max_whitespace_cnt=_MAX_WHITESPACE
        )
    if wanted.regex is not None:
        return Grammar.from_regex(wanted.regex)
    if wanted.grammar is not None:
        return Grammar.from_ebnf(wanted.grammar)
    if wanted.structural_tag is not None:
        return Grammar.from_structural_tag(wanted.structural_tag)
    # a JSON string is a valid EBNF string, except for surrogate pairs: hence ensure_ascii=False
    texts = " | ".join(json.dumps(option, ensure_ascii=False) for option in wanted.choice)
    return Grammar.from_ebnf(f"root ::= {texts}")


def _message(error: Exception) -> str:
    reason = str(error).removeprefix("structured_outputs: ")
    return f"structured_outputs: {_SOURCE.sub('', reason).strip()}"
