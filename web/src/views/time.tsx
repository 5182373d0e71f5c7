// Where the time goes: a lane for each process over one time axis, and the samples of queues and engines below it.
import { useMemo } from "preact/hooks";
import type uPlot from "uplot";
import { url, useApi } from "../api";
import { clock, duration, number, percent, words } from "../format";
import { colour } from "../theme";
import type { TimeView } from "../types";
import { Chart, series } from "../ui/chart";
import type { Line } from "../ui/chart";
import { Page, Section } from "../ui/parts";
import { Await, Empty } from "../ui/states";
import { Table } from "../ui/table";
import { SafeText } from "../ui/text";

type Lane = TimeView["lanes"][number];

const KINDS = ["train", "wait", "push", "pause", "checkpoint"];
const INK: Record<string, string> = {
  train: "series-1", wait: "line-2", push: "series-2", pause: "series-5", checkpoint: "series-3",
};
const ink = (what: string): string => INK[what] ?? "series-8";
const LANE_HEIGHT = 34;

export function Time({ run }: { run: string; arg: string; query: URLSearchParams }) {
  const time = useApi<TimeView>(url("runs", run, "time"), { live: run, on: ["steps", "state"], restS: 5 });
  return (
    <Page title="Time">
      <Await of={time}>{(data) => <TimePage data={data} />}</Await>
    </Page>
  );
}

function TimePage({ data }: { data: TimeView }) {
  const samples = Object.entries(data.samples).filter(([, points]) => points.length > 0);
  if (data.lanes.every(({ spans }) => spans.length === 0) && samples.length === 0) return <Empty>Nothing is recorded yet.</Empty>;
  const what = [...new Set(data.lanes.flatMap(({ spans }) => spans.map((span) => span[2])))]
    .sort((a, b) => (KINDS.indexOf(a) + 99) % 99 - (KINDS.indexOf(b) + 99) % 99);
  return (
    <>
      <Section title="Processes" aside={<Key what={what} />} note="Drag to zoom, double-click to see the whole run.">
        <Lanes lanes={data.lanes} />
      </Section>
      <Section title="Shares of the recorded time"><Shares lanes={data.lanes} what={what} /></Section>
      {samples.length > 0 && <Section title="Queues and engines"><Samples samples={samples} /></Section>}
    </>
  );
}

function Key({ what }: { what: string[] }) {
  return (
    <>
      {what.map((name) => (
        <span key={name} class="legend-item"><span class="block-key" style={{ background: `var(--${ink(name)})` }} aria-hidden="true" />{words(name)}</span>
      ))}
    </>
  );
}

function Lanes({ lanes }: { lanes: Lane[] }) {
  // The plot needs points to put its cursor on: the ends of all spans.
  const { x, lines } = useMemo(() => {
    const ends = new Set<number>();
    for (const { spans } of lanes) for (const [start, end] of spans) ends.add(start).add(end);
    const at = [...ends].sort((a, b) => a - b);
    const hidden: Line = { label: "", values: at.map(() => null), colour: "line", faint: true };
    return { x: at, lines: [hidden] };
  }, [lanes]);
  const paint = (plot: uPlot) => {
    const { ctx, bbox } = plot;
    const ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    const inks = new Map(lanes.flatMap(({ spans }) => spans.map((span) => span[2])).map((name) => [name, ""]));
    for (const name of inks.keys()) inks.set(name, colour(ink(name)));
    lanes.forEach(({ spans }, row) => {
      const top = bbox.top + (bbox.height / lanes.length) * row + 5 * ratio;
      const height = bbox.height / lanes.length - 10 * ratio;
      for (const [start, end, name] of spans) {
        const left = plot.valToPos(start, "x", true);
        const width = Math.max(ratio * 0.75, plot.valToPos(end, "x", true) - left);
        if (left > bbox.left + bbox.width || left + width < bbox.left) continue;
        ctx.fillStyle = inks.get(name) ?? "";
        ctx.fillRect(left, top, Math.max(1, width - (width > 4 * ratio ? ratio : 0)), height);
      }
    });
    ctx.restore();
  };
  const rows = lanes.length;
  return (
    <Chart label={`Lanes of ${lanes.map(({ process }) => process).join(", ")}`} x={x} lines={lines} sync="time" isTime
           height={rows * LANE_HEIGHT + 44} range={[0, rows]} draw={paint}
           yAxis={{
             size: Math.min(130, 20 + 7.2 * Math.max(0, ...lanes.map(({ process }) => process.length))),
             grid: { show: false },
             splits: () => lanes.map((_lane, row) => rows - row - 0.5),
             values: () => lanes.map(({ process }) => (process.length > 16 ? `${process.slice(0, 15)}…` : process)),
           }}
           caption={(index) => (index === null ? <span class="legend-at">Point at the lanes to read what each process does.</span>
             : <Now lanes={lanes} at={x[index] ?? 0} />)} />
  );
}

function Now({ lanes, at }: { lanes: Lane[]; at: number }) {
  return (
    <>
      {lanes.map(({ process, spans }) => {
        const span = spans.find(([start, end]) => start <= at && at < end) ?? spans.find(([, end]) => end === at);
        return (
          <span key={process} class="legend-item">
            <SafeText text={process} inline /> <b>{span ? `${words(span[2])} ${duration(span[1] - span[0])}` : "–"}</b>
          </span>
        );
      })}
      <span class="legend-at">{clock(at)}</span>
    </>
  );
}

function Shares({ lanes, what }: { lanes: Lane[]; what: string[] }) {
  const rows = lanes.map(({ process, spans }) => {
    const seconds: Record<string, number> = {};
    let first = Infinity;
    let last = -Infinity;
    for (const [start, end, name] of spans) {
      seconds[name] = (seconds[name] ?? 0) + end - start;
      first = Math.min(first, start);
      last = Math.max(last, end);
    }
    return { process, seconds, total: Math.max(0, last - first) };
  });
  return (
    <Table label="Shares of time" rows={rows} rowKey={({ process }) => process} columns={[
      { key: "process", head: "Process", cell: ({ process }) => <SafeText text={process} inline /> },
      ...what.map((name) => ({
        key: name, head: words(name), is_number: true,
        cell: ({ seconds, total }: (typeof rows)[number]) => (
          seconds[name] === undefined ? "–" : <span title={duration(seconds[name])}>{percent(total > 0 ? seconds[name] / total : null)}</span>
        ),
      })),
      { key: "total", head: "Time", is_number: true, cell: ({ total }) => duration(total) },
      { key: "bar", head: <span class="sr">As a bar</span>, cell: ({ seconds, total }) => (
        <span class="share-bar wide" aria-hidden="true">
          {what.map((name) => seconds[name] !== undefined && (
            <span key={name} style={{ width: `${(100 * seconds[name]) / (total || 1)}%`, background: `var(--${ink(name)})` }} />
          ))}
        </span>
      ) },
    ]} />
  );
}

// One chart for each quantity: engine_0/running and engine_1/running share one.
function Samples({ samples }: { samples: [string, [number, number][]][] }) {
  const charts = useMemo(() => {
    const found = new Map<string, [string, [number, number][]][]>();
    for (const [name, points] of samples) {
      const cut = name.lastIndexOf("/");
      const quantity = cut === -1 ? name : name.slice(cut + 1);
      found.set(quantity, [...(found.get(quantity) ?? []), [cut === -1 ? name : name.slice(0, cut), points]]);
    }
    return [...found].map(([quantity, parts]) => {
      const x = [...new Set(parts.flatMap(([, points]) => points.map(([at]) => at)))].sort((a, b) => a - b);
      const lines = parts.slice(0, 8).map(([label, points], index): Line => {
        const values = new Map(points);
        return { label, values: x.map((at) => values.get(at) ?? null), colour: series(index) };
      });
      return { quantity, x, lines };
    });
  }, [samples]);
  return (
    <div class="charts">
      {charts.map(({ quantity, x, lines }) => {
        const isShare = quantity === "kv" || quantity.endsWith("share");
        return (
          <div key={quantity} class="card">
            <h3>{quantity === "kv" ? "KV cache in use" : words(quantity)}</h3>
            <Chart label={words(quantity)} x={x} lines={lines} sync="time" isTime height={150} range={isShare ? [0, 1] : [0, null]}
                   format={isShare ? percent : number} {...(isShare ? { yFormat: percent } : {})} />
          </div>
        );
      })}
    </div>
  );
}
