"""Reference pages from the code: each function returns the Markdown that takes the place of `<!-- generated: NAME -->`.

They are made when the site is built, and not kept in git: nobody has to run a script after a change, and changes of the same
part of the code do not conflict in generated text.
"""

from __future__ import annotations

from collections.abc import Callable

from docs.generator.reference import commands, events, metrics, python_api, queues, routes, settings

GENERATED: dict[str, Callable[[], str]] = {
    "commands": commands.page,
    "dashboard-routes": routes.dashboard,
    "errors": python_api.error_classes,
    "events": events.page,
    "host-routes": routes.host,
    "metrics": metrics.page,
    "names": python_api.names,
    "proxy-routes": routes.proxy,
    "queues": queues.page,
    "rewards": python_api.reward_names,
    "run-records": python_api.run_records,
    "settings": settings.page,
}
