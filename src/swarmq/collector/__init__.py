"""The collector: joins begins, turns and ends into rollouts, forms groups, issues tickets, and keeps the ledger of every episode.

Runs as `swarmq-collector`, or as a child process of a learner. `decide/` is pure and holds all decisions; `store` and `service` are
its shell. Other packages may import only `ledger`: read-only access to the fates of episodes. Imports no HTTP, numpy or torch.
"""
