"""HTML as a test sees it: well formed or an error, its elements and its text."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "link", "input"}
LOADING = {"src", "srcset", "href", "data", "action", "poster", "xlink:href", "background"}


class Reader(HTMLParser):
    """Holds a document to be well formed; keeps its elements and its text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        assert len({name for name, _ in attributes}) == len(attributes)
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def checked(text):
    """What every page must hold."""
    reader = Reader(text)
    assert not reader.all("script") and not reader.all("link") and not reader.all("img")
    for _, attributes in reader.elements:
        for name, value in attributes.items():
            assert name not in LOADING or value.startswith("#"), (name, value)
            assert not name.startswith("on")
    assert "url(" not in text and "@import" not in text
    names = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len({*names}) == len(names)
    targets = {a["href"][1:] for a in reader.all("a")}
    assert targets and targets <= {*names}
    assert "default-src 'none'" in reader.all("meta")[-1]["content"]
    return reader
