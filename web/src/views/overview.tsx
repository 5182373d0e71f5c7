import { Page } from "../ui/parts";
import { Empty } from "../ui/states";

export function OverviewView({ run }: { run: string; arg: string; query: URLSearchParams }) {
  return <Page title="Overview"><Empty>{run}</Empty></Page>;
}
