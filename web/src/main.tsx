// The frame around every view: header, navigation, login, keyboard.
import "./app.css";
import { Component, render } from "preact";
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError, post, unauthorized, url, useApi } from "./api";
import { embedded, offers } from "./embedded";
import { MeContext } from "./me";
import { isLive, OperateBar } from "./operate";
import { link, useRoute } from "./router";
import { Help, useShortcuts } from "./shortcuts";
import { useStreamState } from "./stream";
import { choose, useTheme } from "./theme";
import type { Me, RunEntry } from "./types";
import { States } from "./ui/parts";
import { Empty } from "./ui/states";
import { SafeText } from "./ui/text";
import { VIEWS } from "./views/all";
import { Runs } from "./views/runs";
import { Studies, StudyPage } from "./views/studies";

function App() {
  const [isLoginWanted, setLoginWanted] = useState(false);
  const route = useRoute();
  const { isHelpOpen, setHelpOpen } = useShortcuts(route.run);
  const me = useApi<Me>(url("me"));
  const runs = useApi<{ runs: RunEntry[] }>(url("runs"), { everyS: 15 });
  const entry = runs.data?.runs.find(({ id }) => id === route.run);
  const view = route.run === null ? undefined : VIEWS.find(({ id }) => id === route.view);
  const main = useRef<HTMLElement>(null);
  unauthorized.notify = () => setLoginWanted(true);

  // A new view: name it, and put the focus where reading begins.
  const place = `${route.run}/${route.view}/${route.arg}`;
  const isFirst = useRef(true);
  useEffect(() => {
    document.title = [view?.title ?? (STUDY_VIEWS.includes(route.view) ? "Studies" : "Runs"), entry?.run ?? route.run, "swarmq"].filter(Boolean).join(" · ");
  }, [place, entry?.run]);
  useEffect(() => {
    window.scrollTo(0, 0);
    if (!isFirst.current) main.current?.querySelector<HTMLElement>("h1")?.focus({ preventScroll: true });
    isFirst.current = false;
  }, [place]);

  if (isLoginWanted) return <Login onDone={() => { setLoginWanted(false); location.reload(); }} />;
  return (
    <MeContext.Provider value={{ me: me.data, isLive: isLive(entry) }}>
    <div class={`frame ${route.run === null || !hasNavigation ? "no-nav" : ""}`}>
      <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); main.current?.focus(); }}>Skip to content</a>
      <header class="top">
        <a class="brand" href={link(null, "runs")}><Logo />swarmq</a>
        {route.run === null && embedded === null && (
          <nav class="crumb" aria-label="Lists">
            <a href={link(null, "runs")} aria-current={STUDY_VIEWS.includes(route.view) ? undefined : "page"}>Runs</a>
            <a href={link(null, "studies")} aria-current={STUDY_VIEWS.includes(route.view) ? "page" : undefined}>Studies</a>
          </nav>
        )}
        {route.run !== null && (
          <span class="crumb">
            <span aria-hidden="true">/</span>
            <a href={link(route.run, "overview")}><SafeText text={entry?.run ?? route.run} inline /></a>
            {entry && entry.error === "" && entry.state !== "" && <States state={entry.state} />}
          </span>
        )}
        <span class="top-end">
          {route.run !== null && embedded === null && <StreamDot run={route.run} isLive={isLive(entry)} />}
          <ThemeButton />
          <button class="quiet icon" onClick={() => setHelpOpen(true)} title="Keyboard shortcuts (?)">
            <span aria-hidden="true">?</span><span class="sr">Keyboard shortcuts</span>
          </button>
        </span>
      </header>
      {route.run !== null && hasNavigation && <Navigation run={route.run} view={route.view} />}
      <main id="main" ref={main} tabIndex={-1}>
        {route.run !== null && me.data?.can_operate && <OperateBar run={route.run} entry={entry} />}
        <Fence key={place}>
          {route.run === null && route.view === "studies" ? <Studies /> : route.run === null && route.view === "study" ? (
            <StudyPage id={route.query.get("id") ?? ""} />
          ) : route.run === null ? (
            <Runs runs={runs} query={route.query} isCompare={route.view === "compare"} />
          ) : view === undefined ? (
            <Empty>There is no view named “<SafeText text={route.view} inline />”.</Empty>
          ) : (
            <view.view key={`${route.run}/${view.id}`} run={route.run} arg={route.arg} query={route.query} />
          )}
        </Fence>
      </main>
      {isHelpOpen && <Help onClose={() => setHelpOpen(false)} />}
    </div>
    </MeContext.Provider>
  );
}

const STUDY_VIEWS = ["studies", "study"];

const hasNavigation = VIEWS.some(({ id }) => offers(id)); // an exported episode has nowhere else to go

// Where a view was reached from, so that the navigation shows the reader's place.
const PARENT: Record<string, string> = { group: "episodes", episode: "episodes", tokens: "episodes" };

function Navigation({ run, view }: { run: string; view: string }) {
  const bar = useRef<HTMLElement>(null);
  const present = PARENT[view] ?? view;
  useEffect(() => {
    const nav = bar.current;
    const chosen = nav?.querySelector<HTMLElement>("[aria-current]");
    if (nav && chosen && nav.scrollWidth > nav.clientWidth) nav.scrollLeft = chosen.offsetLeft - nav.clientWidth / 3;
  }, [present]);
  const parts = [...new Set(VIEWS.filter(({ id }) => offers(id)).map(({ part }) => part))].filter((part) => part !== "");
  return (
    <nav class="side" aria-label="Views of the run" ref={bar}>
      {parts.map((part) => (
        <div key={part} class="side-part">
          <p class="side-title" id={`nav-${part}`}>{part}</p>
          <ul aria-labelledby={`nav-${part}`}>
            {VIEWS.filter((entry) => entry.part === part && offers(entry.id)).map(({ id, title }) => (
              <li key={id}><a href={link(run, id)} aria-current={id === present ? "page" : undefined}>{title}</a></li>
            ))}
          </ul>
        </div>
      ))}
    </nav>
  );
}

function StreamDot({ run, isLive: isRunLive }: { run: string; isLive: boolean }) {
  const state = useStreamState(run);
  if (!isRunLive && state !== "lost") return null; // nothing will change any more
  const text = { connecting: "connecting", open: "live", lost: "reconnecting" }[state];
  return <span class={`stream ${state}`} role="status" title="Whether this page follows the run">{text}</span>;
}

function ThemeButton() {
  const { choice, theme } = useTheme();
  const next = choice === "system" ? (theme === "dark" ? "light" : "dark") : choice === "dark" ? "light" : "dark";
  return (
    <button class="quiet icon" onClick={() => choose(next)} title={`Switch to the ${next} theme`}>
      <svg viewBox="0 0 16 16" width="16" height="16" aria-hidden="true">
        <circle cx="8" cy="8" r="6" fill="none" stroke="currentColor" stroke-width="1.5" />
        <path d="M8 2a6 6 0 0 1 0 12z" fill="currentColor" />
      </svg>
      <span class="sr">Switch to the {next} theme</span>
    </button>
  );
}

function Logo() {
  return (
    <svg viewBox="0 0 20 20" width="20" height="20" aria-hidden="true" class="logo">
      <g fill="none" stroke="currentColor" stroke-width="1.6">
        <circle cx="4.5" cy="4.5" r="2.2" /><circle cx="4.5" cy="15.5" r="2.2" /><circle cx="15.5" cy="10" r="2.6" />
        <path d="M6.6 5.4l6.5 3.3M6.6 14.6l6.5-3.3" />
      </g>
    </svg>
  );
}

function Login({ onDone }: { onDone: () => void }) {
  const [token, setToken] = useState("");
  const [error, setError] = useState("");
  const send = (event: Event) => {
    event.preventDefault();
    post(url("login"), { token: token.trim() }).then(onDone, (problem: unknown) => {
      setError(problem instanceof ApiError ? problem.message : String(problem));
    });
  };
  return (
    <main class="login">
      <form onSubmit={send}>
        <h1><Logo /> swarmq</h1>
        <label class="field wide">
          <span>Token with the role “read”</span>
          <input type="password" value={token} autocomplete="current-password" required
                 onInput={(event) => setToken(event.currentTarget.value)} />
        </label>
        {error !== "" && <p class="state failed" role="alert">{error}</p>}
        <button class="primary" type="submit">Open the dashboard</button>
        <p class="note"><code>swarmq token</code> makes tokens. The token stays in a cookie that scripts cannot read.</p>
      </form>
    </main>
  );
}

/** Keep an error in one view from taking the whole page away. */
class Fence extends Component<{ children: ComponentChildren }, { error: Error | null }> {
  override state: { error: Error | null } = { error: null };

  static override getDerivedStateFromError(error: Error): { error: Error } {
    return { error };
  }

  override componentDidCatch(error: Error): void {
    console.error(error);
  }

  override render() {
    if (this.state.error === null) return this.props.children;
    return (
      <div class="state failed" role="alert">
        <p>This view could not be drawn: <SafeText text={this.state.error.message} inline /></p>
        <button onClick={() => this.setState({ error: null })}>Try again</button>
      </div>
    );
  }
}

/** `swarmq dashboard` prints an address with a token behind the #, which no server sees: trade it for a cookie and forget it. */
async function takeToken(): Promise<void> {
  const token = /^#token=(.+)$/.exec(location.hash)?.[1];
  if (token === undefined) return;
  history.replaceState(null, "", link(null, "runs"));
  await post(url("login"), { token: decodeURIComponent(token) }).catch(() => undefined); // the form then asks for another one
}

if (embedded !== null && location.hash === "") history.replaceState(null, "", embedded.start);
const root = document.getElementById("app");
void takeToken().then(() => {
  if (root !== null) render(<App />, root);
});
