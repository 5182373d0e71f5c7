// Engines and the weights that they sample with.
import { useMemo } from "preact/hooks";
import { url, useApi } from "../api";
import { embedded } from "../embedded";
import { dateTime, duration, number, percent, plural } from "../format";
import type { Engines } from "../types";
import { Chart } from "../ui/chart";
import { Age, Badge, Meter, Page, Section } from "../ui/parts";
import { Await, Empty } from "../ui/states";
import { Table, VirtualTable } from "../ui/table";
import { SafeText } from "../ui/text";

export function EnginesView({ run }: { run: string; arg: string; query: URLSearchParams }) {
  const engines = useApi<Engines>(url("runs", run, "engines"), { live: run, on: ["steps", "state"], restS: 2 });
  return (
    <Page title="Engines and weights" aside={engines.data && engines.data.at !== null && embedded === null && (
      <span>{engines.data.is_live ? "As of " : "Last recorded "}<Age at={engines.data.at} /></span>
    )}>
      <Await of={engines}>
        {({ engines: rows, pushes }) => (
          <>
            <Section title={plural(rows.length, "engine")}>
              {rows.length === 0 ? <Empty>No engine is known of this run. Their state is recorded while a run is up.</Empty> : <EngineTable rows={rows} />}
            </Section>
            <Pushes pushes={pushes} />
          </>
        )}
      </Await>
    </Page>
  );
}

function EngineTable({ rows }: { rows: Engines["engines"] }) {
  const newest = Math.max(...rows.map(({ version }) => version ?? -1));
  return (
    <Table label="Engines" rows={rows} rowKey={({ policy, name, url: address }) => `${policy} ${name} ${address}`} columns={[
      { key: "name", head: "Engine", cell: ({ name }) => <b><SafeText text={name} inline /></b> },
      { key: "state", head: "State", cell: ({ state }) => <Badge state={state} /> },
      { key: "policy", head: "Policy", cell: ({ policy }) => <SafeText text={policy} inline /> },
      { key: "version", head: "Weights", is_number: true, title: "Version of the weights that the engine samples with", cell: ({ version }) => (
        <span title={version !== null && version < newest ? `${newest - version} behind the newest engine` : ""}>
          {number(version)}{version !== null && version < newest ? <span class="warn-text"> −{newest - version}</span> : ""}
        </span>
      ) },
      { key: "running", head: "Running", is_number: true, cell: ({ running }) => number(running) },
      { key: "waiting", head: "Queued", is_number: true, cell: ({ waiting }) => number(waiting) },
      { key: "kv", head: "KV cache", cell: ({ kv }) => kv === null ? "–" : (
        <span class="metered"><span>{percent(kv)}</span><Meter share={kv} label="KV cache in use" tone={kv > 0.9 ? "warn" : "info"} /></span>
      ) },
      { key: "url", head: "Address", cell: ({ url: address }) => <span class="mono"><SafeText text={address} inline /></span> },
    ]} />
  );
}

function Pushes({ pushes }: { pushes: Engines["pushes"] }) {
  const policies = [...new Set(pushes.map(({ policy }) => policy))];
  const charts = useMemo(() => policies.map((policy) => {
    const rows = pushes.filter((push) => push.policy === policy).sort((a, b) => a.step - b.step);
    return {
      policy, x: rows.map(({ step }) => step),
      lines: [
        { label: "push", values: rows.map(({ push_s }) => push_s), colour: "series-1" },
        { label: "engines paused", values: rows.map(({ pause_s }) => pause_s), colour: "series-5" },
      ],
    };
  }), [pushes]);
  if (pushes.length === 0) return <Section title="Weight pushes"><Empty>No weights have been pushed yet.</Empty></Section>;
  const newest = [...pushes].sort((a, b) => b.at - a.at);
  return (
    <Section title="Weight pushes" note="How long it takes to bring a step's weights into the engines, and how long they hold their requests for it.">
      {charts.map(({ policy, x, lines }) => (
        <div key={policy}>
          {policies.length > 1 && <h3><SafeText text={policy} inline /></h3>}
          <Chart label={`Weight pushes of ${policy}`} x={x} lines={lines} height={200} range={[0, null]} sync="pushes"
                 format={duration} yFormat={(value) => (value === 0 ? "0" : duration(value))} />
        </div>
      ))}
      <VirtualTable label="Weight pushes, newest first" rows={newest} rowKey={({ policy, step, at }) => `${policy} ${step} ${at}`} rowHeight={30} columns={[
        { key: "step", head: "Step", width: "5rem", is_number: true, cell: ({ step }) => number(step) },
        { key: "policy", head: "Policy", width: "7rem", cell: ({ policy }) => <SafeText text={policy} inline /> },
        { key: "method", head: "Way", width: "8rem", cell: ({ method }) => <SafeText text={method} inline /> },
        { key: "push", head: "Push", width: "6rem", is_number: true, cell: ({ push_s }) => duration(push_s) },
        { key: "pause", head: "Paused", width: "6rem", is_number: true, cell: ({ pause_s }) => duration(pause_s) },
        { key: "at", head: "When", width: "minmax(11rem, 1fr)", cell: ({ at }) => dateTime(at) },
      ]} />
    </Section>
  );
}
