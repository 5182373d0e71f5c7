import { Page } from "../ui/parts";
import { Empty } from "../ui/states";

export function Ledger({ run }: { run: string; arg: string; query: URLSearchParams }) {
  return <Page title="Ledger"><Empty>{run}</Empty></Page>;
}
