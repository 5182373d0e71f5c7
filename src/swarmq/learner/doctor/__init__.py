"""`swarmq doctor`: is what is trained what was sampled, and is the training alive? Reads a run, changes nothing."""
