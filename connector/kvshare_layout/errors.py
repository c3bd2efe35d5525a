"""The one error of the layout protocol.

May live here: exceptions raised by the pure package. Everything that a person can mend is collected first and raised
once, so that nobody has to fix mistakes one at a time.
"""

from collections.abc import Iterable


class LayoutError(ValueError):
    """Input from which no valid layout follows.

    Attributes:
        mistakes: one sentence per mistake: what was given, what was expected, what to do.
    """

    def __init__(self, mistakes: str | Iterable[str]) -> None:
        self.mistakes: tuple[str, ...] = (mistakes,) if isinstance(mistakes, str) else tuple(mistakes)
        super().__init__("; ".join(self.mistakes))
