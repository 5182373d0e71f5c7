import { Page } from "../ui/parts";
import { Empty } from "../ui/states";

export function EnginesView({ run }: { run: string; arg: string; query: URLSearchParams }) {
  return <Page title="Engines"><Empty>{run}</Empty></Page>;
}
