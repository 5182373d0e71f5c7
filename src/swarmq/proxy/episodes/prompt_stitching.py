"""Building of prompts from the exact tokens of earlier turns and freshly rendered tokens for the rest.

Tokens alone decide nearly always. If a rendering spells the last answer in other tokens, texts are compared: the engine decodes
both, the rest of the text is encoded separately, and the result must decode to the rendering's text. Tokenizers that begin
every text with a space (SentencePiece) would encode the rest differently on its own; for them it is the rendering's own tokens
after the earlier turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from swarmq.engine.client.protocol import Engine
from swarmq.messages import pack_ids, unpack_ids
from swarmq.proxy.episodes.conversation_graph import (
    ID_BYTES,
    Graph,
    HistoryKeys,
    Reason,
    Stitched,
    TurnNode,
    branch_off,
    branch_reason,
    continue_node,
)
from swarmq.proxy.episodes.special_tokens import MARKUP

Json = dict[str, Any]

REPLACED = "\ufffd"
"""Character that a decoder writes for bytes that are no whole character."""


async def stitch(
    graph: Graph,
    history: HistoryKeys,
    fresh_ids: list[int],
    engine: Engine,
    *,
    request_id: str,
    lost: bool = False,
    messages: Sequence[Json] = (),
) -> Stitched:
    """Build the prompt of a request from recorded tokens where they fit, and from `fresh_ids`, the rendered prompt, elsewhere.

    `lost`: whether earlier answers of this episode may be unknown here. `messages`: the messages of `history`. Raises
    EngineError if the engine does not tokenize or detokenize a text.
    """
    fresh = pack_ids(fresh_ids)
    known = graph.known(history)
    edited: Reason | None = "history_edited" if graph.is_edited(history) else None
    if not known:
        return Stitched(prompt=fresh, branch=edited or ("memory_lost" if lost and history.answered else None))
    found = await _continuation(graph, known[0], history, fresh, engine, request_id, messages)
    if isinstance(found, Stitched):
        return msgspec.structs.replace(found, branch=edited) if edited else found
    return branch_off(known, fresh, edited or found)


async def _continuation(
    graph: Graph,
    twins: list[TurnNode],
    history: HistoryKeys,
    fresh: bytes,
    engine: Engine,
    request_id: str,
    messages: Sequence[Json],
) -> Stitched | Reason:
    """Return a prompt that continues one of the twins, or why the first of them cannot be continued.

    Twins that no other request continues are tried first, so that each of several equal answers is continued once.
    """
    reasons: list[Reason] = []
    taken = [node for node in twins if graph.is_claimed(node, request_id)]
    for some in ([node for node in twins if node not in taken], taken):
        for node in some:
            if found := continue_node(node, fresh):
                graph.claim(node, request_id)
                return found
        for node in some:
            graph.claim(node, request_id)  # before the first await, so that a concurrent request takes another twin
            by_text = await _continue_by_text(node, history, fresh, engine, messages)
            if isinstance(by_text, Stitched):
                return by_text
            graph.unclaim(node, request_id)
            reasons.append(by_text)
    return reasons[0]


async def _continue_by_text(
    node: TurnNode, history: HistoryKeys, fresh: bytes, engine: Engine, messages: Sequence[Json]
) -> Stitched | Reason:
    recorded = node.tokens()
    text, rendered = await asyncio.gather(_text(engine, recorded), _text(engine, fresh))
    if not rendered.startswith(text):
        reason = branch_reason(node, history)
        given = messages[node.depth - 1] if node.depth <= len(messages) else {}
        return reason if reason != "template_rewrote_history" else await _continue_by_key(node, given, fresh, engine)
    rest = pack_ids(await engine.tokenize(rendered[len(text) :]))
    prompt = recorded + rest
    if prompt != fresh and await _text(engine, prompt) != rendered:
        prompt = recorded + await _find_tokens_after(text, fresh, engine)
        if await _text(engine, prompt) != rendered:
            return "drift"
    return Stitched(prompt=prompt, parent=node, shared=node.num_tokens, depth=node.depth, repaired=prompt != fresh)


async def _continue_by_key(node: TurnNode, given: Json, fresh: bytes, engine: Engine) -> Stitched | Reason:
    """Continue an answer whose text lacks something that was sampled: the agent sent it back unchanged, so the recorded tokens
    stand for it if the rendering shows nothing else. `given`: the answer's message."""
    content = given.get("content")
    if not isinstance(content, str) or not content or given.get("tool_calls"):
        return "template_rewrote_history"
    sampled, last = await asyncio.gather(_text(engine, node.sampled), _text(engine, node.sampled[-ID_BYTES:]))
    end = last if MARKUP.fullmatch(last) else ""
    if sampled == content + end or _strip_hidden(sampled) != _strip_hidden(content):
        return "template_rewrote_history"
    lost: Reason = "character_cut" if REPLACED in sampled else "token_dropped"
    tail = await _text(engine, fresh[node.fresh_bytes :]) if node.begins_rendering(fresh) else ""
    if not tail.startswith(content + end):
        return lost
    text = tail[len(content + end) :]
    rest = pack_ids(await engine.tokenize(text))
    if await _text(engine, rest) != text:
        return lost
    return Stitched(prompt=node.tokens() + rest, parent=node, shared=node.num_tokens, depth=node.depth, repaired=True)


def _strip_hidden(text: str) -> str:
    """Return the part of a text that a message shows: no special tokens, no partial characters."""
    return MARKUP.sub("", text).replace(REPLACED, "")


async def _find_tokens_after(text: str, fresh: bytes, engine: Engine) -> bytes:
    """Return the tokens of `fresh` after `text`, found by bisection."""
    low, high = 0, len(fresh) // ID_BYTES
    while low < high:
        middle = (low + high) // 2
        if len(await _text(engine, fresh[: middle * ID_BYTES])) < len(text):
            low = middle + 1
        else:
            high = middle
    return fresh[low * ID_BYTES :]


async def _text(engine: Engine, packed: bytes) -> str:
    return await engine.detokenize(unpack_ids(packed).tolist())
