"""`swarmq doctor`: checks that a stored run trains on what was sampled and that training is alive. Changes nothing.

Runs in the command's process, with torch. Offers `examine.examine`; uses `health` for signs in the metrics.
"""
