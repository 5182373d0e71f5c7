import { Page } from "../ui/parts";
import { Empty } from "../ui/states";

export function SettingsPage({ run }: { run: string; arg: string; query: URLSearchParams }) {
  return <Page title="Settings"><Empty>{run}</Empty></Page>;
}
