"""Runners: many attempts by an agent's function, from a list of tasks or from a task queue.

Run in user code (`run_episodes_until_all_complete`, `evaluate`) and in `swarmq worker` with its child processes. Offers
`task_list`, `worker`, `worker_processes` and the results in `report`. Built on `client.episodes` and `client.data`, which never
import the runners.
"""
