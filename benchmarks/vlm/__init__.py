"""Learning from images on a CPU: the model, the task, the runs, and the comparison with transformers."""
