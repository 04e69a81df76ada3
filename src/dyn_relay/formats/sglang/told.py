"""Text that was told: what there is to know of it once it is out."""

from __future__ import annotations


class Told:
    """Its length in characters and its end; the whole of it only as long as somebody wants it (`forget`)."""

    __slots__ = ("_parts", "length", "tail")

    #: Characters of the end that are kept.
    KEPT = 256

    def __init__(self) -> None:
        self.length = 0
        self.tail = ""
        self._parts: list[str] | None = []

    def add(self, text: str) -> None:
        """More text."""
        if text:
            self.length += len(text)
            self.tail = (self.tail + text)[-self.KEPT :]
            if self._parts is not None:
                self._parts.append(text)

    def join(self, other: Told) -> None:
        """The text of `other` after this one's."""
        if other._parts is None or self._parts is None:
            self._parts = None
        else:
            self._parts += other._parts
        self.length += other.length
        self.tail = (self.tail + other.tail)[-self.KEPT :]

    def forget(self) -> None:
        """The whole is not wanted any more."""
        self._parts = None

    def cut(self, length: int) -> None:
        """Take back what came after `length` characters; only if nothing was forgotten."""
        text = self.whole[:length]
        self._parts, self.length, self.tail = [text], length, text[-self.KEPT :]

    @property
    def whole(self) -> str:
        """All of it; only if nothing was forgotten."""
        assert self._parts is not None, "it was forgotten"
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""
