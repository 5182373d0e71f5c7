import { Page } from "../ui/parts";
import { Empty } from "../ui/states";

export function Curves({ run }: { run: string; arg: string; query: URLSearchParams }) {
  return <Page title="Curves"><Empty>{run}</Empty></Page>;
}
