"""What was said in an episode and the exact tokens that said it. Pure: no clock, no I/O.

    messages   m1 ─ m2 ─ [answer a] ─ m3 ─ [answer b]        keys: a hash chain over canonical messages
    nodes               node a ────────── node b             tokens: prompt after the shared ones, then sampled

A request names messages. The node of its longest known prefix has the tokens which the engine saw and sampled; the
next prompt is to begin with exactly these. A fresh rendering may spell the same text in other tokens (drift), so a
node also remembers, as length and digest, what rendering its prompt freshly gave: where a later rendering begins
with that and goes on with the sampled tokens, the two spell the same without comparing any text.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

Reason = Literal["history_edited", "template_rewrote_history", "tools_changed", "answer_cut", "drift", "memory_lost"]
"""Why a conversation that we know could not be continued token by token:

- `history_edited`: an answer came back other than it was given, or the history was cut or summarised;
- `template_rewrote_history`: the chat template writes history other than it was sampled (thoughts that it leaves out,
  white space that it trims, tool calls in another form, an empty thought that only the newest prompt has);
- `tools_changed`: so did the tools or the template's arguments, and with them the text before the answer;
- `answer_cut`: the agent got less than was sampled, because a stop string was cut off;
- `drift`: the text is the same, but the tokens that were sampled cannot begin it;
- `memory_lost`: the answers were given by another proxy, or before this one was started again or ran out of memory.
"""

ID_BYTES = 4
"""Tokens are packed little-endian int32 everywhere here, so that prefixes compare at memory speed."""

NODE_BYTES, KEY_BYTES = 512, 128
"""What a turn and a key take besides tokens, by tracemalloc."""

_hash_json = msgspec.json.Encoder(order="deterministic")


class History(msgspec.Struct, frozen=True, kw_only=True):
    """The messages of a request, as keys to look up."""

    base: bytes
    """Hash of what the template gets besides messages: tools and template arguments."""
    keys: tuple[bytes, ...]
    """keys[i] identifies messages 0..i."""
    answered: int
    """How many messages there are through the last one of the assistant; 0 without one."""


class Node(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One confirmed turn."""

    call_id: str
    key: bytes
    """Of the request's messages and the answer."""
    base: bytes
    depth: int
    """Number of messages, the answer included."""
    parent: Node | None
    shared: int
    """Leading tokens taken from the parent's sequence."""
    prompt: bytes
    """Prompt tokens after the shared ones."""
    sampled: bytes
    repaired: bool
    """The prompt is not what rendering gave."""
    fresh_bytes: int
    fresh_digest: bytes
    """Of what rendering gave for the prompt."""
    cut: bool
    """The agent got less of the answer than was sampled."""

    @property
    def prompt_tokens(self) -> int:
        return self.shared + len(self.prompt) // ID_BYTES

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + len(self.sampled) // ID_BYTES

    def tokens(self, count: int | None = None) -> bytes:
        """The first `count` tokens of the sequence; all of them without."""
        pieces: list[bytes] = []
        node: Node | None = self
        need = self.num_tokens if count is None else count
        while node is not None and need:
            if need > node.shared:
                own = node.prompt + node.sampled
                pieces.append(own[: (need - node.shared) * ID_BYTES])
                need = node.shared
            node = node.parent
        return b"".join(reversed(pieces))

    def rendered_in(self, fresh: bytes) -> bool:
        """Whether a rendering begins with what rendering this node's prompt gave."""
        return len(fresh) >= self.fresh_bytes and digest(fresh[: self.fresh_bytes]) == self.fresh_digest


class Stitched(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt to sample from, and where it comes from."""

    prompt: bytes
    parent: Node | None = None
    shared: int = 0
    """Its first tokens are the first tokens of the parent's sequence."""
    depth: int = 0
    """Messages that the shared tokens speak of."""
    repaired: bool = False
    branch: Reason | None = None

    @property
    def added(self) -> bytes:
        return self.prompt[self.shared * ID_BYTES :]


class Graph:
    """The nodes of one episode under one policy."""

    __slots__ = ("_answers", "_seen", "size_bytes")

    def __init__(self) -> None:
        self._answers: dict[bytes, Node] = {}
        self._seen: set[bytes] = set()
        self.size_bytes = 0

    def known(self, history: History) -> list[Node]:
        """Nodes of known prefixes of the messages, the longest first."""
        return [self._answers[key] for key in reversed(history.keys) if key in self._answers]

    def edited(self, history: History) -> bool:
        """The conversation is one of ours, but its last answer is not as we gave it."""
        if not history.answered or history.keys[history.answered - 1] in self._answers:
            return False
        return history.keys[0] in self._seen

    def add(self, node: Node, history: History) -> None:
        """Remember a turn that is confirmed, so that later ones may refer to it."""
        self._answers[node.key] = node
        known = len(self._seen)
        self._seen.update(history.keys)
        self.size_bytes += len(node.prompt) + len(node.sampled) + NODE_BYTES + KEY_BYTES * (len(self._seen) - known)


def history_of(chat: dict[str, Any]) -> History:
    messages = chat["messages"]
    key, keys = b"", []
    for message in messages:
        key = next_key(key, message)
        keys.append(key)
    answered = [i + 1 for i, message in enumerate(messages) if message.get("role") == "assistant"]
    base = digest(_hash_json.encode([chat.get("tools") or None, chat.get("chat_template_kwargs") or None]))
    return History(base=base, keys=tuple(keys), answered=answered[-1] if answered else 0)


def next_key(key: bytes, message: dict[str, Any]) -> bytes:
    return digest(key + _hash_json.encode(canonical(message)))


def canonical(message: dict[str, Any]) -> list[Any]:
    """What of a message makes it the same message when it comes back.

    Generous on purpose, because agents drop reasoning, ids and empty fields: what is stitched is compared as text.
    """
    calls = [_canonical_call(call) for call in message.get("tool_calls") or ()]
    content = _canonical_content(message.get("content"))
    if calls and isinstance(content, str) and not content.strip():
        content = ""  # the line break between a thought and a call, which comes and goes
    return [message.get("role"), message.get("name"), content, calls]


def continued(node: Node, fresh: bytes) -> Stitched | None:
    """Go on after the node's answer, when tokens alone show that the rendering spells the same."""
    rest = fresh[node.fresh_bytes :]
    if not rest.startswith(node.sampled) or not node.rendered_in(fresh):
        return None
    prompt = node.tokens() + rest[len(node.sampled) :] if node.repaired else fresh
    return Stitched(prompt=prompt, parent=node, shared=node.num_tokens, depth=node.depth, repaired=prompt != fresh)


def branched(nodes: Sequence[Node], fresh: bytes, reason: Reason) -> Stitched:
    """Leave the recorded way, as late as tokens alone allow. `nodes`: known prefixes, longest first."""
    for node in nodes:
        if found := continued(node, fresh):
            return msgspec.structs.replace(found, branch=reason)
        if node.rendered_in(fresh):
            prompt = node.tokens(node.prompt_tokens) + fresh[node.fresh_bytes :]
            return Stitched(
                prompt=prompt,
                parent=node,
                shared=node.prompt_tokens,
                depth=node.depth - 1,
                repaired=prompt != fresh,
                branch=reason,
            )
    if not nodes:
        return Stitched(prompt=fresh, branch=reason)
    shared = common_tokens(nodes[0].tokens(), fresh)
    return Stitched(prompt=fresh, parent=nodes[0] if shared else None, shared=shared, branch=reason)


def why_not(node: Node, history: History) -> Reason:
    """Why a rendering does not begin with the text of what was recorded."""
    if history.base != node.base:
        return "tools_changed"
    return "answer_cut" if node.cut else "template_rewrote_history"


def common_tokens(one: bytes, other: bytes) -> int:
    """Length of the common prefix, in tokens."""
    low, high = 0, min(len(one), len(other)) // ID_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * ID_BYTES : middle * ID_BYTES] == other[low * ID_BYTES : middle * ID_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


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
