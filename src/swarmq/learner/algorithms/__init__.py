"""The mathematics of training: advantages, losses, filters and loss weights as pure functions in small registries.

The trainer's ranks and the batch feeder call them. A new method is a function and a row in its registry. `advantages` and
`loss_effects` import no torch.
"""
