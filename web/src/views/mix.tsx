import { Page } from "../ui/parts";
import { Empty } from "../ui/states";

export function MixView({ run }: { run: string; arg: string; query: URLSearchParams }) {
  return <Page title="Mix"><Empty>{run}</Empty></Page>;
}
