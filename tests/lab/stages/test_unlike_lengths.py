"""What unlike lengths cost an engine: measured by its steps, stored, and found by a pool."""

import numpy as np
import pytest

from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.cost_cache import cost_model_path
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.errors import MeasureError
from raybatch.policy.cost.cost_model import EngineLimits
from raybatch.records.types import Capacity, Completion, ReplicaStats
from raybatch_lab.stages.measured import measured_curve, store_curve
from raybatch_lab.unlike_lengths import lengths_of, measure_curve
from tests.lab.stages.pools import curve_to

LIMITS = EngineLimits(kv_tokens=1 << 16, max_num_seqs=32, block_size=16, max_batched_tokens=256)


class Clocked:
    """An engine that decodes all rows at once, in seconds by their lengths that its clock tells."""

    def __init__(self, cost_of, max_len=4096):
        self.now, self._cost_of, self._max_len = 0.0, cost_of, max_len
        self._rows, self._generated = {}, 0

    def capacity(self):
        return Capacity(
            kv_tokens=1 << 16, max_model_len=self._max_len, max_num_seqs=32, block_size=16
        )

    def submit(self, requests):
        self._rows |= {
            r.request_id: (len(r.prompt_token_ids), r.sampling.max_tokens) for r in requests
        }

    def poll(self):
        self.now += self._cost_of(np.array([length for length, _ in self._rows.values()]))
        self._generated += len(self._rows)
        self._rows = {i: (length + 1, left - 1) for i, (length, left) in self._rows.items()}
        done = [i for i, (_, left) in self._rows.items() if not left]
        for i in done:
            del self._rows[i]
        return [Completion(request_id=i) for i in done]

    def num_unfinished(self):
        return len(self._rows)

    def abort(self, request_ids):
        for i in request_ids:
            self._rows.pop(i, None)

    def stats(self):
        return ReplicaStats(generated_tokens=self._generated)


def measured(cost_of, **options):
    engine = Clocked(cost_of, **options)
    curve = measure_curve(engine, LIMITS, lambda: engine.now)
    assert not engine.num_unfinished()
    return curve


def test_lengths_have_the_mean_and_vary_as_asked_for():
    lengths = lengths_of(64, 500, 0.5)
    assert lengths.sum() == 64 * 500
    assert lengths.std() / lengths.mean() == pytest.approx(0.5, rel=0.1)


def test_an_engine_that_pays_for_tokens_alone_has_a_flat_curve():
    curve = measured(lambda lengths: 1.0 + 0.01 * lengths.sum())
    assert [point.factor for point in curve.points] == pytest.approx([1.0] * 4, rel=1e-3)


def test_an_engine_whose_steps_wait_for_the_longest_row_has_a_curve_that_says_by_how_much():
    curve = measured(lambda lengths: 1.0 + 0.01 * len(lengths) * lengths.max())
    longest = [lengths_of(16, 512, v).max() / 512 for v in (0.0, 0.5, 1.0, 1.5)]
    assert [point.factor for point in curve.points] == pytest.approx(longest, rel=0.05)


def test_steps_that_do_not_grow_with_lengths_tell_nothing():
    with pytest.raises(MeasureError, match="no longer than"):
        measured(lambda lengths: 1.0)


def test_an_engine_of_short_rows_is_refused():
    with pytest.raises(MeasureError, match="too small for rows"):
        measured(lambda lengths: 1.0, max_len=64)


def spec_of(kind="native", device="cpu"):
    return PoolSpec(
        model="m",
        backend=BackendConfig(kind=kind),
        engine=EngineConfig(device=device),
        pool=PoolConfig(replicas=2),
    )


def test_a_stored_curve_is_that_of_its_engine(tmp_path):
    spec, other = spec_of(), spec_of(device="auto")
    path = cost_model_path(spec.model, spec.backend, spec.engine, folder=tmp_path)
    store_curve(curve_to(1.7), path)
    assert measured_curve(spec, folder=tmp_path).curve == curve_to(1.7)
    assert measured_curve(other, folder=tmp_path).curve != curve_to(1.7)


@pytest.mark.parametrize(
    ("kind", "device", "num_gpus", "is_known"),
    [
        ("native", "cpu", 0, True),
        ("native", "auto", 1, False),
        ("native", "cuda", 0, False),
        ("vllm", "cpu", 0, False),
    ],
)
def test_native_engines_on_cpus_are_known_without_a_file(
    tmp_path, kind, device, num_gpus, is_known
):
    found = measured_curve(spec_of(kind, device), num_gpus=num_gpus, folder=tmp_path)
    assert is_known == (found is not None)
