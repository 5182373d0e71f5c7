import { Page } from "../ui/parts";
import { Empty } from "../ui/states";

export function Logs({ run }: { run: string; arg: string; query: URLSearchParams }) {
  return <Page title="Logs"><Empty>{run}</Empty></Page>;
}
