// Charts of a run, made from the metrics that it has; charts of several runs over each other.
import {
  Answer, Choice, Search, address, ask, go, html, nearest, runPath, setQuery, useAnswer, useEffect, useMemo, useState,
} from "./common.js";
import { Curve, savePage } from "./charts.js";

// Groups of charts: each chart has a title and the names of its metrics (`*` stands for any end). Where the title is empty,
// each metric has a chart of its own. What no group names comes last.
const GROUPS = [
  ["Learning", [
    ["Held-out accuracy", "eval/accuracy eval/accuracy/*"],
    ["Reward", "reward/mean reward/mean/* reward/std"],
    ["Accuracy in training", "reward/accuracy reward/accuracy/*"],
    ["Groups of equal rewards (share)", "reward/groups_without_spread reward/groups_without_spread/*"],
    ["Reward by role", "reward/role/*"],
    ["Rewards taken off or added by shaping", "reward/overlong_penalty reward/reference_kl_penalty"],
    ["Held-out pass@k", "eval/pass@*"],
    ["Held-out reward", "eval/reward/*"],
  ]],
  ["Policy", [
    ["Entropy (nats)", "policy/entropy policy/entropy/*"],
    ["Server against trainer, KL by lag (nats)", "policy/mismatch_kl_lag*"],
    ["Moved since it sampled, KL (nats)", "policy/kl policy/moved_kl_lag*"],
    ["Importance ratio", "policy/ratio_mean policy/ratio_min policy/ratio_max"],
    ["Tokens masked or clipped (share)", "policy/masked policy/masked_* policy/clipped policy/log_ratio_clamped"],
    ["Lag (versions)", "policy/lag_mean policy/lag_max"],
    ["Noise", "policy/noise_sigma"],
  ]],
  ["Answers", [
    ["Length (tokens)", "rollout/num_tokens_mean rollout/num_tokens_max"],
    ["Cut off before their end (share)", "rollout/truncated eval/truncated/*"],
    ["Dropped and begun again", "rollout/dropped rollout/dropped_* rollout/restarted"],
    ["Turns and rows", "rollout/num_turns rollout/num_rows rollout/step_errors"],
    ["Found by filters (share)", "rollout/found_*"],
  ]],
  ["Measures", [["", "reward/measure/*"]]],
  ["Own metrics", [["", "policy/custom_*"]]],
  ["Losses and gradients", [
    ["Loss", "loss/total loss/policy loss/sdpo loss/dpo"],
    ["Gradient norm", "optim/grad_norm optim/grad_norm_*"],
    ["Share of the gradient by loss", "optim/grad_share_*"],
    ["Learning rate", "optim/learning_rate"],
    ["Tokens with anything to teach (share)", "optim/signal"],
  ]],
  ["Hints and evidence", [
    ["Hints given", "hints/given hints/given_* hints/errors"],
    ["Hints declined or left out", "hints/declined_* hints/left_out_*"],
    ["The hint model", "hints/model_*"],
    ["Self-distillation", "policy/sdpo_tokens"],
    ["Divergence from the hinted policy (nats)", "policy/sdpo_divergence"],
    ["Evidence for advantages", "evidence/*"],
  ]],
  ["Preference pairs", [
    ["Pairs", "pairs/made pairs/ready pairs/broken pairs/too_old pairs/not_taken"],
    ["Questions to teachers", "pairs/questions_asked pairs/questions_answered pairs/questions_cached pairs/requests"],
    ["The judge", "pairs/judge_*"],
    ["Turns", "pairs/turns_*"],
    ["Skipped", "pairs/skipped_*"],
    ["DPO accuracy", "policy/dpo_accuracy"],
    ["DPO margin", "policy/dpo_margin"],
  ]],
  ["Teacher", [
    ["Policy against teacher, KL (nats)", "policy/teacher_kl"],
    ["Scored by the teacher", "teacher/rows teacher/tokens teacher/tokens_left_out"],
    ["Requests to the teacher", "teacher/requests teacher/failed teacher/failed_*"],
  ]],
  ["Proofs", [
    ["Tokens proved", "proofs/tokens proofs/tokens_now"],
    ["Difference of the tokens proved (nats)", "proofs/max_abs proofs/mean_abs"],
    ["Proofs that fail", "proofs/failed proofs/unproved proofs/dropped"],
    ["Canary (nats)", "policy/canary_max_abs policy/canary_base_max_abs"],
  ]],
  ["Speed", [
    ["Tokens a second", "perf/generate_tokens_per_s perf/train_tokens_per_s"],
    ["Seconds of a step", "time/step_s time/generate_s time/train_s time/wait_batch_s time/wait_trainer_s"],
    ["Requests at the servers", "perf/server_running perf/server_waiting perf/max_concurrent_groups"],
    ["KV cache in use (share)", "perf/server_kv_use"],
    ["Trainer, TFLOP/s", "perf/train_tflops"],
    ["Model FLOPs utilization", "perf/train_mfu"],
    ["Seconds of the rest", "time/publish_s time/load_s time/sleep_s time/wake_s time/proofs_s time/checkpoint_s time/evaluate_s"],
  ]],
];
const OPEN = new Set(["Learning", "Policy", "Answers"]);
const MAX_SERIES = 8;
const MAX_FOUND = 60;
const NO_CHART = /^progress\/step$|_at_s$/;
const OVERLAID = ["eval/accuracy", "reward/mean", "reward/accuracy", "reward/groups_without_spread", "policy/entropy",
  "rollout/num_tokens_mean", "rollout/truncated", "policy/mismatch_kl_lag0", "optim/grad_norm", "time/step_s",
  "perf/generate_tokens_per_s", "perf/train_tokens_per_s"];

const isEval = (name) => name.startsWith("eval/") || name.startsWith("time/evaluate_s");

function matches(pattern, name) {
  return pattern.endsWith("*") ? name.startsWith(pattern.slice(0, -1)) && name.length >= pattern.length : name === pattern;
}

// Charts by group: [[group, [{ title, names }]]].
function grouped(names) {
  const left = new Set(names), groups = [];
  for (const [group, charts] of GROUPS) {
    const made = [];
    for (const [title, patterns] of charts) {
      const found = patterns.split(" ").flatMap((one) => names.filter((name) => left.has(name) && matches(one, name)));
      for (const name of found) left.delete(name);
      if (!title) made.push(...found.map((name) => ({ title: name.replace(/^\w+\/(measure\/|custom_)?/, ""), names: [name] })));
      else if (found.length) made.push({ title, names: found });
    }
    if (made.length) groups.push([group, made]);
  }
  if (left.size) groups.push(["Everything else", [...left].map((name) => ({ title: name, names: [name] }))]);
  return groups;
}

// With one environment, its own figure is the mean of all; of several curves of the same values one is shown.
function distinct(names, columns) {
  if (names.length < 2) return names;
  const seen = new Set();
  return names.filter((name) => {
    const values = columns[name].join();
    return !seen.has(values) && seen.add(values);
  });
}

// The part of names that all have in common, up to a slash or underscore, says nothing in a legend.
function shortNames(names) {
  if (names.length < 2) return names;
  let common = names[0];
  for (const name of names) while (!name.startsWith(common)) common = common.slice(0, -1);
  common = common.slice(0, Math.max(common.lastIndexOf("/"), common.lastIndexOf("_")) + 1);
  return names.map((name) => name.slice(common.length) || name);
}

const usable = (columns) => Object.keys(columns).filter((name) => !NO_CHART.test(name)
    && columns[name].some((one) => one !== null));

// The least and greatest values of a long run hide where it goes.
const usualSmoothing = (steps) => (steps.length >= 400 ? "0.9" : "0");

// What stands above charts: search, smoothing, axis, range, picture.
function Tools({ query, smooth, ends, onSave, found }) {
  const [low, high] = [query.from ?? "", query.to ?? ""];
  return html`<form class="fields" role="search" aria-label="charts" onSubmit=${(event) => event.preventDefault()}>
    <${Search} label="metric" value=${query.find ?? ""} onChange=${(find) => setQuery({ find })} />
    <${Choice} label="smoothing" value=${smooth}
      onChange=${(one) => setQuery({ smooth: one })}
      options=${[["0", "none"], ["0.6", "some"], ["0.9", "much"], ["0.97", "most"]]} />
    <label class="check"><span><input type="checkbox" checked=${query.log === "1"}
      onChange=${(event) => setQuery({ log: event.target.checked ? "1" : "" })} />log axis</span></label>
    <label class="short">steps <input type="number" aria-label="first step" placeholder=${ends[0]} value=${low}
      onChange=${(event) => setQuery({ from: event.target.value })} /> to <input type="number" aria-label="last step"
      placeholder=${ends[1]} value=${high} onChange=${(event) => setQuery({ to: event.target.value })} /></label>
    ${(low || high) && html`<button onClick=${() => setQuery({ from: "", to: "" })}>all steps</button>`}
    <button onClick=${onSave}>picture of the page</button>
    <span class="quiet" role="status">${found}</span></form>`;
}

// The charts of one run. `marks`: steps where something was dropped, began again, stood still, or code was changed.
export function RunCharts({ run, about, query, numbers }) {
  const long = about?.step > 500 && (query.from || query.to);
  const range = new URLSearchParams({ ...(query.from && { low: query.from }), ...(query.to && { high: query.to }) });
  const state = useAnswer(runPath(run, `curves${long ? `?${range}` : ""}`), run);
  return html`<${Answer} state=${state}>${(told) => html`<${Charts} run=${run} told=${told} query=${query} numbers=${numbers} about=${about}
    traced=${about?.traced ?? []} />`}<//>`;
}

function Charts({ run, told, query, numbers, about, traced }) {
  const { train, eval: evaluated, changes } = told;
  const steps = train["progress/step"] ?? [], known = evaluated["progress/step"] ?? [];
  const columns = useMemo(() => ({ ...train, ...evaluated }), [told]);
  const names = useMemo(() => [...new Set([...usable(evaluated), ...usable(train)])], [told]);
  const marks = useMemo(() => {
    const usual = [...(train["time/step_s"] ?? [])].sort((a, b) => a - b)[Math.floor(steps.length / 2)];
    const special = steps.filter((_, index) => train["rollout/dropped"]?.[index] > 0 || train["rollout/restarted"]?.[index] > 0
      || train["time/step_s"]?.[index] > 5 * usual);
    return special.length < steps.length / 4 ? special : [];
  }, [told]);
  if (!steps.length && !known.length) return about?.models?.length ? html`<p>Each model of this service is a run:
    ${about.models.map((name) => html` <a key=${name} href=${address(["run", name])}>${name}</a>`)}</p>`
    : html`<p>No step is finished yet.</p>`;
  const words = (query.find ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const found = words.length ? names.filter((name) => words.every((word) => name.toLowerCase().includes(word))) : [];
  const groups = words.length
    ? [["Found", found.slice(0, MAX_FOUND).map((name) => ({ title: name, names: [name] }))]]
    : grouped(names);
  const changed = changes.map(([step]) => step), smooth = query.smooth ?? usualSmoothing(steps);
  const ends = [Math.min(...steps.slice(0, 1), ...known.slice(0, 1)), Math.max(...steps.slice(-1), ...known.slice(-1))];
  const span = query.from || query.to ? [Number(query.from || ends[0]), Number(query.to || ends[1])] : null;
  const smoothingOf = (own) => (query.smooth === undefined && own.length < 100 ? 0 : Number(smooth)); // few points need none
  const chart = ({ title, names: wanted }) => {
    const held = wanted.filter(isEval), here = held.length ? held : wanted;
    const shown = distinct(here, columns), drawn = shown.slice(0, MAX_SERIES), labels = shortNames(drawn);
    return html`<${Curve} key=${title} title=${title} steps=${held.length ? known : steps} group="steps" span=${span}
      marks=${held.length ? changed : [...marks, ...changed]} smooth=${smoothingOf(held.length ? known : steps)}
          log=${query.log === "1"}
      series=${drawn.map((name, index) => ({ label: labels[index], values: columns[name] }))}
      note=${shown.length > drawn.length ? `and ${shown.length - drawn.length} more, by search` : null}
      onRange=${(from, to) => setQuery({ from: from ?? "", to: to ?? "" })}
      onStep=${(step) => (held.length ? go(["run", run, "evaluation"], { after: step })
        : go(["run", run, "step", traced.length ? nearest(traced, step) : step]))} />`;
  };
  return html`<${Tools} query=${query} smooth=${smooth} ends=${ends} onSave=${() => savePage(run, numbers)}
      found=${words.length ? `${found.length} of ${names.length} metrics` : `${names.length} metrics`} />
    ${groups.map(([name, made]) => html`<${Part} key=${`${name} ${words.length > 0}`} name=${name} charts=${made} chart=${chart}
      first=${words.length > 0 || OPEN.has(name) || !groups.some(([one]) => OPEN.has(one))} />`)}
    <p class="quiet">A click or Enter on a step opens its rollouts; dragging chooses a range for all charts, a double click all
      steps. Dashed: something was dropped, began again, or stood still${changed.length ? ", or code was changed" : ""}.</p>
    ${changes.map(([step, files]) => html`<p key=${step}>Code changed after step ${step}: <code>${files.join(", ")}</code>
        </p>`)}`;
}

// A group of charts, which are made once it is opened.
function Part({ name, charts, chart, first }) {
  const [open, setOpen] = useState(first);
  return html`<details class="part" open=${open} onToggle=${(event) => setOpen(event.target.open)}>
    <summary>${name} <span class="quiet">${charts.length}</span></summary>
    <div class="charts">${open && charts.map(chart)}</div></details>`;
}

// Several runs over each other, held-out accuracy first, and the settings in which they differ.
export function ComparePage({ query }) {
  const names = (query.runs ?? "").split(",").filter(Boolean);
  const [found, setFound] = useState({});
  useEffect(() => {
    let current = true;
    Promise.all(names.map(async (name) => {
      const { train, eval: evaluated } = await ask(runPath(name, "curves"));
      return { name, train, evaluated, settings: (await ask(runPath(name, "settings"))).values };
    })).then((value) => current && setFound({ value }), (error) => current && setFound({ error: error.message }));
    return () => { current = false; };
  }, [query.runs]);
  return html`<h1>${names.length} runs over each other</h1><div><${Answer} state=${found}>${(runs) => html`<${Overlay}
      runs=${runs} query=${query} />`}<//></div>`;
}

function Overlay({ runs, query }) {
  const names = useMemo(() => [...new Set(runs.flatMap((run) => [...usable(run.evaluated), ...usable(run.train)]))].sort(),
      [runs]);
  const words = (query.find ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = words.length ? names.filter((name) =>
      words.every((word) => name.toLowerCase().includes(word))) : names.filter((name) => OVERLAID.includes(name));
  if (!words.length) wanted.sort((a, b) => OVERLAID.indexOf(a) - OVERLAID.indexOf(b));
  const kinds = Object.fromEntries(["train", "evaluated"].map((kind) => {
    const steps = [...new Set(runs.flatMap((run) => run[kind]["progress/step"] ?? []))].sort((a, b) => a - b);
    return [kind, { steps, at: runs.map((run) =>
        new Map((run[kind]["progress/step"] ?? []).map((step, index) => [step, index]))) }];
  }));
  const all = [...kinds.train.steps, ...kinds.evaluated.steps], smooth = query.smooth ?? usualSmoothing(kinds.train.steps);
  const ends = all.length ? [Math.min(...all.slice(0, 1)), Math.max(kinds.train.steps.at(-1) ?? 0,
      kinds.evaluated.steps.at(-1) ?? 0)] : [0, 1];
  const span = query.from || query.to ? [Number(query.from || ends[0]), Number(query.to || ends[1])] : null;
  const chart = (name) => {
    const kind = isEval(name) ? "evaluated" : "train", { steps, at } = kinds[kind];
    const series = runs.map((run, index) =>
        ({ label: run.name, values: steps.map((step) => run[kind][name]?.[at[index].get(step)] ?? null) }));
    return html`<${Curve} key=${name} title=${name} steps=${steps} series=${series} group="compare" span=${span}
      smooth=${Number(smooth)} log=${query.log === "1"}
          onRange=${(from, to) => setQuery({ from: from ?? "", to: to ?? "" })} />`;
  };
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))].filter((key) =>
    new Set(runs.map((run) => JSON.stringify(run.settings[key]))).size > 1
        && !/output_dir|run_id|port|endpoint|base_url/.test(key));
  return html`<p>${runs.map((run) => html`<a key=${run.name} href=${address(["run", run.name])}>${run.name}</a> `)}</p>
    <${Tools} query=${query} smooth=${smooth} ends=${ends} onSave=${() => savePage(runs.map((run) => run.name).join(" and "), [])}
      found=${words.length ? `${wanted.length} of ${names.length} metrics`
          : `${wanted.length} of ${names.length} metrics; search for others`} />
    <div class="charts">${wanted.slice(0, MAX_FOUND).map(chart)}</div>
    <h2>Settings that differ</h2>${keys.length ? html`<div class="settings">${keys.map((key) => html`<dl key=${key}><dt>
      <code>${key}</code></dt>
      <dd>${runs.map((run) => html`<div key=${run.name}>
        <span class="quiet">${run.name}</span> ${JSON.stringify(run.settings[key])}</div>`)}</dd></dl>`)}</div>`
      : html`<p>None.</p>`}`;
}
