"""Documents as Markdown. Figures and examples are left to the page."""

from clustrs.evaluation.report.blocks import Block, Bullets, Document, Listing, Table, Text, Value
from clustrs.evaluation.report.escaping import for_markdown


def markdown(document: Document) -> str:
    """Render a document."""
    parts = [f"# {for_markdown(document.title)}"]
    for section in document.sections:
        shown = [_block(block) for block in section.without_images]
        parts += [f"## {for_markdown(section.title)}", *shown] if shown else []
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> str:
    match block:
        case Text(text, warning):
            return f"**{for_markdown(text)}**" if warning else for_markdown(text)
        case Bullets(lines):
            return "\n".join(f"- {for_markdown(line)}" for line in lines)
        case Listing(lines):
            return "\n".join(["```json", *lines, "```"])
        case Table():
            return _table(block)
    raise TypeError(f"{type(block).__name__} has no place in Markdown")


def _table(table: Table) -> str:
    lines = [
        f"**{for_markdown(table.title)}**",
        "",
        _line([for_markdown(text) for text in (*table.heads, *table.columns)]),
        _line(["---"] * len(table.heads) + ["---:"] * len(table.columns)),
    ]
    lines += [_line([*map(for_markdown, row.heads), *map(_value, row.values)]) for row in table.rows]
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _value(value: Value) -> str:
    text = for_markdown(value.text)
    parts = [f"**{text}**" if value.strong else text, value.interval, value.note]
    parts.append(f"(paper {for_markdown(value.paper)})" if value.paper else "")
    return " ".join(part for part in parts if part)
