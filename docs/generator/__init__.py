"""The generator of the site that `make docs` builds from the Markdown of this repository."""
