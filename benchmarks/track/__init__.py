"""The product's figures from commit to commit: a fixed set of benchmarks on a CPU, one line for each time they are run, and a gate."""
