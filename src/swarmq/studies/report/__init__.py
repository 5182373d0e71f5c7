"""The report of a study: a function of its ledger alone, so that it is the same to the byte whenever it is made.

    entries ──compose──> blocks ──┬─ markdown, with figures as SVG files
                                  ├─ html, one file
                                  └─ pdf

Results are ordered by arm, seed and rung, never by when a trial ended: a study whose processes were killed has the report of one
that was left alone, except for the chapter on its operation. Needs `swarmq[studies]`.
"""

from swarmq.studies.report.compose import compose
from swarmq.studies.report.write import FORMATS, render_html, render_markdown, render_pdf, write_report

__all__ = ["FORMATS", "compose", "render_html", "render_markdown", "render_pdf", "write_report"]
