// The conversation of an episode, turn by turn, with tools, reasoning and long prompts folded.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { number, plural, shortId, words } from "../format";
import { to } from "../router";
import type { Message, TurnView } from "../types";
import { SafeText } from "../ui/text";
import { firstLine, read } from "./message";
import type { Said } from "./message";
import { LongText } from "./parts";

const AT_FIRST = 30; // turns drawn at first
const MORE = 30; // turns that are added when the end comes in sight

/** Why a turn could not continue an earlier one (docs/proxy.md, "Branches"). */
const BRANCHES: Record<string, string> = {
  history_edited: "the agent changed, cut or summarised earlier messages",
  tools_changed: "other tools or template arguments than before",
  template_rewrote_history: "the chat template writes the history differently from how it was sampled",
  drift: "the same text, rendered anew, gives other tokens than were sampled",
  answer_cut: "a stop string cut off the end of an earlier answer",
  token_dropped: "an earlier answer contained a special token that its text does not show",
  character_cut: "an earlier answer ended within a character",
};

export function Conversation({ run, id, turns, chosen, isUnfolded, rewards }: {
  run: string; id: string; turns: TurnView[]; chosen: number | null; isUnfolded: boolean; rewards: Record<string, number>;
}) {
  const [drawn, setDrawn] = useState(Math.max(AT_FIRST, (chosen ?? 0) + 5));
  const end = useRef<HTMLDivElement>(null);
  useEffect(() => {
    if (chosen !== null && chosen >= drawn) setDrawn(chosen + 5);
  }, [chosen]);
  useEffect(() => {
    if (end.current === null) return;
    const observer = new IntersectionObserver(
      (entries) => { if (entries.some((entry) => entry.isIntersecting)) setDrawn((count) => count + MORE); },
      { rootMargin: "1200px" },
    );
    observer.observe(end.current);
    return () => observer.disconnect();
  }, [drawn < turns.length, drawn]);
  useEffect(() => {
    if (chosen !== null) document.getElementById(`turn-${chosen}`)?.scrollIntoView({ block: "start" });
  }, [chosen]);
  const byCall = new Map(turns.map((turn, at) => [turn.call_id, at]));
  return (
    <>
      <ol class="turns">
        {turns.slice(0, drawn).map((turn, at) => (
          <Turn key={turn.call_id || at} run={run} id={id} turn={turn} at={at} parentAt={turn.parent === null ? null : byCall.get(turn.parent) ?? null}
                isChosen={at === chosen} isUnfolded={isUnfolded} reward={turn.reward ?? rewards[turn.call_id] ?? null} />
        ))}
      </ol>
      {drawn < turns.length && <div ref={end} class="quiet-text" role="status">{plural(turns.length - drawn, "more turn")}…</div>}
    </>
  );
}

function Turn({ run, id, turn, at, parentAt, isChosen, isUnfolded, reward }: {
  run: string; id: string; turn: TurnView; at: number; parentAt: number | null; isChosen: boolean; isUnfolded: boolean;
  reward: number | null;
}) {
  const parent = parentAt === null ? null : <a href={to(run, "episode", id, { turn: parentAt })}>turn {parentAt + 1}</a>;
  return (
    <li id={`turn-${at}`} class={`turn ${turn.received ? "" : "lost"} ${isChosen ? "chosen" : ""}`}>
      <header class="turn-head">
        <h3>Turn {number(at + 1)}</h3>
        {turn.agent && <SafeText text={turn.agent} inline />}
        <span class="quiet-text">
          {number(turn.prompt_tokens)} → {plural(turn.sampled_tokens, "token")}
          {turn.versions && <> · weights {turn.versions[0] === turn.versions[1] ? turn.versions[0] : `${turn.versions[0]}–${turn.versions[1]}`}</>}
          {turn.finish_reason && turn.finish_reason !== "stop" && <> · ended by {words(turn.finish_reason)}</>}
        </span>
        <span class="turn-end">
          {reward !== null && <span>reward {number(reward)}</span>}
          {turn.advantage !== null && <span class={turn.advantage < 0 ? "ink-down" : "ink-up"}>advantage {number(turn.advantage)}</span>}
          <a href={to(run, "tokens", id, { turn: at })}>tokens</a>
        </span>
      </header>
      {!turn.received && (
        <p class="turn-note lost-note">The agent is not proved to have received this answer, so no token of it is trained.</p>
      )}
      {turn.branch && (
        <p class="turn-note branch-note">
          Branch ({words(turn.branch)}): {BRANCHES[turn.branch] ?? "it could not continue an earlier turn"}
          {parent && <>, so it shares only its first tokens with {parent}</>}.
        </p>
      )}
      {!turn.branch && turn.begins && at > 0 && <p class="turn-note">Begins a conversation of its own.</p>}
      {!turn.branch && !turn.begins && parentAt !== null && parentAt !== at - 1 && <p class="turn-note">Continues {parent}.</p>}
      {turn.repaired && <p class="turn-note">Rendering the prompt anew would have given other tokens; the recorded ones were kept.</p>}
      {turn.messages.length === 0 ? <p class="quiet-text">The text of this turn is not kept.</p> : turn.messages.map((message, nth) => (
        <Bubble key={nth} message={message} isAnswer={nth === turn.messages.length - 1 && message.role === "assistant"} isUnfolded={isUnfolded} />
      ))}
    </li>
  );
}

const FOLDED_SYSTEM = 400; // characters from which a system prompt is folded

function Bubble({ message, isAnswer, isUnfolded }: { message: Message; isAnswer: boolean; isUnfolded: boolean }) {
  const said = read(message);
  const isTool = said.role === "tool" || said.role === "function";
  const isFolded = isTool || ((said.role === "system" || said.role === "developer") && said.text.length > FOLDED_SYSTEM);
  return (
    <div class={`said role-${/^[a-z]+$/.test(said.role) ? said.role : "other"} ${isAnswer ? "answer" : ""}`}>
      {isFolded ? (
        <Fold isOpen={isUnfolded} head={<>
          <b><SafeText text={isTool ? said.name || "tool result" : said.role} inline /></b>{" "}
          <span class="quiet-text">{number(said.text.length)} characters</span> <SafeText text={firstLine(said.text)} inline />
        </>}>
          <LongText text={said.text} is_code={isTool} />
          <Rest said={said} isUnfolded={isUnfolded} />
        </Fold>
      ) : (
        <>
          <p class="said-role"><SafeText text={said.role} inline />{said.name && <> · <SafeText text={said.name} inline /></>}{isAnswer && <span class="quiet-text"> sampled</span>}</p>
          {said.reasoning !== "" && (
            <Fold isOpen={isUnfolded} head={<><b>reasoning</b> <span class="quiet-text">{number(said.reasoning.length)} characters</span> <SafeText text={firstLine(said.reasoning)} inline /></>}>
              <LongText text={said.reasoning} />
            </Fold>
          )}
          {(said.text !== "" || (said.calls.length === 0 && said.others.length === 0)) && <LongText text={said.text} />}
          <Rest said={said} isUnfolded={isUnfolded} />
        </>
      )}
    </div>
  );
}

function Rest({ said, isUnfolded }: { said: Said; isUnfolded: boolean }) {
  return (
    <>
      {said.calls.map((call, at) => (
        <Fold key={at} isOpen={isUnfolded} head={<>
          <span class="quiet-text">calls</span> <b><SafeText text={call.name} inline /></b>{" "}
          <SafeText text={firstLine(call.args.replace(/\s+/g, " "))} inline />
        </>}>
          <LongText text={call.args} is_code />
          {call.id && <p class="quiet-text">call id <SafeText text={shortId(call.id)} inline /></p>}
        </Fold>
      ))}
      {said.others.map(([type, json], at) => (
        <Fold key={at} isOpen={isUnfolded} head={<b><SafeText text={words(type)} inline /></b>}><LongText text={json} is_code /></Fold>
      ))}
    </>
  );
}

/** A folded part whose inside is only drawn once it was opened. */
function Fold({ head, children, isOpen }: { head: ComponentChildren; children: ComponentChildren; isOpen: boolean }) {
  const [open, setOpen] = useState(isOpen);
  useEffect(() => setOpen(isOpen), [isOpen]);
  return (
    <details class="fold" open={open} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>{head}</summary>
      {open && children}
    </details>
  );
}
