"""Escaped text and tables of HTML that is also well-formed XML."""

from collections.abc import Sequence
import html


def escape(text: str) -> str:
  """Returns a text that stands for itself between tags and in attributes."""
  # Names may come from anywhere; HTML and XML forbid most control characters.
  clean = "".join(
    c if c in "\n\t" or (c.isprintable() and not _is_lone(c)) else "\ufffd"
    for c in text
  )
  return html.escape(clean)


def table(
  titles: Sequence[str],
  rows: Sequence[Sequence[str]],
  *,
  caption: str = "",
  kind: str = "",
) -> str:
  """Returns a table; nothing if it has no rows.

  Args:
    titles: Of the columns.
    rows: Cells, of which the first names the row.
    caption: What the table shows, where its surroundings do not say it.
    kind: A CSS class.
  """
  if not rows:
    return ""
  head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
  body = "".join(_row(row) for row in rows)
  above = f"<caption>{escape(caption)}</caption>" if caption else ""
  return (
    f'<div class="table"><table class="{escape(kind)}">{above}'
    f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
  )


def details(summary: str, content: str) -> str:
  """Returns content that is shown when it is asked for.

  Args:
    summary: What it is; a click on it shows it.
    content: HTML.
  """
  return (
    f"<details><summary>{escape(summary)}</summary>{content}</details>"
    if content
    else ""
  )


def listing(title: str, items: Sequence[str], *, kind: str = "") -> str:
  """Returns a titled list; nothing if it has no items.

  Args:
    title: Of the list.
    items: Sentences.
    kind: A CSS class.
  """
  if not items:
    return ""
  lines = "".join(f"<li>{escape(item)}</li>" for item in items)
  return f'<h3>{escape(title)}</h3><ul class="{escape(kind)}">{lines}</ul>'


def _row(cells: Sequence[str]) -> str:
  first, *rest = cells
  columns = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
  return f'<tr><th scope="row">{escape(first)}</th>{columns}</tr>'


def _is_lone(character: str) -> bool:
  """Whether it is half of a pair, which no encoding can write."""
  return "\ud800" <= character <= "\udfff"
