"""Tokens as text while they come: words are told once they are whole, and stop strings are never told.

`TextStream(words, stops).push(token)` returns whether a stop string ended the answer; `take()` gives what may be told
by now. A token may be a part of a letter, and a stop string may come over several tokens, so some text is held back.
Leaves out which tokens come.
"""

from __future__ import annotations

from collections.abc import Sequence

from gnomon.serve.vocabulary import BROKEN, Vocabulary

LONGEST_LETTER = 16
"""Tokens after which a letter that is still broken is told as it is."""


class TextStream:
    """The text of one answer."""

    def __init__(
        self, words: Vocabulary, stops: Sequence[str] = (), *, keep_stop: bool = False, specials: bool = False
    ) -> None:
        """stops: strings that end the answer. keep_stop: whether it is told too. specials: whether special tokens have
        text."""
        self.words, self.stops, self.keep_stop, self.specials = words, tuple(stops), keep_stop, specials
        self.longest = max(map(len, self.stops), default=0)
        self.ids: list[int] = []
        self.before = 0
        """Tokens from here on are decoded together with the new ones, for what stands between words."""
        self.read = 0
        """Tokens before this are in `text`."""
        self.text = ""
        self.num_sent = 0
        """Letters of it that were taken."""
        self.ended = False

    def push(self, token: int) -> bool:
        """Takes one more token; returns whether the answer ends with it."""
        self.ids.append(token)
        # Decoded together with the tokens before: a tokenizer may leave out the space before the first word of a text,
        # and the difference of the two has it.
        old = self._decoded(self.before, self.read)
        new = self._decoded(self.before)
        if new.endswith(BROKEN) and len(self.ids) - self.read < LONGEST_LETTER:
            return False
        return self._add(new[len(old) :])

    def _decoded(self, first: int, stop: int | None = None) -> str:
        return self.words.decode(self.ids[first:stop], specials=self.specials)

    def _add(self, text: str) -> bool:
        # A stop string may have begun in what was there before.
        begin = max(0, len(self.text) - self.longest + 1)
        self.text += text
        self.before, self.read = self.read, len(self.ids)
        places = [(at, stop) for stop in self.stops if (at := self.text.find(stop, begin)) >= 0]
        if places:
            # The one that begins first; of two that begin there the shorter, which was whole first.
            at, stop = min(places)
            self.text = self.text[: at + len(stop) * self.keep_stop]
            self.ended = True
        return self.ended

    def take(self, *, all: bool = False) -> str:
        """Text since the last call. all: also what could begin a stop string, since nothing follows; a letter that is
        not whole then is none."""
        if all and not self.ended and self.read < len(self.ids):
            old = self._decoded(self.before, self.read)
            self._add(self._decoded(self.before)[len(old) :].rstrip(BROKEN))
        upto = len(self.text) if all or self.ended else len(self.text) - self._num_withheld()
        new = self.text[self.num_sent : upto]
        self.num_sent = max(self.num_sent, upto)
        return new

    def _num_withheld(self) -> int:
        """Letters at the end with which a stop string may begin."""
        for count in range(min(self.longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-count:]) for stop in self.stops):
                return count
        return 0
