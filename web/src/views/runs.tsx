// All runs that the dashboard was given.
import type { Loaded } from "../api";
import { dateTime, number } from "../format";
import { link } from "../router";
import type { RunEntry } from "../types";
import { Badge, Page } from "../ui/parts";
import { Await, Empty } from "../ui/states";
import { Table } from "../ui/table";
import { SafeText } from "../ui/text";

export function Runs({ runs }: { runs: Loaded<{ runs: RunEntry[] }>; query: URLSearchParams }) {
  return (
    <Page title="Runs">
      <Await of={runs}>
        {({ runs: entries }) => entries.length === 0 ? <Empty>No run yet.</Empty> : (
          <Table label="Runs" rows={entries} rowKey={(row) => row.id}
                 columns={[
                   { key: "run", head: "Run", cell: (row) => <a href={link(row.id, "overview")}><SafeText text={row.run} inline /></a> },
                   { key: "state", head: "State", cell: (row) => <Badge state={row.state} /> },
                   { key: "step", head: "Step", is_number: true, cell: (row) => number(Object.values(row.policies)[0]?.step) },
                   { key: "at", head: "Last event", cell: (row) => dateTime(row.at) },
                 ]} />
        )}
      </Await>
    </Page>
  );
}
