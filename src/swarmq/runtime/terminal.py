"""What people see in a terminal: names and texts of others are shown, and cannot move its cursor or change what stands there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
"""Control characters as pictures."""
HIDDEN = dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)
"""The second set of control characters, and what turns the direction of writing: they have no picture."""
VISIBLE = SHOWN | HIDDEN


def visible(text: str) -> str:
    """`text` with its control characters made visible; lines and tabs stay."""
    return text.translate(VISIBLE)


def console(**options: Any) -> Console:
    """rich's console, which takes no markup or control character from the texts that it is given."""
    from rich.console import Console  # noqa: PLC0415 - only where somebody looks

    class VisibleConsole(Console):
        def render_str(self, text: str, **more: Any) -> Any:  # before a table measures its cells
            return super().render_str(visible(text), **more)

        def render(self, *given: Any, **more: Any) -> Iterable[Any]:
            for segment in super().render(*given, **more):
                yield segment if segment.control else segment._replace(text=visible(segment.text))

    return VisibleConsole(markup=False, emoji=False, **options)
