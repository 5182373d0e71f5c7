"""Seeing a run: a board folded from its events, drawn in a terminal, and curves drawn from its event file."""
