"""A run and another host that has an invite alone."""

from support.other_host import world  # noqa: F401 - a fixture
