"""What the coordinator knows of its replicas between two plans."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from raybatch.actors.coordinator.learned_lengths import LearnedLengths
from raybatch.actors.coordinator.pool_view import PoolView
from raybatch.actors.wire.records import Room
from raybatch.policy.pool.plan import plan_pool
from raybatch.records.types import ReplicaStats
from tests.actors.queues import queue_of

# rows that a replica holds, rows that it has told to wait in its engine, whether it asks for more
REPLICAS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=6)


@given(REPLICAS)
def test_where_a_glance_finds_nothing_to_steal_no_plan_would(replicas):
    queue = queue_of(sum(num_held for num_held, _, _ in replicas))
    view, members, pulling = PoolView(queue, LearnedLengths()), [], []
    for replica_id, (num_held, num_waiting, is_pulling) in enumerate(replicas):
        if num_held:
            queue.dispatch({replica_id: Room(tokens=10 * num_held, rows=num_held)})
        stats = ReplicaStats(num_waiting=num_waiting)
        view.heard(replica_id, stats, None)
        members.append(SimpleNamespace(replica_id=replica_id, is_ready=True, stats=stats))
        pulling += [replica_id] * is_pulling
    steal = plan_pool(view.snapshot(members, pulling, with_rows=False)).steal
    assert steal is None or view.may_steal(pulling)
    assert not view.may_steal(r for r in pulling if replicas[r][0])
