"""Activation exchange: shard owners compute feed-forward blocks for all ranks of a group at once.

```
rank               0                   1                   2
rows               2                   3                   none: a dummy
layer 0, owner 0   one chain for 5 <-- sends 3             nothing
                   adds 2          --> adds 3
layer 2, owner 2   sends 2, adds 2     sends 3, adds 3     one chain for 5
```

All ranks run an exchange pass together. They gather their row counts once, at its start. With
shards, a rank sends its rows to the owners of all shards of a dense layer; in a sparse layer it
sends each row to the owners of its experts. It adds the results in the order of shards.

Source: Compute-as-a-Service of SiDP (section 4.3).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from raybatch.engine.forward.decoder import Decoder
from raybatch.errors import RankError
from raybatch.kernels.moe import Chosen
from raybatch.models.config import ModelSpec, MoeSpec
from raybatch.records.share import Unit
from raybatch_extensions.sharing.layers import SharedLayers, choose_experts
from raybatch_extensions.sharing.peers import Peers, seconds_of_channel


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangePlan:
    """Row counts of one exchange pass, the same on all ranks.

    Args:
        rows: number of rows of each rank; 0 for a dummy pass.
        last_rows: number of rows of each rank in the last layer, which may be fewer.
        is_last: a rank requested the end; all ranks leave after this pass.
    """

    rows: tuple[int, ...]
    last_rows: tuple[int, ...]
    is_last: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeCounters:
    """Counters of one rank since its exchange began.

    Args:
        num_dummies: exchange passes in which this rank had no rows.
        sent_bytes: bytes of rows sent to each rank.
        num_served_rows: rows computed for peers, summed over layers.
        num_chains: how often this rank computed the shards it owns, by layer.
    """

    num_exchanges: int
    num_dummies: int
    sent_bytes: tuple[int, ...]
    num_served_rows: int
    num_chains: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """Rows that this rank sends to the owner of one shard.

    Args:
        data: [n, B], as sent.
        places: their indices among the own rows, int64 [n]; None for all rows.
    """

    owner: int
    data: torch.Tensor
    places: torch.Tensor | None = None


class ActivationExchange:
    """Runs the exchange passes of one rank; used by the engine thread only.

    An exchange pass is `begin`, then a decoder pass whose `ffn_service` is `add_ffn_`; a rank
    without rows calls `serve` instead. Each raises RankError if a peer has died, left, or exceeded
    the timeout of the group. Any error in them makes this rank leave. A caller that abandons a pass
    calls `close`; otherwise the peers wait for it.

    Args:
        decoder: runs the passes of this rank and the shards that it owns.
    """

    def __init__(
        self, peers: Peers, spec: ModelSpec, layers: SharedLayers, decoder: Decoder
    ) -> None:
        self._peers, self._layers, self._decoder = peers, layers, decoder
        self._moe, self._num_layers, self._model_dim = spec.moe, spec.num_layers, spec.model_dim
        ownership, self._rank, self._size = layers.ownership, layers.rank, layers.ownership.size
        self._owners = [
            [ownership.owner(Unit(layer, shard)) for shard in range(ownership.num_shards)]
            for layer in range(spec.num_layers)
        ]
        self._others = [rank for rank in range(self._size) if rank != self._rank]
        self._plan: ExchangePlan | None = None
        self._next_layer = 0
        self._has_left = False
        self._num_exchanges = self._num_dummies = self._num_served_rows = 0
        self._sent = [0] * self._size
        self._num_chains = [0] * spec.num_layers

    @property
    def counters(self) -> ExchangeCounters:
        return ExchangeCounters(
            num_exchanges=self._num_exchanges,
            num_dummies=self._num_dummies,
            sent_bytes=tuple(self._sent),
            num_served_rows=self._num_served_rows,
            num_chains=tuple(self._num_chains),
        )

    def is_wanted(self) -> bool:
        """Return whether a peer waits in an exchange pass for this rank; does not block."""
        return not self._has_left and self._peers.is_awaited()

    def begin(
        self, num_rows: int, num_last_rows: int | None = None, *, ends: bool = False
    ) -> ExchangePlan:
        """Begin the next exchange pass and return its row counts; blocks until all ranks begin it.

        Args:
            num_rows: rows of this rank; 0 for a dummy pass.
            num_last_rows: rows in the last layer; None for all.
            ends: request that this pass is the last one.
        """
        assert self._plan is None, "the previous exchange pass has not ended"
        with self._leaving_on_error():
            last_rows = num_rows if num_last_rows is None else num_last_rows
            counts = self._peers.all_gather((num_rows, last_rows, int(ends)))
        self._plan = ExchangePlan(
            rows=tuple(numbers[0] for numbers in counts),
            last_rows=tuple(numbers[1] for numbers in counts),
            is_last=any(numbers[2] for numbers in counts),
        )
        self._next_layer = 0
        self._num_exchanges += 1
        self._num_dummies += not num_rows
        return self._plan

    def skip(self) -> None:
        """Cancel the exchange pass that has begun; all ranks must do so."""
        assert self._plan is not None, "no exchange pass has begun"
        self._num_exchanges -= 1
        self._num_dummies -= not self._plan.rows[self._rank]
        self._plan = None

    def add_ffn_(self, layer: int, x: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add the feed-forward output of a layer to `x` [T, M]; `hidden` are normalised rows."""
        with self._leaving_on_error():
            rows = self._enter(layer)
            assert rows[self._rank] == len(hidden), "row count differs from `begin`"
            requests = self._requests(layer, hidden) if len(hidden) else []
            answers = self._run(layer, rows, requests)
            for request, answer in zip(requests, answers, strict=True):
                if request.places is None:
                    x += answer
                else:
                    x.index_add_(0, request.places, answer)

    @torch.inference_mode()
    def serve(self) -> None:
        """Run a pass without own rows: compute the owned shards for the peers."""
        with self._leaving_on_error():
            for layer in range(self._num_layers):
                rows = self._enter(layer)
                assert not rows[self._rank], "a rank with rows runs its decoder"
                self._run(layer, rows, [])

    def close(self) -> None:
        """Leave the group; later operations of the peers with this rank fail."""
        if not self._has_left:
            self._has_left = True
            self._peers.close()

    @contextmanager
    def _leaving_on_error(self) -> Iterator[None]:
        if self._has_left:
            raise RankError("this rank has left its group")
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _enter(self, layer: int) -> tuple[int, ...]:
        """Advance to a layer; return the rows per rank in it."""
        plan = self._plan
        assert plan is not None, "no exchange pass has begun"
        assert layer == self._next_layer, "layers must run in order"
        self._next_layer += 1
        if self._next_layer < self._num_layers:
            return plan.rows
        self._plan = None
        return plan.last_rows

    def _requests(self, layer: int, hidden: torch.Tensor) -> list[_Request]:
        """Return the requests to the shard owners of a layer, in the order of shards."""
        owners, found = self._owners[layer], None
        if len(owners) > 1:
            found = choose_experts(self._decoder, hidden, self._layers.ffn(layer))
        if found is None:
            return [_Request(owner=owner, data=hidden) for owner in owners]
        weights, chosen = found
        packed = _pack(hidden, weights, chosen)
        # shard t holds the experts t, t + d, ..
        shard_of = chosen % len(owners)
        places = [(shard_of == t).any(dim=1).nonzero().squeeze(1) for t in range(len(owners))]
        return [
            _Request(owner=owner, data=packed.index_select(0, rows), places=rows)
            for owner, rows in zip(owners, places, strict=True)
        ]

    def _run(
        self, layer: int, rows: tuple[int, ...], requests: list[_Request]
    ) -> list[torch.Tensor]:
        """Exchange rows with the shard owners; return their results for this rank."""
        counts = self._counts(layer, rows, requests)
        staging = self._staging(layer, sum(counts))
        parts, own = torch.split(staging, counts), _of(self._rank, requests)
        self._transfer(
            {r.owner: r.data for r in requests if r is not own},
            {rank: parts[rank] for rank in self._others},
        )
        if own is not None:
            parts[self._rank].copy_(own.data)
        made = self._compute(layer, staging)
        self._num_served_rows += len(staging) - counts[self._rank]
        slices = torch.split(made, counts)
        answers = [
            slices[self._rank] if r is own else made.new_empty(len(r.data), self._model_dim)
            for r in requests
        ]
        self._transfer(
            {rank: slices[rank] for rank in self._others},
            {r.owner: x for r, x in zip(requests, answers, strict=True) if r is not own},
        )
        return answers

    def _counts(self, layer: int, rows: tuple[int, ...], requests: list[_Request]) -> list[int]:
        """Return the number of rows per rank that this rank's shard of a layer computes."""
        if self._rank not in self._owners[layer]:
            return [0] * self._size
        if not self._is_routed(layer):
            return list(rows)
        counts = {rank: torch.zeros(1, dtype=torch.int64) for rank in range(self._size)}
        wanted = {r.owner: torch.tensor([len(r.data)]) for r in requests}
        own = wanted.pop(self._rank, None)
        self._transfer(wanted, {rank: counts[rank] for rank in self._others if rows[rank]})
        if own is not None:
            counts[self._rank] = own
        return [int(counts[rank]) for rank in range(self._size)]

    def _is_routed(self, layer: int) -> bool:
        """Return whether each row goes only to the owners of its experts."""
        return len(self._owners[layer]) > 1 and self._layers.ffn(layer).router is not None

    def _staging(self, layer: int, num_rows: int) -> torch.Tensor:
        """Return an empty buffer for the requests of all ranks."""
        norm = self._layers.ffn(layer).norm
        if not self._is_routed(layer):
            return norm.new_empty(num_rows, self._model_dim)
        widths = _packed_widths(self._model_dim, self._moe_spec.top_k, norm.dtype)
        return norm.new_empty(num_rows, sum(widths), dtype=torch.uint8)

    def _compute(self, layer: int, staging: torch.Tensor) -> torch.Tensor:
        """Return the output of this rank's shard for all requests, in one chain: [n, M]."""
        ffn = self._layers.ffn(layer)
        if not len(staging):
            return ffn.norm.new_empty(0, self._model_dim)
        self._num_chains[layer] += 1
        number = self._owners[layer].index(self._rank)
        shard = self._layers.owned[Unit(layer, number)]
        hidden, chosen = staging, None
        if self._is_routed(layer):
            hidden, chosen = self._unpack(staging, ffn.norm.dtype)
        made = torch.zeros_like(hidden)
        self._decoder.add_shard_(made, hidden, ffn, shard, chosen)
        return made

    def _unpack(self, staging: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Chosen]:
        """Return packed rows as hidden states and chosen experts."""
        widths = _packed_widths(self._model_dim, self._moe_spec.top_k, dtype)
        parts = torch.split(staging, widths, dim=1)
        # clone: slices of one row count as contiguous although they may be misaligned
        hidden, weights, numbers = (x.clone(memory_format=torch.contiguous_format) for x in parts)
        return hidden.view(dtype), (weights.view(dtype), numbers.view(torch.int32))

    def _transfer(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
    ) -> None:
        sends = {rank: x for rank, x in sends.items() if x.numel()}
        receives = {rank: x for rank, x in receives.items() if x.numel()}
        if sends or receives:
            self._peers.transfer(sends, receives)
        for rank, x in sends.items():
            self._sent[rank] += x.nbytes

    @property
    def _moe_spec(self) -> MoeSpec:
        assert self._moe is not None, "a model with sparse layers has a MoeSpec"
        return self._moe


def seconds_of_rows(
    num_rows: int, spec: ModelSpec, layers: SharedLayers, device: torch.device
) -> float:
    """Measure the seconds that a rank spends on sending and receiving `num_rows` rows in a pass.

    Assumes equal row counts on all ranks, and that routed rows go to all owners.
    """
    num_bytes = num_rows * spec.model_dim * layers.ffn(0).norm.element_size()
    # rows travel to the owner and back
    return 2 * len(layers.sources) * seconds_of_channel(num_bytes, device)


def _of(owner: int, requests: list[_Request]) -> _Request | None:
    return next((request for request in requests if request.owner == owner), None)


def _packed_widths(model_dim: int, top_k: int, dtype: torch.dtype) -> list[int]:
    """Return the byte widths in a packed row: hidden states, expert weights, expert ids."""
    return [model_dim * dtype.itemsize, top_k * dtype.itemsize, top_k * torch.int32.itemsize]


def _pack(hidden: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Pack rows and their experts into bytes, uint8 [T, B]."""
    parts = hidden, weights, chosen.int()
    return torch.cat([x.contiguous().view(torch.uint8) for x in parts], dim=1)
