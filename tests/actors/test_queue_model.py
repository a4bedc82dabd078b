"""The queue under random pulls, deaths, stops, returns, drops and canaries, against a model."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.records import ROW_BITS, ROW_MASK, Credit, RowRange
from tests.actors.queues import add_groups, add_plain, held_rows

CANARY_ROW = 1
KINDS = ("ungrouped", "planned", "plain")
PREFIX, OWN, NEW = 8, 4, 6


class Model:
    """Model of the queue: what replicas run; every row that is not dropped has one outcome.

    At most one row is the canary: it waits, or one replica holds it and no other row.
    """

    def __init__(self, kinds, batches):
        self.queue = RowQueue(3)
        self.groups = {}
        self.rows = set()
        self.batch_ids = []
        self.to_come = list(zip(kinds, batches, strict=False))
        self._next_id = itertools.count()
        self.add_batch()
        self.outcomes = {}
        self.held = {1: [], 2: [], 3: []}
        self.canaries = {}
        self.dropped = set()
        self.unconfirmed = set()
        # by row, the source of its move; and all moves that have not ended
        self.moving = {}
        self.moves = []
        # by row, the replica with a copy; rows that had one; replicas and rows that are to end
        self.copies = {}
        self.copied = set()
        self.ending = set()
        # expected output lengths of rows that were weighed again
        self.new = {}

    def add_batch(self):
        if self.to_come:
            kind, groups = self.to_come.pop(0)
            self._add(next(self._next_id), kind, groups)

    def _add(self, batch_id, kind, groups):
        if kind == "plain":
            add_plain(self.queue, batch_id, groups, prefix=PREFIX, distinct=OWN, new=NEW)
        else:
            if kind == "ungrouped":
                groups = [None] * len(groups)
            add_groups(self.queue, batch_id, groups, prefix=PREFIX, distinct=OWN, new=NEW)
        self.batch_ids.append(batch_id)
        self.rows |= {(batch_id, row) for row in range(len(groups))}
        for row, group in enumerate(groups):
            # a key that only rows of the same prefix have
            self.groups[batch_id, row] = None if group is None else (kind, group)

    def replica(self, number):
        return sorted(self.held)[number % 3]

    def pull(self, replica_id, rows):
        is_canary_next = self.queue.has_canary() and not self.canaries
        was_empty = not self.runs(replica_id)
        grants = self.queue.dispatch({replica_id: Credit(tokens=10 * rows, rows=rows)})
        self.held[replica_id] += held_rows(grants.get(replica_id, []))
        if was_empty and is_canary_next:
            (self.canaries[replica_id],) = self.held[replica_id]

    def finish(self, replica_id, num):
        for batch_id, row in self.held[replica_id][:num]:
            is_wanted = batch_id not in self.dropped
            assert self.queue.finish(replica_id, batch_id, [row]).tolist() == [is_wanted]
            if is_wanted:
                self.held[replica_id].remove((batch_id, row))
                self.moving.pop((batch_id, row), None)
                if (loser := self.copies.pop((batch_id, row), None)) is not None:
                    self.ending.add((loser, (batch_id, row)))
                self._end(batch_id, row)

    def copy(self, replica_id, number):
        """Try to begin a copy of a row of another replica."""
        held = [(r, row) for r, rows in sorted(self.held.items()) for row in rows]
        others = [(r, row) for r, row in held if r != replica_id]
        if not others:
            return
        owner, row = others[number % len(others)]
        is_free = row not in {*self.moving, *self.copied} and row[0] not in self.dropped
        tests = [self.queue.load(r).is_testing for r in (owner, replica_id)]
        may_begin = is_free and not any(tests)
        assert may_begin == self.queue.copies.begin(replica_id, row_id_of(row))
        if may_begin:
            self.copies[row] = replica_id
            self.copied.add(row)

    def finish_copy(self, number):
        """Let a copy end before its row; the later result of the owner is ignored."""
        if not self.copies:
            return
        row = sorted(self.copies)[number % len(self.copies)]
        owner = next(r for r, rows in self.held.items() if row in rows)
        assert self.queue.finish(self.copies.pop(row), row[0], [row[1]]).tolist() == [True]
        assert self.queue.finish(owner, row[0], [row[1]]).tolist() == [False]
        self.held[owner].remove(row)
        self.ending.add((owner, row))
        self._end(*row)

    def copy_and(self, replica_id, number):
        """Begin a copy if possible, and let one of both sides end."""
        self.pull(replica_id, 3)
        other = next(r for r in sorted(self.held) if r != replica_id)
        self.copy(other, number)
        ends = (self.die, self.stop, self.give_back, lambda _: self.finish_copy(number))
        ends[number % 4]((replica_id, other)[number // 4 % 2])

    def note_aborted(self):
        losers = {(r, row_of(row_id)) for r, row_id in self.queue.copies.take_losers()}
        assert {loser for loser in losers if loser[0] in self.held} <= self.ending
        if self.ending:
            replica_id, row = self.ending.pop()
            self.queue.copies.note_aborted(replica_id, row_id_of(row))

    def die(self, replica_id):
        alone = len(self.runs(replica_id)) == 1
        loss = self.queue.lose(replica_id)
        assert not loss.given_up() or alone
        for batch_id, crashes in loss.given_up():
            self._end(batch_id, crashes.row)
        # the death of a copy does not raise the crash count of its row
        crashed = {(b, one.row) for b, crashes in loss.crashes.items() for one in crashes}
        assert crashed == {row for row in self.held[replica_id] if row[0] not in self.dropped}
        self._replace(replica_id)

    def stop_test(self):
        """Let the same rows kill two replicas, and stop the next one, which runs them alone."""
        for end in (self.die, self.die, self.stop):
            replica_id = self.replica(0)
            self.pull(replica_id, 20)
            end(replica_id)

    def stop(self, replica_id):
        self.queue.release(replica_id)
        self._check_canary_waits(replica_id)
        self._replace(replica_id)

    def give_back(self, replica_id):
        if self.held[replica_id]:
            batch_id, row = self.held[replica_id][-1]
            self.queue.give_back(replica_id, [RowRange(batch_id, row, row + 1)])
            self._check_canary_waits(replica_id)
            if batch_id not in self.dropped:
                self.moving.pop(self.held[replica_id].pop(), None)
                self._inherit([(batch_id, row)])
        for row in [row for row, at in self.copies.items() if at == replica_id][-1:]:
            self.queue.give_back(replica_id, [RowRange(row[0], row[1], row[1] + 1)])
            del self.copies[row]

    def drop(self, batch_id):
        if batch_id not in self.dropped:
            holders = {r for r, rows in self.held.items() if any(b == batch_id for b, _ in rows)}
            holders |= {r for row, r in self.copies.items() if row[0] == batch_id}
            assert sorted(holders) == sorted(self.queue.drop(batch_id))
            self.dropped.add(batch_id)
            for row in [row for row in self.copies if row[0] == batch_id]:
                # it runs there until the abort of the batch is confirmed
                self.held[self.copies.pop(row)].append(row)
            self.moving = {row: r for row, r in self.moving.items() if row[0] != batch_id}
            self.unconfirmed |= {(replica_id, batch_id) for replica_id in holders}

    def confirm(self):
        if self.unconfirmed:
            replica_id, batch_id = self.unconfirmed.pop()
            self.queue.note_aborted(replica_id, batch_id)
            kept = [row for row in self.held[replica_id] if row[0] != batch_id]
            self.held[replica_id] = kept

    def begin_move(self, replica_id, number):
        if rows := self.held[replica_id]:
            moved = rows[number % len(rows)]
            is_free = moved not in {*self.moving, *self.copies} and moved[0] not in self.dropped
            may_move = is_free and not self.queue.load(replica_id).is_testing
            assert may_move == self.queue.begin_move(replica_id, *moved)
            if may_move:
                self.moving[moved] = replica_id
                self.moves.append((moved, replica_id))

    def move(self, replica_id, number):
        """Move a row of the replica at once, if it has one."""
        self.pull(replica_id, 3)
        self.begin_move(replica_id, number)
        self.end_move(len(self.moves) - 1, is_commit=True)

    def end_move(self, number, *, is_commit):
        """End a move, also if its row or replica has ended."""
        if not self.moves:
            return
        moved, source = self.moves.pop(number % len(self.moves))
        target = next(r for r in sorted(self.held) if r != source)
        is_under_way = self.moving.get(moved) == source
        if not is_commit:
            self.queue.end_move(source, *moved)
        else:
            may_come = is_under_way and not self.queue.load(target).is_testing
            is_done = self.queue.commit_move(source, target, *moved, with_kv=bool(number % 2))
            assert may_come == is_done
            if is_done:
                self.held[source].remove(moved)
                self.held[target].append(moved)
            elif is_under_way:
                self.queue.end_move(source, *moved)
        if is_under_way:
            del self.moving[moved]

    def reweigh(self, batch_id, new):
        """Weigh the rows of a batch again; held rows keep their cost."""
        num_rows = 1 + max((row for b, row in self.rows if b == batch_id), default=-1)
        held = {row for rows in self.held.values() for row in rows}
        if batch_id not in self.dropped and num_rows > 0:
            all_rows = len(self.queue._batches[batch_id].output)
            self.queue.reweigh([(batch_id, lambda rows: np.full(len(rows), new))])
            waiting = {(batch_id, row) for row in range(all_rows)} - held
            self.new |= dict.fromkeys(waiting, new)

    def add_canary(self):
        if not self.queue.has_canary():
            batch_id = next(self._next_id)
            self.queue.add_canary(batch_id, [10] * 3, [10] * 3, CANARY_ROW)
            self.rows.add((batch_id, CANARY_ROW))
            self.groups[batch_id, CANARY_ROW] = "canary"
            self.batch_ids.append(batch_id)

    def runs(self, replica_id):
        """Return the runs of a replica: rows, copies, and runs that will be aborted."""
        copies = [row for row, at in self.copies.items() if at == replica_id]
        return [*self.held[replica_id], *copies, *(r for at, r in self.ending if at == replica_id)]

    def check(self):
        assert {r: len(self.runs(r)) for r in self.held} == {
            r: self.queue.load(r).num_rows for r in self.held
        }
        self._check_copies()
        self.canaries = {r: c for r, c in self.canaries.items() if c in self.held.get(r, ())}
        assert self.queue.has_canary() or not self.canaries
        for replica_id in self.held:
            self._check_cost(replica_id, self.runs(replica_id))
        waiting = self.queue._waiting
        for each in (waiting.shared, *waiting._own.values()):
            self._check_waiting(each)

    def _check_copies(self):
        """Check that a row has one owner, which is not the replica with its copy."""
        assert {row_id_of(row) for row in self.copies} == set(self.queue.copies.row_ids())
        for row, at in self.copies.items():
            replica_ids = np.arange(at + 2)
            is_there = self.queue.copies.are_at(replica_ids, np.full(at + 2, row_id_of(row)))
            assert replica_ids[is_there].tolist() == [at]
            owners = [r for r, rows in self.held.items() if row in rows]
            assert len(owners) == 1
            assert owners != [at]
            assert self.queue.is_held(owners[0], row[0], np.array([row[1]]))[0]

    def _check_cost(self, replica_id, rows):
        """Check that the cost is the rows' own tokens and the prefix of each group once."""
        of_batch = {}
        for batch_id, row in rows:
            of_batch.setdefault(batch_id, []).append(row)
        if self.dropped & of_batch.keys():
            # only the replica still knows their groups
            return
        own, prefixes = 0, {}
        for batch_id, numbers in of_batch.items():
            groups = self.queue.groups_of(batch_id, [RowRange(batch_id, r, r + 1) for r in numbers])
            lens = [0] * len(numbers) if groups is None else groups.prefix_lens.tolist()
            ids = [-1] * len(numbers) if groups is None else groups.group_ids.tolist()
            for row, group, prefix_len in zip(numbers, ids, lens, strict=True):
                known = self.groups[batch_id, row]
                # the canaries of the model have their own batches and no group
                prompt, new = (10, 10) if known == "canary" else (OWN, NEW)
                length = prompt + self.new.get((batch_id, row), new)
                own += length + (0 if known in ("canary", None) else PREFIX) - prefix_len
                own += PREFIX if known is None and self._is_plain(batch_id) else 0
                if group >= 0:
                    prefixes[group] = prefix_len
        assert own + sum(prefixes.values()) == self.queue.load(replica_id).cost

    def _check_waiting(self, queue):
        """Check that the costs of waiting group batches are the sums over their rows."""
        for group_batch in queue._group_batches:
            states = [(self.queue._batches[s.batch_id], s) for s in group_batch.row_ranges]
            assert group_batch.cost == sum(of.cost_between(s.start, s.stop) for of, s in states)
        assert queue.cost == sum(group_batch.cost for group_batch in queue._group_batches)

    def _is_plain(self, batch_id):
        return self.queue._batches[batch_id].keys is not None

    def kept_rows(self):
        return {row for row in self.rows if row[0] not in self.dropped}

    def _check_canary_waits(self, replica_id):
        canary = self.canaries.pop(replica_id, None)
        if canary is not None and canary[0] in self.dropped:
            self.canaries[replica_id] = canary
        elif canary is not None:
            assert self.queue.has_canary()

    def _inherit(self, rows):
        """Give rows without an owner to the replicas with their copies."""
        for row in rows:
            if row in self.copies:
                self.held[self.copies.pop(row)].append(row)

    def _replace(self, replica_id):
        self.copies = {row: r for row, r in self.copies.items() if r != replica_id}
        self.ending = {(r, row) for r, row in self.ending if r != replica_id}
        self._inherit(self.held[replica_id])
        self.moving = {row: r for row, r in self.moving.items() if r != replica_id}
        self.held[max(self.held) + 1] = []
        del self.held[replica_id]
        self.unconfirmed = {pair for pair in self.unconfirmed if pair[0] != replica_id}

    def _end(self, batch_id, row):
        self.outcomes[batch_id, row] = self.outcomes.get((batch_id, row), 0) + 1


def row_id_of(row):
    return row[0] << ROW_BITS | row[1]


def row_of(row_id):
    return row_id >> ROW_BITS, row_id & ROW_MASK


def play(model, kind, number):
    replica_id = model.replica(number)
    moves = [
        lambda: model.pull(replica_id, 1 + number % 7),
        lambda: model.finish(replica_id, 1 + number % 5),
        lambda: model.die(replica_id),
        lambda: model.give_back(replica_id),
        lambda: model.drop(model.batch_ids[number % len(model.batch_ids)]),
        model.confirm,
        lambda: model.queue.pick_canary(number / 99),
        model.add_canary,
        lambda: model.stop(replica_id),
        model.add_batch,
        model.stop_test,
        lambda: model.begin_move(replica_id, number),
        lambda: model.end_move(number, is_commit=True),
        lambda: model.end_move(number, is_commit=False),
        lambda: model.move(replica_id, number),
        lambda: model.reweigh(model.batch_ids[number % len(model.batch_ids)], (3, 24)[number % 2]),
        lambda: model.copy(replica_id, number),
        lambda: model.finish_copy(number),
        lambda: model.copy_and(replica_id, number),
        model.note_aborted,
    ]
    moves[kind]()
    model.check()


@st.composite
def histories(draw):
    group = st.sampled_from([None, 1, 2, 3])
    batches = draw(st.lists(st.lists(group, max_size=12), min_size=1, max_size=4))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=4, max_size=4))
    poison = draw(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 11)), max_size=2))
    # without a minimum size most histories have five actions
    move = st.tuples(st.integers(0, 19), st.integers(0, 99))
    moves = draw(st.lists(move, min_size=20, max_size=60))
    return (kinds, batches), poison, moves


@settings(max_examples=200, deadline=None)
@given(histories())
def test_random_ends_and_drops_never_lose_or_double_a_row(history):
    (kinds, batches), poison, moves = history
    model = Model(kinds, batches)
    for kind, number in moves:
        play(model, kind, number)
    while model.to_come:
        model.add_batch()
    while model.unconfirmed:
        model.confirm()
    while model.ending:
        model.note_aborted()
    model.check()
    kept = model.kept_rows()
    for _ in range(2000):
        if kept <= set(model.outcomes):
            break
        model.pull(model.replica(0), 5)
        for replica_id in list(model.held):
            if poison & set(model.held[replica_id]):
                model.die(replica_id)
            else:
                model.finish(replica_id, 99)
        while model.ending:
            model.note_aborted()
        model.check()
    finished = {row: count for row, count in model.outcomes.items() if row in kept}
    assert finished == dict.fromkeys(kept, 1)
    assert 0 == model.queue.num_waiting() == sum(model.queue.load(r).num_rows for r in model.held)
    assert {0} == {model.queue.load(r).cost for r in model.held}
