// The rollouts of a step or an evaluation: its groups as small multiples, a table with prompts and answers, the worst tokens.
import {
  Answer, Choice, Clip, Pages, Search, Table, address, ask, figure, go, html, percent, range, runPath, setQuery, shown,
  useAnswer, useEffect, useKeys, useMemo, useState,
} from "./common.js";
import { Frame } from "./run.js";

const PAGE = innerWidth < 640 ? 12 : 50;
const GROUPS = 60;
const place = (run, kind, step) => ["run", run, kind, step];

export function StepPage({ run, kind, step, query }) {
  const state = useAnswer(runPath(run, kind, step, "rollouts"), run);
  const title = kind === "eval" ? `evaluation of version ${step}` : `step ${step}`;
  return html`<${Frame} run=${run} here=${kind === "eval" ? "evaluation" : "steps"} title=${title}>${() => html`<${Answer}
      state=${state}>${(told) => html`
    <${Steps} run=${run} kind=${kind} step=${Number(step)} traced=${told.traced} />
    ${told.rollouts.length ? html`<${Rollouts} run=${run} kind=${kind} step=${step} rows=${told.rollouts} query=${query} />`
      : html`<p>There is no trace of this step${told.traced.length ? `; there are traces of ${told.traced.length} others`
        : ""}.</p>`}`}<//>`}<//>`;
}

function Steps({ run, kind, step, traced }) {
  const before = traced.filter((one) => one < step).at(-1), after = traced.find((one) => one > step);
  useKeys({
    k: () => before !== undefined && go(place(run, kind, before)), j: () => after !== undefined && go(place(run, kind, after)),
  }, [run, kind, step, traced.length]);
  const link = (one, rel, text) => one !== undefined && html`<a href=${address(place(run, kind, one))} rel=${rel}>${text}</a>`;
  return html`<p class="siblings">${link(before, "prev", `← ${before}`)} <b>${step}</b> ${link(after, "next", `${after} →`)}
    ${traced.length > 1 && html`<span class="quiet">of ${traced[0]} to ${traced.at(-1)}; j and k, or g and a number</span>`}</p>`;
}

const SORTS = {
  group: (row) => row.group, reward: (row) => row.reward, advantage: (row) => row.advantage, length: (row) => row.num_tokens,
  accuracy: (row) => row.accuracy, "log-ratio": (row) => row.max_log_ratio, entropy: (row) => row.mean_entropy,
  masked: (row) => row.num_masked, end: (row) => row.drop_reason ?? row.stop_reason, rollout: (row) => row.group,
};

function sorted(rows, sort) {
  const of = SORTS[sort.replace(/^-/, "")] ?? SORTS.group, sign = sort.startsWith("-") ? -1 : 1;
  const size = (value) => (sort.endsWith("log-ratio") && typeof value === "number" ? Math.abs(value) : value);
  return [...rows].sort((a, b) => {
    const [x, y] = [size(of(a)), size(of(b))];
    if (x === y) return 0;
    if (x === null || x === undefined) return 1;
    if (y === null || y === undefined) return -1;
    return x < y ? -sign : sign;
  });
}

const reason = (row) => (row.drop_reason ? `dropped: ${row.drop_reason}` : row.stop_reason ?? "");

function Rollouts({ run, kind, step, rows, query }) {
  const sort = query.sort ?? "group", text = (query.find ?? "").trim(), path = runPath(run, kind, step);
  const first = useMemo(() => rows.filter((row) => !row.row), [rows]);
  const [hits, setHits] = useState(null);
  useEffect(() => {
    let current = true;
    setHits(null);
    if (text) ask(`${path}/find?text=${encodeURIComponent(text)}`).then((ids) => current && setHits(new Set(ids)), async () => {
      // A report has no search of its own, but all texts.
      const all = await ask(`${path}/texts`), wanted = text.toLowerCase();
      const ids = Object.keys(all).filter((id) => JSON.stringify(all[id]).toLowerCase().includes(wanted));
      if (current) setHits(new Set(ids));
    });
    return () => { current = false; };
  }, [text, path]);
  const between = (value, low, high) => (!low || value >= Number(low)) && (!high || value <= Number(high));
  const chosen = useMemo(() => sorted(first.filter((row) => (!query.env || row.env === query.env)
    && (!query.end || reason(row) === query.end) && (!query.group || String(row.group) === query.group)
    && between(row.reward, query.low, query.high) && between(row.num_tokens, query.short, query.long)
    && (!text || hits?.has(row.rollout) || `${row.rollout} ${row.env} ${row.example} ${reason(row)}`.includes(text))), sort),
  [first, sort, text, hits, query.env, query.end, query.group, query.low, query.high, query.short, query.long]);
  const page = Math.min(Number(query.page ?? 0), Math.max(0, Math.ceil(chosen.length / PAGE) - 1));
  const open = chosen.slice(page * PAGE, (page + 1) * PAGE);
  const texts = useAnswer(`${path}/texts?rollouts=${encodeURIComponent(open.map((row) => row.rollout).join(",")
      || "none")}`).value ?? {};
  const measures = [...new Set(first.flatMap((row) => Object.keys(row.measures)))];
  const colour = measures.includes(query.measure) ? query.measure : "";
  const envs = [...new Set(first.map((row) => row.env))], ends = [...new Set(first.map(reason))].filter(Boolean).sort();
  const to = (row) => address([...place(run, kind, step), "rollout", row.rollout]);
  const rewards = first.map((row) => row.reward).filter((value) => value !== null), mean = rewards.reduce((sum, one) => sum + one,
      0) / Math.max(1, rewards.length);
  const share = (test) => percent(first.filter(test).length / first.length);
  const set = (change) => setQuery({ page: "", ...change });
  const number = (name, label) => html`<input type="number" step="any" aria-label=${label} value=${query[name] ?? ""}
      onChange=${(event) => set({ [name]: event.target.value })} />`;
  const columns = [
    { name: "rollout", cell: (row) => html`<a href=${to(row)}>${row.rollout}</a>` },
    ...(envs.length > 1 ? [{ name: "environment", sort: false, cell: (row) => row.env }] : []),
    { name: "prompt", sort: false, kind: "text", cell: (row) => html`<${Clip} text=${texts[row.rollout]?.prompt} />` },
    { name: "answer", label: "last answer", sort: false, kind: "text", cell: (row) => (row.failure ? html`<span class="bad">
        <${Clip} text=${row.failure} /></span>`
      : html`<${Clip} text=${texts[row.rollout]?.answer} />${texts[row.rollout]?.equal && (row.reward ?? 0) <= 0
        && html`<span class="bad">✗ equal to the right answer, reward ${figure(row.reward)}</span>`}`) },
    ...(Object.values(texts).some((one) => one.right !== null)
        ? [{ name: "right", label: "right answer", sort: false, kind: "text", cell: (row) => html`<${Clip}
          text=${texts[row.rollout]?.right} />` }] : []),
    { name: "reward", num: true, cell: (row) => figure(row.reward) },
        { name: "advantage", num: true, cell: (row) => figure(row.advantage, 2) },
    ...(first.some((row) => row.accuracy !== null && row.accuracy !== row.reward)
        ? [{ name: "accuracy", num: true, cell: (row) => figure(row.accuracy, 2) }] : []),
    { name: "length", label: "tokens", num: true, cell: (row) => figure(row.num_tokens) },
    { name: "log-ratio", num: true, cell: (row) => figure(row.max_log_ratio) },
        { name: "entropy", num: true, cell: (row) => figure(row.mean_entropy) },
    ...(first.some((row) => row.num_masked) ? [{ name: "masked", num: true, cell: (row) => figure(row.num_masked) }] : []),
    { name: "end", cell: (row) => reason(row) || null },
    ...(colour ? [{ name: colour, num: true, sort: false, cell: (row) => figure(row.measures[colour], 2) }] : []),
  ];
  return html`<dl class="facts">${[["rollouts", figure(first.length)], ["reward", rewards.length ? figure(mean) : "–"],
      ["cut off", share((row) => row.stop_reason === "length" || row.stop_reason === "context_full")],
      ["dropped", share((row) => row.drop_reason)],
          ["tokens", figure(first.reduce((sum, row) => sum + (row.num_tokens ?? 0), 0))]]
      .map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    <form class="fields" role="search" aria-label="rollouts" onSubmit=${(event) => event.preventDefault()}>
      <${Search} label="find" value=${query.find ?? ""} onChange=${(find) => set({ find })} />
      ${envs.length > 1 && html`<${Choice} label="environment" value=${query.env ?? ""} options=${[["", "all"], ...envs]}
          onChange=${(env) => set({ env })} />`}
      ${ends.length > 1 && html`<${Choice} label="end" value=${query.end ?? ""} options=${[["", "any"], ...ends]}
          onChange=${(end) => set({ end })} />`}
      <${Choice} label="sort" value=${sort in SORTS || sort.slice(1) in SORTS ? sort : "group"}
        onChange=${(one) => set({ sort: one })}
        options=${Object.keys(SORTS).filter((one) => one !== "rollout").flatMap((one) => (one === "group" ? [["group", "group"]]
            : [[`-${one}`, `${one}, largest first`], [one, `${one}, smallest first`]]))} />
      ${measures.length > 0 && html`<${Choice} label="bars show" value=${colour} options=${[["", "reward"], ...measures]}
          onChange=${(measure) => set({ measure })} />`}
      <label class="short">reward ${number("low", "least reward")} to ${number("high", "greatest reward")}</label>
      <label class="short">tokens ${number("short", "fewest tokens")} to ${number("long", "most tokens")}</label>
      ${query.group && html`<button onClick=${() => set({ group: "" })}>group ${query.group}: show all groups</button>`}
      <span class="quiet" role="status">${figure(chosen.length)} of ${figure(first.length)}${text && !hits ? ", searching…"
        : ""}</span></form>
    <${Groups} rows=${chosen} measure=${colour} to=${to} onGroup=${(group) => set({ group })} query=${query} />
    <${Table} label=${`rollouts of step ${step}`} kind="wide rollouts" columns=${columns} rows=${open}
      keyOf=${(row) => row.rollout}
      classOf=${(row) => (row.drop_reason ? "dropped" : "")} sort=${sort} onSort=${(one) => set({ sort: one })} />
    <${Pages} what="rollouts" page=${page} num=${Math.ceil(chosen.length / PAGE)} onPage=${(one) => setQuery({ page: one })} />
    <${WorstTokens} run=${run} kind=${kind} step=${step} query=${query} />`;
}

// Each group as bars of its rollouts, all on one scale: blue above the middle of the scale, orange below it, grey if dropped.
function Groups({ rows, measure, to, onGroup, query }) {
  const of = (row) => (measure ? row.measures[measure] : row.reward);
  const groups = new Map();
  for (const row of rows.filter((one) => !one.rollout.includes("."))) groups.set(row.group,
      [...(groups.get(row.group) ?? []), row]);
  if (groups.size < 2 || [...groups.values()].every((members) => members.length < 2)) return null;
  const [low, high] = range(rows.map(of)) ?? [0, 1];
  const base = Math.min(0, low), height = high - base || 1, middle = (low + high) / 2;
  const page = Math.min(Number(query.gpage ?? 0), Math.ceil(groups.size / GROUPS) - 1);
  return html`<h2>Groups <span class="quiet">${groups.size}</span></h2>
    <p class="quiet">A bar is a rollout, and its height ${measure
      || "the reward"}, from ${figure(base)} to ${figure(high)}; orange: in the lower half; grey: dropped.</p>
    <ul class="groups">${[...groups].slice(page * GROUPS, (page + 1) * GROUPS).map(([group, members]) => {
      const known = members.map(of).filter((value) => value !== null && value !== undefined);
      const mean = known.reduce((sum, one) => sum + one, 0) / Math.max(1, known.length);
      return html`<li key=${group}><button class="plain caption" onClick=${() => onGroup(group)} title=${`only group ${group}`}>
        <span><span class="hidden">only the group of </span>example ${members[0].example}<span class="hidden">, mean</span>
          </span> <b>${figure(mean, 2)}</b></button>
        <div class="bars">${members.map((row) => html`<a key=${row.rollout} href=${to(row)} tabindex="-1" aria-hidden="true"
          class=${row.drop_reason ? "dropped" : (of(row) ?? low) < middle || (low === high && !(high > 0)) ? "less" : ""}
          style=${{ height: `${Math.round((100 * ((of(row) ?? base) - base)) / height)}%` }}
          title=${`${row.rollout}: ${figure(of(row))}${row.drop_reason ? `, ${row.drop_reason}` : ""}`}></a>`)}</div></li>`;
    })}</ul><${Pages} what="groups" page=${page} num=${Math.ceil(groups.size / GROUPS)}
        onPage=${(one) => setQuery({ gpage: one })} />`;
}

const MEASURES = [["", "nothing"], "log-ratio", "surprise", "entropy", "teacher", "advantage"];

function WorstTokens({ run, kind, step, query }) {
  const by = query.worst ?? "";
  return html`<h2>Worst tokens of the step</h2>
    <form class="fields" onSubmit=${(event) => event.preventDefault()}><${Choice} label="largest" value=${by} options=${MEASURES}
      onChange=${(worst) => setQuery({ worst })} />
      <span class="quiet">across all rollouts, by absolute value</span></form>
    ${by && html`<${Worst} run=${run} kind=${kind} step=${step} by=${by} />`}`;
}

function Worst({ run, kind, step, by }) {
  const state = useAnswer(runPath(run, kind, step, `tokens?by=${by}`));
  return html`<${Answer} state=${state}>${(tokens) => (tokens.length === 0 ? html`<p
      class="quiet">The trace has no such figure of any token.</p>`
    : html`<${Table} label="worst tokens" rows=${tokens} keyOf=${(one) => `${one.rollout} ${one.row} ${one.at}`} columns=${[
      { name: by, num: true, cell: (one) => figure(one.value, 4) },
      { name: "token", kind: "text", cell: (one) => html`<code>${shown(one.before)}<ins>${shown(one.text).replace(/\n/g, "↵")
          || "∅"}</ins>${shown(one.after)}</code>` },
      { name: "rollout", cell: (one) => html`<a
          href=${address([...place(run, kind, step), "rollout", one.rollout],
              { at: one.at, row: one.row || "", colour: by })}>${one.rollout}, token ${one.at}</a>` },
      { name: "reward", num: true, cell: (one) => figure(one.reward) }]} />`)}<//>`;
}
