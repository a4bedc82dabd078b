"""Ranks of a group that run rounds, each a thread of this process."""

import random
import threading
from dataclasses import dataclass
from itertools import count

import torch

from raybatch.errors import RankError
from raybatch_extensions.ranks.records import RankInit
from raybatch_extensions.ranks.rendezvous import Rendezvous
from raybatch_extensions.sharing.activation_exchange import ActivationExchange
from raybatch_extensions.sharing.peers import GlooPeers, connect_peers
from raybatch_extensions.sharing.segments import HostSegment
from tests.engine.weights.steps import prompt_logits
from tests.extensions.sharing.groups import decoder_of

_generations = count(1)


class ThreadStore:
    """Where ranks of one process meet, without a server."""

    def __init__(self):
        self.server = torch.distributed.HashStore()

    def calls(self, size, *, timeout_s):
        generation = next(_generations)
        return [
            RankInit(generation=generation, rank=i, size=size, host="", port=0, timeout_s=timeout_s)
            for i in range(size)
        ]


@dataclass(frozen=True)
class Pass:
    """Prompts of these lengths, and which of their rows have logits."""

    lens: tuple[int, ...]
    logits_of: tuple[int, ...]
    seed: int

    @property
    def num_rows(self):
        return sum(self.lens)

    def logits(self, decoder, spec):
        return prompt_logits(
            decoder, spec, lens=self.lens, seed=self.seed, logits_of=self.logits_of
        )


def random_pass(random: random.Random, *, most_prompts=3):
    """Return a pass, of which some have no rows, and some no logits."""
    lens = tuple(random.randint(1, 4) for _ in range(random.randint(0, most_prompts)))
    rows = range(sum(lens))
    logits_of = sorted(random.sample(rows, random.randint(0, len(rows))))
    return Pass(lens, tuple(logits_of), random.randint(0, 99))


NO_ROWS = Pass((), (), 0)
TWO_ROWS = Pass((2,), (0, 1), 7)


class Rank:
    """A model of a group with its rounds."""

    def __init__(self, model, peers):
        self.spec = model.spec
        self.decoder = decoder_of(model, model.placed)
        self.exchange = ActivationExchange(peers, model.spec, model.placed, self.decoder)
        self.decoder.ffn_service = self.exchange.add_ffn_

    def run(self, each, *, ends=False):
        """Run a round; return the logits, None without rows."""
        self.exchange.begin(each.num_rows, len(each.logits_of), ends=ends)
        if each.num_rows:
            return each.logits(self.decoder, self.spec)
        self.exchange.serve()
        return None


def peers_of(call, rendezvous, kind, inbox):
    """Return the peers of a rank: "shared", "gloo", or with "inboxes", as those of GPUs."""
    if kind == "gloo":
        return GlooPeers(call, rendezvous)
    return connect_peers(call, rendezvous, None if kind == "shared" else inbox)


def peers_in_threads(store, size, act, *, kind="shared", timeout_s=60.0):
    """Return what `act` returns, or the RankError that it raises, of the peers of each rank."""
    calls = store.calls(size, timeout_s=timeout_s)
    made = [None] * size
    # of an odd size, so that tensors lie across its end
    inboxes = [HostSegment(3001 * (size - 1), free_bytes=1 << 30) for _ in range(size)]
    if kind == "closed inboxes":
        for inbox in inboxes:
            inbox._mapped.close()

    def run(call):
        try:
            rendezvous = Rendezvous(call, store)
            peers = peers_of(call, rendezvous, kind, inboxes[call.rank])
        except RankError as error:
            made[call.rank] = error
            return
        try:
            made[call.rank] = act(peers, call.rank)
            peers.close()
        except Exception as error:
            peers.close()
            made[call.rank] = error

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in made:
        if isinstance(one, Exception) and not isinstance(one, RankError):
            raise one
    return made


class CountedPeers:
    """Peers that fail at one of their operations, counted from 1."""

    def __init__(self, peers, fails_at):
        self._peers, self._left = peers, fails_at
        self.is_awaited, self.close = peers.is_awaited, peers.close

    def before(self):
        self._left -= 1
        if self._left == 0:
            self.fail()

    def fail(self):
        raise NotImplementedError

    def all_gather(self, numbers):
        self.before()
        return self._peers.all_gather(numbers)

    def transfer(self, sends, receives):
        self.before()
        self._peers.transfer(sends, receives)


def ranks_in_threads(store, models, act, *, wrap=None, **options):
    """Return what `act` returns, or the RankError that it raises, of each rank.

    `wrap` is put around the peers of each rank.
    """

    def run(peers, number):
        rank = Rank(models[number], peers if wrap is None else wrap(peers, number))
        try:
            return act(rank, number)
        finally:
            # twice, as the others do not mind
            rank.exchange.close()

    return peers_in_threads(store, len(models), run, **options)
