"""Data for agents: readers of data sets, tasks with their slots, and the feed that puts tasks on a queue.

Used by user code, by the runners and by `swarmq feed`. Offers `tasks.SwarmTask`, `readers.read_tasks`, `feed.feed` and
`targets.load_object`. Never imports `client.episodes` or `client.runners`.
"""
