"""What looking at a run costs: the dashboard of a large run, and transcripts on the collector's path."""
