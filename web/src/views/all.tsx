// The views of a run, in the order of the navigation.
import type { FunctionComponent } from "preact";
import { Episode } from "./episode";
import { Episodes } from "./episodes";
import { Group } from "./group";
import { Tokens } from "./tokens";
import { Clients } from "./clients";
import { Curves } from "./curves";
import { EnginesView } from "./engines";
import { Evaluation } from "./evaluation";
import { Ledger } from "./ledger";
import { Logs } from "./logs";
import { MixView } from "./mix";
import { OverviewView } from "./overview";
import { SettingsPage } from "./settings";
import { Time } from "./time";

export interface ViewProps { run: string; arg: string; query: URLSearchParams }

export interface View {
  id: string;
  title: string;
  key: string; // pressed after g
  part: string; // heading in the navigation; "" for views that are reached from others
  view: FunctionComponent<ViewProps>;
}

export const VIEWS: View[] = [
  { id: "overview", title: "Overview", key: "o", part: "Watch", view: OverviewView },
  { id: "curves", title: "Curves", key: "c", part: "Watch", view: Curves },
  { id: "time", title: "Time", key: "t", part: "Watch", view: Time },
  { id: "evaluation", title: "Evaluation", key: "v", part: "Watch", view: Evaluation },
  { id: "ledger", title: "Ledger", key: "l", part: "Explain", view: Ledger },
  { id: "episodes", title: "Episodes", key: "e", part: "Explain", view: Episodes },
  { id: "mix", title: "Mix and kinds", key: "m", part: "Explain", view: MixView },
  { id: "clients", title: "Clients", key: "a", part: "Inspect", view: Clients },
  { id: "engines", title: "Engines", key: "n", part: "Inspect", view: EnginesView },
  { id: "settings", title: "Settings", key: "s", part: "Inspect", view: SettingsPage },
  { id: "logs", title: "Logs", key: "g", part: "Inspect", view: Logs },
  { id: "group", title: "Group", key: "", part: "", view: Group },
  { id: "episode", title: "Episode", key: "", part: "", view: Episode },
  { id: "tokens", title: "Tokens", key: "", part: "", view: Tokens },
];
