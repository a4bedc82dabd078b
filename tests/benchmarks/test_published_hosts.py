"""Models and hosts of SiDP's evaluation compared with published figures."""

import pytest
from published_hosts import ALL, HOSTS, bytes_of, costs_of, fitted

PARAMETERS = {
    "Qwen3-32B": 32_762_123_264,
    "Qwen2.5-72B": 72_706_203_648,
    "Llama-3.1-70B": 70_553_706_496,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
}


def test_models_have_their_published_parameters():
    assert {model: bytes_of(model).weight_bytes // 2 for model in ALL} == PARAMETERS


@pytest.mark.parametrize(
    ("host", "rows", "times"), [("H20", 512, 5.0), ("H200", 512, 1.8), ("B200", 256, 1.0)]
)
def test_fitted_hosts_take_what_figure_9_says(host, rows, times):
    found = fitted(HOSTS[host])
    costs = costs_of("Llama-3.1-70B", found, tp=2, cached_tokens=1024)
    fetch_s = sum(bytes_of("Llama-3.1-70B").ffn_bytes) / 2 / found.link_bytes_per_s
    assert costs.pass_s(rows) == pytest.approx(times * fetch_s, rel=0.01)
    assert found.compute_share < HOSTS[host].compute_share
