import { Page } from "../ui/parts";
import { Empty } from "../ui/states";

export function Episode({ run, arg }: { run: string; arg: string; query: URLSearchParams }) {
  return <Page title="Episode"><Empty>{run} {arg}</Empty></Page>;
}
