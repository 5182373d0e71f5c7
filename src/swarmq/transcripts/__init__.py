"""Transcripts: every closed episode of a run, kept readable in `<run>/transcripts`.

The collector writes them in a thread of its own (`writer`, which applies `retention`); `swarmq.observe` reads them (`read`), also
while they are written and after everything has died. `format` defines the records and the files. They are best effort: losing them
loses no training. Imports neither broker, collector nor store.
"""
