"""An address that other hosts cannot reach is refused before it is announced."""

import pytest

from swarmq.errors import ConfigError
from swarmq.hosts.addresses import check_announced, find_own_address, format_url, is_loopback, resolve, split_address


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/v1", "https://[::1]:8000", "http://127.3.2.1:80"])
def test_loopback_is_announced_only_on_the_runs_own_host(url):
    assert is_loopback(url)
    check_announced(url, is_run_on_this_host=True)
    with pytest.raises(ConfigError, match="loopback address, which the run's other hosts cannot reach"):
        check_announced(url, is_run_on_this_host=False)


@pytest.mark.parametrize("url", ["http://0.0.0.0:8000", "http://[::]:8000/v1"])
def test_the_address_that_means_all_of_them_is_announced_nowhere(url):
    with pytest.raises(ConfigError, match="announce one with --url http://NAME:8000"):
        check_announced(url, is_run_on_this_host=True)


def test_another_address_passes():
    check_announced("http://192.0.2.7:8000/v1", is_run_on_this_host=False)
    assert not is_loopback("http://gpu2.example.org:8000")


def test_a_name_that_resolves_to_nothing_is_told_with_its_port():
    with pytest.raises(ConfigError, match=r"nowhere.invalid:8000: the name 'nowhere.invalid' resolves to nothing"):
        resolve("nowhere.invalid", 8000)


def test_a_host_reaches_itself_by_its_loopback():
    assert find_own_address("127.0.0.1", 9) == "127.0.0.1"


def test_urls_are_split_and_put_together():
    assert split_address("amqps://user:word@gpu.example.org/") == ("gpu.example.org", 5671)
    assert split_address("http://[::1]:8000/v1") == ("::1", 8000)
    assert format_url("http", "::1", 8000) == "http://[::1]:8000"
    for wrong in ("gpu2", "http://", "http://gpu2:port"):
        with pytest.raises(ConfigError, match="not a valid URL"):
            split_address(wrong)
