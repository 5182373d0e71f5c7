// Charts on uPlot: cursors and zoom of all charts with one `sync` key move together, colours follow the theme, the legend shows
// the values at the cursor (or the newest ones), and the arrow keys move the cursor of a focused chart.
import { useEffect, useId, useMemo, useRef, useState } from "preact/hooks";
import type { ComponentChild } from "preact";
import uPlot from "uplot";
import { clock, number, short } from "../format";
import { colour, useTheme } from "../theme";
import { SafeText } from "./text";

export interface Line {
  label: string;
  values: (number | null)[];
  colour: string; // a colour of app.css, e.g. "series-1"
  dash?: number[];
  faint?: boolean; // unsmoothed values behind a smoothed line; not in the legend
  low?: (number | null)[]; // an interval around the line
  high?: (number | null)[];
  points?: boolean; // a dot at every value
}

export interface ChartMark { x: number; label: string; text: string }

interface ChartProps {
  label: string; // for screen readers, and the heading of the legend's announcements
  x: number[];
  lines: Line[];
  height?: number;
  sync?: string;
  marks?: ChartMark[];
  isTime?: boolean; // x in seconds since 1970
  xLabel?: string;
  range?: [number | null, number | null]; // of y; null: from the data
  format?: (value: number | null | undefined) => string;
  yFormat?: (value: number) => string; // of the axis
  draw?: (plot: uPlot) => void; // paints below the lines
  yAxis?: Partial<uPlot.Axis>;
  caption?: (index: number | null, plot: uPlot | null) => ComponentChild; // replaces the legend's values
}

const groups = new Map<string, Set<uPlot>>();
let isZooming = false;

export const SERIES = [1, 2, 3, 4, 5, 6, 7, 8].map((n) => `series-${n}`);
export const series = (index: number): string => SERIES[index % SERIES.length] ?? "series-1";

export function Chart(props: ChartProps) {
  const { label, x, lines, height = 190, sync, marks = [], isTime = false, xLabel = "step", format = number } = props;
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const [index, setIndex] = useState<number | null>(null);
  const [isSpoken, setSpoken] = useState(false);
  const { theme } = useTheme();
  const id = useId();

  const data = useMemo(() => columns(x, lines), [x, lines]);
  const shape = JSON.stringify([
    lines.map(({ label: name, colour: ink, dash, faint, low, points }) => [name, ink, dash, faint, low !== undefined, points]),
    theme, height, sync, isTime, props.range,
  ]);

  useEffect(() => {
    const element = box.current;
    if (element === null) return;
    const made = new uPlot(options(latest, element.clientWidth || 300, height, setIndex), data, element);
    plot.current = made;
    if (sync !== undefined) groups.set(sync, (groups.get(sync) ?? new Set()).add(made));
    const observer = new ResizeObserver(() => {
      if (element.clientWidth > 0) made.setSize({ width: element.clientWidth, height });
    });
    observer.observe(element);
    return () => {
      observer.disconnect();
      if (sync !== undefined) groups.get(sync)?.delete(made);
      made.destroy();
      plot.current = null;
    };
  }, [shape]);

  useEffect(() => {
    const made = plot.current;
    if (made === null || made.data === data) return;
    // A reader who zoomed in keeps the section; otherwise the chart grows with the run.
    const { min, max } = made.scales["x"] ?? {};
    const old = made.data[0];
    const isZoomed = old.length > 1 && (Number(min) > Number(old[0]) || Number(max) < Number(old[old.length - 1]));
    made.setData(data, !isZoomed);
    if (isZoomed) made.redraw();
  }, [data]);
  useEffect(() => plot.current?.redraw(false), [marks]);

  const move = (event: KeyboardEvent) => {
    const made = plot.current;
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (made === null || by === undefined || x.length === 0) return;
    event.preventDefault();
    const at = Math.max(0, Math.min(x.length - 1, (index ?? x.length - (by < 0 ? 0 : 1)) + by));
    // The third argument, which the types do not name, moves the cursors of the other charts, too.
    const place = made.setCursor as (position: { left: number; top: number }, fire: boolean, publish: boolean) => void;
    place({ left: made.valToPos(x[at] ?? 0, "x"), top: made.bbox.height / 2 / devicePixelRatio }, true, true);
    setSpoken(true);
  };

  const shownAt = index ?? lastWith(lines);
  const named = lines.filter(({ faint }) => !faint);
  const at = shownAt === null ? null : x[shownAt];
  const where = at === null || at === undefined ? "" : isTime ? clock(at) : `${xLabel} ${number(at)}`;
  const near = index === null ? undefined : marks.find(({ x: mark }) => mark === at);
  return (
    <figure class="chart" aria-labelledby={id}>
      <div class="plot" ref={box} style={{ minHeight: `${height}px` }} tabIndex={0} role="img"
           aria-label={`${label}. ${describe(x, named, format)}`} onKeyDown={move}
           onBlur={() => { setSpoken(false); plot.current?.setCursor({ left: -10, top: -10 }); }} />
      <figcaption id={id} class="legend" aria-live={isSpoken ? "polite" : "off"}>
        {props.caption ? props.caption(index, plot.current) : (
          <>
            {named.map((line) => (
              <span key={line.label} class="legend-item">
                <Swatch colour={line.colour} {...(line.dash ? { dash: line.dash } : {})} />
                <SafeText text={line.label} inline />
                <b>{format(shownAt === null ? null : line.values[shownAt])}</b>
                {line.low && line.high && shownAt !== null && line.low[shownAt] !== null && (
                  <span class="quiet-text">{format(line.low[shownAt])} to {format(line.high[shownAt])}</span>
                )}
              </span>
            ))}
            <span class="legend-at">{where}{near && <> · <SafeText text={near.text} inline /></>}</span>
          </>
        )}
      </figcaption>
    </figure>
  );
}

export function Swatch({ colour: ink, dash }: { colour: string; dash?: number[] }) {
  return (
    <svg width="18" height="8" aria-hidden="true" class="swatch">
      <line x1="0" x2="18" y1="4" y2="4" stroke-width="2.5" style={{ stroke: `var(--${ink})` }}
            stroke-dasharray={dash?.join(" ")} />
    </svg>
  );
}

function columns(x: number[], lines: Line[]): uPlot.AlignedData {
  const all: (number | null)[][] = [];
  for (const line of lines) {
    all.push(line.values);
    if (line.low && line.high) all.push(line.high, line.low);
  }
  return [x, ...all] as uPlot.AlignedData;
}

function options(
  latest: { current: ChartProps }, width: number, height: number, setIndex: (index: number | null) => void,
): uPlot.Options {
  const { lines, sync, isTime = false, range, yAxis } = latest.current;
  const [ink2, line1, line2, surface, accent] = ["ink-2", "line", "line-2", "surface", "accent"].map(colour);
  const font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const series: uPlot.Series[] = [{}];
  const strokes: string[] = [""]; // by series
  const bands: uPlot.Band[] = [];
  for (const { label, colour: name, dash, faint, low, points } of lines) {
    const stroke = colour(name);
    strokes.push(faint ? "transparent" : stroke, ...(low === undefined ? [] : ["transparent", "transparent"]));
    series.push({
      label, stroke: faint ? fade(stroke, 0.3) : stroke, width: faint ? 1 : 1.75, spanGaps: true,
      ...(dash ? { dash } : {}),
      points: { show: points ? true : undefined, size: 5, fill: surface, stroke } as uPlot.Series.Points,
    });
    if (low !== undefined) {
      const at = series.length;
      const side: uPlot.Series = { label, stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
      series.push(side, { ...side });
      bands.push({ series: [at, at + 1], fill: fade(stroke, 0.16) });
    }
  }
  return {
    width, height, series, bands,
    legend: { show: false },
    padding: [12, 8, 0, 0],
    cursor: {
      ...(sync !== undefined ? { sync: { key: sync, scales: ["x", null] } } : {}),
      y: false,
      focus: { prox: 24 },
      points: { size: 7, width: 0, fill: (_plot, index) => strokes[index] ?? "", stroke: (_plot, index) => strokes[index] ?? "" },
    },
    scales: {
      x: { time: isTime },
      y: {
        range: (_plot, min, max) => {
          const [low, high] = range ?? [null, null];
          if (!Number.isFinite(min) || !Number.isFinite(max)) return [low ?? 0, high ?? 1];
          const pad = max === min ? Math.abs(max) * 0.1 || 0.5 : (max - min) * 0.08;
          return [low ?? min - pad, high ?? max + pad];
        },
      },
    },
    axes: [
      { stroke: ink2, font, grid: { show: false }, ticks: { stroke: line2, size: 4, width: 1 }, size: 28, gap: 4, space: isTime ? 72 : 46,
        values: (_plot: uPlot, splits: number[], _axis: number, _space: number, step: number) => (
          isTime ? times(splits, step) : splits.map((v) => (Number.isInteger(v) ? short(v) : ""))
        ) },
      { stroke: ink2, font, grid: { stroke: line1, width: 1 }, ticks: { show: false }, size: 52, gap: 6,
        values: (_plot, splits) => splits.map((v) => (latest.current.yFormat ?? short)(v)), ...yAxis },
    ],
    hooks: {
      drawClear: [(plot) => latest.current.draw?.(plot)],
      draw: [(plot) => drawMarks(plot, latest.current.marks ?? [], { line: accent ?? "", text: accent ?? "", back: surface ?? "" })],
      setCursor: [(plot) => setIndex(plot.cursor.idx ?? null)],
      setScale: [(plot, key) => {
        if (key !== "x" || sync === undefined || isZooming || latest.current.x.length === 0) return;
        const { min, max } = plot.scales["x"] ?? {};
        if (min === undefined || min === null || max === undefined || max === null) return;
        if (!("isReady" in plot)) return;
        isZooming = true;
        for (const other of groups.get(sync) ?? []) if (other !== plot) other.setScale("x", { min, max });
        isZooming = false;
      }],
      ready: [(plot) => { Object.assign(plot, { isReady: true }); }],
    },
  };
}

function drawMarks(plot: uPlot, marks: ChartMark[], ink: { line: string; text: string; back: string }): void {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.font = `${11 * ratio}px ${getComputedStyle(document.body).fontFamily}`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  for (const { x, label } of marks) {
    const left = Math.round(plot.valToPos(x, "x", true));
    if (left < bbox.left || left > bbox.left + bbox.width) continue;
    ctx.strokeStyle = ink.line;
    ctx.lineWidth = ratio;
    ctx.setLineDash([3 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(left, bbox.top);
    ctx.lineTo(left, bbox.top + bbox.height);
    ctx.stroke();
    ctx.setLineDash([]);
    const size = (8 + ctx.measureText(label).width / ratio) * ratio;
    ctx.fillStyle = ink.line;
    ctx.beginPath();
    ctx.roundRect(left - size / 2, bbox.top - 10 * ratio, size, 14 * ratio, 3 * ratio);
    ctx.fill();
    ctx.fillStyle = ink.back;
    ctx.fillText(label, left, bbox.top - 2.5 * ratio);
  }
  ctx.restore();
}

/** Labels of a time axis: seconds only where the marks are less than a minute apart, the date where a day begins. */
function times(splits: number[], step: number): string[] {
  return splits.map((at, index) => {
    const date = new Date(at * 1000);
    const before = splits[index - 1];
    const isNewDay = before !== undefined && new Date(before * 1000).getDate() !== date.getDate();
    if (step >= 86400 || isNewDay) return `${date.getDate()} ${date.toLocaleDateString("en-GB", { month: "short" })}`;
    return date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...(step < 60 ? { second: "2-digit" } : {}) });
  });
}

function fade(rgb: string, alpha: number): string {
  return rgb.replace(/^rgb\((.*)\)$/, (_all, inner: string) =>
    inner.includes(",") ? `rgba(${inner}, ${alpha})` : `rgb(${inner} / ${alpha})`);
}

function lastWith(lines: Line[]): number | null {
  for (let at = (lines[0]?.values.length ?? 0) - 1; at >= 0; at--) {
    if (lines.some(({ values }) => values[at] !== null && values[at] !== undefined)) return at;
  }
  return null;
}

// Say in words what a reader who does not see the chart would ask first.
function describe(x: number[], lines: Line[], format: (value: number | null | undefined) => string): string {
  if (x.length === 0) return "No values yet.";
  return lines.slice(0, 6).map(({ label, values }) => {
    const known = values.filter((value): value is number => value !== null && value !== undefined);
    if (known.length === 0) return `${label}: no values.`;
    return `${label}: first ${format(known[0])}, newest ${format(known[known.length - 1])}, ` +
      `lowest ${format(known.reduce((a, b) => Math.min(a, b)))}, highest ${format(known.reduce((a, b) => Math.max(a, b)))}.`;
  }).join(" ");
}
