// Rounds of evaluation: pass@k with intervals over weight versions, and each task under each version.
import { useMemo } from "preact/hooks";
import { url, useApi } from "../api";
import { duration, number, percent } from "../format";
import { to } from "../router";
import type { Evaluations } from "../types";
import { Chart, series } from "../ui/chart";
import type { Line } from "../ui/chart";
import { Age, Page, Section } from "../ui/parts";
import { Await, Empty, Indexing, whileIndexed } from "../ui/states";
import { Table, VirtualTable } from "../ui/table";
import { Name, SafeText } from "../ui/text";

type Round = Evaluations["rounds"][number];

export function Evaluation({ run }: { run: string; arg: string; query: URLSearchParams }) {
  const evaluations = useApi<Evaluations>(url("runs", run, "evaluations"), { live: run, on: ["steps", "episodes"], restS: 5, everyS: whileIndexed });
  return (
    <Page title="Evaluation">
      <Await of={evaluations}>
        {({ rounds, matrix, index }) => rounds.length === 0 ? (
          <Empty>No round of evaluation yet. <code>[eval] every</code> in the job file asks for one every so many steps.</Empty>
        ) : (
          <>
            <Charts rounds={rounds} />
            <Rounds run={run} rounds={rounds} />
            {!index.is_done && <Indexing index={index} />}
            {matrix.tasks.length > 0 && <Matrix run={run} matrix={matrix} />}
          </>
        )}
      </Await>
    </Page>
  );
}

function Charts({ rounds }: { rounds: Round[] }) {
  const charts = useMemo(() => {
    const ordered = [...rounds].sort((a, b) => a.version - b.version);
    const kinds = [...new Set(ordered.flatMap((round) => Object.keys(round.kinds)))].sort();
    return kinds.map((kind) => {
      const ks = [...new Set(ordered.flatMap((round) => Object.keys(round.kinds[kind]?.pass ?? {})))].sort((a, b) => Number(a) - Number(b));
      const of = (k: string, part: "value" | "low" | "high") => ordered.map((round) => round.kinds[kind]?.pass[k]?.[part] ?? null);
      const lines = ks.map((k, at): Line => ({
        label: `pass@${k}`, values: of(k, "value"), low: of(k, "low"), high: of(k, "high"), colour: series(at), points: true,
      }));
      if (lines.length === 0) {
        lines.push({ label: "reward", values: ordered.map((round) => round.kinds[kind]?.reward ?? null), colour: series(0), points: true });
      }
      return { kind, lines, x: ordered.map(({ version }) => version), isShare: ks.length > 0 };
    });
  }, [rounds]);
  return (
    <div class="charts">
      {charts.map(({ kind, lines, x, isShare }) => (
        <section key={kind} class="section card" aria-label={kind}>
          <h2><SafeText text={kind} inline /></h2>
          <Chart label={`Evaluation of ${kind}`} x={x} lines={lines} sync="evaluation" xLabel="version" height={220}
                 {...(isShare ? { range: [0, 1] as [number, number], format: percent, yFormat: percent } : {})} />
        </section>
      ))}
    </div>
  );
}

function Rounds({ run, rounds }: { run: string; rounds: Round[] }) {
  const rows = [...rounds].sort((a, b) => b.at - a.at).flatMap((round) => (
    Object.entries(round.kinds).map(([kind, result], at) => ({ round, kind, result, isFirst: at === 0 }))
  ));
  return (
    <Section title="Rounds" note="Intervals hold 95 % of what repeated rounds of as many tasks would show.">
      <Table label="Rounds of evaluation" rows={rows} rowKey={({ round, kind }) => `${round.at} ${kind}`}
             rowClass={({ isFirst }) => (isFirst ? "" : "continues")} columns={[
        { key: "version", head: "Version", is_number: true, cell: ({ round, isFirst }) => (isFirst ? <b>{number(round.version)}</b> : "") },
        { key: "kind", head: "Kind", cell: ({ kind }) => <a href={to(run, "episodes", "", { state: "eval", kind })}><SafeText text={kind} inline /></a> },
        { key: "reward", head: "Reward", is_number: true, cell: ({ result }) => number(result.reward, 3) },
        { key: "pass", head: "pass@k", cell: ({ result }) => (
          <span class="pass">
            {Object.entries(result.pass).map(([k, { value, low, high }]) => (
              <span key={k}>@{k} <b>{percent(value)}</b> <span class="quiet-text">{percent(low)} to {percent(high)}</span></span>
            ))}
          </span>
        ) },
        { key: "tasks", head: "Tasks", is_number: true, cell: ({ result }) => number(result.tasks) },
        { key: "episodes", head: "Episodes", is_number: true, cell: ({ result }) => number(result.episodes) },
        { key: "missing", head: "Missing", is_number: true, title: "Attempts without a result, of those given up", cell: ({ round, isFirst }) => (
          !isFirst ? "" : round.missing + round.given_up === 0 ? "0" : `${number(round.missing)} (${number(round.given_up)} given up)`
        ) },
        { key: "seconds", head: "Took", is_number: true, cell: ({ round, isFirst }) => (isFirst ? duration(round.seconds) : "") },
        { key: "at", head: "When", cell: ({ round, isFirst }) => (isFirst ? <span class="nowrap"><Age at={round.at} /></span> : "") },
      ]} />
    </Section>
  );
}

function Matrix({ run, matrix }: { run: string; matrix: Evaluations["matrix"] }) {
  const rows = matrix.tasks.map((task, at) => ({ task, cells: matrix.cells[at] ?? [] }));
  const longest = Math.max(...matrix.tasks.map((task) => task.length));
  return (
    <Section title="Every task under every version" note="Share of the task's attempts that succeeded, in percent.">
      <VirtualTable label="Tasks by version" rows={rows} rowKey={({ task }) => task} rowHeight={30} columns={[
        { key: "task", head: "Task", width: `minmax(12rem, ${longest + 4}ch)`, cell: ({ task }) => (
          <a href={to(run, "episodes", "", { state: "eval", task })} title={task}><Name text={task} /></a>
        ) },
        ...matrix.versions.map((version, at) => ({
          key: String(version), head: number(version), width: "3.6rem", is_number: true,
          cell: ({ cells }: (typeof rows)[number]) => <Cell share={cells[at] ?? null} />,
        })),
      ]} />
    </Section>
  );
}

function Cell({ share }: { share: number | null }) {
  if (share === null) return <span class="cell quiet-text" title="not evaluated">·</span>;
  return <span class="cell" style={{ "--share": `${Math.round(share * 42)}%` }}>{Math.round(share * 100)}</span>;
}
