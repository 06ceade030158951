// What all pages share: asking the server, the address, live changes, keys, small parts, figures as text.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact-htm.js";

export * from "./vendor/preact-htm.js";

// --- the server ---

// An exported report carries its answers with it; see grpo/view/export.py.
const embedded = document.getElementById("answers");
const answers = embedded ? JSON.parse(embedded.textContent) : null;

export const isReport = answers !== null;

export async function ask(path) {
  if (answers) {
    const plain = path.replace(/\?.*/, ""); // a report has all of a step's texts, and curves once
    if (path in answers) return answers[path];
    if (/\/(texts|curves)$/.test(plain) && plain in answers) return answers[plain];
    throw new Error("This is not in the report; open the run with `grpo view`.");
  }
  const response = await fetch(`api/${path}`);
  if (response.ok) return response.json();
  const said = await response.text();
  let message = said;
  try { message = JSON.parse(said).detail ?? said; } catch { /* plain text */ }
  throw new Error(message || `status ${response.status}`);
}

const listeners = new Set();

export function listen() {
  if (isReport) return;
  const events = new EventSource("api/events");
  events.onmessage = (event) => {
    const name = JSON.parse(event.data);
    for (const tell of listeners) tell(name);
  };
  const live = (state) => { document.body.dataset.live = state; };
  events.onopen = () => live("yes");
  events.onerror = () => live("no");
}

// The answer to `path`, asked again whenever `run` has changed (null: any run).
export function useAnswer(path, run) {
  const [state, setState] = useState({ path: null });
  useEffect(() => {
    let current = true, asking = false, again = false;
    const load = async () => {
      if (asking) { again = true; return; }
      asking = true;
      try {
        const value = await ask(path);
        if (current) setState({ path, value });
      } catch (error) {
        if (current) setState((old) => ({ path, value: old.path === path ? old.value : undefined, error: error.message }));
      }
      asking = false;
      if (again && current) { again = false; load(); }
    };
    load();
    const changed = (name) => { if (run === null || name === run) load(); };
    if (run !== undefined) listeners.add(changed);
    return () => { current = false; listeners.delete(changed); };
  }, [path, run]);
  return state.path === path ? state : { path };
}

// Shows what an answer has become, or that it is awaited, or why there is none.
export function Answer({ state, children }) {
  if (state.value !== undefined) return children(state.value);
  if (state.error) return html`<p class="error" role="alert">${state.error}</p>`;
  return html`<p class="quiet" aria-live="polite">reading…</p>`;
}

// --- the address: #/part/part?name=value ---

export function parseAddress(hash) {
  const [path, query] = hash.replace(/^#?\/?/, "").split("?");
  return {
    parts: path.split("/").filter(Boolean).map(decodeURIComponent),
    query: Object.fromEntries(new URLSearchParams(query ?? "")),
  };
}

export function address(parts, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const path = parts.map(encodeURIComponent).join("/");
  return `#/${path}${given.length ? `?${new URLSearchParams(given)}` : ""}`;
}

export function go(parts, query) { location.hash = address(parts, query); }

// Changes some of the address's query in place.
export function setQuery(change) {
  const { parts, query } = parseAddress(location.hash);
  history.replaceState(null, "", address(parts, { ...query, ...change }));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

export function useAddress() {
  const [place, setPlace] = useState(parseAddress(location.hash));
  // As soon as a page is seen: an address that is opened before it was painted would be lost.
  useLayoutEffect(() => {
    const moved = () => setPlace(parseAddress(location.hash));
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  return place;
}

// --- keys: page(s) may tell what `j` and `k` do ---

const keys = new Map();

// As soon as a page is seen, not after it was painted: a key pressed in between would be lost.
export function useKeys(handlers, dependencies) {
  useLayoutEffect(() => {
    for (const [key, handler] of Object.entries(handlers)) keys.set(key, handler);
    return () => { for (const [key, handler] of Object.entries(handlers)) if (keys.get(key) === handler) keys.delete(key); };
  }, dependencies);
}

export function onKey(event) {
  const typing = event.target.closest?.("input, select, textarea");
  if (event.key === "Escape" && typing) { typing.blur(); return; }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const handler = keys.get(event.key);
  if (handler) { event.preventDefault(); handler(); }
}

// --- small parts ---

// Text of a model: signs that cannot be seen, or turn the direction of others, are told by their number.
export function shown(text) {
  return text.replace(
    /[\u0000-\u0008\u000b-\u001f\u007f\u200b-\u200f\u202a-\u202e\u2066-\u2069]/g,
    (sign) => `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}

// Two lines of a text; all of it on demand.
export function Clip({ text, children }) {
  const [open, setOpen] = useState(false);
  const [long, setLong] = useState(false);
  const box = useRef(null);
  useLayoutEffect(() => {
    setOpen(false);
    setLong(box.current ? box.current.scrollHeight > box.current.clientHeight + 4 : false);
  }, [text, children?.length]);
  if (text === null || text === undefined) return html`<span class="quiet">–</span>`;
  return html`<div ref=${box} class=${`clip${open ? " open" : ""}`} dir="auto">${children ?? (shown(text) || "∅")}</div>
    ${long && html`<button class="plain" aria-expanded=${open}
        onClick=${() => setOpen(!open)}>${open ? "less" : "more"}</button>`}`;
}

// What is wider than its place can be moved there, by keys too.
export function Scroll({ label, children }) {
  const box = useRef(null);
  const [wide, setWide] = useState(false);
  useEffect(() => {
    const look = () => setWide(box.current.scrollWidth > box.current.clientWidth + 1);
    const watch = new ResizeObserver(look);
    watch.observe(box.current);
    watch.observe(box.current.firstElementChild ?? box.current);
    return () => watch.disconnect();
  }, []);
  return html`<div class="scroll" ref=${box} role=${wide ? "region" : undefined} aria-label=${wide ? label : undefined}
    tabindex=${wide ? 0 : undefined}>${children}</div>`;
}

// A table whose rows become cards on a narrow page. `columns`: [{ name, label, num, cell(row), sort }].
export function Table({ label, columns, rows, keyOf, sort, onSort, classOf, kind = "" }) {
  const down = sort?.startsWith("-"), by = sort?.replace(/^-/, "");
  const order = (one) => (one.name === by ? (down ? "descending" : "ascending") : undefined);
  const arrow = (one) => (one.name === by ? (down ? " ↓" : " ↑") : "");
  const next = (one) => (one.name === by ? (down ? one.name : `-${one.name}`) : one.num ? `-${one.name}` : one.name);
  return html`<${Scroll} label=${label}><table class=${`cards ${kind}`} aria-label=${label}>
    <thead><tr>${columns.map((one) => html`<th key=${one.name} scope="col" class=${one.num ? "num" : ""} aria-sort=${order(one)}>
      ${onSort && one.sort !== false
        ? html`<button class="plain" onClick=${() => onSort(next(one))}>${one.label ?? one.name}${arrow(one)}</button>`
        : one.label ?? one.name}</th>`)}</tr></thead>
    <tbody>${rows.map((row, index) => html`<tr key=${keyOf(row)} class=${classOf?.(row, index) ?? ""}>${columns.map((one) => {
      const cell = one.cell(row, index);
      return html`<td key=${one.name} data-label=${one.label ?? one.name} class=${`${one.num ? "num " : ""}${one.kind ?? ""}${
        cell === null || cell === undefined || cell === "" ? " none" : ""}`}>${cell ?? ""}</td>`;
    })}</tr>`)}</tbody></table><//>`;
}

export function Pages({ page, num, onPage, what }) {
  if (num <= 1) return null;
  return html`<nav class="pages" aria-label=${`pages of ${what}`}>
    <button disabled=${page === 0} onClick=${() => onPage(page - 1)}>← previous</button>
    <span>page ${page + 1} of ${num}</span>
    <button disabled=${page === num - 1} onClick=${() => onPage(page + 1)}>next →</button></nav>`;
}

export function Choice({ label, value, options, onChange }) {
  return html`<label class="short">${label} <select value=${value} onChange=${(event) => onChange(event.target.value)}>
    ${options.map((one) => {
      const [name, text] = Array.isArray(one) ? one : [one, one];
      return html`<option key=${name} value=${name} selected=${name === value}>${text}</option>`;
    })}</select></label>`;
}

// A field that tells a moment after the last key, so that each key need not ask the server.
export function Search({ id = "search", label, value, onChange, wait = 150 }) {
  const [text, setText] = useState(value);
  const timer = useRef(0);
  useEffect(() => { setText(value); }, [value]);
  useEffect(() => () => clearTimeout(timer.current), []);
  const typed = (event) => {
    const now = event.target.value;
    setText(now);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => onChange(now), wait);
  };
  return html`<label>${label} <input id=${id} type="search" value=${text} onInput=${typed} /></label>`;
}

// --- figures ---

export function nearest(steps, step) {
  return steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best));
}

export const runPath = (run, ...parts) => ["runs", encodeURIComponent(run), ...parts].join("/");

export function figure(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 10 ** -digits) return digits === 0 ? "0" : value.toExponential(1);
  return value.toFixed(digits);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 100) return `${value.toFixed(1)} s`;
  const minutes = Math.floor(value / 60);
  return minutes < 100 ? `${minutes} min ${Math.round(value % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${+(100 * share).toFixed(share > 0.1 && share < 0.995 ? 0 : 1)}%`;
}

// Least and greatest of numbers, however many; null where there are none.
export function range(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value === null || value === undefined) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : null;
}

// A colour between two ends for a number in [-1, 1]: orange below 0, blue above; the page's style says which tones.
export function diverging(share) {
  const strength = Math.min(1, Math.abs(share ?? 0));
  const tone = share < 0 ? "var(--low)" : "var(--high)";
  return `color-mix(in srgb, ${tone} calc(var(--full) * ${(0.06 + 0.94 * strength).toFixed(3)}), transparent)`;
}

export function sequential(share) {
  return `color-mix(in srgb, var(--heat) calc(var(--full) * ${Math.min(1, Math.max(0, share ?? 0)).toFixed(3)}), transparent)`;
}
