"""Sphinx's settings for the site: the pages of docs/, README, CONTRIBUTING, CHANGELOG and those of examples/.

The source folder is the repository, so that a link between any two of these files works on a code host and in the site alike.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from swarmq.version import __version__  # noqa: E402 - found through the path above

project = "swarmq"
author = "The swarmq maintainers"
copyright = author  # noqa: A001 - Sphinx's name
release = version = __version__

extensions = ["myst_parser", "docs.generator.extension"]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/**.md",
    "examples/README.md",
    "examples/*/README.md",
]
exclude_patterns = [
    "docs/studies/*/studies/*/trials",
    ".*",
    "benchmarks",
    "build",
    "deploy",
    "requirements",
    "runs",
    "scripts",
    "src",
    "tests",
    "web",
    "**/node_modules",
]

myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
myst_number_code_blocks = []
suppress_warnings = ["misc.highlighting_failure"]  # fragments of JSON and shell sessions
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
highlight_language = "text"

html_theme = "furo"
html_title = f"swarmq {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "native"
