// The page of games: ratings with their errors, the exact judge beside them, who beats whom, and the newest games.
import { Answer, address, figure, html, range, useAnswer } from "./common.js";
import { Curve } from "./charts.js";
import { Tabs } from "./run.js";

const MAX_COLUMNS = 24;

export function GamesPage({ run }) {
  const state = useAnswer(`runs/${encodeURIComponent(run)}/games`, run);
  const about = useAnswer(`runs/${encodeURIComponent(run)}`, run);
  return html`<h1>${run}: games</h1><${Tabs} run=${run} here="games" traced=${about.value?.traced} /><${Answer} state=${state}>${(tables) =>
    tables.length === 0 ? html`<p>No games yet. A game is a rollout in which a role is bound to a player, once its batch has left.</p>`
      : tables.map((table) => html`<${Table} key=${table.env} run=${run} table=${table} traced=${about.value?.traced ?? []} />`)}<//>`;
}

function versionOf(name) {
  const found = /^v(\d+)/.exec(name);
  return found ? Number(found[1]) : null;
}

function Table({ run, table, traced }) {
  const judged = Object.keys(table.judged).map(Number);
  const rated = table.players.filter((one) => versionOf(one.name) !== null).sort((a, b) => versionOf(a.name) - versionOf(b.name));
  return html`<h2>${table.env}: ${figure(table.num_games)} games</h2>
    ${[...table.cycles.slice(0, 8).map((one) => `Cycle: ${one.player} won ${percent(one.won)} of ${one.games} games against ${one.other}, and their ratings say ${percent(one.expected)}.`),
      ...table.disagree.map((one) => `Ratings and judge disagree: version ${one.later} is rated ${figure(one.elo)} ± ${figure(one.sigma)} against version ${one.earlier}, and its NashConv is ${figure(one.nash_conv)} off.`)]
      .map((text) => html`<p key=${text} class="warning" role="status">⚠ ${text}</p>`)}
    <div class="charts"><${Ratings} rated=${rated} />
      ${judged.length > 0 && html`<${Curve} title="NashConv by the exact judge: what the best opponents win, 0 is perfect" steps=${judged}
        series=${[{ label: "NashConv", values: Object.values(table.judged) }]} />`}</div>
    <${Matrix} table=${table} />
    <h3>Strongest players</h3><div class="scroll"><table><thead><tr><th>player</th><th>Elo</th><th>standard error</th><th>games</th></tr></thead><tbody>
      ${table.players.slice(0, 30).map((one) => html`<tr key=${one.name}><td>${one.name}</td><td>${figure(Math.round(one.elo))}</td><td>${figure(Math.round(one.sigma))}</td><td>${figure(one.games)}</td></tr>`)}</tbody></table></div>
    <h3>Newest games</h3><div class="scroll"><table class="games"><thead><tr><th>game</th><th>step</th><th>policy</th><th>as</th><th>against</th><th>as</th><th>result</th></tr></thead><tbody>
      ${table.newest.map((one) => html`<tr key=${`${one.rollout} ${one.role} ${one.other_role}`}><td>${traced.includes(one.step)
        ? html`<a href=${address(["run", run, "step", one.step, "rollout", one.rollout])}>${one.rollout}</a>` : one.rollout}</td><td>${one.step}</td>
        <td title=${one.digest}>${one.player}</td><td>${one.role}</td><td title=${one.other_digest}>${one.other}</td><td>${one.other_role}</td>
        <td class=${one.score > 0.5 ? "good" : one.score < 0.5 ? "bad" : "quiet"}>${one.score > 0.5 ? "won" : one.score < 0.5 ? "lost" : "drawn"}</td></tr>`)}</tbody></table></div>`;
}

function percent(share) { return `${Math.round(100 * share)} %`; }

// Elo by version, with two standard errors either way.
function Ratings({ rated }) {
  const span = range(rated.flatMap((one) => [one.elo - 2 * one.sigma, one.elo + 2 * one.sigma]));
  if (!span) return null;
  const [low, high] = span, versions = rated.map((one) => versionOf(one.name));
  const [first, last] = [versions[0], versions.at(-1)];
  const x = (version) => 44 + 340 * (version - first) / Math.max(1, last - first), y = (elo) => 150 - 138 * (elo - low) / (high - low || 1);
  const said = rated.map((one) => `${one.name} ${Math.round(one.elo)} ± ${Math.round(one.sigma)}`);
  return html`<figure class="chart"><figcaption>Elo by version, with two standard errors</figcaption>
    <svg class="ratings" viewBox="0 0 400 170" role="img" aria-label=${`Elo by version: ${said.slice(-12).join(", ")}`}>
      ${[low, (low + high) / 2, high].map((elo) => html`<g key=${elo}><line class="grid" x1="40" x2="390" y1=${y(elo)} y2=${y(elo)} /><text x="36" y=${y(elo) + 4} text-anchor="end">${Math.round(elo)}</text></g>`)}
      ${[...new Set([first, last])].map((version) => html`<text key=${version} x=${x(version)} y="166" text-anchor="middle">v${version}</text>`)}
      ${rated.map((one, index) => html`<g key=${one.name}><title>${said[index]}, ${one.games} games</title>
        <line class="error" x1=${x(versions[index])} x2=${x(versions[index])} y1=${y(one.elo - 2 * one.sigma)} y2=${y(one.elo + 2 * one.sigma)} />
        <circle cx=${x(versions[index])} cy=${y(one.elo)} r="2.4" /></g>`)}</svg></figure>`;
}

// The share of games that the player of the row won against that of the column.
function Matrix({ table }) {
  const by = new Map(table.pairs.map((one) => [`${one.player} ${one.other}`, one]));
  const met = (name) => table.pairs.filter((one) => one.player === name).length;
  const order = (a, b) => (versionOf(a) ?? -1) - (versionOf(b) ?? -1);
  const names = [...new Set(table.pairs.map((one) => one.player))].sort((a, b) => met(b) - met(a)).slice(0, MAX_COLUMNS).sort(order);
  return html`<h3>Who beats whom: share won by the row against the column</h3>
    <div class="scroll"><table class="matrix"><thead><tr><th></th>${names.map((name) => html`<th key=${name} scope="col">${name}</th>`)}</tr></thead><tbody>
    ${names.map((row) => html`<tr key=${row}><th scope="row">${row}</th>${names.map((column) => {
      const one = by.get(`${row} ${column}`);
      if (!one) return html`<td key=${column} class="quiet">·</td>`;
      const num = one.won + one.drawn + one.lost, share = (one.won + one.drawn / 2) / num;
      return html`<td key=${column} class=${share > 0.5 ? "good" : share < 0.5 ? "bad" : ""} title=${`${one.won} won, ${one.drawn} drawn, ${one.lost} lost`}>${percent(share)}</td>`;
    })}</tr>`)}</tbody></table></div>`;
}
