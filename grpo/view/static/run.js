// What all pages of a run have above them; the table of runs, a run's own page, its timeline and its settings.
import {
  Answer, Search, Table, address, figure, go, html, percent, runPath, seconds, setQuery, useAnswer, useEffect, useKeys,
  useState,
} from "./common.js";
import { Gantt, Spark } from "./charts.js";
import { RunCharts } from "./curves.js";

const ENDED = ["finished", "failed", "stopped", "unreadable"];
const isLive = (one) => !ENDED.includes(one.state) && (one.processes ?? []).some((process) => process.alive);

const waitsOf = (one) => (one.state === "finished" ? null : one.waits); // in a run that has finished nobody waits

// "Live" means that the run is alive, not that this page is connected.
export function State({ one }) {
  const live = isLive(one);
  return html`<span class=${`state ${one.state}${live ? " live" : ""}`}>${live ? `live, ${one.state}` : one.state}</span>`;
}

const TABS = ["overview", "steps", "evaluation", "timeline", "games", "proof", "settings"];

// Name, state and pages of a run stand above what a page shows, whichever answer comes first: each has a place of its own.
export function Frame({ run, here, title, children }) {
  const state = useAnswer(runPath(run), run), one = state.value;
  const last = one?.traced?.at(-1);
  const parts = (name) => (name === "overview" ? ["run", run] : name === "steps" ? ["run", run, "step", last ?? 1]
      : ["run", run, name]);
  return html`<div class="head"><h1>${run}${title ? `: ${title}` : ""}</h1>
      <span>${one && html`<${State} one=${one} /> <span class="quiet">step ${figure(one.step)}${one.max_steps
        ? ` of ${figure(one.max_steps)}` : ""}</span>`}</span></div>
    <nav class="tabs" aria-label="pages of the run">${TABS.map((name) => html`<a key=${name} href=${address(parts(name))}
      aria-current=${name === here ? "page" : undefined}>${name}</a>`)}</nav>
    <div>${state.error && !one ? html`<p class="error" role="alert">${state.error}</p>` : children(one)}</div>`;
}

export function RunsPage() {
  const state = useAnswer("runs", null);
  const [chosen, setChosen] = useState([]);
  const [at, setAt] = useState(-1);
  const [find, setFind] = useState("");
  const runs = (state.value ?? []).filter((run) => `${run.name} ${run.state}`.toLowerCase().includes(find.toLowerCase()));
  useKeys({
    j: () => setAt((old) => Math.min(runs.length - 1, old + 1)), k: () => setAt((old) => Math.max(0, old - 1)),
    Enter: () => runs[at] && go(["run", runs[at].name]),
  }, [runs.length, at]);
  const toggle = (name) => setChosen((old) => (old.includes(name) ? old.filter((one) => one !== name) : [...old, name]));
  const accuracy = (run) => (run.accuracies.length ? `${percent(run.accuracies[0])} → ${percent(run.accuracies.at(-1))}` : null);
  const columns = [
    { name: "overlay", cell: (run) => html`<input type="checkbox" aria-label=${`overlay ${run.name}`}
      checked=${chosen.includes(run.name)} onChange=${() => toggle(run.name)} />` },
    { name: "run", cell: (run) => html`<a href=${address(["run", run.name])}>${run.name}</a>` },
    { name: "state", cell: (run) => html`<${State} one=${run} />` },
    { name: "step", num: true, cell: (run) => (run.step === undefined ? null : `${figure(run.step)}${run.max_steps
        ? ` / ${figure(run.max_steps)}` : ""}`) },
    { name: "accuracy", num: true, cell: accuracy },
    { name: "reward", num: true, cell: (run) => figure(run.reward) },
    { name: "curve", label: "reward by step", cell: (run) => html`<${Spark} values=${run.rewards} label="reward" />` },
    { name: "look", label: "to look at", kind: "text", cell: (run) => [...run.findings.map((one) => one.text),
        ...run.warnings.map((one) => one.message)][0]?.slice(0, 160) ?? null },
    { name: "waits", label: "who waits for whom", kind: "text quiet", cell: waitsOf },
  ];
  return html`<h1>Runs</h1><div><${Answer} state=${state}>${(all) => (all.length === 0
    ? html`<p>No runs here yet. A run appears when its programs have made <code>run.json</code>.</p>`
    : html`<form class="fields" onSubmit=${(event) => event.preventDefault()}><${Search} label="find" value=${find}
      onChange=${setFind} wait=${0} />
        ${chosen.length > 1 ? html`<a class="button"
            href=${address(["compare"], { runs: chosen.join(",") })}>Overlay ${chosen.length} runs</a>`
          : html`<span class="quiet">Tick runs to lay them over each other.</span>`}</form>
      <${Table} label="runs" kind="wide" columns=${columns} rows=${runs} keyOf=${(run) => run.name}
        classOf=${(_, index) => (index === at ? "at" : "")} />`)}<//></div>`;
}

export function RunPage({ run, query }) {
  return html`<${Frame} run=${run} here="overview">${(one) => html`
    <div class="numbers" role="group" aria-label="in figures">${one && numbersOf(one).map(([name, value, note, share]) => html`<dl
      class="number" key=${name}><dt>${name}</dt>
      <dd>${value}${share !== undefined && html`<div class="bar">
        <i style=${{ width: `${Math.round(100 * Math.min(1, share))}%` }}></i></div>`}<small>${note}</small></dd></dl>`)}</div>
    <div class="notes">${one && html`<${Notes} run=${run} one=${one} />`}</div>
    <div><${RunCharts} run=${run} about=${one} query=${query} numbers=${one ? numbersOf(one) : []} /></div>`}<//>`;
}

function numbersOf(one) {
  const [before, after] = [one.accuracies[0], one.accuracies.at(-1)];
  const left = one.max_steps && one.step && one.seconds ? (one.seconds / one.step) * (one.max_steps - one.step) : null;
  return [
    before === undefined ? ["reward", figure(one.reward), "mean of the newest step; there is no evaluation"]
      : ["accuracy on held-out examples", one.accuracies.length > 1 ? `${percent(before)} → ${percent(after)}` : percent(before),
        `${one.accuracies.length < 2 ? "before training" : ENDED.includes(one.state) ? "before and after" : "before and now"}${
          one.reward === null ? "" : `; reward ${figure(one.reward)}`}`],
    ["steps", `${figure(one.step)}${one.max_steps ? ` / ${figure(one.max_steps)}` : ""}`, one.live === null
        ? "" : `policy v${one.live}`,
      ...(one.max_steps ? [one.step / one.max_steps] : [])],
    ["time of the steps", seconds(one.seconds), isLive(one) && left ? `about ${seconds(left)} left` : one.step && one.seconds
        ? `${seconds(one.seconds / one.step)} a step` : ""],
    ["rollouts a second", one.rollouts_per_s ? figure(one.rollouts_per_s, one.rollouts_per_s < 10 ? 2 : 0) : "–",
        "over all steps"],
  ];
}

// Why it may not learn, what its programs have warned of, and who waits for whom.
function Notes({ run, one }) {
  const flat = one.findings.some((note) => note.metric === "reward/groups_without_spread"); // says it once
  const warnings = one.warnings.filter((note) => !(flat && note.kind.includes("all rewards are equal")));
  const warning = (note) => html`<div class="note warning" role="status" key=${note.kind}><p>
      <b>${note.program}${note.step === null ? "" : `, step ${note.step}`}${
    note.times > 1 ? `, ${note.times} times` : ""}</b> ${note.message.length < 400 ? note.message
    : html`${note.message.slice(0, 120)} … ${note.message.slice(-240)} <details>
      <summary>all of it</summary>${note.message}</details>`}</p></div>`;
  return html`${waitsOf(one) && html`<p class=${one.state === "failed" ? "error" : "quiet"}>${one.waits}</p>`}
    ${one.findings.map((note) => html`<div class="note finding" role="status" key=${note.text}><p>
        <b>${note.text}</b> ${note.do}${" "}
      <a href=${address(["run", run], { find: note.metric })}>${note.metric}</a>${one.traced.length > 0 && html`, <a
      href=${address(["run", run, "step", one.traced.at(-1)])}>answers of step ${one.traced.at(-1)}</a>`}</p></div>`)}
    ${warnings.slice(0, 3).map(warning)}
    ${warnings.length > 3 && html`<details><summary>${warnings.length - 3} more warnings</summary>${
      warnings.slice(3).map(warning)}</details>`}`;
}

export function SettingsPage({ run, query }) {
  const state = useAnswer(runPath(run, "settings"));
  const find = (query.find ?? "").toLowerCase();
  return html`<${Frame} run=${run} here="settings" title="settings">${() => html`
    <form class="fields" onSubmit=${(event) => event.preventDefault()}><${Search} label="find a key or value"
      value=${query.find ?? ""} onChange=${(text) => setQuery({ find: text })} /></form>
    <${Answer} state=${state}>${({ values, given }) => {
      const rows = Object.entries(values).filter(([key, value]) =>
          `${key} ${JSON.stringify(value)}`.toLowerCase().includes(find));
      const programs = [...new Set(rows.map(([key]) => key.split(".")[0]))];
      const part = (title, own, start, open) => own.length > 0 && html`<details class="part settings" key=${title}
          open=${find !== "" || open}>
          <summary>${title} <span class="quiet">${own.length}</span></summary>
          <dl>${own.map(([key, value]) => html`<dt key=${key}><code>${key.slice(start)}</code></dt>
            <dd>${JSON.stringify(value)}</dd>`)}</dl></details>`;
      return html`${part("given by the preset, the command line or grpo", rows.filter(([key]) => given.includes(key)), 0, true)}
        ${programs.map((program) => part(program, rows.filter(([key]) => key.startsWith(`${program}.`)), program.length + 1,
          program === "orch" && !given.length))}`;
    }}<//>`}<//>`;
}

export function TimelinePage({ run, query }) {
  const known = query.from !== undefined;
  const path = runPath(run, `timeline${known ? `?start_s=${query.from}&end_s=${query.to}` : ""}`);
  const state = useAnswer(path, known ? undefined : run);
  const [view, setView] = useState(null);
  useEffect(() => { setView(null); }, [path]);
  return html`<${Frame} run=${run} here="timeline" title="timeline">${(one) => html`${one && waitsOf(one) && html`<p class="quiet">${one.waits}</p>`}
    <${Answer} state=${state}>${(told) => {
      if (!told.lanes.length) return html`<p>Nothing has been told yet.</p>`;
      const [from, to] = view ?? (known ? [Number(query.from), Number(query.to)] : [0, told.end_s]);
      return html`<p>${seconds(to - from)} shown, from ${seconds(from)}${told.left_out
          ? `; the ${told.left_out} shortest spans are left out, zoom in for them` : ""}
        ${" "}<button onClick=${() => setQuery({ from: from.toFixed(3), to: to.toFixed(3) })}>Read this part anew</button>${" "}
        <button onClick=${() => { setView(null); go(["run", run, "timeline"]); }}>All</button></p>
        <${Gantt} lanes=${told.lanes} spans=${told.spans} from=${from} to=${to}
          onMove=${(low, high) => setView([Math.max(0, low), Math.min(told.end_s, high)])}
          onStep=${(step, what) => go(what === "evaluate" ? ["run", run, "eval", step] : ["run", run, "step", step])} />
        <p class="quiet">The share is how much of the time a program worked. Wheel, + and −: zoom; drag or arrows: move;
          click: the step.</p>`;
    }}<//>`}<//>`;
}
