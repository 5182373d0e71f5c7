"""What a proxy gives to the dashboard process that it starts and forwards pages from."""

from __future__ import annotations

import msgspec

BASE = "/dashboard"
"""Path of the pages at a proxy."""
READY = "ready"
"""Line that the process prints when it can be reached."""


class DashboardProcessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the process, given as JSON in its only argument."""

    run: str
    folder: str
    """Path of the run folder."""
    socket: str
    """Path of the socket file to listen on."""
    is_secure: bool = False
    """Whether browsers reach the proxy by https."""
