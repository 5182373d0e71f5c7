"""The graph of an episode's messages with the exact tokens of each. Pure: no clock, no I/O.

  messages   m1 ─ m2 ─ [answer a] ─ m3 ─ [answer b]        keys: a hash chain over canonical messages
  nodes               node a ────────── node b             tokens: prompt after the shared ones, then sampled

The node of a request's longest known prefix has the tokens that the engine saw and sampled, with which the next prompt should
begin. A fresh rendering may spell the same text in other tokens (drift), so a node also stores length and digest of the fresh
rendering of its prompt: if a later rendering begins with that and continues with the sampled tokens, the two are equal without
comparing any text.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

Reason = Literal[
    "history_edited",
    "template_rewrote_history",
    "tools_changed",
    "answer_cut",
    "token_dropped",
    "character_cut",
    "drift",
    "memory_lost",
]
"""Reason for which a known conversation could not be continued token by token:

- `history_edited`: an answer came back changed, what precedes it was changed (a clock in the system prompt), or the history was cut
  or summarised;
- `template_rewrote_history`: the chat template renders history otherwise than it was sampled (without thoughts, with trimmed white
  space, with tool calls in another form, with an empty thought in the newest prompt alone);
- `tools_changed`: the tools or the template's arguments changed, and with them the text before the answer;
- `answer_cut`: the agent got less than was sampled, because a stop string was cut off;
- `token_dropped`: a special token was sampled within the answer, which no text shows; `character_cut`: the answer ended within a
  character. Both are continued if the agent sends the answer back unchanged and the template renders it so;
- `drift`: the text is the same, but the sampled tokens cannot begin it;
- `memory_lost`: the answers were given by another proxy, or before a restart or shortage of memory of this one.
"""

ID_BYTES = 4
"""Bytes of a token id: packed little-endian int32, so that prefixes are compared at memory speed."""

WORTH_TOKENS = 64
"""Number of shared tokens below which they are sent again, because a reference costs about as much; images are never sent again."""

NODE_BYTES, KEY_BYTES = 832, 128
"""Bytes of a turn and of a key besides tokens, measured by tracemalloc."""

_hash_json = msgspec.json.Encoder(order="deterministic")


ImagePlace = tuple[int, str]
"""(index of an image's first token in the prompt, hash of the image)"""


class HistoryKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Keys by which a graph finds the messages of a request."""

    base: bytes
    """Hash of the template's other inputs: tools and template arguments."""
    keys: tuple[bytes, ...]
    """Keys; keys[i] identifies messages 0..i."""
    answered: int
    """Number of messages up to and including the assistant's last one; 0 if there is none."""
    answers: tuple[bytes, ...]
    """Hashes of the assistant's messages with content, whatever precedes them."""


class TurnNode(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One confirmed turn."""

    call_id: str
    request_id: str
    key: bytes
    """Key of the request's messages and the answer."""
    base: bytes
    answer: bytes | None
    """Hash of the answer, whatever precedes it; None for an empty one."""
    depth: int
    """Number of messages, including the answer."""
    parent: TurnNode | None
    """Node that holds the first tokens: the continued turn, or another turn with the same beginning."""
    shared: int
    """Number of leading tokens in the parent's sequence."""
    prompt: bytes
    """Prompt tokens after the shared ones."""
    sampled: bytes
    repaired: bool
    """Whether the prompt differs from its rendering."""
    images: tuple[ImagePlace, ...] = ()
    """Images after the shared tokens, if the turn is trained."""
    fresh_bytes: int
    fresh_digest: bytes
    """Digest of the prompt's fresh rendering."""
    cut: bool
    """Whether the agent got less of the answer than was sampled."""

    @property
    def prompt_tokens(self) -> int:
        return self.shared + len(self.prompt) // ID_BYTES

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + len(self.sampled) // ID_BYTES

    def tokens(self, count: int | None = None) -> bytes:
        """Return the first `count` tokens of the sequence, or all of them."""
        pieces: list[bytes] = []
        node: TurnNode | None = self
        need = self.num_tokens if count is None else count
        while node is not None and need:
            if need > node.shared:
                own = node.prompt + node.sampled
                pieces.append(own[: (need - node.shared) * ID_BYTES])
                need = node.shared
            node = node.parent
        return b"".join(reversed(pieces))

    def find_images(self, count: int) -> set[ImagePlace]:
        """Return the images among the first `count` tokens of the sequence."""
        found: set[ImagePlace] = set()
        node: TurnNode | None = self
        while node is not None:
            found |= {place for place in node.images if place[0] < count}
            count = min(count, node.shared)
            node = node.parent
        return found

    def begins_rendering(self, fresh: bytes) -> bool:
        """Return whether a rendering begins with the fresh rendering of this node's prompt."""
        return len(fresh) >= self.fresh_bytes and digest(fresh[: self.fresh_bytes]) == self.fresh_digest


class Stitched(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to sample from, and how it continues earlier turns."""

    prompt: bytes
    images: tuple[ImagePlace, ...] = ()
    """Images in the prompt, if the turn will be trained."""
    parent: TurnNode | None = None
    shared: int = 0
    """Number of first tokens that are the first tokens of the parent's sequence."""
    depth: int = 0
    """Number of messages that the shared tokens cover."""
    repaired: bool = False
    branch: Reason | None = None


EMPTY_HISTORY = HistoryKeys(base=b"", keys=(), answered=0, answers=())
EMPTY_PROMPT = Stitched(prompt=b"")


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The confirmed turn that holds the first tokens of a prompt, so that they are not sent again."""

    node: TurnNode | None = None
    shared: int = 0
    depth: int = 0
    """Number of the request's leading messages that are also recorded with that turn."""
    begins: bool = False
    """Whether the prompt only shares its first tokens with the turn and does not continue it."""


class Graph:
    """The nodes of one episode under one policy."""

    __slots__ = (
        "_answers",
        "_claims",
        "_edited",
        "_given",
        "_newest",
        "_prompts",
        "_seen",
        "image_bytes",
        "size_bytes",
    )

    def __init__(self) -> None:
        self._answers: dict[bytes, list[TurnNode]] = {}
        """Key of an answer -> its twins: one per equal request that was answered in the same words."""
        self._claims: dict[str, str] = {}
        """Call id of a twin -> the request that continues it."""
        self._seen: set[bytes] = set()
        self._given: set[bytes] = set()
        """Hashes of all answers sent to the agent, regardless of the messages before them."""
        self._edited: set[bytes] = set()
        """Keys of conversations up to an answer that the agent sent back changed."""
        self._prompts: dict[tuple[bytes, tuple[ImagePlace, ...], str], TurnNode] = {}
        """(digest of a prompt, its images, continued call id) -> first node with it."""
        self._newest: dict[bytes, TurnNode] = {}
        """First key of a conversation -> its newest node; b"" -> the newest of all."""
        self.size_bytes = 0
        self.image_bytes = 0
        """Size of the images that the recorded turns carry."""

    def known(self, history: HistoryKeys) -> list[list[TurnNode]]:
        """Return the nodes of known prefixes of the messages, the longest first, twins together, the newest first."""
        return [self._answers[key][::-1] for key in reversed(history.keys) if key in self._answers]

    def claim(self, node: TurnNode, request_id: str) -> None:
        """Mark a node as continued by the request, so that other requests prefer a twin that nothing continues yet."""
        if len(self._answers[node.key]) > 1 and node.call_id not in self._claims:
            self._claims[node.call_id] = request_id
            self.size_bytes += KEY_BYTES

    def unclaim(self, node: TurnNode, request_id: str) -> None:
        if self._claims.get(node.call_id) == request_id:
            del self._claims[node.call_id]
            self.size_bytes -= KEY_BYTES

    def is_claimed(self, node: TurnNode, request_id: str) -> bool:
        """Return whether another request continues this node."""
        return self._claims.get(node.call_id, request_id) != request_id

    def is_edited(self, history: HistoryKeys) -> bool:
        """Return whether the conversation is known, but its last answer was changed or moved.

        Few-shot examples before every question do not count as the model's answers: they recur unchanged.
        """
        if not history.answered or (key := history.keys[history.answered - 1]) in self._answers:
            return False
        if key in self._seen:
            return key in self._edited
        return history.keys[0] in self._seen or not self._given.isdisjoint(history.answers)

    def origin(self, stitched: Stitched, history: HistoryKeys, request_id: str) -> Origin:
        """Return the confirmed turn from which the first tokens of the prompt can be taken: that of an equal request, the continued
        turn, or a turn with the same beginning.

        An equal request counts only if both continue the same turn, so that every continued turn is recognised as such. Only
        another choice of the same request also covers the messages: an earlier sending may be dropped as lost.
        """
        begins = stitched.parent is None and stitched.branch is None
        worth = 1 if stitched.images else WORTH_TOKENS
        same = self._prompts.get(_prompt_key(digest(stitched.prompt), stitched))
        if same and same.prompt_tokens - stitched.shared >= worth:
            depth = same.depth - 1 if same.request_id == request_id else stitched.depth
            return Origin(node=same, shared=same.prompt_tokens, depth=depth, begins=begins)
        near = self._newest.get(history.keys[0]) or self._newest.get(b"")
        if stitched.parent:
            shared = limit_to_images(stitched.parent, stitched.shared, stitched.images)
            return Origin(node=stitched.parent, shared=shared, depth=stitched.depth)
        if near is None:
            return Origin()
        # Only the prompt of the other turn: with its answer, that turn would count as continued.
        shared = common_tokens(near.tokens(near.prompt_tokens), stitched.prompt)
        shared = limit_to_images(near, shared, stitched.images)
        return Origin(node=near, shared=shared, begins=begins) if shared >= worth else Origin()

    def add(self, node: TurnNode, stitched: Stitched, history: HistoryKeys) -> None:
        """Add a confirmed turn, so that later ones may refer to it."""
        if self.is_edited(history):
            self._edited.add(history.keys[history.answered - 1])
        self._answers.setdefault(node.key, []).append(node)
        if node.answer:
            self._given.add(node.answer)
        same = node.fresh_digest if not node.repaired else digest(stitched.prompt)
        self._prompts.setdefault(_prompt_key(same, stitched), node)
        self._newest[history.keys[0]] = self._newest[b""] = node
        known = len(self._seen)
        self._seen.update(history.keys)
        self.size_bytes += len(node.prompt) + len(node.sampled) + NODE_BYTES + KEY_BYTES * (len(self._seen) - known)


def history_of(chat: dict[str, Any]) -> HistoryKeys:
    messages = chat["messages"]
    key, keys = b"", []
    for message in messages:
        key = next_key(key, message)
        keys.append(key)
    answered = [i + 1 for i, message in enumerate(messages) if message.get("role") == "assistant"]
    base = digest(_hash_json.encode([chat.get("tools") or None, chat.get("chat_template_kwargs") or None]))
    return HistoryKeys(
        base=base,
        keys=tuple(keys),
        answered=answered[-1] if answered else 0,
        answers=tuple(found for i in answered if (found := hash_answer(messages[i - 1]))),
    )


def hash_answer(message: dict[str, Any]) -> bytes | None:
    """Return the hash of an answer, whatever precedes it, or None for an empty one."""
    return next_key(b"answer", message) if message.get("content") or message.get("tool_calls") else None


def next_key(key: bytes, message: dict[str, Any]) -> bytes:
    return digest(key + _hash_json.encode(canonical(message)))


def canonical(message: dict[str, Any]) -> list[Any]:
    """Return the part of a message by which it is recognised when it comes back.

    It is generous on purpose, because agents drop reasoning, ids and empty fields; stitched prompts are compared as text.
    """
    calls = [_canonical_call(call) for call in message.get("tool_calls") or ()]
    content = _canonical_content(message.get("content"))
    if calls and isinstance(content, str) and not content.strip():
        content = ""  # white space between a thought and a call, which templates add or drop
    return [message.get("role"), message.get("name"), content, calls]


def continue_node(node: TurnNode, fresh: bytes) -> Stitched | None:
    """Continue after the node's answer if the tokens alone show that the rendering spells the same text; else return None."""
    rest = fresh[node.fresh_bytes :]
    if not rest.startswith(node.sampled) or not node.begins_rendering(fresh):
        return None
    prompt = node.tokens() + rest[len(node.sampled) :] if node.repaired else fresh
    return Stitched(prompt=prompt, parent=node, shared=node.num_tokens, depth=node.depth, repaired=prompt != fresh)


def branch_off(known: Sequence[Sequence[TurnNode]], fresh: bytes, reason: Reason) -> Stitched:
    """Branch off the recorded conversation, as late as tokens alone allow. `known`: twins of known prefixes, longest first."""
    for twins in known:
        if found := next((found for node in twins if (found := continue_node(node, fresh))), None):
            return msgspec.structs.replace(found, branch=reason)
        if node := next((node for node in twins if node.begins_rendering(fresh)), None):
            prompt = node.tokens(node.prompt_tokens) + fresh[node.fresh_bytes :]
            return Stitched(
                prompt=prompt,
                parent=node,
                shared=node.prompt_tokens,
                depth=node.depth - 1,
                repaired=prompt != fresh,
                branch=reason,
            )
    newest = known[0][0]
    shared = common_tokens(newest.tokens(), fresh)
    return Stitched(prompt=fresh, parent=newest if shared else None, shared=shared, branch=reason)


def branch_reason(node: TurnNode, history: HistoryKeys) -> Reason:
    """Return why a rendering does not begin with the text of the node."""
    if history.base != node.base:
        return "tools_changed"
    return "answer_cut" if node.cut else "template_rewrote_history"


def limit_to_images(node: TurnNode, shared: int, images: Sequence[ImagePlace]) -> int:
    """Return how many of the first `shared` tokens a prompt with these images shares with the node: equal placeholder tokens may
    stand for different images."""
    ours = {place for place in images if place[0] < shared}
    return min((offset for offset, _ in ours ^ node.find_images(shared)), default=shared)


class Placed(Protocol):
    """An image of a rendering."""

    @property
    def key(self) -> str: ...
    @property
    def offset(self) -> int: ...


def find_places(stitched: Stitched, fresh: bytes, shown: Sequence[Placed]) -> list[int] | None:
    """Return the offsets, in a repaired prompt, of the images that its fresh rendering shows; None if they are not certain.

    Images of the continued turn are where they were recorded. The rest of the prompt is the end of the rendering.
    """
    recorded = sorted(stitched.parent.find_images(stitched.shared)) if stitched.parent else []
    if [key for _, key in recorded] != [image.key for image in shown[: len(recorded)]]:
        return None
    later = shown[len(recorded) :]
    moved_by = len(stitched.prompt) // ID_BYTES - len(fresh) // ID_BYTES
    if later:
        first = later[0].offset
        if first + moved_by < stitched.shared:
            return None
        if stitched.prompt[(first + moved_by) * ID_BYTES :] != fresh[first * ID_BYTES :]:
            return None
    return [*(offset for offset, _ in recorded), *(image.offset + moved_by for image in later)]


def common_tokens(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix, in tokens."""
    low, high = 0, min(len(one), len(other)) // ID_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * ID_BYTES : middle * ID_BYTES] == other[low * ID_BYTES : middle * ID_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


def _prompt_key(prompt: bytes, stitched: Stitched) -> tuple[bytes, tuple[ImagePlace, ...], str]:
    return prompt, stitched.images, stitched.parent.call_id if stitched.parent else ""


def digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=16).digest()


def _canonical_content(content: Any) -> Any:
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return "\n".join(str(part.get("text")) for part in content)
    return content or ""


def _canonical_call(call: Any) -> list[Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return [call]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            arguments = msgspec.json.decode(arguments)
    return [function.get("name"), arguments]
