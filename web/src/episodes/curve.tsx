// A quantity by position: the shape of an answer at one look, and a way to get to any place in it.
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { number, plural } from "../format";
import { colour, useTheme } from "../theme";
import { curveOf, QUANTITIES } from "./tokens";
import type { Columns, Quantity } from "./tokens";

const HEIGHT = 150;

export function Curve({ columns, quantity, marks, onHover, onJump }: {
  columns: Columns; quantity: Quantity; marks: number[]; onHover: (at: number | null) => void; onJump: (at: number) => void;
}) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const { theme } = useTheme();
  const told = useRef({ onHover, onJump, marks });
  told.current = { onHover, onJump, marks };
  const name = QUANTITIES.find(([key]) => key === quantity)?.[1] ?? quantity;
  const series = dataOf(columns, quantity);

  useEffect(() => {
    const element = box.current;
    if (element === null) return;
    const [ink, line, accent, second, bad] = ["ink-2", "line", "series-1", "series-2", "bad"].map(colour) as [string, string, string, string, string];
    const hasTwo = quantity === "logprob";
    const stepped = ["mask", "version", "advantage"].includes(quantity) ? uPlot.paths.stepped?.({ align: 1 }) : undefined;
    const made = new uPlot({
      width: element.clientWidth, height: HEIGHT, legend: { show: false }, padding: [8, 8, 0, 0],
      scales: { x: { time: false }, ...(quantity === "mask" ? { y: { range: [-0.1, 1.1] } } : {}) },
      cursor: { drag: { x: false, y: false }, y: false, points: { size: 6 } },
      axes: [
        { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line }, size: 26, font: "11px system-ui", values: (_, values) => values.map((value) => number(value)) },
        {
          stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line }, size: 52, font: "11px system-ui",
          values: (_, values) => values.map((value) => (quantity === "mask" ? ({ 0: "no", 1: "yes" } as Record<number, string>)[value] ?? "" : number(value, 3))),
        },
      ],
      series: [
        {},
        { stroke: accent, width: 1, points: { show: false }, ...(stepped ? { paths: stepped } : {}) },
        ...(hasTwo ? [{ stroke: second, width: 1, points: { show: false } }] : []),
      ],
      hooks: {
        draw: [(self) => {
          const { ctx, bbox } = self;
          ctx.save();
          ctx.fillStyle = bad;
          for (const at of told.current.marks) ctx.fillRect(self.valToPos(at, "x", true) - 1, bbox.top, 2, 8);
          ctx.restore();
        }],
        setCursor: [(self) => told.current.onHover(self.cursor.idx ?? null)],
      },
    }, series as uPlot.AlignedData, element);
    plot.current = made;
    const click = () => { if (made.cursor.idx !== null && made.cursor.idx !== undefined) told.current.onJump(made.cursor.idx); };
    const leave = () => told.current.onHover(null);
    made.over.addEventListener("click", click);
    made.over.addEventListener("mouseleave", leave);
    const observer = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height: HEIGHT }));
    observer.observe(element);
    return () => {
      observer.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [theme, quantity]);

  useEffect(() => { plot.current?.setData(series as uPlot.AlignedData); }, [columns]);

  return (
    <figure class="curve">
      <div ref={box} class="curve-box" role="img" aria-label={`${name} by position, ${plural(columns.id.length, "token")}`} />
      <figcaption class="legend">
        {quantity === "logprob" && <><span><i class="key-line-1" /> when sampled</span><span><i class="key-line-2" /> in training</span></>}
        {marks.length > 0 && <span><i class="key-mark" /> clipped, masked or filtered</span>}
        <span class="quiet-text">Click to go to a token.</span>
      </figcaption>
    </figure>
  );
}

function dataOf(columns: Columns, quantity: Quantity): (number | null)[][] {
  const first = curveOf(columns, quantity);
  const positions = first.map((_, at) => at);
  return quantity === "logprob" ? [positions, first, columns.logprob_trained] : [positions, first];
}
