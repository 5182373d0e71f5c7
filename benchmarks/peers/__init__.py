"""The loop beside verl's and TRL's trainers: the same model, episodes of the same turns, one card, one after the other.

`python -m benchmarks.peers` is `run`. verl and TRL pin other versions than swarmq, so each runs in an environment of its
own (requirements-verl.txt, requirements-trl.txt); the modules in `theirs` are imported there only.
"""
