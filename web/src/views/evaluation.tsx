import { Page } from "../ui/parts";
import { Empty } from "../ui/states";

export function Evaluation({ run }: { run: string; arg: string; query: URLSearchParams }) {
  return <Page title="Evaluation"><Empty>{run}</Empty></Page>;
}
