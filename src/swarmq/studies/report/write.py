"""A report's blocks as Markdown, HTML and PDF. No date, path or version gets into a file, so that equal ledgers give equal bytes."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape as escape_xml

from swarmq.errors import MissingExtraError
from swarmq.runtime.files import write_atomically
from swarmq.studies.records import Entry
from swarmq.studies.report.blocks import Block, Bullets, Code, Figure, Heading, ReportTable, Text
from swarmq.studies.report.compose import compose
from swarmq.studies.report.figures import draw

FORMATS = ("md", "html", "pdf")

CSS = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5b636b; --line: #d9dde1; --paper: #fff; --band: #f5f6f7 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --soft: #a3abb3; --line: #3a4046; --paper: #16191c; --band: #1f2327 } }
body { margin: 2.5rem auto; max-width: 60rem; padding: 0 1.2rem; background: var(--paper); color: var(--ink); font: 15px/1.55 system-ui, sans-serif }
h1 { font-size: 1.7rem; margin: 0 0 .6rem } h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; border-bottom: 1px solid var(--line); padding-bottom: .25rem }
p, li { max-width: 46rem; overflow-wrap: anywhere }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; margin-top: .8rem }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top } th { color: var(--soft); font-weight: 600 }
.caption { color: var(--soft); font-size: .85rem; margin: .4rem 0 1.4rem } figure { margin: 1rem 0 } figure img { max-width: 100%; background: #fff; border-radius: 4px }
pre { background: var(--band); padding: .7rem .9rem; overflow-x: auto; font-size: .82rem }
"""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write_report(
    entries: Sequence[Entry], folder: Path, formats: Sequence[str] = FORMATS, *, study_file: str = "study.toml"
) -> list[Path]:
    """Write `report.FORMAT` and the figures of Markdown into a folder; returns the paths. `study_file`: name of the study's file.

    Raises StudyError for a ledger without a study, OSError.
    """
    blocks = compose(entries, study_file=study_file)
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, bytes] = {}
    if "md" in formats:
        made |= {f"{block.name}.svg": draw(block, "svg") for block in blocks if isinstance(block, Figure)}
        made["report.md"] = render_markdown(blocks).encode()
    if "html" in formats:
        made["report.html"] = render_html(blocks).encode()
    if "pdf" in formats:
        made["report.pdf"] = render_pdf(blocks)
    for name, content in made.items():
        write_atomically(folder / name, content)
    return [folder / name for name in made if name.startswith("report.")]


def render_markdown(blocks: Sequence[Block]) -> str:
    """Return the report as Markdown; its figures are files beside it."""
    parts = []
    for block in blocks:
        match block:
            case Heading(text, level):
                parts.append(f"{'#' * level} {_md(text)}")
            case Text(text):
                parts.append(_md(text))
            case Bullets(items):
                parts.append("\n".join(f"- {_md(item)}" for item in items))
            case Code(text):
                fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
                parts.append(f"{fence}\n{text}\n{fence}")
            case ReportTable(head, rows, caption):
                lines = [head, ["---"] * len(head), *rows]
                parts.append(
                    "\n".join(f"| {' | '.join(c if c == '---' else _md(c) for c in line)} |" for line in lines)
                )
                parts += [f"*{_md(caption)}*"] if caption else []
            case Figure(name=name, caption=caption):
                parts += [f"![{_md(caption)}]({name}.svg)", f"*{_md(caption)}*"]
    return "\n\n".join(parts) + "\n"


def render_html(blocks: Sequence[Block]) -> str:
    """Return the report as one HTML file that loads nothing."""
    title = next((block.text for block in blocks if isinstance(block, Heading)), "report")
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title><style>{CSS}</style></head><body>'
    )
    return head + "\n".join(_html(block) for block in blocks) + "</body></html>\n"


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Text(text):
            return f"<p>{escape(text)}</p>"
        case Bullets(items):
            return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"
        case Code(text):
            return f"<pre>{escape(text)}</pre>"
        case ReportTable(head, rows, caption):
            heads = "".join(f"<th>{escape(cell)}</th>" for cell in head)
            body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
            table = f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
            return table + (f'<p class="caption">{escape(caption)}</p>' if caption else "")
        case Figure(caption=caption):
            image = base64.b64encode(draw(block, "svg")).decode()
            return (
                f'<figure><img alt="{escape(caption)}" src="data:image/svg+xml;base64,{image}">'
                f'<figcaption class="caption">{escape(caption)}</figcaption></figure>'
            )


def render_pdf(blocks: Sequence[Block]) -> bytes:
    """Return the report as PDF pages of size A4. Raises MissingExtraError without reportlab."""
    try:
        from reportlab.lib import colors  # noqa: PLC0415 - an extra
        from reportlab.lib.pagesizes import A4  # noqa: PLC0415
        from reportlab.lib.styles import ParagraphStyle  # noqa: PLC0415
        from reportlab.lib.units import mm  # noqa: PLC0415
        from reportlab.platypus import SimpleDocTemplate  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("a report as PDF needs reportlab: pip install 'swarmq[studies]'") from error
    _register_fonts()
    out = io.BytesIO()
    title = next((block.text for block in blocks if isinstance(block, Heading)), "report")
    document = SimpleDocTemplate(
        out, pagesize=A4, invariant=1, title=title, author="", leftMargin=20 * mm, rightMargin=20 * mm,
        topMargin=18 * mm, bottomMargin=20 * mm,
    )  # fmt: skip
    ink, soft = colors.HexColor("#1c2024"), colors.HexColor("#5b636b")
    body = ParagraphStyle("body", fontName="Sans", fontSize=9, leading=13, textColor=ink, spaceAfter=5)
    styles = {
        "body": body,
        "h1": ParagraphStyle("h1", body, fontName="Sans-Bold", fontSize=17, leading=22, spaceAfter=8),
        "h2": ParagraphStyle("h2", body, fontName="Sans-Bold", fontSize=11.5, leading=15, spaceBefore=12, keepWithNext=1),
        "caption": ParagraphStyle("caption", body, fontSize=7.5, leading=10.5, textColor=soft, spaceAfter=10),
        "cell": ParagraphStyle("cell", body, fontSize=7.5, leading=10, spaceAfter=0),
        "head": ParagraphStyle("head", body, fontName="Sans-Bold", fontSize=7.5, leading=10, textColor=soft, spaceAfter=0),
        "code": ParagraphStyle("code", body, fontName="Mono", fontSize=7.5, leading=10, backColor=colors.HexColor("#f5f6f7"), borderPadding=5, spaceBefore=5, spaceAfter=11),
    }  # fmt: skip
    flow = [part for block in blocks for part in _pdf(block, styles, document.width)]

    def number_page(canvas: Any, made: Any) -> None:
        canvas.setFont("Sans", 7.5)
        canvas.setFillColor(soft)
        canvas.drawString(made.leftMargin, 11 * mm, title)
        canvas.drawRightString(A4[0] - made.rightMargin, 11 * mm, str(made.page))

    document.build(flow, onFirstPage=number_page, onLaterPages=number_page)
    return out.getvalue()


def _pdf(block: Block, styles: dict[str, Any], width: float) -> list[Any]:
    from reportlab.lib.utils import ImageReader  # noqa: PLC0415
    from reportlab.platypus import Image, ListFlowable, Paragraph, Spacer, XPreformatted  # noqa: PLC0415

    match block:
        case Heading(text, level):
            return [Paragraph(escape_xml(text), styles[f"h{min(level, 2)}"])]
        case Text(text):
            return [Paragraph(escape_xml(text), styles["body"])]
        case Bullets(items):
            paragraphs = [Paragraph(escape_xml(item), styles["body"]) for item in items]
            return [ListFlowable(paragraphs, bulletType="bullet", start="•", leftIndent=12, bulletFontSize=8)]
        case Code(text):
            return [XPreformatted(escape_xml("\n".join(_fold(text))), styles["code"])]
        case ReportTable(_, _, caption):
            return [_pdf_table(block, styles, width), Spacer(1, 4), Paragraph(escape_xml(caption), styles["caption"])]
        case Figure(caption=caption):
            png = draw(block, "png")
            across, down = ImageReader(io.BytesIO(png)).getSize()
            image = Image(io.BytesIO(png), width=width, height=width * down / across)
            image.keepWithNext = True
            return [image, Paragraph(escape_xml(caption), styles["caption"])]


def _pdf_table(block: ReportTable, styles: dict[str, Any], width: float) -> Any:
    from reportlab.lib import colors  # noqa: PLC0415
    from reportlab.pdfbase.pdfmetrics import stringWidth  # noqa: PLC0415
    from reportlab.platypus import LongTable, Paragraph, TableStyle  # noqa: PLC0415

    lines = [block.head, *block.rows]
    # a column is as wide as its widest cell, but for long texts, which share what is left
    wants = [9 + max(stringWidth(line[i], "Sans-Bold", 7.5) for line in lines) for i in range(len(block.head))]
    fair = width / len(wants)
    short = sum(want for want in wants if want <= fair)
    long = sum(want for want in wants if want > fair)
    columns = [want if want <= fair else min(want, (width - short) * want / long) for want in wants]
    cells = [
        [Paragraph(escape_xml(cell), styles["head" if place == 0 else "cell"]) for cell in line]
        for place, line in enumerate(lines)
    ]
    table = LongTable(cells, colWidths=columns, repeatRows=1, hAlign="LEFT", spaceBefore=4)
    table.setStyle(
        TableStyle(
            [
                ("LINEBELOW", (0, 0), (-1, -1), 0.4, colors.HexColor("#d9dde1")),
                ("VALIGN", (0, 0), (-1, -1), "TOP"),
                ("LEFTPADDING", (0, 0), (-1, -1), 0),
                ("RIGHTPADDING", (0, 0), (-1, -1), 7),
                ("TOPPADDING", (0, 0), (-1, -1), 2.5),
                ("BOTTOMPADDING", (0, 0), (-1, -1), 2.5),
            ]
        )
    )
    return table


def _register_fonts() -> None:
    """Register the fonts that come with matplotlib: they have all letters that a report uses."""
    import matplotlib as mpl  # noqa: PLC0415
    from reportlab.pdfbase.pdfmetrics import registerFont, registerFontFamily  # noqa: PLC0415
    from reportlab.pdfbase.ttfonts import TTFont  # noqa: PLC0415

    folder = Path(mpl.get_data_path(), "fonts", "ttf")
    for name, file in (("Sans", "DejaVuSans"), ("Sans-Bold", "DejaVuSans-Bold"), ("Mono", "DejaVuSansMono")):
        registerFont(TTFont(name, folder / f"{file}.ttf"))
    registerFontFamily("Sans", normal="Sans", bold="Sans-Bold", italic="Sans", boldItalic="Sans-Bold")


def _fold(text: str, width: int = 100) -> list[str]:
    return [line[i : i + width] for line in text.splitlines() for i in range(0, max(len(line), 1), width)]


def _md(text: str) -> str:
    """Escape what Markdown would take for markup; a line stays one line."""
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*\[\]|~]|^[#>+-]|(?<!\w)_|_(?!\w))", r"\\\1", plain)
