// Pages of rollouts: a step's groups, one rollout token by token, one prompt over all versions.
import { Answer, address, diverging, figure, go, html, range, sequential, setQuery, useAnswer, useEffect, useKeys, useMemo, useRef, useState } from "./common.js";
import { Tabs } from "./run.js";

const SORTS = {
  group: (row) => row.group, reward: (row) => row.reward, advantage: (row) => row.advantage, length: (row) => row.num_tokens,
  accuracy: (row) => row.accuracy, "log-ratio": (row) => row.max_log_ratio, entropy: (row) => row.mean_entropy, masked: (row) => row.num_masked,
};
const SHOWN = 400;

const place = (run, kind, step) => ["run", run, kind, step];

export function StepPage({ run, kind, step, query }) {
  const state = useAnswer(`runs/${encodeURIComponent(run)}/${kind}/${step}/rollouts`, run);
  return html`<h1>${run}: ${kind === "eval" ? `evaluation of version ${step}` : `step ${step}`}</h1>
    <${Answer} state=${state}>${(told) => html`<${Tabs} run=${run} here="steps" traced=${told.traced} />
      <${Steps} run=${run} kind=${kind} step=${Number(step)} traced=${told.traced} />
      ${told.rollouts.length ? html`<${Groups} run=${run} kind=${kind} step=${step} rows=${told.rollouts} query=${query} />`
        : html`<p>There is no trace of this step${told.traced.length ? `; there are traces of ${told.traced.length} others` : ""}.</p>`}`}<//>`;
}

function Steps({ run, kind, step, traced }) {
  const before = traced.filter((one) => one < step).at(-1), after = traced.find((one) => one > step);
  useKeys({ k: () => before !== undefined && go(place(run, kind, before)), j: () => after !== undefined && go(place(run, kind, after)) }, [run, kind, step, traced.length]);
  return html`<p>${before !== undefined && html`<a href=${address(place(run, kind, before))} rel="prev">← ${before}</a>`} <b>${step}</b> ${after !== undefined
    && html`<a href=${address(place(run, kind, after))} rel="next">${after} →</a>`}</p>`;
}

function Groups({ run, kind, step, rows, query }) {
  const sort = query.sort in SORTS ? query.sort : "group", text = query.find ?? "";
  const envs = [...new Set(rows.map((row) => row.env))];
  const measures = [...new Set(rows.flatMap((row) => Object.keys(row.measures ?? {})))];
  const of = SORTS[sort], measure = measures.includes(query.measure) ? query.measure : null;
  const shown = useMemo(() => rows.filter((row) => row.row === 0 || row.row === null)
    .filter((row) => !query.env || row.env === query.env)
    .filter((row) => !text || `${row.rollout} ${row.env} ${row.example} ${row.drop_reason ?? ""} ${row.stop_reason ?? ""}`.includes(text))
    .sort((a, b) => sort === "group" ? a.group - b.group : (of(b) ?? -Infinity) - (of(a) ?? -Infinity)), [rows, sort, text, query.env]);
  const span = range(rows.map((row) => measure ? row.measures[measure] : row.reward)) ?? [0, 0];
  const groups = new Map();
  for (const row of shown) groups.set(row.group, [...(groups.get(row.group) ?? []), row]);
  const share = (row) => {
    const value = measure ? row.measures?.[measure] : row.reward;
    return span[1] > span[0] && value !== null && value !== undefined ? 2 * (value - span[0]) / (span[1] - span[0]) - 1 : 0;
  };
  const to = (row) => address([...place(run, kind, step), "rollout", row.rollout]);
  const select = (name, value, options, label) => html`<label>${label} <select onChange=${(event) => setQuery({ [name]: event.target.value })}>
    ${options.map((one) => html`<option value=${one} selected=${one === value}>${one || "all"}</option>`)}</select></label>`;
  return html`<form class="filters" onSubmit=${(event) => event.preventDefault()}>
      ${select("sort", sort, Object.keys(SORTS), "sort by")} ${envs.length > 1 && select("env", query.env ?? "", ["", ...envs], "environment")}
      ${measures.length > 0 && select("measure", measure ?? "", ["", ...measures], "colour by")}
      <label>find <input id="search" type="search" value=${text} onInput=${(event) => setQuery({ find: event.target.value })} /></label></form>
    <p class="quiet">${shown.length} rollouts in ${groups.size} groups; ${shown.filter((row) => row.drop_reason).length} dropped; reward ${figure(span[0])} (orange) to ${figure(span[1])} (blue)</p>
    <div class="heat" role="list" aria-label="groups by rollouts, coloured by reward">${[...groups].slice(0, SHOWN).map(([group, members]) => html`
      <div role="listitem" key=${group} aria-label=${`group ${group}`}>${members.map((row) => html`<a key=${row.rollout} href=${to(row)} style=${{ background: diverging(share(row)) }}
        class=${row.drop_reason ? "dropped" : ""} title=${`${row.rollout}, reward ${figure(row.reward)}${row.drop_reason ? `, ${row.drop_reason}` : ""}`}
        aria-label=${`rollout ${row.rollout}, reward ${figure(row.reward)}`}></a>`)}</div>`)}</div>
    <div class="scroll"><table class="rollouts"><thead><tr><th>rollout</th><th>prompt</th><th>reward</th><th>advantage</th><th>accuracy</th><th>tokens</th><th>log-ratio</th><th>entropy</th>
      <th>masked</th><th>end</th>${measures.slice(0, 4).map((name) => html`<th>${name}</th>`)}</tr></thead><tbody>${shown.slice(0, SHOWN).map((row) => html`
      <tr key=${row.rollout} class=${row.drop_reason ? "dropped" : ""}><td><a href=${to(row)}>${row.rollout}</a></td>
        <td><a href=${address(["run", run, "prompt", row.env, row.example])}>${row.env} ${row.example}</a></td><td>${figure(row.reward)}</td><td>${figure(row.advantage)}</td>
        <td>${figure(row.accuracy, 2)}</td><td>${figure(row.num_tokens)}</td><td>${figure(row.max_log_ratio)}</td><td>${figure(row.mean_entropy)}</td>
        <td>${figure(row.num_masked)}</td><td>${row.drop_reason ?? row.stop_reason ?? ""}</td>${measures.slice(0, 4).map((name) => html`<td>${figure(row.measures?.[name], 2)}</td>`)}</tr>`)}
    </tbody></table></div>${shown.length > SHOWN && html`<p class="quiet">The first ${SHOWN} are shown; filter for others.</p>`}`;
}

// --- one rollout ---

const COLOURS = {
  advantage: { of: (row, index) => row.advantages?.[index], colour: diverging, scale: (values) => largest(values) },
  "log-ratio": { of: (row, index) => delta(row, index), colour: diverging, scale: (values) => largest(values) },
  ratio: { of: (row, index) => { const one = delta(row, index); return one === null ? null : Math.exp(one) - 1; }, colour: diverging, scale: (values) => Math.min(largest(values), 2) },
  entropy: { of: (row, index) => row.entropy?.[index], colour: sequential, scale: (values) => largest(values) },
  "surprise": { of: (row, index) => row.loss_mask?.[index] ? -row.logprobs[index] : null, colour: sequential, scale: (values) => largest(values) },
  mask: { of: (row, index) => row.masked?.[index] ? 1 : 0, colour: (share) => diverging(-share), scale: () => 1 },
  none: { of: () => null, colour: () => "", scale: () => 1 },
};
const PART = 2000;  // tokens that are put on the page at once; those of a long rollout follow frame by frame

function largest(values) { const span = range(values); return span ? Math.max(Math.abs(span[0]), Math.abs(span[1])) || 1 : 1; }

function delta(row, index) {
  const trainer = row.trainer_logprobs?.[index];
  return row.loss_mask?.[index] && trainer !== null && trainer !== undefined ? trainer - row.logprobs[index] : null;
}

export function RolloutPage({ run, kind, step, rollout, query }) {
  const path = `runs/${encodeURIComponent(run)}/${kind}/${step}/rollouts`;
  const state = useAnswer(`${path}/${rollout}`, run), all = useAnswer(path, run);
  const beside = useAnswer(`${path}/${query.beside ?? rollout}`);
  const mine = all.value?.rollouts.find((row) => row.rollout === rollout);
  const siblings = all.value?.rollouts.filter((row) => mine && row.group === mine.group && (row.row ?? 0) === 0) ?? [];
  const at = siblings.findIndex((row) => row.rollout === rollout);
  const to = (row) => row && go([...place(run, kind, step), "rollout", row.rollout], { colour: query.colour });
  useKeys({ j: () => to(siblings[at + 1]), k: () => to(siblings[at - 1]) }, [at, siblings.length, query.colour]);
  return html`<h1>Rollout ${rollout}</h1><p><a href=${address(["run", run])}>${run}</a> › <a href=${address(place(run, kind, step))}>${kind === "eval" ? "evaluation of version" : "step"} ${step}</a></p>
    ${siblings.length > 1 && html`<nav class="siblings" aria-label="rollouts of the same group">${siblings.map((row) => html`<a key=${row.rollout}
      href=${address([...place(run, kind, step), "rollout", row.rollout], { colour: query.colour })} aria-current=${row.rollout === rollout ? "page" : undefined}>${row.rollout} <b>${figure(row.reward, 2)}</b></a>`)}
      <label>beside <select onChange=${(event) => setQuery({ beside: event.target.value })}><option value="">nothing</option>${siblings.filter((row) => row.rollout !== rollout)
        .map((row) => html`<option value=${row.rollout} selected=${row.rollout === query.beside}>${row.rollout} (${figure(row.reward, 2)})</option>`)}</select></label></nav>`}
    <${Answer} state=${state}>${(rows) => rows.length === 0 ? html`<p>There is no such rollout in the trace of this step.</p>`
      : html`<div class=${query.beside ? "beside" : ""}>${[rows, ...(query.beside && beside.value ? [beside.value] : [])].map((rowsOf, side) => html`
        <section key=${side} aria-label=${`rollout ${rowsOf[0]?.rollout}`}>${rowsOf.map((row) => html`<${Row} key=${`${row.rollout} ${row.row}`} row=${row} run=${run}
          other=${query.beside && beside.value ? (side ? rows : beside.value)[0] : null} query=${query} />`)}</section>`)}</div>`}<//>`;
}

function Row({ row, run, other, query }) {
  const facts = [["reward", figure(row.reward)], ...Object.entries(row.rewards).length > 1 ? Object.entries(row.rewards).map(([name, value]) => [`reward of ${name}`, figure(value)]) : [],
    ...Object.entries(row.players ?? {}).map(([role, one]) => [`player of ${role}`, `${one.name} ${one.digest}`]),
    ["advantage", figure(row.advantage)], ["accuracy", figure(row.accuracy, 2)], ["tokens", figure(row.num_tokens)], ["temperature", figure(row.temperature, 2)],
    ["end", row.drop_reason ? `dropped: ${row.drop_reason}` : row.stop_reason], ["versions", [...new Set(row.versions ?? [])].map((one) => `v${one}`).join(", ")],
    ...Object.entries(row.measures).map(([name, value]) => [name, figure(value, 2)])];
  return html`<article><h2>${row.rollout}${row.role ? ` as ${row.role}` : ""}${row.row ? `, row ${row.row}` : ""}</h2>
    <p><a href=${address(["run", run, "prompt", row.env, row.example])}>${row.env} ${row.example}</a> over all versions</p>
    <dl class="facts">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${row.hint && html`<h3>Hint</h3><pre class="message">${row.hint}</pre>`}
    ${(row.pairs ?? []).map((pair, index) => html`<h3 key=${index}>Preference pair, by ${pair.source}</h3>
      <${Message} message=${{ role: "preferred", content: pair.chosen }} /><${Message} message=${{ role: "rejected", content: pair.rejected }} />`)}
    <h3>Conversation</h3>${row.messages.map((message, index) => html`<${Message} key=${index} message=${message} />`)}
    <${Tokens} row=${row} other=${other} query=${query} /></article>`;
}

export function Message({ message }) {
  const text = typeof message.content === "string" ? message.content : message.content === null || message.content === undefined ? "" : JSON.stringify(message.content, null, 1);
  const [whole, setWhole] = useState(text.length < 20000);
  return html`<div class=${`message ${message.role}`}><b>${message.role}${message.name ? ` ${message.name}` : ""}</b>
    <pre dir="auto">${shown(whole ? text : text.slice(0, 20000))}</pre>${!whole && html`<button onClick=${() => setWhole(true)}>all ${figure(text.length)} characters</button>`}
    ${(message.tool_calls ?? []).map((call) => html`<pre class="call">${call.function?.name ?? ""}(${call.function?.arguments ?? JSON.stringify(call)})</pre>`)}</div>`;
}

// Text in which signs that cannot be seen, or turn the direction of others, are told by their number.
function shown(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f\u200b-\u200f\u202a-\u202e\u2066-\u2069]/g, (sign) => `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

function visible(text, id) {
  if (text === undefined || text === null) return `⟨${id}⟩`;
  return shown(text).replace(/\n/g, "↵\n") || "∅";
}

function Tokens({ row, other, query }) {
  const name = query.colour in COLOURS ? query.colour : row.trainer_logprobs ? "log-ratio" : "advantage";
  const colour = COLOURS[name], box = useRef(null);
  const [at, setAt] = useState(null);
  const count = row.token_ids?.length ?? 0;
  const values = useMemo(() => Array.from({ length: count }, (_, index) => row.loss_mask[index] ? colour.of(row, index) ?? null : null), [row, name]);
  const scale = colour.scale(values);
  const differs = useMemo(() => other?.token_ids ? firstDifference(row.token_ids, other.token_ids) : count, [row, other]);
  useEffect(() => { setAt(null); }, [row]);
  const peak = () => {
    let best = null;
    for (let index = 0; index < count; index++) if (values[index] !== null && (best === null || Math.abs(values[index]) > Math.abs(values[best]))) best = index;
    if (best === null) return;
    setAt(best);
    setReady(count);
    requestAnimationFrame(() => box.current.querySelector(`[data-at="${best}"]`)?.scrollIntoView({ block: "center" }));
  };
  const over = (event) => { const one = event.target.dataset?.at; if (one !== undefined) setAt(Number(one)); };
  const [ready, setReady] = useState(PART);
  useEffect(() => {
    if (ready >= count) return undefined;
    const frame = requestAnimationFrame(() => setReady(ready + PART));
    return () => cancelAnimationFrame(frame);
  }, [ready, count]);
  const made = useRef({});
  if (made.current.row !== row || made.current.name !== name || made.current.differs !== differs) made.current = { row, name, differs, parts: [] };
  const { parts } = made.current;
  for (let begin = parts.length * PART; begin < Math.min(count, ready); begin += PART) parts.push(part(begin));
  function part(begin) {
    const spans = [];
    for (let index = begin; index < Math.min(count, begin + PART); index++) {
      const sampled = row.loss_mask[index], version = row.versions?.[index];
      if (index > 0 && sampled && row.versions && version !== row.versions[index - 1] && row.loss_mask[index - 1]) spans.push(html`<i class="version">v${version}</i>`);
      spans.push(html`<span data-at=${index} class=${`${sampled ? "" : "given"}${row.masked?.[index] ? " masked" : ""}${index >= differs && other ? " differs" : ""}`}
        style=${sampled && values[index] !== null ? { background: colour.colour(values[index] / scale) } : undefined}>${visible(row.tokens[index], row.token_ids[index])}</span>`);
    }
    return html`<div class="part" key=${begin}>${spans}</div>`;
  }
  if (!count) return html`<p class="quiet">The trace has no tokens of this rollout.</p>`;
  return html`<h3>Tokens</h3><p class="filters"><label>colour <select onChange=${(event) => setQuery({ colour: event.target.value })}>${Object.keys(COLOURS).map((one) => html`
      <option value=${one} selected=${one === name}>${one}</option>`)}</select></label> <button onClick=${peak}>largest</button>
      <span class="quiet">full colour at ${figure(scale)}; grey: given, not sampled; underlined: left out by a mask</span></p>
    <${Figures} row=${row} at=${at} />
    <div class="tokens" dir="auto" ref=${box} onMouseOver=${over} onClick=${over}>${parts}</div>`;
}

function Figures({ row, at }) {
  if (at === null) return html`<p class="figures quiet">Point at a token for its figures.</p>`;
  const one = (column, digits = 4) => figure(row[column]?.[at], digits), difference = delta(row, at);
  return html`<p class="figures"><b>${at}</b> <code>${visible(row.tokens[at], row.token_ids[at])}</code> id ${row.token_ids[at]} · version ${one("versions")} · server ${one("logprobs")} · trainer ${one("trainer_logprobs")}
    · Δ ${figure(difference, 4)} · ratio ${difference === null ? "–" : figure(Math.exp(difference), 4)} · entropy ${one("entropy")} · advantage ${one("advantages")}${row.masked?.[at]
    ? html` · <b>masked: ${row.mask_names[row.masked[at]]}</b>` : ""}</p>`;
}

function firstDifference(mine, others) {
  let index = 0;
  while (index < mine.length && mine[index] === others[index]) index++;
  return index;
}

// --- one prompt over all versions ---

export function PromptPage({ run, env, example }) {
  const state = useAnswer(`runs/${encodeURIComponent(run)}/prompt?${new URLSearchParams({ env, example })}`, run);
  const about = useAnswer(`runs/${encodeURIComponent(run)}`, run);
  return html`<h1>${env} ${example}</h1><${Tabs} run=${run} traced=${about.value?.traced} />
    <${Answer} state=${state}>${(told) => {
      const parts = [["step", "In training", told.train], ["eval", "In evaluations", told.eval]].filter(([, , rows]) => rows.length);
      if (!parts.length) return html`<p>No trace has this prompt.</p>`;
      return parts.map(([kind, title, rows]) => html`<section key=${kind}><h2>${title}</h2>
        ${(rows[0].messages ?? []).slice(0, Math.max(1, rows[0].messages.length - 1)).filter((message) => message.role !== "assistant").slice(0, 3).map((message) => html`<${Message} message=${message} />`)}
        <div class="scroll"><table><thead><tr><th>${kind === "eval" ? "version" : "step"}</th><th>rollout</th><th>reward</th><th>accuracy</th><th>answer</th></tr></thead><tbody>
        ${rows.slice(0, 500).map((row) => html`<tr key=${`${row.step} ${row.rollout} ${row.row}`}><td>${row.step}</td><td><a href=${address([...place(run, kind, row.step), "rollout", row.rollout])}>${row.rollout}</a></td>
          <td>${figure(row.reward)}</td><td>${figure(row.accuracy, 2)}</td><td class="answer" dir="auto">${shown(answer(row))}</td></tr>`)}</tbody></table></div></section>`);
    }}<//>`;
}

function answer(row) {
  const text = row.messages.filter((message) => message.role === "assistant").map((message) => message.content).join(" … ");
  return text.length > 300 ? `${text.slice(0, 300)}…` : text;
}
