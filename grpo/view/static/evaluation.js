// Two evaluations beside each other: what became right and what became wrong, with both answers; one prompt over all versions.
import { Answer, Choice, Clip, Pages, Search, Table, address, figure, html, percent, runPath, setQuery, shown, useAnswer,
    useMemo } from "./common.js";
import { Frame } from "./run.js";
import { Message } from "./conversation.js";

const PAGE = 10;

export function EvaluationPage({ run, query }) {
  const wanted = new URLSearchParams(Object.entries(query).filter(([name]) => name === "before" || name === "after")).toString();
  const state = useAnswer(runPath(run, `evaluation${wanted ? `?${wanted}` : ""}`), run);
  return html`<${Frame} run=${run} here="evaluation" title="evaluation">${() => html`<${Answer} state=${state}>${(told) =>
    (told.versions.length ? html`<${Compared} run=${run} told=${told}
        query=${query} />` : html`<p>There is no trace of an evaluation yet.</p>`)}<//>`}<//>`;
}

const KINDS = {
  right: ["newly right", (one) => one.before < one.after], wrong: ["newly wrong", (one) => one.before > one.after],
  still: ["still wrong", (one) => one.before < 1 && one.before === one.after], all: ["all", () => true],
};

function Compared({ run, told, query }) {
  const [before, after] = told.compared, versions = told.versions.map((one) => [String(one), `v${one}`]);
  const envs = [...new Set(told.examples.map((one) => one.env))];
  const mean = (rows, key) => rows.reduce((sum, one) => sum + one[key], 0) / Math.max(1, rows.length);
  const ks = Object.keys(told.pass[after] ?? {});
  const kind = query.kind in KINDS ? query.kind : Object.keys(KINDS).find((name) => told.examples.some(KINDS[name][1])) ?? "all";
  const rows = told.examples.filter(KINDS[kind][1]), page = Math.min(Number(query.page ?? 0),
      Math.max(0, Math.ceil(rows.length / PAGE) - 1));
  const [open] = [rows.slice(page * PAGE, (page + 1) * PAGE)];
  const texts = [before, after].map((version, side) => useAnswer(runPath(run, "eval", version,
    `texts?tokens=true&rollouts=${encodeURIComponent(open.map((one) => one.rollouts[side]).join(",") || "none")}`)));
  const option = (name) => [name, `${KINDS[name][0]} (${told.examples.filter(KINDS[name][1]).length})`];
  return html`<form class="fields" onSubmit=${(event) => event.preventDefault()}>
      <${Choice} label="before" value=${String(before)} options=${versions}
        onChange=${(value) => setQuery({ before: value, page: "" })} />
      <${Choice} label="after" value=${String(after)} options=${versions}
        onChange=${(value) => setQuery({ after: value, page: "" })} />
      <${Choice} label="show" value=${kind} options=${Object.keys(KINDS).map(option)}
        onChange=${(value) => setQuery({ kind: value, page: "" })} /></form>
    <${Table} label="accuracy by environment"
      rows=${envs.map((env) => ({ env, rows: told.examples.filter((one) => one.env === env) }))} keyOf=${(one) => one.env}
          columns=${[
      { name: "environment", cell: (one) => one.env }, { name: "examples", num: true, cell: (one) => figure(one.rows.length) },
      { name: "before", label: `v${before}`, num: true, cell: (one) => percent(mean(one.rows, "before")) },
      { name: "after", label: `v${after}`, num: true, cell: (one) => percent(mean(one.rows, "after")) }]} />
    <h2>${KINDS[kind][0]} <span class="quiet">${rows.length}</span></h2>
    ${rows.length === 0 && html`<p class="quiet">None.</p>`}
    <ul class="cases">${open.map((one) => html`<${Case} key=${`${one.env} ${one.example}`} run=${run} one=${one}
      versions=${[before, after]}
      texts=${texts.map((state, side) => state.value?.[one.rollouts[side]])} />`)}</ul>
    <${Pages} what="examples" page=${page} num=${Math.ceil(rows.length / PAGE)} onPage=${(value) => setQuery({ page: value })} />
    <h2>pass@k</h2><${Table} label="pass at k by version" rows=${Object.keys(told.pass)} keyOf=${(version) => version} columns=${[
      { name: "version", cell: (version) => `v${version}` },
      ...ks.map((k) => ({ name: `k = ${k}`, num: true, cell: (version) => percent(told.pass[version][k]) }))]} />`;
}

function Case({ run, one, versions, texts }) {
  const [before, after] = texts;
  const marks = useMemo(() => (before && after ? difference(before.tokens ?? [before.answer ?? ""],
      after.tokens ?? [after.answer ?? ""]) : null), [before, after]);
  const side = (number) => html`<div><a href=${address(["run", run, "eval", versions[number], "rollout",
      one.rollouts[number]])}>v${versions[number]}</a>
    <span class=${[one.before, one.after][number] >= 1 ? "good" : "bad"}> ${[one.before, one.after][number] >= 1
      ? "✓ right" : `✗ ${[one.before, one.after][number] ? percent([one.before, one.after][number]) : "wrong"}`}</span>
    <${Clip} text=${texts[number]?.answer}>${marks
      && marks[number].map(([text, differs]) =>
        (differs ? (number ? html`<ins>${shown(text)}</ins>` : html`<del>${shown(text)}</del>`) : shown(text)))}<//></div>`;
  return html`<li><a href=${address(["run", run, "prompt", one.env, one.example])}>${one.env} ${one.example}</a>
    <${Clip} text=${after?.prompt ?? before?.prompt ?? ""} />
    ${(after?.right ?? before?.right) != null && html`<div class="facts"><span class="quiet">right answer</span>
        <${Clip} text=${after?.right ?? before?.right} /></div>`}
    <div class="pair">${side(0)}${side(1)}</div></li>`;
}

// Both sequences in parts [text, whether the other lacks it], by the longest common subsequence.
export function difference(mine, others) {
  const kept = common(mine, others), parts = (tokens, side) => tokens.map((text, index) => [text, !kept[side].has(index)]);
  return [parts(mine, 0), parts(others, 1)];
}

// Indices of both sequences that belong to a longest common subsequence; of very long ones only what is equal at both ends.
export function common(mine, others) {
  const kept = [new Set(), new Set()];
  let begin = 0, end = 0;
  const most = Math.min(mine.length, others.length);
  while (begin < most && mine[begin] === others[begin]) { kept[0].add(begin); kept[1].add(begin); begin++; }
  while (end < most - begin && mine.at(-1 - end) === others.at(-1 - end)) {
    kept[0].add(mine.length - 1 - end);
    kept[1].add(others.length - 1 - end);
    end++;
  }
  const rows = mine.length - begin - end, columns = others.length - begin - end;
  if (rows * columns === 0 || rows * columns > 4e6) return kept;
  const width = columns + 1, length = new Uint32Array((rows + 1) * width);
  for (let i = rows - 1; i >= 0; i--) for (let j = columns - 1; j >= 0; j--) {
    length[i * width + j] = mine[begin + i] === others[begin + j] ? length[(i + 1) * width + j + 1] + 1
      : Math.max(length[(i + 1) * width + j], length[i * width + j + 1]);
  }
  for (let i = 0, j = 0; i < rows && j < columns;) {
    if (mine[begin + i] === others[begin + j]) { kept[0].add(begin + i++); kept[1].add(begin + j++); }
    else if (length[(i + 1) * width + j] >= length[i * width + j + 1]) i++;
    else j++;
  }
  return kept;
}

export function PromptPage({ run, env, example, query }) {
  const state = useAnswer(runPath(run, `prompt?${new URLSearchParams({ env, example })}`), run);
  return html`<${Frame} run=${run} here="prompt" title=${`${env} ${example}`}>${() => html`<${Answer} state=${state}>${(told) => {
    const parts = [["step", "In training", told.train], ["eval", "In evaluations", told.eval]].filter(([, , rows]) =>
        rows.length);
    if (!parts.length) return html`<p>No trace has this prompt.</p>`;
    const find = (query.find ?? "").toLowerCase(), answer = (row) =>
        row.messages.filter((one) => one.role === "assistant").map((one) => one.content).join(" … ");
    const first = parts[0][2][0], asked = first.messages.slice(0, first.messages.findIndex((one) => one.role === "assistant"));
    return html`${asked.slice(0, 3).map((message) => html`<${Message} message=${message} />`)}
      <form class="fields" onSubmit=${(event) => event.preventDefault()}><${Search} label="find in answers"
        value=${query.find ?? ""} onChange=${(text) => setQuery({ find: text })} /></form>
      ${parts.map(([kind, title, rows]) => html`<section key=${kind}><h2>${title} <span class="quiet">${rows.length}</span></h2>
        <${Table} label=${title} kind="wide" rows=${rows.filter((row) => answer(row).toLowerCase().includes(find)).slice(0, 500)}
          keyOf=${(row) => `${row.step} ${row.rollout} ${row.row}`} columns=${[
          { name: kind === "eval" ? "version" : "step", cell: (row) => figure(row.step) },
          { name: "rollout", cell: (row) => html`<a
              href=${address(["run", run, kind, row.step, "rollout", row.rollout])}>${row.rollout}</a>` },
          { name: "reward", num: true, cell: (row) => figure(row.reward) },
              { name: "accuracy", num: true, cell: (row) => figure(row.accuracy, 2) },
          { name: "answer", kind: "text answer", cell: (row) => html`<${Clip} text=${answer(row)} />` }]} /></section>`)}`;
  }}<//>`}<//>`;
}
