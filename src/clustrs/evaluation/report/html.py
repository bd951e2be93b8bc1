"""A document as one page that needs nothing else: no scripts, no files, no network."""

from clustrs.evaluation.report.blocks import Block, Document, Figure, Listing, Table, Text, Value
from clustrs.evaluation.report.escaping import for_html

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; }
body { max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
p { max-width: 46rem; overflow-wrap: anywhere; }
p.warning { background: #fff4d6; border-left: 4px solid #d55e00; padding: .5rem .8rem; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; border: solid #000; border-width: 2px 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .2rem .7rem; text-align: right; vertical-align: top; }
th { font-weight: 600; } tbody th { font-weight: 400; }
th.left { text-align: left; max-width: 40rem; overflow-wrap: anywhere; }
thead tr { border-bottom: 1px solid #000; } tr.opens { border-top: 1px solid #bbb; }
td.strong .number { font-weight: 700; }
.interval, .note, .paper { display: block; font-size: .75rem; color: #555; white-space: nowrap; }
.paper { color: #0059b3; font-style: italic; }
figure { margin: 1.5rem 0; } figure svg { max-width: 100%; height: auto; } figcaption { font-size: .9rem; color: #333; }
pre { background: #f5f5f5; padding: .8rem; overflow-x: auto; font-size: .8rem; }
"""
WARNING, OPENS, STRONG = (f' class="{name}"' for name in ("warning", "opens", "strong"))
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(document: Document) -> str:
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{for_html(document.title)}</title>",
        f"<style>{STYLE}</style>",
        "</head>",
        "<body>",
        f"<h1>{for_html(document.title)}</h1>",
    ]
    for section in document.sections:
        parts.append(f"<h2>{for_html(section.title)}</h2>")
        parts += [_block(block) for block in section.blocks]
    return "\n".join([*parts, "</body>", "</html>", ""])


def _block(block: Block) -> str:
    match block:
        case Text(text, warning):
            return f"<p{WARNING if warning else ''}>{for_html(text)}</p>"
        case Listing(lines):
            return "<pre>" + "\n".join(for_html(line) for line in lines) + "</pre>"
        case Figure(title, svg):
            named = svg.replace("<svg", f'<svg role="img" aria-label="{for_html(title)}"', 1)
            return f"<figure>\n{named}\n<figcaption>{for_html(title)}</figcaption>\n</figure>"
    return _table(block)


def _table(table: Table) -> str:
    heads = "".join(f'<th class="left" scope="col">{for_html(head)}</th>' for head in table.heads)
    columns = "".join(f'<th scope="col">{for_html(column)}</th>' for column in table.columns)
    lines = [
        '<div class="wide"><table>',
        f"<caption>{for_html(table.title)}</caption>",
        f"<thead><tr>{heads}{columns}</tr></thead>",
        "<tbody>",
    ]
    for row in table.rows:
        left = "".join(f'<th class="left" scope="row">{for_html(text)}</th>' for text in table.headings(row))
        right = "".join(_value(value) for value in row.values)
        lines.append(f"<tr{OPENS if row.opens else ''}>{left}{right}</tr>")
    return "\n".join([*lines, "</tbody></table></div>"])


def _value(value: Value) -> str:
    inner = f'<span class="number">{for_html(value.text)}</span>'
    for name, text in (("interval", value.interval), ("note", value.note)):
        inner += f'<span class="{name}">{for_html(text)}</span>' if text else ""
    inner += f'<span class="paper">paper {for_html(value.paper)}</span>' if value.paper else ""
    return f"<td{STRONG if value.strong else ''}>{inner}</td>"
