"""The queue under random pulls, deaths, stops, returns, drops and controls, beside a model."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.actors.records import Room, Span
from tests.actors.queues import held_rows, queue_of

CONTROL_ROW = 1


class Model:
    """What replicas run, kept beside the queue; every row that is not dropped has one outcome.

    At most one row is the control: it waits, or one replica holds it and nothing else.
    """

    def __init__(self, sizes):
        self.queue = queue_of(*sizes)
        self.rows = {(batch_id, row) for batch_id, size in enumerate(sizes) for row in range(size)}
        self.batch_ids = list(range(len(sizes)))
        self.outcomes = {}
        self.held = {1: [], 2: [], 3: []}
        self.controls = {}
        self.dropped = set()
        self.unconfirmed = set()
        self._next_control_id = itertools.count(len(sizes))

    def replica(self, number):
        return sorted(self.held)[number % 3]

    def pull(self, replica_id, rows):
        is_control_next = self.queue.has_control() and not self.controls
        was_empty = not self.held[replica_id]
        grants = self.queue.dispatch({replica_id: Room(tokens=10 * rows, rows=rows)})
        self.held[replica_id] += held_rows(grants.get(replica_id, []))
        if was_empty and is_control_next:
            (self.controls[replica_id],) = self.held[replica_id]

    def finish(self, replica_id, num):
        for batch_id, row in self.held[replica_id][:num]:
            is_wanted = batch_id not in self.dropped
            assert self.queue.finish(replica_id, batch_id, [row]).tolist() == [is_wanted]
            if is_wanted:
                self.held[replica_id].remove((batch_id, row))
                self._end(batch_id, row)

    def die(self, replica_id):
        poison = self.queue.lose(replica_id).poison
        assert not poison or len(self.held[replica_id]) == 1
        for batch_id, row, _ in poison:
            self._end(batch_id, row)
        self._replace(replica_id)

    def stop(self, replica_id):
        self.queue.release(replica_id)
        self._check_control_waits(replica_id)
        self._replace(replica_id)

    def give_back(self, replica_id):
        if self.held[replica_id]:
            batch_id, row = self.held[replica_id][-1]
            self.queue.give_back(replica_id, [Span(batch_id, row, row + 1)])
            self._check_control_waits(replica_id)
            if batch_id not in self.dropped:
                self.held[replica_id].pop()

    def drop(self, batch_id):
        if batch_id not in self.dropped:
            holders = [r for r, rows in self.held.items() if any(b == batch_id for b, _ in rows)]
            assert sorted(holders) == sorted(self.queue.drop(batch_id))
            self.dropped.add(batch_id)
            self.unconfirmed |= {(replica_id, batch_id) for replica_id in holders}

    def confirm(self):
        if self.unconfirmed:
            replica_id, batch_id = self.unconfirmed.pop()
            self.queue.note_aborted(replica_id, batch_id)
            kept = [row for row in self.held[replica_id] if row[0] != batch_id]
            self.held[replica_id] = kept

    def add_control(self):
        if not self.queue.has_control():
            batch_id = next(self._next_control_id)
            self.queue.add_control(batch_id, [10] * 3, [10] * 3, CONTROL_ROW)
            self.rows.add((batch_id, CONTROL_ROW))
            self.batch_ids.append(batch_id)

    def check(self):
        assert {r: len(rows) for r, rows in self.held.items()} == {
            r: self.queue.num_held(r) for r in self.held
        }
        self.controls = {r: c for r, c in self.controls.items() if c in self.held.get(r, ())}
        assert self.queue.has_control() or not self.controls

    def kept_rows(self):
        return {row for row in self.rows if row[0] not in self.dropped}

    def _check_control_waits(self, replica_id):
        control = self.controls.pop(replica_id, None)
        if control is not None and control[0] in self.dropped:
            self.controls[replica_id] = control
        elif control is not None:
            assert self.queue.has_control()

    def _replace(self, replica_id):
        self.held[max(self.held) + 1] = []
        del self.held[replica_id]
        self.unconfirmed = {pair for pair in self.unconfirmed if pair[0] != replica_id}

    def _end(self, batch_id, row):
        self.outcomes[batch_id, row] = self.outcomes.get((batch_id, row), 0) + 1


def play(model, kind, number):
    replica_id = model.replica(number)
    moves = [
        lambda: model.pull(replica_id, 1 + number % 7),
        lambda: model.finish(replica_id, 1 + number % 5),
        lambda: model.die(replica_id),
        lambda: model.give_back(replica_id),
        lambda: model.drop(model.batch_ids[number % len(model.batch_ids)]),
        model.confirm,
        lambda: model.queue.pick_control(number / 99),
        model.add_control,
        lambda: model.stop(replica_id),
    ]
    moves[kind]()
    model.check()


@st.composite
def histories(draw):
    sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
    poison = draw(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 11)), max_size=2))
    # without a least size most histories are five moves long
    move = st.tuples(st.integers(0, 8), st.integers(0, 99))
    moves = draw(st.lists(move, min_size=20, max_size=60))
    return sizes, poison, moves


@settings(max_examples=200, deadline=None)
@given(histories())
def test_random_ends_and_drops_never_lose_or_double_a_row(history):
    sizes, poison, moves = history
    model = Model(sizes)
    for kind, number in moves:
        play(model, kind, number)
    while model.unconfirmed:
        model.confirm()
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
        model.check()
    finished = {row: count for row, count in model.outcomes.items() if row in kept}
    assert finished == dict.fromkeys(kept, 1)
    assert 0 == model.queue.num_waiting() == sum(model.queue.num_held(r) for r in model.held)
