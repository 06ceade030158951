// Which page an address shows, and what stands above all pages.
import { Component, address, html, isReport, listen, onKey, parseAddress, render, useAddress, useAnswer, useEffect, useKeys,
    useLayoutEffect } from "./common.js";
import { RunPage, RunsPage, SettingsPage, TimelinePage } from "./run.js";
import { ComparePage } from "./curves.js";
import { EvaluationPage, PromptPage } from "./evaluation.js";
import { GamesPage } from "./games.js";
import { ProofPage } from "./proof.js";
import { RolloutPage } from "./rollouts.js";
import { StepPage } from "./steps.js";

const PAGES = { timeline: TimelinePage, games: GamesPage, evaluation: EvaluationPage, proof: ProofPage, settings: SettingsPage };

function page({ parts, query }) {
  const [what, run, kind, number, more, rest] = parts, key = `${run} ${kind} ${number} ${rest}`;
  if (what === "compare") return html`<${ComparePage} query=${query} />`;
  if (what !== "run" || !run) return html`<${RunsPage} />`;
  if ((kind === "step" || kind === "eval") && number !== undefined) {
    if (more === "rollout") return html`<${RolloutPage} key=${key} run=${run} kind=${kind} step=${number} rollout=${rest}
        query=${query} />`;
    return html`<${StepPage} key=${key} run=${run} kind=${kind} step=${number} query=${query} />`;
  }
  if (kind === "prompt") return html`<${PromptPage} key=${key} run=${run} env=${number} example=${more} query=${query} />`;
  return html`<${PAGES[kind] ?? RunPage} key=${key} run=${run} query=${query} />`;
}

// An error in one page leaves the way to the others.
class Guard extends Component {
  constructor() { super(); this.state = { error: null }; }
  componentDidCatch(error) { console.error(error); this.setState({ error }); }
  render({ children }, { error }) { return error ? html`<p class="error" role="alert">This page failed: ${error.message}</p>`
      : children; }
}

function search() {
  (document.getElementById("search") ?? document.getElementById("go"))?.focus();
}

function App() {
  const place = useAddress(), runs = useAnswer("runs", undefined);
  useLayoutEffect(() => { addEventListener("keydown", onKey); return () => removeEventListener("keydown", onKey); }, []);
  useEffect(listen, []);
  useEffect(() => { document.title = place.parts.length ? `${place.parts.slice(1).join(" ")} – grpo view` : "grpo view"; },
      [place]);
  useEffect(() => { scrollTo(0, 0); }, [place.parts.join("/")]);
  // Where there is one run, its page is the first, unless another was asked for since (`place` may not know it yet).
  useEffect(() => { if (!parseAddress(location.hash).parts.length
      && runs.value?.length === 1) location.replace(address(["run", runs.value[0].name])); }, [place, runs.value]);
  useKeys({ "/": search, g: () => document.getElementById("go").focus() }, []);
  const skip = (event) => { event.preventDefault(); document.querySelector("main").focus(); };
  return html`<header><a class="skip" href="#" onClick=${skip}>to the page</a><a class="home"
      href=${address(runs.value?.length === 1 ? ["run", runs.value[0].name] : [])}>grpo view</a>
      <span class="place">${place.parts.slice(1).join(" › ")}</span>
      <${GoTo} run=${place.parts[0] === "run" ? place.parts[1] : null} runs=${runs} />
        <span class="lost quiet">${isReport ? "report" : ""}</span></header>
    <main tabindex="-1"><${Guard} key=${place.parts.join("/")}>${page(place)}<//></main>
    <footer>Keys: / search, j and k next and previous, g go to a step or a run, Escape leaves a field.</footer>`;
}

// `g`: a step's number, `12/3` for a rollout's id on this page, or the name of a run.
function GoTo({ run, runs }) {
  const submit = (event) => {
    event.preventDefault();
    const field = event.target.elements.go, text = field.value.trim();
    field.value = "";
    field.blur();
    if (run && /^\d+$/.test(text)) location.hash = address(["run", run, "step", text]);
    else if (text) location.hash = address(["run", text.replace(/ .*/, "")]);
  };
  return html`<form class="go" role="search" onSubmit=${submit}><input id="go" name="go" list="runs" autocomplete="off"
      aria-label="go to a step or a run" placeholder=${run ? "go to step or run" : "go to run"} />
    <datalist id="runs">${(runs.value ?? []).map((one) => html`<option value=${one.name} />`)}</datalist></form>`;
}

render(html`<${App} />`, document.getElementById("page"));
