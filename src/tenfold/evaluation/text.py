"""From tokens, as a model writes them, to text that can be shown."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class WrittenText:
    """The text of tokens that come one by one: whole characters only, and never a part of a stop text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._stream = DecodeStream(skip_special_tokens=True)
        self._shown = 0
        self.tokens: list[int] = []
        self.text = ""
        self.stopped = False
        """Whether a stop text has come; the text ends before it."""

    def add(self, token: int) -> str:
        """Take in a token; what may be shown now and was not before."""
        self.tokens.append(token)
        piece = self._stream.step(self._tokenizer, token)
        if piece is None:  # a character may need several tokens
            return ""
        # A stop text may have begun before this piece.
        start = max(0, len(self.text) - max(map(len, self._stops), default=0))
        self.text += piece
        places = [place for stop in self._stops if (place := self.text.find(stop, start)) >= 0]
        if places:
            self.text, self.stopped = self.text[: min(places)], True
        return self._show(len(self.text) - (0 if self.stopped else self._begun()))

    def end(self) -> str:
        """No more tokens come; the rest of the text, and whatever bytes are left of a character."""
        if not self.stopped:
            whole: str = self._tokenizer.decode(self.tokens)
            if whole.startswith(self.text):
                self.text = whole
        return self._show(len(self.text))

    def _show(self, to: int) -> str:
        shown, self._shown = self.text[self._shown : to], max(self._shown, to)
        return shown

    def _begun(self) -> int:
        """How many characters at the end may be the beginning of a stop text."""
        lengths = (n for stop in self._stops for n in range(1, len(stop)) if self.text.endswith(stop[:n]))
        return max(lengths, default=0)
