"""The messages of an episode, each stored once, for agents that name a conversation, or parts of it, instead of sending it
again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

Json = dict[str, Any]
_encode = msgspec.json.Encoder(order="deterministic").encode


class Conversations:
    """A trie of messages: conversations share their common beginnings."""

    def __init__(self) -> None:
        self._steps: dict[bytes, tuple[bytes, bytes]] = {}
        """Key of a conversation -> (key without its last message, that message)."""
        self._ends: dict[str, bytes] = {}
        self._parts: dict[str, tuple[bytes, str, int]] = {}
        """Name of a part -> (key of the conversation whose last message has it, field, index within the field)."""
        self.size_bytes = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._ends)

    def keep(self, name: str, messages: Sequence[Json]) -> None:
        key = b""
        for message in messages:
            raw = _encode(message)
            before, key = key, hashlib.blake2b(key + raw, digest_size=16).digest()
            if key not in self._steps:
                self._steps[key] = (before, raw)
                self.size_bytes += len(raw) + 160
        self._ends[name] = key
        self.size_bytes += len(name) + 100

    def recall(self, name: str) -> list[Json] | None:
        """Return the messages of the named conversation, or None."""
        key = self._ends.get(name)
        if key is None:
            return None
        messages: list[Json] = []
        while key:
            key, raw = self._steps[key]
            messages.append(msgspec.json.decode(raw))
        return messages[::-1]

    def keep_parts(self, name: str, parts: Mapping[str, tuple[str, int]]) -> None:
        """Store `parts`: name -> (field of the conversation's last message, index); a whole text has index 0."""
        for part, where in parts.items():
            self._parts[part] = (self._ends[name], *where)
            self.size_bytes += len(part) + 200

    def recall_part(self, name: str) -> Json | None:
        """Return a message that has only the named part, or None."""
        if name not in self._parts:
            return None
        key, field, at = self._parts[name]
        message = msgspec.json.decode(self._steps[key][1])
        whole = message.get(field) or ""
        part = whole[at : at + 1] if isinstance(whole, list) else whole if at == 0 else ""
        return {"role": message["role"], "content": ""} | ({field: part} if part else {})
