"""The tutorials under `examples/`, run whole as a user runs them, with held-out reward before and after: `python -m benchmarks.examples`.

__main__   which tutorials, how many at once; table, curves and results
course     one tutorial with one seed, in a process of its own
manifest   a tutorial's `example.toml`
curve      the picture of a tutorial's README
"""
