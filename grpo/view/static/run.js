// Pages of whole runs: the table of runs, one run's curves, several overlaid, timeline, evaluations, proof.
import { Answer, address, figure, go, html, range, seconds, setQuery, useAnswer, useEffect, useKeys, useState, ask } from "./common.js";
import { Curve, Gantt, Spark } from "./charts.js";

// Each chart of a run's page: its title, and which metrics are on it (exact names, or a beginning that ends in "/").
const CHARTS = [
  ["Reward", ["reward/mean", "reward/mean/", "reward/std"]],
  ["Accuracy", ["reward/accuracy", "reward/accuracy/"]],
  ["Groups of equal rewards, which teach nothing (share)", ["reward/groups_without_spread", "reward/groups_without_spread/"]],
  ["Entropy of the policy (nats)", ["policy/entropy", "policy/entropy/"]],
  ["Server against trainer, KL by lag (nats)", ["policy/mismatch_kl_lag"]],
  ["Log-ratio now to when sampled, mean; and its KL (nats)", ["policy/log_ratio_mean", "policy/kl"]],
  ["Importance ratio", ["policy/ratio_mean", "policy/ratio_min", "policy/ratio_max"]],
  ["Tokens left out, share by mask", ["policy/masked", "policy/masked_"]],
  ["Answer length (tokens)", ["rollout/num_tokens_mean", "rollout/num_tokens_max"]],
  ["Loss terms", ["loss/"]],
  ["Gradient norm", ["optim/grad_norm"]],
  ["Learning rate", ["optim/learning_rate"]],
  ["Tokens per second", ["perf/generate_tokens_per_s", "perf/train_tokens_per_s"]],
  ["Seconds of a step", ["time/step_s", "time/generate_s", "time/train_s", "time/wait_batch_s", "time/wait_trainer_s"]],
  ["Lag (versions)", ["policy/lag_mean", "policy/lag_max"]],
  ["Dropped, truncated, restarted", ["rollout/dropped", "rollout/truncated", "rollout/restarted"]],
  ["Measures", ["reward/measure/"]],
];
const MAX_SERIES = 6;

function named(columns, wanted) {
  const names = Object.keys(columns).filter((name) => wanted.some((one) =>
    one === name || (/[/_g]$/.test(one) && name.startsWith(one) && name !== one)));
  // With one environment, its own figure is the mean of all.
  const seen = new Set();
  return names.filter((name) => {
    const values = columns[name].join();
    if (seen.has(values) || columns[name].every((value) => value === null)) return false;
    seen.add(values);
    return true;
  }).slice(0, MAX_SERIES);
}

export function State({ state }) { return html`<span class=${`state ${state}`}>${state}</span>`; }

export function RunsPage() {
  const state = useAnswer("runs", null);
  const [chosen, setChosen] = useState([]);
  const [at, setAt] = useState(-1);
  const runs = state.value ?? [];
  const open = (index) => runs[index] && go(["run", runs[index].name]);
  useKeys({
    j: () => setAt((old) => Math.min(runs.length - 1, old + 1)), k: () => setAt((old) => Math.max(0, old - 1)),
    Enter: () => open(at),
  }, [runs.length, at]);
  const toggle = (name) => setChosen((old) => old.includes(name) ? old.filter((one) => one !== name) : [...old, name]);
  return html`<h1>Runs</h1><${Answer} state=${state}>${(rows) => rows.length === 0
    ? html`<p>No runs here yet. A run appears when its programs have made <code>run.json</code>.</p>`
    : html`<div class="scroll"><table><thead><tr><th><span class="hidden">overlay</span></th><th>run</th><th>state</th>
      <th>step</th><th>reward</th><th class="wide">curve</th><th>accuracy</th><th>who waits for whom</th></tr></thead><tbody>
      ${rows.map((run, index) => html`<tr key=${run.name} class=${index === at ? "at" : ""}>
        <td><input type="checkbox" aria-label=${`overlay ${run.name}`} checked=${chosen.includes(run.name)} onChange=${() => toggle(run.name)} /></td>
        <td><a href=${address(["run", run.name])}>${run.name}</a></td><td><${State} state=${run.state} /></td>
        <td>${figure(run.step)}${run.max_steps ? ` / ${run.max_steps}` : ""}</td><td>${figure(run.reward)}</td>
        <td><${Spark} values=${run.rewards} label="reward" /></td>
        <td>${run.accuracies.length ? `${figure(run.accuracies[0])} → ${figure(run.accuracies.at(-1))}` : "–"}</td>
        <td class="quiet">${run.waits}</td></tr>`)}</tbody></table></div>
      ${chosen.length > 1 && html`<p><a class="button" href=${address(["compare"], { runs: chosen.join(",") })}>Overlay ${chosen.length} runs</a></p>`}`}<//>`;
}

// Links between a run's pages.
export function Tabs({ run, traced, here }) {
  const last = traced?.at(-1);
  const tabs = [["curves", ["run", run]], ["timeline", ["run", run, "timeline"]],
    ...(last ? [["steps", ["run", run, "step", last]]] : []), ["evaluation", ["run", run, "evaluation"]], ["games", ["run", run, "games"]], ["proof", ["run", run, "proof"]],
    ["settings", ["run", run, "settings"]]];
  return html`<nav class="tabs" aria-label="pages of the run">${tabs.map(([name, parts]) => html`<a key=${name} href=${address(parts)}
    aria-current=${name === here ? "page" : undefined}>${name}</a>`)}</nav>`;
}

export function RunPage({ run }) {
  const about = useAnswer(`runs/${encodeURIComponent(run)}`, run);
  const curves = useAnswer(`runs/${encodeURIComponent(run)}/curves`, run);
  const traced = about.value?.traced;
  const toStep = (step) => go(["run", run, "step", traced?.length ? nearest(traced, step) : step]);
  return html`<h1>${run}</h1><${Tabs} run=${run} traced=${traced} here="curves" />
    <div><${Answer} state=${about}>${(one) => html`<${Head} one=${one} />`}<//></div>
    <${Answer} state=${curves}>${({ train, eval: evaluated, changes }) => html`<${Charts} run=${run} columns=${train} onStep=${toStep} evaluated=${evaluated} changes=${changes} />`}<//>`;
}

function nearest(steps, step) {
  return steps.reduce((best, one) => Math.abs(one - step) < Math.abs(best - step) ? one : best);
}

function Head({ one }) {
  return html`<p><${State} state=${one.state} /> step ${figure(one.step)}${one.max_steps ? ` of ${one.max_steps}` : ""},
    reward ${figure(one.reward)}, policy ${one.live === null ? "–" : `v${one.live}`}</p>
    <p class="quiet">${one.waits}</p>
    ${(one.warnings ?? []).map((warning) => html`<p key=${warning.kind} class="warning" role="status">⚠ ${warning.program}${warning.step === null ? ""
      : `, step ${warning.step}`}${warning.times > 1 ? `, ${warning.times} times` : ""}: ${warning.message}</p>`)}`;
}

function Charts({ run, columns, onStep, evaluated, changes }) {
  const steps = columns["progress/step"] ?? [];
  if (!steps.length) return html`<p>No step is finished yet.</p>`;
  // What a line marks: rollouts were dropped or began again, or the step took five times as long as usual.
  const usual = [...(columns["time/step_s"] ?? [])].sort((a, b) => a - b)[Math.floor(steps.length / 2)];
  const marks = steps.filter((_, index) => columns["rollout/dropped"]?.[index] > 0 || columns["rollout/restarted"]?.[index] > 0
    || columns["time/step_s"]?.[index] > 5 * usual);
  const changed = changes.map(([step]) => step);
  const known = evaluated["progress/step"] ?? [];
  return html`<div class="charts">
    ${known.length > 0 && html`<${Curve} title="Held-out accuracy" steps=${known} marks=${changed} group="eval"
      series=${named(evaluated, ["eval/accuracy", "eval/accuracy/"]).map((name) => ({ label: name, values: evaluated[name] }))}
      onStep=${(step) => go(["run", run, "evaluation"], { after: step })} />`}
    ${CHARTS.map(([title, wanted]) => [title, named(columns, wanted)]).filter(([, names]) => names.length).map(([title, names]) => html`
      <${Curve} key=${title} title=${title} steps=${steps} marks=${[...marks, ...changed]} group="train" onStep=${onStep}
        series=${names.map((name) => ({ label: name, values: columns[name] }))} />`)}</div>
    <p class="quiet">A click on a step opens its rollouts; dragging zooms, a double click shows all. Dashed lines: something was
    dropped, began again, or the step stood still${changes.length > 0 ? ", or code was changed" : ""}.</p>
    ${changes.map(([step, files]) => html`<p key=${step}>Code changed after step ${step}: <code>${files.join(", ")}</code></p>`)}`;
}

export function ComparePage({ query }) {
  const names = (query.runs ?? "").split(",").filter(Boolean);
  const [found, setFound] = useState(null);
  useEffect(() => {
    let current = true;
    Promise.all(names.map(async (name) => ({
      name, curves: (await ask(`runs/${encodeURIComponent(name)}/curves`)).train, settings: await ask(`runs/${encodeURIComponent(name)}/settings`),
    }))).then((value) => current && setFound({ value }), (error) => current && setFound({ error: error.message }));
    return () => { current = false; };
  }, [query.runs]);
  return html`<h1>${names.join(", ")}</h1><${Answer} state=${found ?? {}}>${(runs) => {
    const steps = [...new Set(runs.flatMap((run) => run.curves["progress/step"] ?? []))].sort((a, b) => a - b);
    const all = (metric) => runs.map((run) => {
      const at = new Map((run.curves["progress/step"] ?? []).map((step, index) => [step, run.curves[metric]?.[index] ?? null]));
      return { label: run.name, values: steps.map((step) => at.get(step) ?? null) };
    });
    const keys = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))].filter((key) =>
      new Set(runs.map((run) => JSON.stringify(run.settings[key]))).size > 1 && !/output_dir|run_id|port|endpoint|base_url/.test(key));
    return html`<div class="charts">${["reward/mean", "reward/accuracy", "policy/entropy", "rollout/num_tokens_mean", "time/step_s", "optim/grad_norm"]
      .map((metric) => html`<${Curve} key=${metric} title=${metric} steps=${steps} series=${all(metric)} group="compare" />`)}</div>
      <h2>Settings that differ</h2><div class="scroll"><table><thead><tr><th>key</th>${runs.map((run) => html`<th>${run.name}</th>`)}</tr></thead>
      <tbody>${keys.map((key) => html`<tr key=${key}><td><code>${key}</code></td>${runs.map((run) => html`<td>${JSON.stringify(run.settings[key])}</td>`)}</tr>`)}
      </tbody></table></div>`;
  }}<//>`;
}

export function SettingsPage({ run }) {
  const state = useAnswer(`runs/${encodeURIComponent(run)}/settings`);
  const about = useAnswer(`runs/${encodeURIComponent(run)}`);
  const [text, setText] = useState("");
  return html`<h1>${run}: settings</h1><${Tabs} run=${run} here="settings" traced=${about.value?.traced} />
    <input type="search" placeholder="find a key" aria-label="find a key" value=${text} onInput=${(event) => setText(event.target.value)} />
    <${Answer} state=${state}>${(values) => html`<table><tbody>${Object.entries(values).filter(([key]) => key.includes(text)).map(([key, value]) => html`
      <tr key=${key}><td><code>${key}</code></td><td>${JSON.stringify(value)}</td></tr>`)}</tbody></table>`}<//>`;
}

export function TimelinePage({ run, query }) {
  const known = query.from !== undefined;
  const path = `runs/${encodeURIComponent(run)}/timeline${known ? `?start_s=${query.from}&end_s=${query.to}` : ""}`;
  const state = useAnswer(path, known ? undefined : run);
  const [view, setView] = useState(null);
  useEffect(() => { setView(null); }, [path]);
  const about = useAnswer(`runs/${encodeURIComponent(run)}`, run);
  return html`<h1>${run}: timeline</h1><${Tabs} run=${run} here="timeline" traced=${about.value?.traced} />
    <${Answer} state=${about}>${(one) => html`<p class="quiet">${one.waits}</p>`}<//>
    <${Answer} state=${state}>${(told) => {
      if (!told.lanes.length) return html`<p>Nothing has been told yet.</p>`;
      const [from, to] = view ?? (known ? [Number(query.from), Number(query.to)] : [0, told.end_s]);
      return html`<p>${seconds(to - from)} shown, from ${seconds(from)}${told.left_out ? `; the ${told.left_out} shortest spans are left out, zoom in for them` : ""}
        ${" "}<button onClick=${() => setQuery({ from: from.toFixed(3), to: to.toFixed(3) })}>Read this part anew</button>${" "}
        <button onClick=${() => { setView(null); go(["run", run, "timeline"]); }}>All</button></p>
        <${Gantt} lanes=${told.lanes} spans=${told.spans} from=${from} to=${to} onMove=${(low, high) => setView([Math.max(0, low), Math.min(told.end_s, high)])}
          onStep=${(step, what) => go(what === "evaluate" ? ["run", run, "eval", step] : ["run", run, "step", step])} />
        <p class="quiet">The share is how much of the time a program worked. Wheel: zoom; drag: move; click: the step.</p>`;
    }}<//>`;
}

export function EvaluationPage({ run, query }) {
  const wanted = new URLSearchParams(Object.entries(query).filter(([name]) => name === "before" || name === "after")).toString();
  const state = useAnswer(`runs/${encodeURIComponent(run)}/evaluation${wanted ? `?${wanted}` : ""}`, run);
  const about = useAnswer(`runs/${encodeURIComponent(run)}`, run);
  return html`<h1>${run}: evaluation</h1><${Tabs} run=${run} here="evaluation" traced=${about.value?.traced} /><${Answer} state=${state}>${(told) => {
    if (!told.versions.length) return html`<p>There is no trace of an evaluation yet.</p>`;
    const [before, after] = told.compared;
    const choose = (name, value) => html`<select aria-label=${`${name} version`} onChange=${(event) => setQuery({ [name]: event.target.value })}>
      ${told.versions.map((version) => html`<option value=${version} selected=${version === value}>v${version}</option>`)}</select>`;
    const groups = [["newly right", told.examples.filter((one) => one.before < one.after)], ["newly wrong", told.examples.filter((one) => one.before > one.after)]];
    const envs = [...new Set(told.examples.map((one) => one.env))];
    const mean = (rows, key) => rows.reduce((sum, one) => sum + one[key], 0) / Math.max(1, rows.length);
    const ks = Object.keys(told.pass[after] ?? {});
    return html`<p>${choose("before", before)} against ${choose("after", after)}</p>
      <table><thead><tr><th>environment</th><th>examples</th><th>v${before}</th><th>v${after}</th></tr></thead><tbody>${envs.map((env) => {
        const rows = told.examples.filter((one) => one.env === env);
        return html`<tr key=${env}><td>${env}</td><td>${rows.length}</td><td>${figure(mean(rows, "before"))}</td><td>${figure(mean(rows, "after"))}</td></tr>`;
      })}</tbody></table>
      <h2>pass@k</h2><table><thead><tr><th>version</th>${ks.map((k) => html`<th>k = ${k}</th>`)}</tr></thead><tbody>
        ${told.versions.map((version) => html`<tr key=${version}><td>v${version}</td>${ks.map((k) => html`<td>${figure(told.pass[version][k])}</td>`)}</tr>`)}</tbody></table>
      ${groups.map(([name, rows]) => html`<h2>${name} (${rows.length})</h2><ul class="examples">${rows.slice(0, 200).map((one) => html`<li>
        <a href=${address(["run", run, "prompt", one.env, one.example])}>${one.env} ${one.example}</a> ${figure(one.before, 2)} → ${figure(one.after, 2)}${" "}
        <a href=${address(["run", run, "eval", before, "rollout", one.rollouts[0]])}>before</a> <a href=${address(["run", run, "eval", after, "rollout", one.rollouts[1]])}>after</a></li>`)}</ul>`)}`;
  }}<//>`;
}

export function ProofPage({ run }) {
  const state = useAnswer(`runs/${encodeURIComponent(run)}/proof`, run);
  const about = useAnswer(`runs/${encodeURIComponent(run)}`, run);
  return html`<h1>${run}: proof</h1><${Tabs} run=${run} here="proof" traced=${about.value?.traced} /><${Answer} state=${state}>${(page) => {
    // A training service has datums and checkpoints, where a run has rollouts and batches.
    const names = { datums: "rollouts", checkpoints: "batches" };
    const facts = Object.fromEntries(page.parts.map((part) => [names[part.name] ?? part.name, part.facts]));
    return html`<p class=${page.broken.length ? "bad" : page.unproved.length ? "" : "good"} role="status"><b>${page.verdict}</b></p>
      <p class="quiet">Run ${page.run_id}, ${page.state}, step ${figure(page.step)}${page.max_steps === null ? "" : ` of ${figure(page.max_steps)}`}. The same page: <code>grpo prove</code> on the run's folder or a copy of it.</p>
      <table class="proof"><tbody>${page.parts.map((part) => html`<tr key=${part.name}><th scope="row">${part.name}</th>
        <td class=${part.broken.length ? "bad" : part.unproved.length ? "quiet" : "good"}>${part.broken.length ? "✗" : part.unproved.length ? "○" : "✓"}<span class="hidden"> ${part.broken.length ? "broken" : part.unproved.length ? "in part" : "proved"}</span></td>
        <td>${part.summary}</td></tr>`)}</tbody></table>
      <${Found} title="Broken" what="broken" found=${page.broken} /><${Found} title="Unproved" what="quiet" found=${page.unproved} />
      <h2>Fate of every ${facts.rollouts.refused ? "datum" : "rollout"}</h2>
      <table><tbody>${Object.entries(facts.rollouts.states ?? {}).map(([name, num]) => html`<tr key=${name}><td>${name}</td><td>${figure(num)}</td></tr>`)}
      ${Object.entries(facts.rollouts.dropped ?? {}).map(([name, num]) => html`<tr key=${`dropped ${name}`}><td class="quiet">dropped: ${name}</td><td>${figure(num)}</td></tr>`)}</tbody></table>
      <h2>Checks of the ledger</h2><ul class="checks">${Object.entries(facts.rollouts.checks ?? {}).map(([name, found]) => html`<li key=${name} class=${found.length ? "bad" : "good"}>
        ${found.length ? "✗" : "✓"} ${name}${found.length ? html`<ul>${found.map((one) => html`<li>${one}</li>`)}</ul>` : ""}</li>`)}</ul>
      <${Samples} of=${facts.tokens.by_step} gaps=${facts.gradients.gaps} />
      ${facts.versions.canaries?.length > 0 && html`<${Canary} proofs=${facts.versions.canaries} />`}
      <${Digests} title="Versions on disk" files=${facts.versions.files} /><${Digests} title="Batches on disk" files=${facts.batches.files} />
      <${Digests} title="Code of the user" files=${facts.code.files} />`;
  }}<//>`;
}

function Found({ title, what, found }) {
  return found.length > 0 && html`<h2>${title}</h2><ul class="findings">${found.map((one) => html`<li key=${one} class=${what === "broken" ? "bad" : ""}>${one}</li>`)}</ul>`;
}

// Tokens that are proved, and how far the witness in the gradient is from that of the batch, by step.
function Samples({ of, gaps }) {
  const steps = Object.keys(of ?? {}).map(Number), witnessed = Object.keys(gaps ?? {}).map(Number);
  if (!steps.length) return null;
  const rows = Object.values(of), share = (part, whole) => whole ? part / whole : null;
  return html`<h2>Tokens and gradients</h2><div class="charts">
    <${Curve} title="Share of tokens that are proved, by step" steps=${steps} series=${[
      { label: "at lag 0, by the step itself", values: rows.map(([num, now]) => share(now, num)) },
      { label: "of the others, in spot proofs", values: rows.map(([num, now, spots]) => share(spots, num - now)) }]} />
    ${witnessed.length > 0 && html`<${Curve} title="Witness in the gradient against that of the batch (share of its size), by step" steps=${witnessed}
      series=${[{ label: "largest difference", values: Object.values(gaps) }]} />`}</div>`;
}

function Digests({ title, files }) {
  const rows = Object.entries(files ?? {});
  return rows.length > 0 && html`<details><summary>${title} (${rows.length}), with their digests</summary><div class="scroll"><table><tbody>
    ${rows.map(([name, digest]) => html`<tr key=${name}><td>${name}</td><td><code>${digest}</code></td></tr>`)}</tbody></table></div></details>`;
}

// How far each server's log-probabilities of the canary were from the trainer's.
function Canary({ proofs }) {
  const versions = [...new Set(proofs.map((one) => one.version))], servers = [...new Set(proofs.map((one) => one.server))];
  const by = new Map(proofs.map((one) => [`${one.version} ${one.server}`, one.max_abs]));
  const largest = (key) => figure(range(proofs.map((one) => one[key]))[1]);
  return html`<h2>Canary</h2><p class="quiet">Differences up to ${figure(range(proofs.map((one) => one.tolerance))[0])} nats are a proof. The bases of trainer and servers differ by up to ${largest("base_max_abs")} nats, ${largest("base_mean_abs")} on average.</p>
    <div class="charts"><${Curve} title="Largest difference between trainer and server (nats), by version" steps=${versions}
      series=${servers.map((server) => ({ label: server, values: versions.map((version) => by.get(`${version} ${server}`) ?? null) }))} /></div>`;
}
