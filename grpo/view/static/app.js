// Which page an address shows, and what stands above all pages.
import { Component, html, isReport, listen, onKey, render, useAddress, useAnswer, useEffect, useKeys, useLayoutEffect, address } from "./common.js";
import { ComparePage, EvaluationPage, ProofPage, RunPage, RunsPage, SettingsPage, TimelinePage } from "./run.js";
import { GamesPage } from "./games.js";
import { PromptPage, RolloutPage, StepPage } from "./rollouts.js";

function page({ parts, query }) {
  const [what, run, kind, number, more, rest] = parts;
  if (what === "compare") return html`<${ComparePage} query=${query} />`;
  if (what !== "run" || !run) return html`<${RunsPage} />`;
  if ((kind === "step" || kind === "eval") && number !== undefined) {
    if (more === "rollout") return html`<${RolloutPage} key=${`${run} ${kind} ${number} ${rest}`} run=${run} kind=${kind} step=${number} rollout=${rest} query=${query} />`;
    return html`<${StepPage} key=${`${run} ${kind} ${number}`} run=${run} kind=${kind} step=${number} query=${query} />`;
  }
  const pages = { timeline: TimelinePage, games: GamesPage, evaluation: EvaluationPage, proof: ProofPage, settings: SettingsPage };
  if (kind === "prompt") return html`<${PromptPage} run=${run} env=${number} example=${more} />`;
  return html`<${pages[kind] ?? RunPage} key=${`${run} ${kind}`} run=${run} query=${query} />`;
}

// An error in one page leaves the way to the others.
class Guard extends Component {
  constructor() { super(); this.state = { error: null }; }
  componentDidCatch(error) { console.error(error); this.setState({ error }); }
  render({ children }, { error }) { return error ? html`<p class="error" role="alert">This page failed: ${error.message}</p>` : children; }
}

function search() {
  const field = document.getElementById("search") ?? document.querySelector("input[type=search]") ?? document.getElementById("go");
  field?.focus();
}

function App() {
  const place = useAddress();
  useLayoutEffect(() => { addEventListener("keydown", onKey); return () => removeEventListener("keydown", onKey); }, []);
  useEffect(listen, []);
  useEffect(() => { document.title = place.parts.length ? `${place.parts.slice(1).join(" ")} – grpo view` : "grpo view"; }, [place]);
  useEffect(() => { scrollTo(0, 0); }, [place.parts.join("/")]);
  useKeys({ "/": search, g: () => document.getElementById("go").focus() }, []);
  return html`<header><a class="home" href="#/">grpo view</a><${GoTo} run=${place.parts[0] === "run" ? place.parts[1] : null} />
    <span class="live quiet">${isReport ? "report" : ""}</span></header>
    <main><${Guard} key=${place.parts.join("/")}>${page(place)}<//></main>
    <footer class="quiet">/ search · j k next and previous · g go to</footer>`;
}

// `g`: a step's number, `12/3` for a rollout's id on this page, or the name of a run.
function GoTo({ run }) {
  const runs = useAnswer("runs", undefined);
  const submit = (event) => {
    event.preventDefault();
    const field = event.target.elements.go, text = field.value.trim();
    field.value = "";
    field.blur();
    if (run && /^\d+$/.test(text)) location.hash = address(["run", run, "step", text]);
    else if (text) location.hash = address(["run", text.replace(/ .*/, "")]);
  };
  return html`<form class="go" role="search" onSubmit=${submit}><input id="go" name="go" list="runs" autocomplete="off" aria-label="go to a step or a run" placeholder=${run ? "go to step or run" : "go to run"} />
    <datalist id="runs">${(runs.value ?? []).map((one) => html`<option value=${one.name} />`)}</datalist></form>`;
}

render(html`<${App} />`, document.getElementById("page"));
