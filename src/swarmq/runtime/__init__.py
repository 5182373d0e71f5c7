"""Facts and services of the operating system that every process uses: logs, files, processes, ports, terminals.

Every process runs this code. It imports no other part of swarmq but `errors`, loads nothing heavy, and knows nothing of runs,
episodes or models.
"""
