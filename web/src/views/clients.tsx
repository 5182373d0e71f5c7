import { Page } from "../ui/parts";
import { Empty } from "../ui/states";

export function Clients({ run }: { run: string; arg: string; query: URLSearchParams }) {
  return <Page title="Clients"><Empty>{run}</Empty></Page>;
}
