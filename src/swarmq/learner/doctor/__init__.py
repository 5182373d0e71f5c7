"""`swarmq doctor`: checks that a stored run trains on exactly what was sampled, and that training shows no sign of collapse.
Changes nothing.

Runs in the command's process, with torch. Offers `examine.examine`; uses `health` for signs in the metrics.
"""
