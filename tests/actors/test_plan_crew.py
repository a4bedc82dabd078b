import pytest

from raybatch.actors.pool import check_hosts
from raybatch.errors import ConfigError


def test_an_engine_fits_the_largest_host():
    check_hosts(4, [2, 4])


@pytest.mark.parametrize("hosts", [[], [2, 4]])
def test_an_engine_over_several_hosts_is_refused_with_the_way_out(hosts):
    with pytest.raises(ConfigError, match=r"asks for 8 GPUs .* lower tensor_parallel_size"):
        check_hosts(8, hosts)
