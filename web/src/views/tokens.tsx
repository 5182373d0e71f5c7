import { Page } from "../ui/parts";
import { Empty } from "../ui/states";

export function Tokens({ run, arg }: { run: string; arg: string; query: URLSearchParams }) {
  return <Page title="Tokens"><Empty>{run} {arg}</Empty></Page>;
}
