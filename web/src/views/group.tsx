import { Page } from "../ui/parts";
import { Empty } from "../ui/states";

export function Group({ run, arg }: { run: string; arg: string; query: URLSearchParams }) {
  return <Page title="Group"><Empty>{run} {arg}</Empty></Page>;
}
