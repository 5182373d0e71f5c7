"""The version of this package, importable from everywhere without loading anything else."""

__version__ = "0.1.0"
