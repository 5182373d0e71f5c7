// The ends of the processes' log files, and messages that nobody could read.
import { useEffect, useRef } from "preact/hooks";
import { url, useApi, withQuery } from "../api";
import { bytes, dateTime, words } from "../format";
import { setQuery, to } from "../router";
import type { DeadLetters, LogFiles, LogText } from "../types";
import { Page, Section, Select, TextField } from "../ui/parts";
import { Await, Empty } from "../ui/states";
import { Table } from "../ui/table";
import { SafeText } from "../ui/text";

export function Logs({ run, arg, query }: { run: string; arg: string; query: URLSearchParams }) {
  const files = useApi<LogFiles>(url("runs", run, "logs"), { live: run, on: ["state"] });
  return (
    <Page title="Logs">
      <Await of={files}>
        {({ files: found }) => {
          // An alarm names its process; the file of that process is what the reader wants.
          const chosen = found.find(({ name }) => name === arg) ?? found.find(({ name }) => arg !== "" && name.startsWith(arg.replace(/\.log$/, "")))
            ?? (arg === "" ? found[0] : undefined);
          return found.length === 0 ? <Empty>This run has no log files.</Empty> : (
            <div class="split">
              <nav aria-label="Log files">
                <ul class="files">
                  {found.map(({ name, bytes: size }) => (
                    <li key={name}>
                      <a href={to(run, "logs", name)} aria-current={name === chosen?.name ? "true" : undefined}>
                        <SafeText text={name} inline /> <span class="quiet-text">{bytes(size)}</span>
                      </a>
                    </li>
                  ))}
                </ul>
              </nav>
              {chosen === undefined ? <Empty>There is no log file “<SafeText text={arg} inline />”.</Empty>
                : <LogFile key={chosen.name} run={run} name={chosen.name} query={query} />}
            </div>
          );
        }}
      </Await>
      <DeadLetterSection run={run} />
    </Page>
  );
}

function LogFile({ run, name, query }: { run: string; name: string; query: URLSearchParams }) {
  const lines = query.get("lines") ?? "400";
  const find = query.get("find") ?? "";
  const log = useApi<LogText>(withQuery(url("runs", run, "logs", name), { lines }), { live: run });
  const box = useRef<HTMLPreElement>(null);
  useEffect(() => {
    const element = box.current;
    if (element !== null) element.scrollTop = element.scrollHeight;
  }, [log.data?.text]);
  return (
    <Section title={<SafeText text={name} inline />}>
      <div class="controls" data-filter>
        <TextField label="Lines with" value={find} onInput={(value) => setQuery({ find: value })} size={24} />
        <Select label="Newest lines" value={lines} options={[["100", "100"], ["400", "400"], ["2000", "2000"]]}
                onChoose={(value) => setQuery({ lines: value === "400" ? "" : value })} />
      </div>
      <Await of={log}>
        {({ text }) => {
          const kept = find === "" ? text : text.split("\n").filter((line) => line.includes(find)).join("\n");
          return kept === "" ? <Empty>{find === "" ? "The file is empty." : "No line matches."}</Empty> : (
            <pre class="log" ref={box} tabIndex={0} aria-label={`End of ${name}`}><SafeText text={kept} first={400_000} /></pre>
          );
        }}
      </Await>
    </Section>
  );
}

function DeadLetterSection({ run }: { run: string }) {
  const letters = useApi<DeadLetters>(url("runs", run, "dead-letters"));
  return (
    <Section title="Dead letters" note="Messages that no process could read. They are kept, never retried by themselves.">
      <Await of={letters}>
        {({ rows = [], error }) => {
          if (error) return <p class="note"><SafeText text={error} inline /></p>;
          if (rows.length === 0) return <p class="note">None.</p>;
          const names = [...new Set(rows.flatMap((row) => Object.keys(row)))];
          return (
            <Table label="Dead letters" rows={rows} rowKey={(_row, at) => String(at)} columns={names.map((name) => ({
              key: name, head: words(name),
              cell: (row: Record<string, unknown>) => {
                const value = row[name];
                if ((name === "at" || name.endsWith("_at")) && typeof value === "number") return <span class="nowrap">{dateTime(value)}</span>;
                return <SafeText text={typeof value === "string" ? value : value === undefined ? "" : JSON.stringify(value)} inline />;
              },
            }))} />
          );
        }}
      </Await>
    </Section>
  );
}
