"""Web pages about runs: a JSON API over `observe`, the built front end, and exports of it as single files.

`swarmq dashboard` runs it as a process of its own; the command line hands the same pages to the proxy. It reads run folders and
never changes them, so it can neither slow nor stop training. It never imports the proxy, the collector or torch.
"""
