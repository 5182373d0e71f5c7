// Small parts that every view uses.
import type { ComponentChild, ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { ago, dateTime, percent, words } from "../format";

/** A view: its heading, what stands beside it, and its sections. */
export function Page({ title, aside, children }: { title: ComponentChild; aside?: ComponentChild; children: ComponentChildren }) {
  return (
    <article class="page">
      <header class="page-head"><h1 tabIndex={-1}>{title}</h1>{aside !== undefined && <div class="page-aside">{aside}</div>}</header>
      {children}
    </article>
  );
}

export function Section({ title, aside, note, children }: {
  title: ComponentChild; aside?: ComponentChild; note?: ComponentChild; children: ComponentChildren;
}) {
  return (
    <section class="section">
      <header class="section-head"><h2>{title}</h2>{aside !== undefined && <div class="section-aside">{aside}</div>}</header>
      {note !== undefined && <p class="note">{note}</p>}
      {children}
    </section>
  );
}

export type Tone = "good" | "warn" | "bad" | "info" | "quiet";

const TONES: Record<string, Tone> = {
  trained: "good", up: "good", running: "good", live: "good", ok: "good", done: "good", finished: "good", ready: "good",
  dropped: "warn", paused: "warn", busy: "warn", draining: "warn", waiting: "info", open: "info", published: "info", eval: "info",
  failed: "bad", crashed: "bad", down: "bad", revoked: "bad", error: "bad", aborted: "bad",
};

/** A state as a word with a dot; the colour only repeats what the word says. */
export function Badge({ state, tone }: { state: string; tone?: Tone }) {
  return <span class={`badge ${tone ?? TONES[state] ?? "quiet"}`}>{words(state)}</span>;
}

/** The few words of a run's state, e.g. "up, paused". */
export function States({ state, tone }: { state: string; tone?: Tone }) {
  return <span class="states">{state.split(", ").map((word) => <Badge key={word} state={word} {...(tone ? { tone } : {})} />)}</span>;
}

/** How long ago something happened, kept up to date; the exact time on hover. */
export function Age({ at }: { at: number | null | undefined }) {
  const [, tick] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => tick((n) => n + 1), 5000);
    return () => clearInterval(timer);
  }, []);
  return <time title={dateTime(at)} class="age">{ago(at)}</time>;
}

/** A bar of `share` (0 to 1) with its percentage in words for screen readers. */
export function Meter({ share, label, tone = "info" }: { share: number; label: string; tone?: Tone }) {
  const clamped = Math.max(0, Math.min(1, share));
  return (
    <span class={`meter ${tone}`} role="img" aria-label={`${label}: ${percent(share)}`}>
      <span class="meter-fill" style={{ width: `${clamped * 100}%` }} />
    </span>
  );
}

/** Names and values in two columns; pairs without a value are left out. */
export function Facts({ pairs }: { pairs: [ComponentChild, ComponentChild][] }) {
  const known = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return (
    <dl class="facts">
      {known.map(([name, value], at) => <div key={at} class="fact"><dt>{name}</dt><dd>{value}</dd></div>)}
    </dl>
  );
}

/** One choice of a few as a row of buttons. */
export function Choices<T extends string>({ label, value, options, onChoose }: {
  label: string; value: T; options: readonly (readonly [T, string])[]; onChoose: (value: T) => void;
}) {
  return (
    <span class="choices" role="group" aria-label={label}>
      {options.map(([key, text]) => (
        <button key={key} aria-pressed={key === value} onClick={() => onChoose(key)}>{text}</button>
      ))}
    </span>
  );
}

/** A labelled select; `options` are [value, text]. */
export function Select({ label, value, options, onChoose }: {
  label: string; value: string; options: readonly (readonly [string, string])[]; onChoose: (value: string) => void;
}) {
  return (
    <label class="field">
      <span>{label}</span>
      <select value={value} onChange={(event) => onChoose(event.currentTarget.value)}>
        {options.map(([key, text]) => <option key={key} value={key}>{text}</option>)}
      </select>
    </label>
  );
}

/** A labelled text field that reports its value when typing has rested for a moment. */
export function TextField({ label, value, onInput, placeholder = "", size }: {
  label: string; value: string; onInput: (value: string) => void; placeholder?: string; size?: number;
}) {
  const timer = useRef(0);
  const [text, setText] = useState(value);
  useEffect(() => setText(value), [value]);
  return (
    <label class="field">
      <span>{label}</span>
      <input type="text" value={text} placeholder={placeholder} size={size} autocomplete="off" spellcheck={false}
             onInput={(event) => {
               const next = event.currentTarget.value;
               setText(next);
               clearTimeout(timer.current);
               timer.current = window.setTimeout(() => onInput(next), 300);
             }} />
    </label>
  );
}

/** A button that opens a small panel; a click elsewhere or Escape closes it. */
export function Menu({ title, children }: { title: ComponentChild; children: ComponentChildren }) {
  const element = useRef<HTMLDetailsElement>(null);
  useEffect(() => {
    const close = (event: Event) => {
      const menu = element.current;
      if (menu === null || !menu.open) return;
      const isEscape = event instanceof KeyboardEvent && event.key === "Escape";
      if (!isEscape && (event.type === "keydown" || (event.target instanceof Node && menu.contains(event.target)))) return;
      menu.open = false;
      if (isEscape) menu.querySelector("summary")?.focus();
    };
    document.addEventListener("pointerdown", close);
    document.addEventListener("keydown", close);
    return () => {
      document.removeEventListener("pointerdown", close);
      document.removeEventListener("keydown", close);
    };
  }, []);
  return (
    <details class="menu" ref={element}>
      <summary class="button">{title}</summary>
      <div class="menu-body">{children}</div>
    </details>
  );
}

/** Our own text with `code` in backticks. */
export function Prose({ text }: { text: string }) {
  return <>{text.split("`").map((part, at) => (at % 2 === 1 ? <code key={at}>{part}</code> : part))}</>;
}

/** A button that copies text. */
export function Copy({ text, label = "Copy" }: { text: string; label?: string }) {
  const [isDone, setDone] = useState(false);
  const copy = () => {
    void navigator.clipboard?.writeText(text).then(() => {
      setDone(true);
      setTimeout(() => setDone(false), 1500);
    });
  };
  return <button class="quiet" onClick={copy}><span role="status">{isDone ? "Copied" : label}</span></button>;
}
