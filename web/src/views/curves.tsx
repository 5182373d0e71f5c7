// Curves of a run, or of up to four runs over each other: whatever number a step reports.
import { useMemo, useState } from "preact/hooks";
import { url, useApi, withQuery } from "../api";
import { dateTime, number, title } from "../format";
import { setQuery } from "../router";
import type { RunEntry, Steps } from "../types";
import { Chart, series, Swatch } from "../ui/chart";
import type { ChartMark, Line } from "../ui/chart";
import { Choices, Menu, Page, Section, Select } from "../ui/parts";
import { Empty, Failed, Loading } from "../ui/states";
import { Table } from "../ui/table";
import { SafeText } from "../ui/text";

/** What most readers want first, in this order; whatever of it the run does not report is left out. */
const FIRST = [
  "reward", "reward_by_kind", "success_by_kind", "entropy", "gap_p99", "equal_groups", "staleness", "step_s", "wait_s", "train_s",
  "tokens_sampled", "grad_norm",
];
const MAX_RUNS = 4;
const DASHES: (number[] | undefined)[] = [undefined, [6, 3], [2, 2], [8, 3, 2, 3]];

export function Curves({ run, query }: { run: string; arg: string; query: URLSearchParams }) {
  const runs = useApi<{ runs: RunEntry[] }>(url("runs"));
  const others = (query.get("with") ?? "").split(",").filter((id) => id !== "" && id !== run).slice(0, MAX_RUNS - 1);
  const ids = [run, ...others];
  const policy = query.get("policy") ?? "";
  const names = ids.map((id) => runs.data?.runs.find((entry) => entry.id === id)?.run ?? id);
  const policies = Object.keys(runs.data?.runs.find(({ id }) => id === run)?.policies ?? {});

  // The number of runs may change, the number of hooks may not.
  const asked = query.get("series");
  const loaded = [useSteps(ids[0], policy, asked), useSteps(ids[1], policy, asked), useSteps(ids[2], policy, asked), useSteps(ids[3], policy, asked)]
    .slice(0, ids.length);
  const all = loaded.map(({ data }) => data);
  const offered = useMemo(() => charts(loaded.flatMap(({ names: known }) => known)), loaded.map(({ names: known }) => known.join()));
  const chosen = choose(asked, offered);
  const smoothing = Math.min(0.99, Math.max(0, Number(query.get("smooth") ?? "0") || 0));
  const axis = query.get("x") === "time" && ids.length === 1 ? "time" : "step";
  const failed = loaded.find(({ error }) => error !== null)?.error ?? null;
  const marks = all[0]?.marks ?? [];

  return (
    <Page title="Curves">
      <div class="controls">
        {policies.length > 1 && (
          <Select label="Policy" value={policy} options={policies.map((name, at) => [at === 0 ? "" : name, name] as const)}
                  onChoose={(value) => setQuery({ policy: value })} />
        )}
        <label class="field">
          <span>Smoothing {smoothing === 0 ? "off" : smoothing}</span>
          <input type="range" min="0" max="0.98" step="0.02" value={smoothing}
                 onInput={(event) => setQuery({ smooth: event.currentTarget.value === "0" ? "" : event.currentTarget.value })} />
        </label>
        {ids.length === 1 && (
          <div class="field"><span>Over</span>
            <Choices label="Horizontal axis" value={axis} options={[["step", "steps"], ["time", "time"]]}
                     onChoose={(value) => setQuery({ x: value === "step" ? "" : value })} />
          </div>
        )}
        <RunPicker entries={runs.data?.runs ?? []} run={run} others={others} />
        <SeriesPicker offered={[...offered.keys()]} chosen={chosen} />
      </div>
      {ids.length > 1 && (
        <p class="run-key">
          {names.map((name, at) => (
            <span key={ids[at]} class="legend-item"><Swatch colour={series(at)} /><SafeText text={name} inline /></span>
          ))}
        </p>
      )}
      {failed !== null && <Failed error={failed} />}
      {all[0] === null && failed === null && <Loading what="Reading steps" />}
      {all[0] !== null && all[0] !== undefined && (all[0].steps.length === 0 ? <Empty>No step yet: curves begin with the first one.</Empty> : (
        <>
          <p class="note">Drag over a chart to zoom all of them, double-click to see everything again.</p>
          <div class="charts">
            {chosen.map((name) => (
              <CurveCard key={name} name={name} members={offered.get(name) ?? []} all={all} labels={names} smoothing={smoothing}
                         axis={axis} marks={marks} />
            ))}
          </div>
          {chosen.length === 0 && <Empty>Choose at least one series.</Empty>}
          {marks.length > 0 && <Marks marks={marks} />}
        </>
      ))}
    </Page>
  );
}

/** Ask what a run reports, then for the chosen series alone: a long run's whole table is megabytes. */
function useSteps(run: string | undefined, policy: string, asked: string | null) {
  const address = run === undefined ? null : url("runs", run, "steps");
  const live = run ?? null;
  const first = useApi<Steps>(address && withQuery(address, { policy, series: "reward" }), { live, on: ["steps"], restS: 5, keeps: true });
  const names = first.data?.names ?? [];
  const offered = useMemo(() => charts(names), [names.join()]);
  const members = choose(asked, offered).flatMap((name) => offered.get(name) ?? []);
  const steps = useApi<Steps>(
    address === null || members.length === 0 ? null : withQuery(address, { policy, series: members.join() }),
    { live, on: ["steps"], keeps: true },
  );
  return { names, data: (members.length === 0 ? null : steps.data) ?? first.data, error: first.error ?? steps.error };
}

function choose(asked: string | null, offered: Map<string, string[]>): string[] {
  return asked === null ? FIRST.filter((name) => offered.has(name)).slice(0, 8) : asked.split(",").filter((name) => offered.has(name));
}

/** Put nested series, e.g. reward_by_kind/sum, into one chart under the first part of their name. */
function charts(names: string[]): Map<string, string[]> {
  const found = new Map<string, string[]>();
  for (const name of new Set(names)) {
    const chart = name.split("/")[0] ?? name;
    found.set(chart, [...(found.get(chart) ?? []), name]);
  }
  return new Map([...found].sort(([a], [b]) => a.localeCompare(b)));
}

function CurveCard({ name, members, all, labels, smoothing, axis, marks }: {
  name: string; members: string[]; all: (Steps | null)[]; labels: string[]; smoothing: number; axis: "step" | "time";
  marks: Steps["marks"];
}) {
  const { x, lines } = useMemo(() => draw(name, members, all, labels, smoothing, axis), [...all, name, smoothing, axis, members.join()]);
  const at = useMemo<ChartMark[]>(() => marks.map((mark, index) => ({
    x: axis === "time" ? mark.at : mark.step, label: String(index + 1), text: mark.text,
  })), [marks, axis]);
  return (
    <section class="section card" aria-label={title(name)}>
      <h2>{title(name)}</h2>
      <Chart label={title(name)} x={x} lines={lines} sync="curves" marks={at} isTime={axis === "time"} />
    </section>
  );
}

function draw(
  name: string, members: string[], all: (Steps | null)[], labels: string[], smoothing: number, axis: "step" | "time",
): { x: number[]; lines: Line[] } {
  const known = all.map((steps, run) => ({ steps, run })).filter((entry): entry is { steps: Steps; run: number } => entry.steps !== null);
  const only = known.length === 1 ? known[0]?.steps : undefined;
  const x = only !== undefined
    ? (axis === "time" ? only.at : only.steps)
    : [...new Set(known.flatMap(({ steps }) => steps.steps))].sort((a, b) => a - b);
  const lines: Line[] = [];
  const isHistogram = members.length > 0 && members.every((member) => /^\d+$/.test(member.slice(name.length + 1)));
  for (const { steps, run } of known) {
    const at = only !== undefined ? null : new Map(steps.steps.map((step, index) => [step, index]));
    const drawn = isHistogram ? [`${name}/mean`] : members.slice(0, 8);
    drawn.forEach((member, index) => {
      const column = isHistogram ? meanOf(name, members, steps) : steps.series[member];
      if (column === undefined) return;
      const values = at === null ? column : x.map((step) => column[at.get(step) ?? -1] ?? null);
      const rest = member === name ? "" : member.slice(name.length + 1);
      const part = isHistogram ? `mean ${title(name)}` : rest;
      const label = only !== undefined ? part || title(name) : [labels[run] ?? "", part].filter(Boolean).join(" ");
      const ink = series(only !== undefined ? index : run);
      const dash = only !== undefined ? undefined : DASHES[index % DASHES.length];
      if (smoothing > 0) lines.push({ label: `${label} unsmoothed`, values, colour: ink, faint: true });
      lines.push({ label, values: smoothing > 0 ? smooth(values, smoothing) : values, colour: ink, ...(dash ? { dash } : {}) });
    });
  }
  return { x, lines };
}

/** Mean of a series that counts by number, e.g. staleness/0, staleness/1, ...: a line says more than one for each number. */
function meanOf(name: string, members: string[], steps: Steps): (number | null)[] {
  return steps.steps.map((_step, at) => {
    let total = 0;
    let weighted = 0;
    for (const member of members) {
      const count = steps.series[member]?.[at] ?? 0;
      total += count;
      weighted += count * Number(member.slice(name.length + 1));
    }
    return total === 0 ? null : weighted / total;
  });
}

/** Exponential moving average without a bias towards the first value. */
export function smooth(values: (number | null)[], weight: number): (number | null)[] {
  let total = 0;
  let weights = 0;
  return values.map((value) => {
    if (value === null) return null;
    total = total * weight + value;
    weights = weights * weight + 1;
    return total / weights;
  });
}

function SeriesPicker({ offered, chosen }: { offered: string[]; chosen: string[] }) {
  const [find, setFind] = useState("");
  const shown = offered.filter((name) => title(name).includes(find.toLowerCase()) || name.includes(find));
  const toggle = (name: string) => {
    const next = chosen.includes(name) ? chosen.filter((other) => other !== name) : [...chosen, name];
    setQuery({ series: next.length === 0 ? "none" : next.join() });
  };
  return (
    <Menu title={`Series (${chosen.length} of ${offered.length})`}>
        <label class="field wide" data-filter><span>Find a series</span>
          <input type="search" value={find} onInput={(event) => setFind(event.currentTarget.value)} />
        </label>
        <ul class="checks">
          {shown.map((name) => (
            <li key={name}>
              <label class="check">
                <input type="checkbox" checked={chosen.includes(name)} onChange={() => toggle(name)} />{title(name)}
              </label>
            </li>
          ))}
        </ul>
        <div class="dialog-foot">
          <button onClick={() => setQuery({ series: "none" })}>None</button>
          <button onClick={() => setQuery({ series: "" })}>The usual ones</button>
        </div>
    </Menu>
  );
}

function RunPicker({ entries, run, others }: { entries: RunEntry[]; run: string; others: string[] }) {
  const candidates = entries.filter(({ id, error }) => id !== run && error === "");
  if (candidates.length === 0) return null;
  const toggle = (id: string) => {
    const next = others.includes(id) ? others.filter((other) => other !== id) : [...others, id];
    setQuery({ with: next.join() });
  };
  return (
    <Menu title={others.length === 0 ? "Compare with" : `Compared with ${others.length}`}>
        <ul class="checks one">
          {candidates.map(({ id, run: name }) => (
            <li key={id}>
              <label class="check">
                <input type="checkbox" checked={others.includes(id)} onChange={() => toggle(id)}
                       disabled={!others.includes(id) && others.length >= MAX_RUNS - 1} />
                <SafeText text={name} inline />
              </label>
            </li>
          ))}
        </ul>
    </Menu>
  );
}

function Marks({ marks }: { marks: Steps["marks"] }) {
  return (
    <Section title="Marks" note="Changes of settings and of the clients' code, numbered as in the charts.">
      <Table label="Marks" rows={marks} rowKey={(_mark, at) => String(at)} columns={[
        { key: "mark", head: "Mark", cell: (_mark, at) => <span class="mark">{at + 1}</span> },
        { key: "step", head: "Step", is_number: true, cell: ({ step }) => number(step) },
        { key: "what", head: "What", cell: ({ text }) => <SafeText text={text} inline /> },
        { key: "at", head: "When", cell: ({ at }) => <span class="nowrap">{dateTime(at)}</span> },
      ]} />
    </Section>
  );
}
