"""`python -m swarmq.toy_model`."""

from swarmq.toy_model.command import main

if __name__ == "__main__":
    main()
