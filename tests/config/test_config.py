"""Options out of their range are refused when a config is built, by name."""

import math
import re

import pytest

from raybatch.backends.registry import known_backends
from raybatch.config import (
    BackendConfig,
    EngineConfig,
    LimitConfig,
    PlanConfig,
    PoolConfig,
    WaveConfig,
    from_mapping,
)
from raybatch.errors import ConfigError
from raybatch.policy.cost.estimate import money
from raybatch.records.pooling import Pooling
from raybatch.records.types import Sampling
from raybatch.rows.options import build_stage_config
from raybatch_openai.endpoint.options import OpenAIOptions


@pytest.mark.parametrize("name", ["unit_rows", "max_unit_rows", "max_driver_bytes", "seed"])
@pytest.mark.parametrize("value", [2.5, math.inf, math.nan, "9", None, True, -1], ids=repr)
def test_numbers_of_a_plan_that_are_not_whole_are_refused(name, value):
    with pytest.raises(ConfigError, match=rf"plan\.{name} must be a whole number of at"):
        PlanConfig(**{name: value})


@pytest.mark.parametrize("name", ["probe_fraction", "min_saved_fraction"])
@pytest.mark.parametrize("value", ["abc", math.nan, math.inf, None, True, 1.5, -0.1], ids=repr)
def test_shares_that_are_none_are_refused(name, value):
    with pytest.raises(ConfigError, match=rf"plan\.{name} must be a (finite )?number .* got"):
        PlanConfig(**{name: value})


def test_a_probe_of_no_rows_is_refused_and_every_saving_may_count():
    with pytest.raises(ConfigError, match=r"probe_fraction must be a number above 0"):
        PlanConfig(probe_fraction=0)
    assert 0 == PlanConfig(min_saved_fraction=0).min_saved_fraction
    assert 0 == PlanConfig(seed=0).seed


def test_a_largest_unit_below_the_default_of_units_names_both_and_the_way_out():
    with pytest.raises(ConfigError, match=r"max_unit_rows=10 .*unit_rows=1024.*lower unit"):
        PlanConfig(max_unit_rows=10)


@pytest.mark.parametrize("name", ["block_size_tokens", "max_batched_tokens", "num_threads"])
def test_engines_take_whole_numbers(name):
    with pytest.raises(ConfigError, match=rf"engine\.{name} must be a whole number"):
        EngineConfig(**{name: 2.5})


def test_a_limit_that_is_no_number_is_none():
    with pytest.raises(ConfigError, match=r"pool\.feeder_timeout_s must be a finite number"):
        PoolConfig(feeder_timeout_s=math.nan)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=repr)
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda x: LimitConfig(max_wall_s=x), "limits.max_wall_s must be a finite number of at"),
        (lambda x: PlanConfig(probe_fraction=x), "plan.probe_fraction must be a finite number abo"),
        (lambda x: PoolConfig(replicas=x), "pool.replicas must be a whole number of at least 1"),
        (lambda x: PoolConfig(resources={"a": x}), "'a' must be a finite number of at least 0, "),
        (lambda x: PoolConfig(bundles=[{"a": x}]), "of a bundle must be a finite number above 0"),
        (lambda x: Sampling(temperature=x), "sampling.temperature must be a finite number of at "),
        (lambda x: Sampling(top_p=x), "sampling.top_p must be a finite number above 0 and at most"),
        (lambda x: Sampling(repetition_penalty=x), "sampling.repetition_penalty must be a finite"),
        (lambda x: Sampling(min_p=x), "sampling.min_p must be a finite number of at least 0 and"),
        (lambda x: money(1.0, 1, x), "price_per_engine_hour must be a finite number of at least 0"),
    ],
)
def test_a_number_without_an_end_is_told_to_be_finite(make, reason, value):
    with pytest.raises(ConfigError, match=f"{re.escape(reason)}.*got {value}$"):
        make(value)


def test_a_number_that_is_too_small_is_not_told_to_be_finite():
    with pytest.raises(ConfigError, match=r"max_wall_s must be a number of at least 0, got -1"):
        LimitConfig(max_wall_s=-1)


def test_samples_of_a_row_have_the_bound_of_vllm():
    assert Sampling(n=16_384).n == 16_384
    with pytest.raises(ConfigError, match=r"sampling\.n must be at least 1 and at most 16384, got"):
        Sampling(n=16_385)


def test_an_option_that_is_missing_is_named():
    with pytest.raises(ConfigError, match="rule 0: the option 'sampling' is missing"):
        from_mapping(WaveConfig, {"on": ("error",)}, where="rule 0")


@pytest.mark.parametrize("limit", [{"min_rows_for_error_rate": 0}, {"max_tokens": 1.5}])
def test_limits_that_count_are_whole_numbers(limit):
    with pytest.raises(ConfigError, match=f"{next(iter(limit))} must be a whole number"):
        LimitConfig(**limit)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accelerator_type": 1}, "accelerator_type must be a name such as H100, got 1"),
        ({"accelerator_type": ["H100", ""]}, "accelerator_type must be a name such as H100"),
        ({"accelerator_type": []}, "accelerator_type must be a name such as H100"),
        ({"resources": {"GPU": 1}}, "'GPU' cannot be a custom resource; set num_gpus_per_replica"),
        ({"resources": {"fast": -1}}, "'fast' must be a number of at least 0, got -1"),
        ({"runtime_env": "env.yaml"}, "runtime_env must be a mapping"),
    ],
)
def test_what_engines_reserve_is_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        PoolConfig(**options)


@pytest.mark.parametrize(
    ("kinds", "accelerator_types"),
    [(None, ()), ("H100", ("H100",)), (["H100", "H200"], ("H100", "H200"))],
)
def test_engines_run_on_the_named_kinds_of_accelerators(kinds, accelerator_types):
    assert PoolConfig(accelerator_type=kinds).accelerator_types == accelerator_types


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: EngineConfig(dtype="f"), "engine.dtype"),
        (lambda: EngineConfig(weight_buffers=0), "engine.weight_buffers"),
        (lambda: build_stage_config("demo", {"backend": "f"}, where="w"), "backend.kind"),
        (lambda: OpenAIOptions(base_url="http://h/v1", max_retries=-1), "backend.options.max_re"),
        (lambda: OpenAIOptions(base_url="h"), "backend.options.base_url"),
        (lambda: PoolConfig(strategy="f"), "pool.strategy"),
        (lambda: PlanConfig(order="f"), "plan.order"),
        (lambda: LimitConfig(max_error_rate=2), "limits.max_error_rate"),
        (lambda: WaveConfig(on=("ok",), sampling={}), "waves.on"),
        (lambda: Sampling(temperature=-1), "sampling.temperature"),
        (lambda: Pooling(dimensions=0), "pooling.dimensions"),
        (lambda: build_stage_config("demo", {"on_error": "f"}, where="w"), "on_error"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_are_named_as_job_files_and_flags_name_them(make, name):
    with pytest.raises(ConfigError, match=f"^{re.escape(name)}"):
        make()


@pytest.mark.parametrize("kind", known_backends())
def test_options_of_a_backend_that_are_null_are_none(kind):
    backend = from_mapping(BackendConfig, {"kind": kind, "options": None}, where="backend")
    assert backend == BackendConfig(kind=kind)
    assert backend.options == {}


def test_options_of_a_backend_that_are_no_mapping_are_refused_without_what_they_say():
    with pytest.raises(ConfigError, match=r"^backend\.options must be a mapping, got a str$"):
        BackendConfig(kind="openai", options="api_key: sesame")


@pytest.mark.parametrize(
    ("size", "number"),
    [
        ("8MB", 8_000_000),
        ("8GiB", 8 << 30),
        ("1.5 gb", 1_500_000_000),
        ("64k", 64_000),
        ("1e9", 10**9),
        (" 512 ", 512),
        (2.0e16, 2 * 10**16),
    ],
)
@pytest.mark.parametrize("name", ["kv_cache_bytes", "host_kv_bytes", "device_weight_bytes"])
def test_a_size_with_a_unit_is_refused_with_the_number_to_write(name, size, number):
    with pytest.raises(
        ConfigError, match=rf"got {re.escape(repr(size))}; the unit is bytes: write {number}$"
    ):
        EngineConfig(**{name: size})


def test_other_options_that_count_bytes_tell_the_number_as_well():
    with pytest.raises(ConfigError, match=r"write 33554432$"):
        PlanConfig(max_driver_bytes="32MiB")
    with pytest.raises(ConfigError, match=r"^max_row_bytes must be .* write 8000000$"):
        build_stage_config("demo", {"max_row_bytes": "8MB"}, where="w")


@pytest.mark.parametrize("value", ["lots", "8MW", "1,5GB", "-8MB", 0.5, "0.3k3", None, True])
def test_what_is_no_size_gets_no_number_to_write(value):
    with pytest.raises(ConfigError, match=rf"got {re.escape(repr(value))}$"):
        PlanConfig(max_driver_bytes=value)


def test_only_options_that_count_bytes_tell_a_number():
    with pytest.raises(ConfigError, match=r"got '8k'$"):
        EngineConfig(max_num_seqs="8k")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("max_model_len", 600.5, "must be a whole number of at least 1, got 600.5"),
        (
            "speculative_tokens",
            1.5,
            'must be a whole number of at least 0, "auto" or none, got 1.5',
        ),
        ("tune_malloc", "no", "must be true or false, got 'no'"),
        ("compile_kernels", "false", "must be true or false, got 'false'"),
        ("enable_prefix_caching", 1, "must be true or false, got 1"),
        ("device", 3, "must be a name such as cpu or cuda or cuda:1, got 3"),
        ("device", "mps", "must be a name such as cpu or cuda or cuda:1, got 'mps'"),
        ("device", "cuda:x", "must be a name such as cpu or cuda or cuda:1, got 'cuda:x'"),
    ],
)
def test_engine_options_of_the_wrong_type_are_refused_by_name(name, value, reason):
    with pytest.raises(ConfigError, match=re.escape(f"engine.{name} {reason}")):
        EngineConfig(**{name: value})
