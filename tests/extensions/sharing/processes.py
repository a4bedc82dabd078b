"""A process that is a rank of a group: it runs exchange passes, and may be killed in one."""

import os
import random
import signal

import torch

from raybatch.config import EngineConfig
from raybatch.engine.loading.loaded_model import load_model
from raybatch.errors import RankError
from raybatch_extensions.ranks.rendezvous import Rendezvous
from raybatch_extensions.sharing.ownership import Ownership
from raybatch_extensions.sharing.peers import connect_peers
from raybatch_extensions.sharing.weights import ShareMember
from tests.extensions.sharing.ranks import CountedPeers, Rank, random_pass

NUM_LAYERS, SIZE = 4, 3
CONFIG = EngineConfig(device="cpu", dtype="float32")


class FileStore:
    """A rendezvous of processes on one host, without a server."""

    def __init__(self, path):
        self.server = torch.distributed.FileStore(path, -1)


class DyingPeers(CountedPeers):
    def fail(self):
        os.kill(os.getpid(), signal.SIGKILL)


def passes_of(by):
    dice = random.Random(by)
    return [[random_pass(dice) for _ in range(SIZE)] for _ in range(6)]


def run_rank(calls, folder, dies_at, pipe):
    """Send the logits of exchanges by layer and by shard, then the error after a rank dies."""
    torch.set_num_threads(1)
    for by in ("layer", "shard"):
        rank, peers = _connect(calls[by], folder, by)
        found = [rank.run(each[calls[by].rank]) for each in passes_of(by)]
        pipe.send([None if logits is None else logits.numpy() for logits in found])
        peers.close()
    rank, peers = _connect(calls["dies"], folder, "shard")
    if dies_at:
        rank.exchange._peers = DyingPeers(peers, dies_at)
    try:
        for each in passes_of("shard"):
            rank.run(each[calls["dies"].rank])
    except RankError as error:
        pipe.send(str(error))


def _connect(call, folder, by):
    rendezvous = Rendezvous(call, FileStore(f"{folder}/store"))
    number = iter(range(2))

    def exchange(text):
        turn = next(number)
        rendezvous.leave(f"text {turn} of {call.rank}", text)
        return [rendezvous.find(f"text {turn} of {rank}") for rank in range(call.size)]

    ownership = Ownership(size=call.size, num_layers=NUM_LAYERS, by=by)
    share = ShareMember(ownership=ownership, rank=call.rank, exchange=exchange)
    model = load_model(f"{folder}/model", CONFIG, place=share.place)
    peers = connect_peers(call, rendezvous)
    return Rank(model, peers), peers
