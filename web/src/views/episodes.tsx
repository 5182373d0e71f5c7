import { Page } from "../ui/parts";
import { Empty } from "../ui/states";

export function Episodes({ run, arg }: { run: string; arg: string; query: URLSearchParams }) {
  return <Page title="Episodes"><Empty>{run} {arg}</Empty></Page>;
}
