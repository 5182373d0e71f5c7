"""Run `benchmarks.peers.run`."""

from benchmarks.peers.run import main

if __name__ == "__main__":
    main()
