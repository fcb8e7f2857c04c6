r"""The option `passes` as text, in the manner of MLIR: `cascade{levels=2},blend{ratio=0.15}`.

    pipeline = "none" | pass ("," pass)*
    pass     = name ["{" [option ("," option)*] "}"]
    option   = name "=" value
    value    = characters without , { } " or '"' characters '"' with \" and \\ inside

In names of passes and options `_` and `-` are the same. Blanks between the parts mean nothing.
What names there are, and what their options take, is asked of `compiler.pass_registry`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from torch_cascade.compiler.option_values import written

NONE = "none"

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_BARE = re.compile(r'[^,{}"]+')
_QUOTED = re.compile(r'"(?:[^"\\]|\\["\\])*"')
_BLANK = re.compile(r"\s*")


class PassTextError(ValueError):
    """A text that names no pipeline; the message points at the place."""

    def __init__(self, what: str, text: str, at: int) -> None:
        """`what` is wrong with `text` at index `at`."""
        line = " ".join(text.splitlines()) or text
        super().__init__(f"{what}\n    {line}\n    {' ' * at}^ column {at + 1}")


@dataclass(frozen=True)
class PassSpec:
    """A pass by name, with the options that were said.

    Attributes:
        name: of the pass.
        options: names as in text, in the order of their declaration, with parsed values.

    Example:
        >>> str(PassSpec("blend", (("check-layers", ((1, None),)), ("min-tokens", 9))))
        'blend{check-layers=1,min-tokens=9}'
    """

    name: str
    options: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        said = ",".join(f"{name}={_value_text(value)}" for name, value in self.options)
        return f"{self.name}{{{said}}}" if said else self.name


@dataclass(frozen=True)
class Word:
    """A name or a value, and the index at which it stands in the text."""

    text: str
    at: int


@dataclass(frozen=True)
class Item:
    """One pass as it was written, not yet looked up."""

    name: Word
    options: tuple[tuple[Word, Word], ...]


def read(text: str) -> tuple[Item, ...]:
    """Take a text apart; () for "none".

    Raises:
        PassTextError: the text does not follow the grammar.

    Example:
        >>> [(item.name.text, len(item.options)) for item in read("cascade{levels=2}, blend")]
        [('cascade', 1), ('blend', 0)]
    """
    if text.strip() == NONE:
        return ()
    return _Reader(text).pipeline()


class _Reader:
    """A text and how far it was read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def pipeline(self) -> tuple[Item, ...]:
        items = [self._item()]
        while self._took(","):
            items.append(self._item())
        if self.at < len(self.text):
            self._fail("expected ',' between passes, '{' before options, or the end")
        return tuple(items)

    def _item(self) -> Item:
        name = self._name("the name of a pass")
        if not self._took("{") or self._took("}"):
            return Item(name, ())
        options = [self._option()]
        while self._took(","):
            options.append(self._option())
        if not self._took("}"):
            self._fail("expected ',' or '}' after the value of an option")
        return Item(name, tuple(options))

    def _option(self) -> tuple[Word, Word]:
        name = self._name("the name of an option")
        if not self._took("="):
            self._fail(f"expected '=' and a value after the option {name.text!r}")
        return name, self._value()

    def _name(self, what: str) -> Word:
        self._skip()
        found = _NAME.match(self.text, self.at)
        if found is None:
            self._fail(f"expected {what}")
        self.at = found.end()
        return Word(found[0].replace("_", "-"), found.start())

    def _value(self) -> Word:
        self._skip()
        begin, quoted = self.at, self.text.startswith('"', self.at)
        found = (_QUOTED if quoted else _BARE).match(self.text, begin)
        if found is None:
            self._fail("the quotation is never closed" if quoted else "expected a value")
        self.at = found.end()
        text = re.sub(r"\\(.)", r"\1", found[0][1:-1]) if quoted else found[0].strip()
        return Word(text, begin)

    def _took(self, character: str) -> bool:
        self._skip()
        took = self.text.startswith(character, self.at)
        self.at += took
        return took

    def _skip(self) -> None:
        blank = _BLANK.match(self.text, self.at)
        assert blank is not None
        self.at = blank.end()

    def _fail(self, what: str) -> NoReturn:
        raise PassTextError(what, self.text, self.at)


def _value_text(value: object) -> str:
    text = written(value)
    if text and text == text.strip() and _BARE.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
