"""Terminal output in which foreign names and texts cannot move the cursor, change colours or overwrite other text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

VISIBLE_SYMBOLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
"""Control character -> its visible symbol."""
HIDDEN = dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)
"""C1 control characters and bidirectional overrides, which have no symbol -> replacement character."""
VISIBLE = VISIBLE_SYMBOLS | HIDDEN


def visible(text: str) -> str:
    """Return `text` with control characters replaced by visible symbols, except for newlines and tabs."""
    return text.translate(VISIBLE)


def console(**options: Any) -> Console:
    """Return a rich console that interprets neither markup nor control characters in the texts that it prints."""
    from rich.console import Console  # noqa: PLC0415 - slow to load, and only terminals need it

    class VisibleConsole(Console):
        def render_str(self, text: str, **more: Any) -> Any:  # called before a table measures its cells
            return super().render_str(visible(text), **more)

        def render(self, *given: Any, **more: Any) -> Iterable[Any]:
            for segment in super().render(*given, **more):
                yield segment if segment.control else segment._replace(text=visible(segment.text))

    return VisibleConsole(markup=False, emoji=False, **options)
