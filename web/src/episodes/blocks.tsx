// Tokens as text. They are drawn in blocks, and only blocks near the window hold elements.
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { shown } from "../ui/text";
import { textOf } from "./tokens";
import type { Columns, Scale } from "./tokens";

const NEAR = "1000px 0px";
const TOKENS_PER_LINE = 20; // for the height of a block that was never drawn
const LINE_PX = 25;

export function Block({ columns, start, end, scale, current }: {
  columns: Columns; start: number; end: number; scale: Scale; current: number; // -1: the chosen token is elsewhere
}) {
  const element = useRef<HTMLDivElement>(null);
  const [isNear, setNear] = useState(false);
  const height = useRef(Math.ceil((end - start) / TOKENS_PER_LINE) * LINE_PX);
  const isDrawn = isNear || current >= 0;

  useEffect(() => {
    if (element.current === null) return;
    const observer = new IntersectionObserver((entries) => setNear(entries[entries.length - 1]?.isIntersecting ?? false), { rootMargin: NEAR });
    observer.observe(element.current);
    return () => observer.disconnect();
  }, []);
  useLayoutEffect(() => {
    if (isDrawn && element.current) height.current = element.current.offsetHeight;
  });
  const tokens = useMemo(() => {
    if (!isDrawn) return null;
    const found = [];
    for (let at = start; at < end; at++) found.push(<Token key={at} columns={columns} at={at} scale={scale} isCurrent={at === current} />);
    return found;
  }, [isDrawn, columns.text[start], columns.text[end - 1], end, scale, current]);
  return (
    <div ref={element} class="block-of-tokens" {...(isDrawn ? {} : { style: { height: `${height.current}px` } })}>{tokens}</div>
  );
}

function Token({ columns, at, scale, isCurrent }: { columns: Columns; at: number; scale: Scale; isCurrent: boolean }) {
  const cause = columns.cause[at] ?? "given";
  const { tone, strength } = scale.paint(at);
  const text = textOf(columns, at);
  return (
    <span data-at={at} class={`tok is-${cause} ${tone} ${isCurrent ? "current" : ""} ${text === "" ? "partial" : ""}`}
          {...(strength > 0 ? { style: { "--s": strength.toFixed(2) } } : {})}>
      {text === "" ? "·" : shown(text.replaceAll("\n", "↵\n"))}
    </span>
  );
}
