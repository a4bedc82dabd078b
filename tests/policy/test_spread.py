"""Moves of running rows compared with an exhaustive plan, and the work of planning."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.policy.pool import spread
from raybatch.policy.pool.snapshot import LEFT_SHARES, PoolSnapshot, ReplicaSnapshot, RunningRows
from raybatch.policy.pool.spread import end_s, longest, longest_of_each, spread_rows
from raybatch.policy.pool.throughput import StepSeconds
from tests.tiers import examples

STEP = StepSeconds(step_s=0.012, row_s=0.002, token_s=0.00005)
BYTES_PER_S, TOKEN_BYTES = 1e9, 100_000


def replica_of(generator, replica_id, num_rows, *, slots, pace=1.0, kv_tokens=200_000):
    """Return a replica with rows of uncertain lengths."""
    left = generator.lognormal(5.5, 0.5, num_rows)
    factors = np.sort(generator.lognormal(0.0, 0.5, (num_rows, len(LEFT_SHARES))), axis=1)
    tokens = generator.integers(50, 1500, num_rows)
    return ReplicaSnapshot(
        replica_id=replica_id,
        num_held=num_rows,
        seconds=STEP.times(pace),
        rows=RunningRows(
            ids=1000 * replica_id + np.arange(num_rows),
            tokens=tokens,
            left=left,
            can_move=generator.random(num_rows) < 0.9,
            quantiles=left[:, None] * factors,
        ),
        free_kv_tokens=max(0, kv_tokens - int(tokens.sum())),
        free_seqs=max(0, slots - num_rows),
        kv_token_bytes=TOKEN_BYTES * int(generator.integers(1, 3)),
    )


def choices_of(rows):
    """Yield the sets of rows, the longest first, that may move at once."""
    count = 1
    while count <= len(rows):
        stride = len(rows) // count
        yield from (rows[:count], rows[-count:], rows[stride - 1 :: stride][:count])
        count += max(1, count // 4)


class PlainPlan:
    """Moves rows as `spread_rows` does, but recomputes the result of each choice."""

    def __init__(self, pool):
        self.replicas = pool.replicas
        self.tokens, self.left, self.can_move, self.quantiles = (
            np.concatenate([getattr(r.rows, name) for r in pool.replicas])
            for name in ("tokens", "left", "can_move", "quantiles")
        )
        place = np.repeat(np.arange(len(pool.replicas)), [len(r.rows) for r in pool.replicas])
        self.at = [np.flatnonzero(place == i).tolist() for i in range(len(pool.replicas))]
        self.free_seqs = [r.free_seqs for r in pool.replicas]
        self.free_tokens = [r.free_kv_tokens for r in pool.replicas]

    def end_s(self, place, rows):
        return end_s(self.left[rows], self.replicas[place].seconds, self.quantiles[rows])

    def ends(self):
        return [self.end_s(place, rows) for place, rows in enumerate(self.at)]

    def needed(self, rows):
        return int((self.tokens[rows] + self.left[rows]).sum())

    def step(self):
        """Make the best moves from the replica that ends last; return whether there are some."""
        ends = self.ends()
        source = int(np.argmax(ends))
        targets = sorted(range(len(ends)), key=lambda place: ends[place])
        targets = [t for t in targets if self.free_seqs[t] and ends[t] < ends[source]][:4]
        movable = sorted(
            (i for i in self.at[source] if self.can_move[i]), key=lambda i: -self.left[i]
        )
        limit_s = ends[source] - max(0.25, 0.02 * ends[source])
        found = [
            (end, target, rows)
            for target in targets
            for rows in choices_of(movable)
            if len(rows) <= self.free_seqs[target]
            and self.needed(rows) <= self.free_tokens[target]
            and (end := self.end_after(rows, source, target)) < limit_s
        ]
        if found:
            _, target, rows = min(found, key=lambda each: each[0])
            self.at[source] = [i for i in self.at[source] if i not in rows]
            self.at[target] = self.at[target] + rows
            for place, sign in ((source, 1), (target, -1)):
                self.free_seqs[place] += sign * len(rows)
                self.free_tokens[place] += sign * self.needed(rows)
        return bool(found)

    def end_after(self, rows, source, target):
        one, other = self.replicas[source], self.replicas[target]
        move_s = int(self.tokens[rows].sum()) * other.seconds.token_s
        if one.kv_token_bytes == other.kv_token_bytes:
            num_bytes = int(self.tokens[rows].sum()) * one.kv_token_bytes
            move_s = min(move_s, num_bytes / BYTES_PER_S)
        stays = [i for i in self.at[source] if i not in rows]
        joined_s = self.end_s(target, self.at[target] + rows) + move_s
        return max(self.end_s(source, stays), joined_s)


@settings(max_examples=examples(60, full=1000), deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(
        st.tuples(st.integers(0, 14), st.sampled_from([0.7, 1.0, 1.0, 2.0])), min_size=2, max_size=7
    ),
    st.integers(4, 30),
    st.sampled_from([3000, 10_000, 200_000]),
)
def test_a_plan_equals_the_exhaustive_plan(seed, sizes, slots, kv_tokens):
    generator = np.random.default_rng(seed)
    replicas = tuple(
        replica_of(generator, i, num_rows, slots=slots, pace=pace, kv_tokens=kv_tokens)
        for i, (num_rows, pace) in enumerate(sizes)
    )
    pool = PoolSnapshot(replicas=replicas, bytes_per_s=BYTES_PER_S)
    plain = PlainPlan(pool)
    before_s = max(plain.ends())
    while plain.step():
        pass
    after_s = max(plain.ends())
    moves, saved_s = spread_rows(pool)
    is_worth_it = before_s - after_s > max(0.25, 0.02 * before_s)
    assert saved_s == pytest.approx(is_worth_it * (before_s - after_s), abs=1e-9)
    ids = np.concatenate([r.rows.ids for r in replicas])
    expected = {
        (int(ids[row]), place)
        for place, rows in enumerate(plain.at)
        for row in rows
        if is_worth_it and ids[row] // 1000 != place
    }
    assert expected == {(move.row_id, move.target) for move in moves}


@given(st.integers(0, 2**32 - 1), st.integers(0, 12), st.integers(0, 5))
def test_sets_of_rows_are_evaluated_as_single_ones(seed, num_rows, num_sets):
    generator = np.random.default_rng(seed)
    # some are equal
    quantiles = np.sort(generator.integers(1, 30, (num_rows, len(LEFT_SHARES))), axis=1) * 1.0
    is_in = generator.random((num_sets, num_rows)) < 0.6
    expected = [longest(quantiles[chosen]) for chosen in is_in]
    assert expected == pytest.approx(longest_of_each(quantiles, is_in).tolist())


def test_a_plan_for_many_replicas_evaluates_the_rows_of_two_at_a_time(monkeypatch):
    generator, looked = np.random.default_rng(0), []

    def counting(quantiles, is_in):
        looked.append(is_in.shape)
        return longest_of_each(quantiles, is_in)

    monkeypatch.setattr(spread, "longest_of_each", counting)
    sizes = generator.integers(0, 65, 128).tolist()
    replicas = [replica_of(generator, i, n, slots=64) for i, n in enumerate(sizes)]
    moves, _ = spread_rows(PoolSnapshot(replicas=tuple(replicas), bytes_per_s=BYTES_PER_S))
    assert len(moves) > 500
    assert max(num_rows for _, num_rows in looked) <= 2 * 64
    # a few per move, of some hundred per step
    assert sum(num_sets for num_sets, _ in looked) < 15 * len(moves)
