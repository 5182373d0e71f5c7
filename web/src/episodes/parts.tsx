// What several of the episode views draw: rewards, names that lead to filtered lists, long texts.
import { useEffect, useState } from "preact/hooks";
import { bytes, number } from "../format";
import { to } from "../router";
import { shown } from "../ui/text";
import { Name, SafeText } from "../ui/text";
import { pieces } from "./message";

/** A name (a task, a client) that opens the episodes that share it. */
export function Filtered({ run, field, value, in_column = false }: { run: string; field: string; value: string; in_column?: boolean }) {
  if (value === "") return null;
  const text = in_column ? <Name text={value} /> : <SafeText text={value} inline />;
  return <a href={to(run, "episodes", "", { [field]: value })} title={value}>{text}</a>;
}

/** A signed number with a bar from the middle: above 0 to the right, below to the left. */
export function Signed({ value, top, label, sign = false }: { value: number | null; top: number; label: string; sign?: boolean }) {
  if (value === null) return <span class="quiet-text">–</span>;
  const share = top > 0 ? Math.max(-1, Math.min(1, value / top)) : 0;
  return (
    <span class="signed">
      <span class="signed-value">{sign && value > 0 ? "+" : ""}{number(value)}</span>
      <svg class="signed-bar" viewBox="-50 0 100 6" preserveAspectRatio="none" role="img" aria-label={`${label} ${number(value)}`}>
        <rect class={share < 0 ? "fill-down" : "fill-up"} x={Math.min(0, share * 50)} y={0} width={Math.abs(share) * 50} height={6} />
        <rect class="fill-line" x={-0.5} y={0} width={1} height={6} />
      </svg>
    </span>
  );
}

const FOLD = 4_000; // characters that are shown of a long text at first
const AT_ONCE = 12; // pieces that are added in one frame, so that megabytes never stop the page

/** Foreign text of any length. A long one is folded; "show all" adds it piece by piece while the page stays responsive. */
export function LongText({ text, fold = FOLD, is_code = false }: { text: string; fold?: number; is_code?: boolean }) {
  const isLong = text.length > fold * 1.25;
  const [shownPieces, setShown] = useState(0); // 0: folded
  const parts = isLong && shownPieces > 0 ? pieces(text) : [];
  useEffect(() => {
    if (shownPieces === 0 || shownPieces >= parts.length) return;
    const next = requestAnimationFrame(() => setShown((count) => count + AT_ONCE));
    return () => cancelAnimationFrame(next);
  }, [shownPieces, parts.length]);
  const look = `foreign block longtext ${is_code ? "code" : ""}`;
  if (text === "") return <p class="quiet-text">(empty)</p>;
  if (!isLong) return <div class={look} dir="auto">{shown(text)}</div>;
  if (shownPieces === 0) {
    const cut = /[\ud800-\udbff]/.test(text[fold - 1] ?? "") ? fold + 1 : fold;
    return (
      <div class="folded">
        <div class={look} dir="auto">{shown(text.slice(0, cut))}</div>
        <button class="more" onClick={() => setShown(AT_ONCE)}>
          Show all: {number(text.length - cut)} characters more ({bytes(text.length)})
        </button>
      </div>
    );
  }
  return (
    <div class={look} dir="auto">
      {parts.slice(0, shownPieces).map((part, at) => <div key={at} class="piece">{shown(part.replace(/\n$/, ""))}</div>)}
      {shownPieces < parts.length
        ? <p role="status" class="quiet-text">Showing {Math.round((shownPieces / parts.length) * 100)} %…</p>
        : <button class="more" onClick={() => setShown(0)}>Fold</button>}
    </div>
  );
}
