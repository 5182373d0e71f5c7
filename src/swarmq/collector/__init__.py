"""The collector: joins begins, turns and ends into rollouts, forms groups, issues tickets, and keeps the ledger of every episode.

Runs as `swarmq-collector`, or as a child process of a learner. `decide/` is pure and holds all decisions; `store` and `service` are
its shell. `ledger` is what other packages may import: read-only access to the stored fates. Imports no HTTP, numpy or torch.
"""
