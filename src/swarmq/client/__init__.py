"""The client: what user code imports to begin and end episodes, attempt tasks and evaluate.

Runs in user code, in `swarmq worker` and in `swarmq feed`. `async_client` and `sync_client` offer the public clients; `episodes`
speaks to the run, `data` reads tasks, `runners` attempts many of them. Never imports collector, proxy, engine or learner.
"""
