"""Seeded workloads as token ids, the same in every peer; imports only the standard library.

A workload is a plain frozen record, so it can be sent as JSON. `build` makes its requests and
`digest` identifies them, so that the benchmark can check that all peers get the same ones. Lengths,
token contents and order come from separate streams: changing one does not shift the others.
"""

import dataclasses
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import token_streams
from token_streams import FIRST_TOKEN_ID
from workloads_prefix import GroupClass, class_prompts, tree_prompts

Kind = Literal["random", "mixed", "tail", "shared", "classes", "trees"]
Order = Literal["sorted", "shuffled"]

# outputs of "tail": log-normal, clipped at a multiple of their 95th percentile
TAIL_SIGMA = 1.95
TAIL_CLIP = 9.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The requests of a benchmark, as the fields from which `build` makes them.

    Args:
        name: name in tables.
        kind: "random" (nothing shared, one length), "mixed" (nothing shared, many lengths), "tail"
            (nothing shared, few outputs much longer than all others), "shared" (documents, each
            followed by several queries), "classes" (classes of groups that share a prefix) or
            "trees" (random prefix trees).
        num_requests: rows; a multiple of `queries_per_doc` for "shared".
        prompt_len: tokens; of the query alone for "shared"; the mean for "mixed".
        output_len: exact tokens to generate; the mean for "mixed", the median for "tail".
        doc_len: tokens of one document, for "shared".
        queries_per_doc: requests of one document, for "shared".
        order: "sorted" lexicographically by token ids or "shuffled", for "shared".
        vocab_size: vocabulary size of the model.
        seed: seed of every stream.
        classes: classes of groups, which set all lengths and counts, for "classes".
    """

    name: str
    kind: Kind
    num_requests: int
    prompt_len: int
    output_len: int
    doc_len: int = 0
    queries_per_doc: int = 1
    order: Order = "sorted"
    vocab_size: int = 1024
    seed: int = 42
    classes: tuple[GroupClass, ...] = ()

    def __post_init__(self) -> None:
        if self.num_requests % self.queries_per_doc:
            raise ValueError(
                f"workload {self.name}: num_requests {self.num_requests} is not a multiple of "
                f"queries_per_doc {self.queries_per_doc}"
            )
        if self.vocab_size <= FIRST_TOKEN_ID + 1:
            raise ValueError(f"workload {self.name}: vocab_size {self.vocab_size} is too small")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRequest:
    """One prompt and the exact number of tokens to generate for it."""

    prompt_ids: tuple[int, ...]
    output_len: int


def from_json(fields: Mapping[str, Any]) -> Workload:
    """Build the workload from the fields of `dataclasses.asdict`."""
    classes = tuple(tuple(c) for c in fields["classes"])
    return Workload(**{**fields, "classes": classes})


def build(workload: Workload) -> list[TokenRequest]:
    """Make the requests of `workload`, in the order in which peers get them."""
    if workload.kind == "shared":
        return _build_shared(workload)
    if workload.kind in ("classes", "trees"):
        return _build_prefixed(workload)
    lengths = _stream(workload, "lengths")
    tokens = _stream(workload, "tokens")
    first_ids = _distinct_ids(workload, workload.num_requests, "first")
    requests = []
    for first_id, output_len in zip(first_ids, _output_lens(workload), strict=True):
        prompt_len = workload.prompt_len
        if workload.kind == "mixed":
            prompt_len = _spread(lengths, prompt_len)
            output_len = _spread(lengths, output_len)
        tail = _random_ids(tokens, workload, prompt_len - 1)
        requests.append(TokenRequest(prompt_ids=(first_id, *tail), output_len=output_len))
    return requests


def digest(requests: Sequence[TokenRequest]) -> str:
    """Return a short hash of prompts, lengths and order."""
    state = hashlib.sha256()
    for request in requests:
        state.update(repr((request.prompt_ids, request.output_len)).encode())
    return state.hexdigest()[:16]


def row_digest(token_ids: Sequence[int]) -> str:
    """Return a short hash of one row's output tokens."""
    return hashlib.sha256(repr([int(t) for t in token_ids]).encode()).hexdigest()[:10]


def longest(requests: Sequence[TokenRequest]) -> int:
    """Return the largest prompt plus output, in tokens."""
    return max(len(request.prompt_ids) + request.output_len for request in requests)


def scaled(workload: Workload, num_requests: int) -> Workload:
    """Return the workload with another number of requests, rounded up to whole documents."""
    whole = -(-num_requests // workload.queries_per_doc) * workload.queries_per_doc
    return dataclasses.replace(workload, num_requests=whole)


def _build_shared(workload: Workload) -> list[TokenRequest]:
    tokens = _stream(workload, "tokens")
    num_docs = workload.num_requests // workload.queries_per_doc
    requests = []
    for first_id in _distinct_ids(workload, num_docs, "first"):
        document = (first_id, *_random_ids(tokens, workload, workload.doc_len - 1))
        query_ids = _distinct_ids(workload, workload.queries_per_doc, f"queries of {first_id}")
        for query_id in query_ids:
            query = (query_id, *_random_ids(tokens, workload, workload.prompt_len - 1))
            requests.append(
                TokenRequest(prompt_ids=document + query, output_len=workload.output_len)
            )
    requests.sort(key=lambda request: request.prompt_ids)
    if workload.order == "shuffled":
        _stream(workload, "order").shuffle(requests)
    return requests


def _build_prefixed(workload: Workload) -> list[TokenRequest]:
    vocab_size, seed = workload.vocab_size, workload.seed
    if workload.kind == "classes":
        prompts = class_prompts(workload.classes, vocab_size, seed)
    else:
        prompts = tree_prompts(workload.num_requests, workload.output_len, vocab_size, seed)
    return [TokenRequest(prompt_ids=ids, output_len=output_len) for ids, output_len in prompts]


def _stream(workload: Workload, purpose: str) -> random.Random:
    return token_streams.stream(workload.seed, purpose)


def _output_lens(workload: Workload) -> list[int]:
    if workload.kind != "tail":
        return [workload.output_len] * workload.num_requests
    stream = _stream(workload, "lengths")
    factors = [stream.lognormvariate(0, TAIL_SIGMA) for _ in range(workload.num_requests)]
    lengths = [max(1, round(workload.output_len * factor)) for factor in factors]
    percentile_95 = sorted(lengths)[len(lengths) * 95 // 100]
    return [min(length, round(TAIL_CLIP * percentile_95)) for length in lengths]


def _spread(stream: random.Random, mean: int) -> int:
    # uniform between an eighth and fifteen eighths of the mean: a wide spread, no tail
    return max(1, stream.randrange(mean // 8, 2 * mean - mean // 8 + 1))


def _random_ids(tokens: random.Random, workload: Workload, length: int) -> list[int]:
    return token_streams.random_ids(tokens, workload.vocab_size, length)


def _distinct_ids(workload: Workload, count: int, purpose: str) -> list[int]:
    return token_streams.distinct_ids(workload.seed, purpose, workload.vocab_size, count)
