"""Rounds of a group whose feed-forward blocks are computed at their owners, for all ranks at once.

```
rank               0                   1                   2
rows               2                   3                   none: a dummy
layer 0, of 0      one chain for 5 <-- sends 3             nothing
                   adds 2          --> adds 3
layer 2, of 2      sends 2, adds 2     sends 3, adds 3     one chain for 5
```

In a round every rank runs one pass. How many rows each has is exchanged once, at its start. By
tile, a rank sends its rows to the owners of all tiles of a layer, or where it is sparse, each row
to the owners of the experts that it chose; what they make is added at home, in the order of tiles.

Source: Compute-as-a-Service of SiDP (section 4.3).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from raybatch.engine.ext.sharing.layers import SharedLayers, choose_experts
from raybatch.engine.ext.sharing.peers import Peers, seconds_of_channel
from raybatch.engine.forward.decoder import Decoder
from raybatch.errors import TeamError
from raybatch.kernels.moe import Chosen
from raybatch.models.config import ModelSpec, MoeSpec
from raybatch.policy.ownership import Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPlan:
    """What all ranks know of a round.

    Args:
        rows: of each rank's pass; none where it is a dummy.
        last_rows: of each rank in the last layer, which may be fewer.
        is_last: a rank asked for it, and all leave behind this round.
    """

    rows: tuple[int, ...]
    last_rows: tuple[int, ...]
    is_last: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundCounters:
    """What one rank did since the start.

    Args:
        num_dummies: rounds without rows of its own.
        sent_bytes: of rows, by the rank that got them.
        num_served_rows: computed for others, counted in every layer.
        num_chains: of products, by layer.
    """

    num_rounds: int
    num_dummies: int
    sent_bytes: tuple[int, ...]
    num_served_rows: int
    num_chains: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """Rows that a rank wants a tile to be multiplied with.

    Args:
        data: [n, B], as the owner gets them.
        places: of these rows among its own, int64 [n]; None for all of them.
    """

    owner: int
    data: torch.Tensor
    places: torch.Tensor | None = None


class FfnRounds:
    """The rounds of one rank; of the thread of its engine.

    A round is `begin`, then a pass of the decoder whose `ffn_service` is `add_ffn_`, or without
    rows `serve`. Each of them raises TeamError where a rank has died, left, or kept this one
    waiting for longer than the timeout of the group. An error of any kind in one of them makes this
    rank leave; whoever gives up a pass elsewhere calls `close`, or the others wait until then.

    Args:
        decoder: of this rank, which runs its passes and the tiles that it owns.
    """

    def __init__(
        self, peers: Peers, spec: ModelSpec, layers: SharedLayers, decoder: Decoder
    ) -> None:
        self._peers, self._layers, self._decoder = peers, layers, decoder
        self._moe, self._num_layers, self._model_dim = spec.moe, spec.num_layers, spec.model_dim
        ownership, self._rank, self._size = layers.ownership, layers.rank, layers.ownership.size
        self._owners = [
            [ownership.owner(Unit(layer, tile)) for tile in range(ownership.num_tiles)]
            for layer in range(spec.num_layers)
        ]
        self._others = [rank for rank in range(self._size) if rank != self._rank]
        self._plan: RoundPlan | None = None
        self._next_layer = 0
        self._has_left = False
        self._num_rounds = self._num_dummies = self._num_served_rows = 0
        self._sent = [0] * self._size
        self._num_chains = [0] * spec.num_layers

    @property
    def counters(self) -> RoundCounters:
        return RoundCounters(
            num_rounds=self._num_rounds,
            num_dummies=self._num_dummies,
            sent_bytes=tuple(self._sent),
            num_served_rows=self._num_served_rows,
            num_chains=tuple(self._num_chains),
        )

    def is_wanted(self) -> bool:
        """Return whether another rank has begun a round that this one has not; at once."""
        return not self._has_left and self._peers.is_awaited()

    def begin(
        self, num_rows: int, num_last_rows: int | None = None, *, ends: bool = False
    ) -> RoundPlan:
        """Begin the next round, once all ranks do.

        Args:
            num_rows: of the pass of this rank; 0 for a dummy.
            num_last_rows: of these, in the last layer; None for all of them.
            ends: this rank wants it to be the last round.
        """
        assert self._plan is None, "a round that has begun comes to its end first"
        with self._leaving_on_error():
            last_rows = num_rows if num_last_rows is None else num_last_rows
            told = self._peers.exchange((num_rows, last_rows, int(ends)))
        self._plan = RoundPlan(
            rows=tuple(numbers[0] for numbers in told),
            last_rows=tuple(numbers[1] for numbers in told),
            is_last=any(numbers[2] for numbers in told),
        )
        self._next_layer = 0
        self._num_rounds += 1
        self._num_dummies += not num_rows
        return self._plan

    def skip(self) -> None:
        """Compute nothing in a round that has begun; all ranks must do so."""
        assert self._plan is not None, "a round has begun"
        self._num_rounds -= 1
        self._num_dummies -= not self._plan.rows[self._rank]
        self._plan = None

    def add_ffn_(self, layer: int, x: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add the block of a layer to `x` [T, M], of its normalised rows `hidden`."""
        with self._leaving_on_error():
            rows = self._enter(layer)
            assert rows[self._rank] == len(hidden), "as many rows as were told"
            requests = self._requests(layer, hidden) if len(hidden) else []
            answers = self._run(layer, rows, requests)
            for request, answer in zip(requests, answers, strict=True):
                if request.places is None:
                    x += answer
                else:
                    x.index_add_(0, request.places, answer)

    @torch.inference_mode()
    def serve(self) -> None:
        """Run a whole pass without rows: compute what others want of the tiles of this rank."""
        with self._leaving_on_error():
            for layer in range(self._num_layers):
                rows = self._enter(layer)
                assert not rows[self._rank], "a rank with rows runs its decoder"
                self._run(layer, rows, [])

    def close(self) -> None:
        """Leave the group; what others need of this rank from then on fails."""
        if not self._has_left:
            self._has_left = True
            self._peers.close()

    @contextmanager
    def _leaving_on_error(self) -> Iterator[None]:
        if self._has_left:
            raise TeamError("this rank has left its group")
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _enter(self, layer: int) -> tuple[int, ...]:
        """Go on to a layer; return the rows of each rank in it."""
        plan = self._plan
        assert plan is not None, "a round has begun"
        assert layer == self._next_layer, "a pass goes layer by layer"
        self._next_layer += 1
        if self._next_layer < self._num_layers:
            return plan.rows
        self._plan = None
        return plan.last_rows

    def _requests(self, layer: int, hidden: torch.Tensor) -> list[_Request]:
        """Return what the tiles of a layer are to make, in their order."""
        owners, found = self._owners[layer], None
        if len(owners) > 1:
            found = choose_experts(self._decoder, hidden, self._layers.ffn(layer))
        if found is None:
            return [_Request(owner=owner, data=hidden) for owner in owners]
        weights, chosen = found
        packed = _pack(hidden, weights, chosen)
        # tile t has the experts t, t + d, ..
        tile_of = chosen % len(owners)
        places = [(tile_of == t).any(dim=1).nonzero().squeeze(1) for t in range(len(owners))]
        return [
            _Request(owner=owner, data=packed.index_select(0, rows), places=rows)
            for owner, rows in zip(owners, places, strict=True)
        ]

    def _run(
        self, layer: int, rows: tuple[int, ...], requests: list[_Request]
    ) -> list[torch.Tensor]:
        """Let the owners compute, this rank among them; return what they made for this one."""
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
        """Return how many rows each rank wants this one's tile of a layer to be multiplied with."""
        if self._rank not in self._owners[layer]:
            return [0] * self._size
        if not self._is_routed(layer):
            return list(rows)
        told = {rank: torch.zeros(1, dtype=torch.int64) for rank in range(self._size)}
        wanted = {r.owner: torch.tensor([len(r.data)]) for r in requests}
        own = wanted.pop(self._rank, None)
        self._transfer(wanted, {rank: told[rank] for rank in self._others if rows[rank]})
        if own is not None:
            told[self._rank] = own
        return [int(told[rank]) for rank in range(self._size)]

    def _is_routed(self, layer: int) -> bool:
        """Return whether each row goes to the owners of its experts alone."""
        return len(self._owners[layer]) > 1 and self._layers.ffn(layer).router is not None

    def _staging(self, layer: int, num_rows: int) -> torch.Tensor:
        """Return room for the requests of all ranks."""
        norm = self._layers.ffn(layer).norm
        if not self._is_routed(layer):
            return norm.new_empty(num_rows, self._model_dim)
        widths = _packed_widths(self._model_dim, self._moe_spec.top_k, norm.dtype)
        return norm.new_empty(num_rows, sum(widths), dtype=torch.uint8)

    def _compute(self, layer: int, staging: torch.Tensor) -> torch.Tensor:
        """Return what this rank's tile of a layer makes of all requests, by one chain: [n, M]."""
        ffn = self._layers.ffn(layer)
        if not len(staging):
            return ffn.norm.new_empty(0, self._model_dim)
        self._num_chains[layer] += 1
        number = self._owners[layer].index(self._rank)
        tile = self._layers.owned[Unit(layer, number)]
        hidden, chosen = staging, None
        if self._is_routed(layer):
            hidden, chosen = self._unpack(staging, ffn.norm.dtype)
        made = torch.zeros_like(hidden)
        self._decoder.add_tile_(made, hidden, ffn, tile, chosen)
        return made

    def _unpack(self, staging: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Chosen]:
        """Return rows, and the experts that they have chosen."""
        widths = _packed_widths(self._model_dim, self._moe_spec.top_k, dtype)
        parts = torch.split(staging, widths, dim=1)
        # to places of their own: parts of one row count as contiguous, wherever they begin
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
        assert self._moe is not None, "a model with sparse layers says how"
        return self._moe


def seconds_of_rows(
    num_rows: int, spec: ModelSpec, layers: SharedLayers, device: torch.device
) -> float:
    """Return the seconds that a rank sends and receives in a pass of so many rows; measured.

    Where all ranks have as many rows, it is asked as often as it asks. Routed rows count as if they
    went to all owners.
    """
    num_bytes = num_rows * spec.model_dim * layers.ffn(0).norm.element_size()
    # each goes to the owner and back
    return 2 * len(layers.sources) * seconds_of_channel(num_bytes, device)


def _of(owner: int, requests: list[_Request]) -> _Request | None:
    return next((request for request in requests if request.owner == owner), None)


def _packed_widths(model_dim: int, top_k: int, dtype: torch.dtype) -> list[int]:
    """Return the bytes of a packed row: hidden states, then weights and numbers of experts."""
    return [model_dim * dtype.itemsize, top_k * dtype.itemsize, top_k * torch.int32.itemsize]


def _pack(hidden: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return rows with their experts as bytes, uint8 [T, B]."""
    parts = hidden, weights, chosen.int()
    return torch.cat([x.contiguous().view(torch.uint8) for x in parts], dim=1)
