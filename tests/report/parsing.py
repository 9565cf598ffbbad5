"""What a parser finds in a page: elements, attributes, text by section."""

from html.parser import HTMLParser

VOID = {"meta", "img", "br", "hr"}


class Page(HTMLParser):
    """A page taken apart.

    Attributes:
        elements: (name, attributes) of every element, in order.
        text: All text outside the style sheet.
        sections: id → text.
        style: The style sheet.
    """

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements = []
        self.text = ""
        self.sections = {}
        self.style = ""
        self._open = []
        self._section = None
        self.feed(source)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self._open.append(name)
        if name == "section":
            self._section = dict(attributes)["id"]
            self.sections[self._section] = ""

    def handle_endtag(self, name):
        assert self._open, f"</{name}> closes nothing"
        assert self._open.pop() == name, f"</{name}> closes another element"
        if name == "section":
            self._section = None

    def handle_data(self, text):
        if self._open and self._open[-1] == "style":
            self.style += text
            return
        self.text += text
        if self._section:
            self.sections[self._section] += text

    def named(self, name):
        return [attributes for element, attributes in self.elements if element == name]
