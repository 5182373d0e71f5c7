"""The HTTP side of the proxy: the Litestar app, agent and control routes, metrics, tracing, connection limits.

Runs in the proxy, on top of all its other packages. `app.create_app` is the entry.
"""
