// The processes that run agents: how much they bring, with which code, and what went wrong last.
import { useState } from "preact/hooks";
import { url, useApi } from "../api";
import { dateTime, number, percent, plural } from "../format";
import { useCanOperate } from "../me";
import { Confirm } from "../operate";
import { to } from "../router";
import type { ClientView, IndexProgress } from "../types";
import { Age, Badge, Page, Section } from "../ui/parts";
import { Await, Empty, Indexing, whileIndexed } from "../ui/states";
import { Table } from "../ui/table";
import { SafeText } from "../ui/text";

export function Clients({ run }: { run: string; arg: string; query: URLSearchParams }) {
  const clients = useApi<{ clients: ClientView[]; index: IndexProgress }>(url("runs", run, "clients"), {
    live: run, on: ["episodes", "state"], restS: 3, everyS: whileIndexed,
  });
  const canOperate = useCanOperate();
  const [revoked, setRevoked] = useState<string | null>(null);
  return (
    <Page title="Clients">
      <Await of={clients}>
        {({ clients: rows, index }) => !index.is_done ? <Indexing index={index} /> : rows.length === 0 ? <Empty>No client has begun an episode yet.</Empty> : (
          <>
            <Section title={plural(rows.length, "client")}>
              <Table label="Clients" rows={rows} rowKey={({ client }) => client} columns={[
                { key: "client", head: "Client", cell: ({ client, is_revoked }) => (
                  <span class="stack">
                    <a href={to(run, "episodes", "", { client })}><SafeText text={client} inline /></a>
                    {is_revoked && <Badge state="revoked" />}
                  </span>
                ) },
                { key: "per_min", head: "Episodes/min", is_number: true, cell: ({ per_min }) => number(per_min, 3) },
                { key: "episodes", head: "Episodes", is_number: true, cell: ({ episodes }) => number(episodes) },
                { key: "trained", head: "Trained", is_number: true, cell: ({ client, trained }) => (
                  <a href={to(run, "episodes", "", { client, state: "trained" })}>{number(trained)}</a>
                ) },
                { key: "failed", head: "Failed", is_number: true, cell: ({ client, failed }) => (
                  failed === 0 ? "0" : <a href={to(run, "episodes", "", { client, state: "failed" })}>{number(failed)}</a>
                ) },
                { key: "share", head: "Failing", is_number: true, cell: ({ failed, episodes }) => (
                  <span class={failed > episodes / 10 ? "bad-text" : ""}>{percent(episodes > 0 ? failed / episodes : 0)}</span>
                ) },
                { key: "code", head: "Code, newest first", cell: ({ client, code_versions }) => (
                  <ul class="stack">
                    {[...code_versions].sort((a, b) => b.last_at - a.last_at).slice(0, 3).map(({ version, first_at, episodes }) => (
                      <li key={version} title={`since ${dateTime(first_at)}`}>
                        <a class="mono" href={to(run, "episodes", "", { client, code_version: version })}><SafeText text={version} inline /></a>{" "}
                        <span class="quiet-text">{plural(episodes, "episode")}, since <Age at={first_at} /></span>
                      </li>
                    ))}
                    {code_versions.length > 3 && <li class="quiet-text">and {code_versions.length - 3} older</li>}
                  </ul>
                ) },
                ...(canOperate ? [{ key: "revoke", head: <span class="sr">Revoke</span>, cell: ({ client, is_revoked }: ClientView) => (
                  is_revoked ? null : (
                    <button class="danger" onClick={() => setRevoked(client)}>
                      Revoke…<span class="sr"> <SafeText text={client} inline /></span>
                    </button>
                  )
                ) }] : []),
              ]} />
            </Section>
            <Errors run={run} clients={rows} />
            {revoked !== null && (
              <Confirm run={run} action="revoke" client={revoked} onClose={() => { setRevoked(null); clients.reload(); }} />
            )}
          </>
        )}
      </Await>
    </Page>
  );
}

function Errors({ run, clients }: { run: string; clients: ClientView[] }) {
  const failing = clients.flatMap(({ client, last_error }) => (last_error === null ? [] : [{ client, ...last_error }]))
    .sort((a, b) => b.at - a.at);
  if (failing.length === 0) return null;
  return (
    <Section title="Last error of each client">
      <ul class="stack wide-gap">
        {failing.map(({ client, at, text, episode }) => (
          <li key={client}>
            <p class="error-head">
              <b><SafeText text={client} inline /></b> <Age at={at} />
              {episode !== "" && <a href={to(run, "episode", episode)}>Open the episode</a>}
            </p>
            <pre tabIndex={0} aria-label={`Error of ${client}`}><SafeText text={text} first={8000} /></pre>
          </li>
        ))}
      </ul>
    </Section>
  );
}
