// The recorded tokens of an episode, decoded one by one: what each was worth in training, and what became of it.
import "../episodes/episodes.css";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Block } from "../episodes/blocks";
import { Curve } from "../episodes/curve";
import { Download } from "../episodes/download";
import { useTokens } from "../episodes/read_tokens";
import { blocks, CAUSES, explain, notable, NOTABLE, QUANTITIES, scale, textOf } from "../episodes/tokens";
import type { Columns } from "../episodes/tokens";
import { number, percent, plural, shortId } from "../format";
import { setQuery, to } from "../router";
import type { Cause } from "../types";
import { Facts, Page, Section, Select } from "../ui/parts";
import { Empty, Failed, Loading } from "../ui/states";
import { SafeText, shown } from "../ui/text";

export function Tokens({ run, arg, query }: { run: string; arg: string; query: URLSearchParams }) {
  if (arg === "") return <Page title="Tokens"><Empty>Open an episode from <a href={to(run, "episodes")}>the list</a>.</Empty></Page>;
  return (
    <Page title={<>Tokens of <a class="mono" href={to(run, "episode", arg)} title={arg}>{shortId(arg)}</a></>}
          aside={<><a class="button" href={to(run, "episode", arg)}>Conversation</a><Download run={run} kind="episode" id={arg} /></>}>
      <Timeline key={arg} run={run} id={arg} query={query} />
    </Page>
  );
}

function whole(text: string | null): number | null {
  return text !== null && /^\d{1,9}$/.test(text) ? Number(text) : null;
}

function Timeline({ run, id, query }: { run: string; id: string; query: URLSearchParams }) {
  const timeline = whole(query.get("timeline")) ?? 0;
  const wantedTurn = whole(query.get("turn"));
  const wantedAt = whole(query.get("at"));
  const { columns, isDone, isHeld, error, readOn } = useTokens(run, id, timeline);
  const count = columns.id.length;
  const hasEntropy = columns.entropy.some((value) => value !== null);
  const offered = QUANTITIES.filter(([key]) => key !== "entropy" || hasEntropy);
  const asked = query.get("colour");
  const quantity = offered.find(([key]) => key === asked)?.[0] ?? "mask";
  const [current, setCurrent] = useState<number | null>(null);
  const [hovered, setHovered] = useState<number | null>(null);
  const text = useRef<HTMLDivElement>(null);
  const starts = useMemo(() => blocks(columns.text), [columns.text]);
  const paint = useMemo(() => scale(columns, quantity), [columns, quantity]);
  const found = useMemo(() => notable(columns), [columns.cause]);
  const marks = useMemo(() => [...found.values()].flat().sort((a, b) => a - b), [found]);

  const choose = (at: number, isJump: boolean) => {
    const target = Math.max(0, Math.min(count - 1, at));
    setCurrent(target);
    setHovered(null);
    setQuery({ at: target, turn: null });
    if (isJump) requestAnimationFrame(() => requestAnimationFrame(() => show(target)));
  };

  // A link to a token or a turn: go there as soon as it is read.
  const done = useRef("");
  useEffect(() => {
    const target = wantedAt ?? (wantedTurn === null ? null : columns.turn.indexOf(wantedTurn));
    const key = `${timeline}/${wantedAt}/${wantedTurn}`;
    if (target === null || done.current === key || wantedAt === current) return;
    if (target >= 0 && target < count) {
      done.current = key;
      setCurrent(target);
      requestAnimationFrame(() => requestAnimationFrame(() => show(target)));
    } else if (isDone && wantedAt === null && timeline + 1 < columns.timelines) {
      setQuery({ timeline: timeline + 1 });
    }
  }, [count, isDone, wantedAt, wantedTurn, timeline]);

  const press = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const at = current ?? -1;
    const next = event.key === "n" ? marks.find((mark) => mark > at) : event.key === "p" ? marks.filter((mark) => mark < at).at(-1) : {
      ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: neighbour(at, 1), ArrowUp: neighbour(at, -1), Home: 0, End: count - 1,
    }[event.key];
    if (next === undefined || next === null) return;
    event.preventDefault();
    choose(next, true);
  };
  const over = (event: Event) => {
    const at = (event.target as HTMLElement).closest<HTMLElement>("[data-at]")?.dataset["at"];
    setHovered(at === undefined ? null : Number(at));
  };

  if (count === 0 && error?.status === 404) {
    return <Empty>No tokens can be shown: <SafeText text={error.message} inline />. <a href={to(run, "episode", id)}>What is known of the episode</a></Empty>;
  }
  if (count === 0) return error ? <Failed error={error} retry={readOn} /> : <Loading what="Reading tokens" />;
  const seen = hovered ?? current;
  return (
    <>
      <div class="controls">
        <Select label="Colour by" value={quantity} options={offered} onChoose={(next) => setQuery({ colour: next })} />
        {columns.timelines > 1 && (
          <Select label="Timeline" value={String(timeline)}
                  options={Array.from({ length: columns.timelines }, (_, at) => [String(at), `${at + 1} of ${columns.timelines}`] as const)}
                  onChoose={(next) => { setCurrent(null); setQuery({ timeline: next, at: null, turn: null }); }} />
        )}
        {columns.policy !== "" && <span class="field"><span>Policy</span><SafeText text={columns.policy} inline /></span>}
        <Legend paint={paint.legend} />
      </div>
      <Section title="By position" aside={<Progress columns={columns} isDone={isDone} />}>
        <Curve columns={columns} quantity={quantity} marks={marks} onHover={setHovered} onJump={(at) => choose(at, true)} />
      </Section>
      {error && <Failed error={error} retry={readOn} />}
      {columns.notes.map((note) => <p key={note} class="note"><SafeText text={note} inline /></p>)}
      <div class="token-view">
        <aside class="token-side" aria-label="Token">
          <Inspector run={run} id={id} columns={columns} at={seen} />
          <Find columns={columns} found={found} isDone={isDone} current={current} onJump={(at) => { choose(at, true); text.current?.focus({ preventScroll: true }); }} />
        </aside>
        <div class="token-text" ref={text} tabIndex={0} role="group" data-tokens
             aria-label="Tokens. The arrow keys move from token to token, n and p to the next and previous one that was clipped, masked or filtered."
             onKeyDown={press} onPointerOver={over} onPointerLeave={() => setHovered(null)}
             onClick={(event) => {
               const at = (event.target as HTMLElement).closest<HTMLElement>("[data-at]")?.dataset["at"];
               if (at !== undefined && getSelection()?.isCollapsed !== false) choose(Number(at), false);
             }}>
          {starts.map((start, nth) => {
            const end = starts[nth + 1] ?? count;
            return (
              <Block key={start} columns={columns} start={start} end={end} scale={paint}
                     current={current !== null && current >= start && current < end ? current : -1} />
            );
          })}
          {isHeld && <button onClick={readOn}>Read the other {number(columns.total - count)} tokens</button>}
        </div>
      </div>
    </>
  );
}

function show(at: number): void {
  const element = document.querySelector<HTMLElement>(`[data-at="${at}"]`);
  if (element === null) return;
  const { top, bottom } = element.getBoundingClientRect();
  const below = document.querySelector(".token-side")?.getBoundingClientRect().top ?? innerHeight;
  const limit = below > innerHeight / 2 ? below : innerHeight; // on narrow screens the inspector covers the end of the window
  if (top < 70 || bottom > limit - 20) element.scrollIntoView({ block: "center" });
}

/** The token one line above or below. */
function neighbour(at: number, by: 1 | -1): number | null {
  const from = document.querySelector<HTMLElement>(`[data-at="${at}"]`);
  if (from === null) return null;
  const { left, top } = from.getBoundingClientRect();
  let best: number | null = null;
  let line: number | null = null;
  for (let next = at + by; ; next += by) {
    const element = document.querySelector<HTMLElement>(`[data-at="${next}"]`);
    if (element === null) return best ?? null;
    const place = element.getBoundingClientRect();
    if (Math.abs(place.top - top) < 4) continue;
    if (line !== null && Math.abs(place.top - line) > 4) return best;
    line = place.top;
    if (best === null || (by > 0 ? place.left <= left : place.left >= left)) best = next;
    else return best;
  }
}

function Progress({ columns, isDone }: { columns: Columns; isDone: boolean }) {
  const counts = (Object.keys(CAUSES) as Cause[]).map((cause) => [cause, columns.cause.filter((one) => one === cause).length] as const);
  return (
    <>
      <span>{plural(columns.total, "token")}{isDone && <>: {counts.filter(([, n]) => n > 0).map(([cause, n]) => `${number(n)} ${CAUSES[cause].label}`).join(", ")}</>}</span>
      {!isDone && <span role="status">read {percent(columns.id.length / Math.max(1, columns.total))}</span>}
    </>
  );
}

function Legend({ paint }: { paint: { tone: string; strength: number; label: string }[] }) {
  return (
    <p class="legend token-legend">
      {paint.map(({ tone, strength, label }, at) => (
        <span key={at}><i class={`tok swatch ${tone} ${tone.replace("cause-", "is-")}`} style={{ "--s": strength.toFixed(2) }}>abc</i> {label}</span>
      ))}
    </p>
  );
}

function Inspector({ run, id, columns, at }: { run: string; id: string; columns: Columns; at: number | null }) {
  if (at === null) {
    return <div class="inspector"><p class="quiet-text">Point at a token, or press Tab and move with the arrow keys.</p></div>;
  }
  const turn = columns.turn[at] ?? null;
  return (
    <div class="inspector" aria-live="polite">
      <p class="inspector-token"><code class={`tok is-${columns.cause[at] ?? "given"}`}>{shown((textOf(columns, at) || "·").replaceAll("\n", "↵"))}</code></p>
      <p class="inspector-cause"><SafeText text={explain(columns, at)} inline /></p>
      <Facts pairs={[
        ["Position", number(at)],
        ["Token id", String(columns.id[at])],
        ["Log-probability when sampled", value(columns.logprob[at])],
        ["Log-probability in training", value(columns.logprob_trained[at])],
        ["Ratio", value(columns.ratio[at])],
        ["Advantage", value(columns.advantage[at])],
        ["Entropy", value(columns.entropy[at])],
        ["Weight version", value(columns.version[at])],
        ["Turn", turn === null ? null : <a href={to(run, "episode", id, { turn })}>turn {turn + 1}</a>],
      ]} />
    </div>
  );
}

function value(one: number | null | undefined): string | null {
  return one === null || one === undefined ? null : number(one);
}

const LISTED = 100;

/** The tokens that were not simply trained, each a button that leads to it. */
function Find({ columns, found, isDone, current, onJump }: {
  columns: Columns; found: Map<Cause, number[]>; isDone: boolean; current: number | null; onJump: (at: number) => void;
}) {
  const causes = NOTABLE.filter((cause) => found.has(cause));
  return (
    <div class="find" aria-label="Find tokens" role="group">
      {causes.length === 0 && <p class="quiet-text">{isDone ? "No token was clipped, masked or filtered." : "Looking for clipped tokens…"}</p>}
      {causes.map((cause) => {
        const positions = found.get(cause) ?? [];
        return (
          <details key={cause} open={cause === causes[0] || positions.length <= 8}>
            <summary>{CAUSES[cause].label} {number(positions.length)}</summary>
            <ul>
              {positions.slice(0, LISTED).map((at) => (
                <li key={at}>
                  <button class="find-entry" aria-current={at === current} onClick={() => onJump(at)}>
                    <span class="quiet-text">{number(at)}</span>
                    <code>{shown((textOf(columns, at) || "·").replaceAll("\n", "↵").slice(0, 40))}</code>
                    <span class="find-ratio">{(columns.ratio[at] ?? null) === null ? "" : `×${number(columns.ratio[at], 3)}`}</span>
                  </button>
                </li>
              ))}
            </ul>
            {positions.length > LISTED && <p class="quiet-text">and {number(positions.length - LISTED)} more: n and p walk through all of them</p>}
          </details>
        );
      })}
    </div>
  );
}
