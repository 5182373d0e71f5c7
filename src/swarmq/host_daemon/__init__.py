"""The daemon of a GPU host (`swarmq host serve`): takes jobs over HTTP, queues them for the host's GPUs, and keeps their runs up.

main.py        sockets and the end of the process
app.py         routes, authorization, errors
service.py     what happens to a run from its launch to its deletion
queue.py       which queued runs may start
check.py       whether a job can run on this host
ledger.py      the record of every run, on disk
processes.py   `swarmq up` as a process that outlives the daemon, and is found again
files.py       which files of a run may be read

It runs in a process of its own and offers `main.serve` to the command line. It must never import `cli`, `demo` or `testing`, nor torch.
"""
