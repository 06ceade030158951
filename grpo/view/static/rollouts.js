// One rollout: what it is worth, its conversation, and its tokens with their figures; another one beside it.
import {
  Answer, Choice, address, diverging, figure, go, html, range, runPath, sequential, setQuery, shown, useAnswer, useEffect,
  useKeys, useMemo, useRef, useState,
} from "./common.js";
import { Conversation, Message, Tree } from "./conversation.js";
import { common } from "./evaluation.js";

const PART = 2000; // tokens that are put on the page at once; those of a long rollout follow frame by frame
const UNKNOWN = 1; // log-probability of a token that the teacher does not know

const difference = (row, index, name) => {
  const mine = row.trainer_logprobs?.[index], others = row[name]?.[index];
  return mine === null || mine === undefined || others === null || others === undefined ? null : mine - others;
};
// How tokens can be coloured: the value, the scale of colours, and at which value it is full.
const COLOURS = {
  "log-ratio": { of: (row, index) => difference(row, index, "logprobs"), colour: diverging },
  ratio: { of: (row, index) => { const one = difference(row, index, "logprobs"); return one === null
      ? null : Math.exp(one) - 1; }, colour: diverging, most: 2 },
  advantage: { of: (row, index) => row.advantages?.[index], colour: diverging },
  entropy: { of: (row, index) => row.entropy?.[index], colour: sequential },
  surprise: { of: (row, index) => -row.logprobs[index], colour: sequential },
  teacher: { of: (row, index) => (row.teacher_logprobs?.[index] >= UNKNOWN ? null : difference(row, index, "teacher_logprobs")),
      colour: diverging },
  version: { of: (row, index) => row.versions[index] - row.versions[row.loss_mask.indexOf(true)] + 0.25, colour: sequential },
  mask: { of: (row, index) => (row.masked?.[index] ? -1 : 0), colour: diverging, most: 1 },
  none: { of: () => null, colour: () => "" },
};

function largest(values) {
  const span = range(values);
  return span ? Math.max(Math.abs(span[0]), Math.abs(span[1])) || 1 : 1;
}

const idOf = (name) => `episode-${name}`.replace(/[^\w-]/g, "-");

export function RolloutPage({ run, kind, step, rollout, query }) {
  const path = runPath(run, kind, step, "rollouts");
  const state = useAnswer(`${path}/${rollout}`, run), all = useAnswer(path, run);
  const beside = useAnswer(`${path}/${query.beside || rollout}`);
  const mine = all.value?.rollouts.find((row) => row.rollout === rollout);
  const siblings = all.value?.rollouts.filter((row) => mine && row.group === mine.group && !row.row
      && !row.rollout.includes(".")) ?? [];
  const at = siblings.findIndex((row) => row.rollout === rollout);
  const here = (row) => [["run", run, kind, step, "rollout", row.rollout], { colour: query.colour }];
  const to = (row) => row && go(...here(row));
  useKeys({ j: () => to(siblings[at + 1]), k: () => to(siblings[at - 1]) }, [at, siblings.length, query.colour]);
  const other = query.beside && beside.value;
  return html`<h1>Rollout ${rollout}</h1><p><a href=${address(["run", run])}>${run}</a> › <a
      href=${address(["run", run, kind, step])}>${kind === "eval" ? "evaluation of version" : "step"} ${step}</a></p>
    <div>${siblings.length > 1 && html`<nav class="siblings"
      aria-label="rollouts of the same group">${siblings.map((row) => html`<a key=${row.rollout}
      href=${address(...here(row))} aria-current=${row.rollout === rollout
          ? "page" : undefined}>${row.rollout.split("/").at(-1)} <b>${figure(row.reward, 2)}</b></a>`)}
      <${Choice} label="beside" value=${query.beside ?? ""} onChange=${(one) => setQuery({ beside: one })}
        options=${[["", "nothing"], ...siblings.filter((row) => row.rollout !== rollout).map((row) =>
            [row.rollout, `${row.rollout} (${figure(row.reward, 2)})`])]} /></nav>`}</div>
    <div><${Answer} state=${state}>${(rows) =>
      (rows.length === 0 ? html`<p>There is no such rollout in the trace of this step.</p>`
      : html`<div class=${other ? "beside" : ""}>${[rows, ...(other ? [other] : [])].map((own, side) => html`
        <section key=${side} aria-label=${`rollout ${own[0]?.rollout}`}><${Tree} rows=${own} id=${idOf} />
        ${own.map((row, index) => html`<${Row} key=${`${row.rollout} ${row.row}`} row=${row} run=${run} step=${step}
            other=${other ? (side ? rows : other)[index] : null}
          single=${own.length === 1} query=${query} />`)}</section>`)}</div>`)}<//></div>`;
}

function Row({ row, run, other, single, query }) {
  const facts = [
    ["reward", figure(row.reward)],
    ...(Object.keys(row.rewards).length > 1 ? Object.entries(row.rewards).map(([name, value]) =>
        [`reward of ${name}`, figure(value)]) : []),
    ...Object.entries(row.players ?? {}).map(([role, one]) => [`player of ${role}`, `${one.name} ${one.digest}`]),
    ["advantage", figure(row.advantage)], ["accuracy", figure(row.accuracy, 2)], ["tokens", figure(row.num_tokens)],
        ["temperature", figure(row.temperature, 2)],
    ["end", row.drop_reason ? `dropped: ${row.drop_reason}` : row.stop_reason],
        ["versions", [...new Set(row.versions ?? [])].map((one) => `v${one}`).join(", ")],
    ...Object.entries(row.measures).map(([name, value]) => [name, figure(value, 2)]),
  ].filter(([, value]) => value && value !== "–");
  const fields = Object.entries({ ...row.fields, ...row.extras });
  return html`<article id=${idOf(row.rollout)}><h2 class=${single ? "hidden" : ""}>${row.rollout}${row.role ? ` as ${row.role}`
      : ""}${row.row ? `, row ${row.row}` : ""}</h2>
    <p><a href=${address(["run", run, "prompt", row.env, row.example])}>${row.env} ${row.example}</a> over all versions</p>
    <dl class="facts">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${row.failure && html`<p class="note">✗ ${row.failure}</p>`}
    ${fields.length > 0 && html`<h3>The example, and what the environment says</h3>
        <dl class="facts">${fields.map(([name, value]) => html`<div key=${name}><dt>${name}</dt>
      <dd><code>${shown(typeof value === "string" ? value : JSON.stringify(value))}</code></dd></div>`)}</dl>`}
    ${row.hint && html`<h3>Hint</h3><pre class="message">${shown(row.hint)}</pre>`}
    ${(row.pairs ?? []).map((pair, index) => html`<h3 key=${index}>Preference pair, by ${pair.source}</h3>
      <${Message} message=${{ role: "preferred", content: pair.chosen }} />
        <${Message} message=${{ role: "rejected", content: pair.rejected }} />`)}
    <h3>Conversation</h3><${Conversation} messages=${row.messages} name=${`${row.rollout}-${row.row ?? 0}`} />
    <${Tokens} row=${row} other=${other} query=${query} /></article>`;
}

function visible(text, id) {
  if (text === undefined || text === null) return `⟨${id}⟩`;
  return shown(text).replace(/\n/g, "↵\n") || "∅";
}

function Tokens({ row, other, query }) {
  const name = query.colour in COLOURS ? query.colour : row.trainer_logprobs ? "log-ratio" : "advantage";
  const colour = COLOURS[name], box = useRef(null), count = row.token_ids?.length ?? 0;
  const wanted = query.at !== undefined && Number(query.row || 0) === (row.row ?? 0) ? Number(query.at) : null;
  const [at, setAt] = useState(wanted);
  const [ready, setReady] = useState(PART);
  const values = useMemo(() => Array.from({ length: count }, (_, index) => (row.loss_mask[index] ? colour.of(row, index) ?? null
      : null)), [row, name]);
  const scale = Math.min(largest(values), colour.most ?? Infinity);
  const same = useMemo(() => (other?.token_ids ? common(row.token_ids, other.token_ids)[0] : null), [row, other]);
  const show = (index) => {
    setAt(index);
    setReady(count);
    requestAnimationFrame(() => requestAnimationFrame(() =>
        box.current?.querySelector(`[data-at="${index}"]`)?.scrollIntoView({ block: "center" })));
  };
  useEffect(() => { if (wanted !== null) show(wanted); }, [wanted]);
  const peak = () => {
    let best = null;
    for (let index = 0; index < count; index++) if (values[index] !== null
        && (best === null || Math.abs(values[index]) > Math.abs(values[best]))) best = index;
    if (best !== null) show(best);
  };
  const over = (event) => { const one = event.target.dataset?.at; if (one !== undefined) setAt(Number(one)); };
  const key = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by && count) { setAt(Math.min(count - 1, Math.max(0, (at ?? -1) + by))); event.preventDefault(); }
  };
  useEffect(() => {
    if (ready >= count) return undefined;
    const frame = requestAnimationFrame(() => setReady(ready + PART));
    return () => cancelAnimationFrame(frame);
  }, [ready, count]);
  useEffect(() => {
    for (const one of box.current?.querySelectorAll(".here") ?? []) one.classList.remove("here");
    if (at !== null) box.current?.querySelector(`[data-at="${at}"]`)?.classList.add("here");
  }, [at, ready]);
  const made = useRef({});
  if (made.current.row !== row || made.current.name !== name || made.current.same !== same) made.current = { row, name, same,
      parts: [] };
  const { parts } = made.current;
  for (let begin = parts.length * PART; begin < Math.min(count, ready); begin += PART) parts.push(part(begin));
  function part(begin) {
    const spans = [];
    for (let index = begin; index < Math.min(count, begin + PART); index++) {
      const sampled = row.loss_mask[index], version = row.versions?.[index];
      if (index > 0 && sampled && row.versions && version !== row.versions[index - 1]
          && row.loss_mask[index - 1]) spans.push(html`<i class="version">v${version}</i>`);
      spans.push(html`<span data-at=${index}
          class=${`${sampled ? "" : "given"}${row.masked?.[index] ? " masked" : ""}${same && !same.has(index) ? " differs" : ""}`}
        style=${sampled && values[index] !== null ? { background: colour.colour(values[index] / scale) }
            : undefined}>${visible(row.tokens[index], row.token_ids[index])}</span>`);
    }
    return html`<div class="part" key=${begin}>${spans}</div>`;
  }
  if (!count) return html`<p class="quiet">The trace has no tokens of this rollout.</p>`;
  const choices = Object.keys(COLOURS).filter((one) => one !== "teacher" || row.teacher_logprobs);
  return html`<h3>Tokens</h3><div class="fields"><${Choice} label="colour by" value=${name} options=${choices}
      onChange=${(one) => setQuery({ colour: one })} />
      <button onClick=${peak}>largest</button>
        <span class="quiet">full colour at ${figure(scale)}; grey: given, not sampled; wavy: left out by a mask${same
          ? "; dotted: differs from the other" : ""}</span></div>
    <${Figures} row=${row} at=${at} />
    <div class="tokens" dir="auto" ref=${box} tabindex="0" role="group" aria-label="tokens; arrow keys go from one to the next"
      onKeyDown=${key} onMouseOver=${over} onClick=${over}>${parts}</div>`;
}

function Figures({ row, at }) {
  if (at === null || at >= row.token_ids.length) return html`<p
      class="figures quiet">Point at a token, or choose one with the arrow keys, for its figures.</p>`;
  const one = (column, digits = 4) => figure(row[column]?.[at], digits), ratio = row.loss_mask[at]
      ? difference(row, at, "logprobs") : null;
  const teacher = row.teacher_logprobs ? ` · teacher ${row.teacher_logprobs[at] >= UNKNOWN ? "unknown" : one("teacher_logprobs")}`
      : "";
  return html`<p class="figures" role="status">
      <b>${at}</b> <code>${visible(row.tokens[at],
        row.token_ids[at])}</code> id ${row.token_ids[at]} · version ${one("versions")} · server ${one("logprobs")}
    · trainer ${one("trainer_logprobs")}${teacher}
    · log-ratio ${figure(ratio, 4)} · ratio ${ratio === null
        ? "–" : figure(Math.exp(ratio), 4)} · entropy ${one("entropy")} · advantage ${one("advantages")}${row.masked?.[at]
    ? html` · <b>masked: ${row.mask_names[row.masked[at]]}</b>` : ""}</p>`;
}
