import { Page } from "../ui/parts";
import { Empty } from "../ui/states";

export function Time({ run }: { run: string; arg: string; query: URLSearchParams }) {
  return <Page title="Time"><Empty>{run}</Empty></Page>;
}
