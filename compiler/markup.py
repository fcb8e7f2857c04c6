"""HTML as nested calls: text is escaped unless it is `Markup`, so none gets through by mistake."""

from __future__ import annotations

from html import escape


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, *content: str, **attributes: str) -> Markup:
    """One element.

    Args:
        name: of the element; a void one ("meta") is not to be made with this.
        content: its children in order; a plain string is escaped, `Markup` is not.
        attributes: escaped; an underscore behind a name is dropped, one within becomes a hyphen.

    Example:
        >>> tag("p", "a < b", tag("b", "!"), class_="x")
        '<p class="x">a &lt; b<b>!</b></p>'
    """
    pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    opening = "".join(f' {key}="{escape(value)}"' for key, value in pairs)
    return Markup(f"<{name}{opening}>{joined(*content)}</{name}>")


def joined(*content: str) -> Markup:
    """Children without a parent, escaped as in `tag`."""
    return Markup("".join(c if isinstance(c, Markup) else escape(c) for c in content))


def table(head: list[str], rows: list[list[str]]) -> Markup:
    """A table that scrolls by itself where the window is narrower."""
    top = tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head)))
    body = (tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    return scrolling(tag("table", top, tag("tbody", *body)), ", ".join(head))


def scrolling(content: Markup, label: str) -> Markup:
    """What may be wider than the window: it can be focused, so that the keyboard scrolls it."""
    return tag("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)


def folded(summary: str, *content: str, is_open: bool = False) -> Markup:
    """Content that a click or a key unfolds."""
    attributes = {"open": ""} if is_open else {}
    return tag("details", tag("summary", summary), *content, **attributes)
