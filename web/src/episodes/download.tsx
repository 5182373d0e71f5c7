// The link that downloads what is on screen as one HTML file.
import { url } from "../api";
import { embedded } from "../embedded";
import { dateTime } from "../format";

export function Download({ run, kind, id = "" }: { run: string; kind: "episode" | "group" | "report"; id?: string }) {
  if (embedded !== null) return <span class="quiet-text">Exported {dateTime(embedded.made_at)} by swarmq {embedded.version}</span>;
  return (
    <a class="button" download href={url("runs", run, "export", kind, ...(id === "" ? [] : [id]))} title="One HTML file that opens without a server">
      Export
    </a>
  );
}
