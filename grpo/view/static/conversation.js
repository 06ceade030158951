// A conversation: messages by role, tools' long outputs folded, and a map of all turns to jump by.
import { figure, html, shown, useRef, useState } from "./common.js";

const LONG = 20_000; // characters that are put on the page at once
const FOLDED = 400; // characters of a tool's output that is shown whole

const textOf = ({ content }) => (typeof content === "string" ? content : content === null || content === undefined
    ? "" : JSON.stringify(content, null, 1));
const isWrong = (message) => Boolean(message.error);
const isFolded = (message) => message.role === "tool"
    && (textOf(message).length > FOLDED || textOf(message).split("\n").length > 8);

export function Message({ message, id }) {
  const text = textOf(message), name = `${message.role}${message.name ? ` ${message.name}` : ""}`;
  const [whole, setWhole] = useState(text.length < LONG);
  const body = html`<pre dir="auto">${shown(whole ? text : text.slice(0, LONG))}</pre>${!whole
    && html`<button onClick=${() => setWhole(true)}>all ${figure(text.length)} characters</button>`}`;
  const folds = isFolded(message);
  return html`<div class=${`message ${message.role}${isWrong(message) ? " wrong" : ""}`} id=${id}>
    ${folds ? html`<details><summary>${name}, ${figure(text.length)} characters: <span>${shown(text.slice(0, 80))}…</span>
        </summary>${body}</details>`
      : html`<b>${name}</b>${body}`}
    ${(message.tool_calls ?? []).map((call) => html`<pre
        class="call">${call.function?.name ?? ""}(${call.function?.arguments ?? JSON.stringify(call)})</pre>`)}
    ${isWrong(message) && html`<p class="bad">✗ ${message.error}</p>`}</div>`;
}

export function Conversation({ messages, name }) {
  const box = useRef(null);
  const id = (index) => `${name}-${index}`.replace(/[^\w-]/g, "-");
  const [fold, setFold] = useState(true);
  const all = (open) => {
    for (const one of box.current.querySelectorAll("details")) one.open = open;
    setFold(!open);
  };
  // One stop for Tab; the arrows go through the map.
  const step = (event) => {
    const { nextElementSibling: next, previousElementSibling: before } = event.target;
    const to = { ArrowDown: next, ArrowRight: next, ArrowUp: before, ArrowLeft: before }[event.key];
    if (to) { to.focus(); event.preventDefault(); }
  };
  const jump = (index) => document.getElementById(id(index))?.scrollIntoView({ block: "start" });
  if (!messages.length) return html`<p class="quiet">The trace has no conversation of this row.</p>`;
  const turns = messages.filter((one) => one.role === "assistant").length;
  const list = messages.map((message, index) => html`<${Message} key=${index} id=${id(index)} message=${message} />`);
  if (messages.length < 5) return html`<div ref=${box}>${list}</div>`;
  return html`<p class="fields quiet">${turns} answers, ${messages.length} messages${messages.some(isWrong)
      ? `, ${messages.filter(isWrong).length} with an error` : ""}
      ${messages.some(isFolded) && html`<button
          onClick=${() => all(fold)}>${fold ? "unfold all" : "fold all"}</button>`}</p>
    <div class="talk"><nav class="map" aria-label=${`messages of ${name}; arrow keys go from one to the next`}
      onKeyDown=${step}>${messages.map((message, index) => html`<button
      key=${index}
      class=${`${message.role}${isWrong(message) ? " wrong" : ""}`} style=${{ flexGrow: Math.sqrt(textOf(message).length + 1) }}
      title=${`${index + 1}: ${message.role}, ${textOf(message).slice(0, 60)}`}
          tabindex=${index ? -1 : 0} aria-label=${`message ${index + 1}, ${message.role}`}
      onClick=${() => jump(index)}></button>`)}</nav><div ref=${box}>${list}</div></div>`;
}

// Who spawned whom: the rows of a rollout and of its sub-episodes by their ids, `12/0.1` being the second child of `12/0`.
export function Tree({ rows, id }) {
  const names = [...new Set(rows.map((row) => row.rollout))];
  if (names.length < 2) return null;
  const under = (name) => names.filter((one) => one.slice(0, one.lastIndexOf(".")) === name && one.includes("."));
  const item = (name) => {
    const own = rows.filter((row) => row.rollout === name);
    return html`<li key=${name}><a href="#"
        onClick=${(event) => { event.preventDefault(); document.getElementById(id(name))?.scrollIntoView(); }}>${name}</a>${" "}
      <span class="quiet">${[...new Set(own.map((row) => row.role).filter(Boolean))].join(", ")} reward ${figure(own[0].reward,
        2)},${" "}
      ${figure(own.reduce((sum, row) => sum + (row.num_tokens ?? 0), 0))} tokens</span>
      ${under(name).length > 0 && html`<ul>${under(name).map(item)}</ul>`}</li>`;
  };
  const roots = names.filter((name) => !names.includes(name.slice(0, name.lastIndexOf("."))) || !name.includes("."));
  return html`<details class="tree" open=${names.length < 12}><summary>${names.length} episodes</summary>
      <ul>${roots.map(item)}</ul></details>`;
}
