// What the run was told: its settings, and who changed them while it ran.
import { useState } from "preact/hooks";
import { url, useApi } from "../api";
import { dateTime, literal, number } from "../format";
import { useCanOperate } from "../me";
import { Confirm } from "../operate";
import { setQuery } from "../router";
import type { SettingsView } from "../types";
import { Page, Section, TextField } from "../ui/parts";
import { Await, Empty } from "../ui/states";
import { Table } from "../ui/table";
import { SafeText } from "../ui/text";

export function SettingsPage({ run, query }: { run: string; arg: string; query: URLSearchParams }) {
  const settings = useApi<SettingsView>(url("runs", run, "settings"), { live: run, on: ["state"] });
  return <Page title="Settings"><Await of={settings}>{(data) => <Loaded run={run} data={data} query={query} />}</Await></Page>;
}

function Loaded({ run, data, query }: { run: string; data: SettingsView; query: URLSearchParams }) {
  const canOperate = useCanOperate();
  const [changed, setChanged] = useState<string | null>(null);
  const find = query.get("find") ?? "";
  const isAll = query.get("all") === "true";
  const rows = data.settings.filter(({ path, is_set }) => (isAll || is_set) && path.includes(find));
  return (
    <>
      <Section title="Settings" aside={`${rows.length} of ${data.settings.length}`}>
        <div class="controls" data-filter>
          <TextField label="Path contains" value={find} onInput={(value) => setQuery({ find: value })} size={28} />
          <label class="check">
            <input type="checkbox" checked={isAll} onChange={(event) => setQuery({ all: event.currentTarget.checked })} />
            also those left at their defaults
          </label>
        </div>
        {rows.length === 0 ? <Empty>No setting matches.</Empty> : (
          <Table label="Settings" rows={rows} rowKey={({ path }) => path} columns={[
            { key: "path", head: "Setting", cell: ({ path, is_set }) => (
              <span class={`mono ${is_set ? "strong" : ""}`}><SafeText text={path} inline /></span>
            ) },
            { key: "value", head: "Value", cell: ({ value }) => <span class="mono"><SafeText text={literal(value)} inline /></span> },
            { key: "default", head: "Default", cell: ({ value, default: usual }) => (
              <span class="mono quiet-text">{literal(value) === literal(usual) ? "same" : <SafeText text={literal(usual)} inline />}</span>
            ) },
          ]} />
        )}
      </Section>
      <Section title="Changes while the run was up"
               aside={canOperate ? <button onClick={() => setChanged("")}>Change a setting…</button> : undefined}>
        {data.history.length === 0 ? <Empty>Nothing was changed. <code>swarmq set</code> changes settings of a live run.</Empty> : (
          <Table label="Changes" rows={[...data.history].reverse()} rowKey={({ number: n, path }) => `${n} ${path}`} columns={[
            { key: "number", head: "No.", is_number: true, cell: ({ number: n }) => number(n) },
            { key: "path", head: "Setting", cell: ({ path }) => <span class="mono"><SafeText text={path} inline /></span> },
            { key: "from", head: "Before", cell: ({ before }) => <span class="mono"><SafeText text={literal(before)} inline /></span> },
            { key: "to", head: "After", cell: ({ value }) => <span class="mono"><SafeText text={literal(value)} inline /></span> },
            { key: "step", head: "From step", is_number: true, cell: ({ from_step }) => number(from_step) },
            { key: "who", head: "By", cell: ({ sender }) => <SafeText text={sender} inline /> },
            { key: "at", head: "When", cell: ({ at }) => <span class="nowrap">{dateTime(at)}</span> },
          ]} />
        )}
      </Section>
      {changed !== null && <Confirm run={run} action="set" path={changed} onClose={() => setChanged(null)} />}
    </>
  );
}
