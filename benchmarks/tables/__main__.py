from benchmarks.tables.render import PAGES, render

for page in PAGES:
    page.write_text(render(page.read_text()))
