// All runs that the dashboard was given, and up to four of them side by side.
import { useState } from "preact/hooks";
import type { Loaded } from "../api";
import { url, useApi, withQuery } from "../api";
import { literal, number, percent, plural } from "../format";
import { to } from "../router";
import type { RunEntry, SettingsDiff } from "../types";
import { Age, Meter, Page, Section, States, TextField } from "../ui/parts";
import { Await, Empty } from "../ui/states";
import { Table } from "../ui/table";
import { SafeText } from "../ui/text";

const MAX_COMPARED = 4;

export function Runs({ runs, query, isCompare }: { runs: Loaded<{ runs: RunEntry[] }>; query: URLSearchParams; isCompare: boolean }) {
  if (isCompare) return <Compare runs={runs} ids={(query.get("runs") ?? "").split(",").filter((id) => id !== "").slice(0, MAX_COMPARED)} />;
  return (
    <Page title="Runs">
      <Await of={runs} what="Looking for runs">
        {({ runs: entries }) => entries.length === 0 ? (
          <Empty>No run in the folders that the dashboard was given. A run appears here as soon as <code>swarmq up</code> has made its folder.</Empty>
        ) : <RunTable entries={entries} />}
      </Await>
    </Page>
  );
}

function RunTable({ entries }: { entries: RunEntry[] }) {
  const [chosen, setChosen] = useState<string[]>([]);
  const [find, setFind] = useState("");
  const toggle = (id: string) => setChosen((old) => (old.includes(id) ? old.filter((other) => other !== id) : [...old, id]));
  const rows = entries.filter(({ run, folder }) => run.includes(find) || folder.includes(find))
    .sort((a, b) => (b.at ?? 0) - (a.at ?? 0));
  return (
    <Section title={plural(entries.length, "run")} aside={
      <>
        <span>{chosen.length === 0 ? "Choose two to four to compare them." : `${chosen.length} chosen`}</span>
        {chosen.length >= 2 && <a class="button" href={to(null, "compare", "", { runs: chosen.join() })}>Compare</a>}
      </>
    }>
      {entries.length > 8 && <div data-filter><TextField label="Name or folder contains" value={find} onInput={setFind} size={28} /></div>}
      <Table label="Runs" rows={rows} rowKey={({ id }) => id} columns={[
        { key: "choose", head: <span class="sr">Compare</span>, cell: ({ id, run, error }) => error === "" && (
          <input type="checkbox" aria-label={`Compare ${run}`} checked={chosen.includes(id)}
                 disabled={!chosen.includes(id) && chosen.length >= MAX_COMPARED} onChange={() => toggle(id)} />
        ) },
        { key: "run", head: "Run", cell: ({ id, run, folder, error }) => (
          <span class="stack">
            {error === "" ? <a class="strong" href={to(id, "overview")}><SafeText text={run} inline /></a> : <b><SafeText text={run || folder} inline /></b>}
            <span class="quiet-text small"><SafeText text={folder} inline /></span>
          </span>
        ) },
        { key: "state", head: "State", cell: ({ state, error }) => (
          <span class="stack">
            <States state={error === "" ? state : "unreadable"} {...(error === "" ? {} : { tone: "bad" as const })} />
            {error !== "" && <span class="small"><SafeText text={error} inline /></span>}
          </span>
        ) },
        { key: "progress", head: "Progress", cell: ({ policies }) => (
          <ul class="stack">
            {Object.entries(policies).map(([name, { step, max_steps }]) => (
              <li key={name} class="run-progress">
                <span>{Object.keys(policies).length > 1 && <><SafeText text={name} inline />: </>}step {number(step)}{max_steps ? ` of ${number(max_steps)}` : ""}</span>
                {max_steps ? <Meter share={step / max_steps} label={`${name}: ${percent(step / max_steps)}`} /> : null}
              </li>
            ))}
          </ul>
        ) },
        { key: "reward", head: "Reward", is_number: true, cell: ({ policies }) => (
          <ul class="stack">{Object.entries(policies).map(([name, { reward }]) => <li key={name}>{number(reward, 3)}</li>)}</ul>
        ) },
        { key: "at", head: "Last heard of", cell: ({ at }) => <span class="nowrap"><Age at={at} /></span> },
      ]} />
    </Section>
  );
}

function Compare({ runs, ids }: { runs: Loaded<{ runs: RunEntry[] }>; ids: string[] }) {
  const diff = useApi<SettingsDiff>(ids.length < 2 ? null : withQuery(url("diff"), { runs: ids.join() }));
  const [first = "", ...others] = ids;
  if (ids.length < 2) return <Page title="Compare"><Empty>Choose two to four runs in the <a href={to(null, "runs")}>list of runs</a>.</Empty></Page>;
  const entries = ids.map((id) => runs.data?.runs.find((entry) => entry.id === id));
  return (
    <Page title="Compare" aside={<a class="button" href={to(first, "curves", "", { with: others.join() })}>Their curves over each other</a>}>
      <Section title="Runs">
        <Table label="Compared runs" rows={ids.map((id, at) => ({ id, entry: entries[at] }))} rowKey={({ id }) => id} columns={[
          { key: "run", head: "Run", cell: ({ id, entry }) => <a href={to(id, "overview")}><SafeText text={entry?.run ?? id} inline /></a> },
          { key: "state", head: "State", cell: ({ entry }) => entry && <States state={entry.state} /> },
          { key: "step", head: "Step", is_number: true, cell: ({ entry }) => Object.values(entry?.policies ?? {}).map(({ step }) => number(step)).join(", ") },
          { key: "reward", head: "Reward", is_number: true, cell: ({ entry }) => (
            Object.values(entry?.policies ?? {}).map(({ reward }) => number(reward, 3)).join(", ")
          ) },
          { key: "at", head: "Last heard of", cell: ({ entry }) => <Age at={entry?.at} /> },
        ]} />
      </Section>
      <Section title="Settings that differ">
        <Await of={diff}>
          {({ rows }) => rows.length === 0 ? <Empty>All settings are the same.</Empty> : (
            <Table label="Settings that differ" rows={rows} rowKey={({ path }) => path} columns={[
              { key: "path", head: "Setting", cell: ({ path }) => <span class="mono"><SafeText text={path} inline /></span> },
              ...ids.map((id, at) => ({
                key: id, head: <SafeText text={entries[at]?.run ?? id} inline />,
                cell: ({ values }: SettingsDiff["rows"][number]) => <span class="mono"><SafeText text={literal(values[at])} inline /></span>,
              })),
            ]} />
          )}
        </Await>
      </Section>
    </Page>
  );
}
