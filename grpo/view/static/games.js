// The page of games: ratings with their errors, the exact judge beside them, who beats whom, and the newest games.
import { Answer, Scroll, Table as Rows, address, figure, html, percent, range, runPath, useAnswer } from "./common.js";
import { Curve } from "./charts.js";
import { Frame } from "./run.js";

const MAX_COLUMNS = 24;

export function GamesPage({ run }) {
  const state = useAnswer(runPath(run, "games"), run);
  return html`<${Frame} run=${run} here="games" title="games">${(one) => html`<${Answer}
      state=${state}>${(tables) => (tables.length === 0
    ? html`<p>No games against other players yet. They are rated once a role is bound to one, as an earlier snapshot; where one
        policy has all roles, its reward by role is on the overview.</p>`
    : tables.map((table) => html`<${Table} key=${table.env} run=${run} table=${table}
      traced=${one?.traced ?? []} />`))}<//>`}<//>`;
}

function versionOf(name) {
  const found = /^v(\d+)/.exec(name);
  return found ? Number(found[1]) : null;
}

function Table({ run, table, traced }) {
  const judged = Object.keys(table.judged).map(Number);
  const rated = table.players.filter((one) => versionOf(one.name) !== null).sort((a, b) => versionOf(a.name) - versionOf(b.name));
  return html`<h2>${table.env}: ${figure(table.num_games)} games</h2>
    ${warningsOf(table)
      .map((text) => html`<p key=${text} class="note" role="status">${text}</p>`)}
    <div class="charts"><${Ratings} rated=${rated} />
      ${judged.length > 0 && html`<${Curve} title="NashConv by the exact judge: what the best opponents win, 0 is perfect"
          steps=${judged}
        series=${[{ label: "NashConv", values: Object.values(table.judged) }]} />`}</div>
    <${Matrix} table=${table} />
    <h3>Strongest players</h3><${Rows} label="strongest players" rows=${table.players.slice(0, 30)} keyOf=${(one) => one.name}
      columns=${[
      { name: "player", cell: (one) => one.name }, { name: "Elo", num: true, cell: (one) => figure(Math.round(one.elo)) },
      { name: "standard error", num: true, cell: (one) => figure(Math.round(one.sigma)) },
      { name: "games", num: true, cell: (one) => figure(one.games) }]} />
    <h3>Newest games</h3><${Rows} label="newest games" rows=${table.newest}
      keyOf=${(one) => `${one.rollout} ${one.role} ${one.other_role}`} columns=${[
      { name: "game", cell: (one) => (traced.includes(one.step)
        ? html`<a href=${address(["run", run, "step", one.step, "rollout", one.rollout])}>${one.rollout}</a>` : one.rollout) },
      { name: "step", num: true, cell: (one) => figure(one.step) },
      { name: "policy", cell: (one) => html`<span title=${one.digest}>${one.player}</span>` },
          { name: "as", cell: (one) => one.role },
      { name: "against", cell: (one) => html`<span title=${one.other_digest}>${one.other}</span>` },
      { name: "other", label: "as", cell: (one) => one.other_role },
      { name: "result", cell: (one) => html`<span class=${one.score > 0.5 ? "good" : one.score < 0.5
          ? "bad" : "quiet"}>${result(one.score)}</span>` }]} />`;
}

function warningsOf({ cycles, disagree }) {
  const beaten = cycles.slice(0, 8).map((one) =>
    `Cycle: ${one.player} won ${percent(one.won)} of ${one.games} games against ${one.other}, and their ratings say`
    + ` ${percent(one.expected)}.`);
  const judged = disagree.map((one) =>
    `Ratings and judge disagree: version ${one.later} is rated ${figure(one.elo)} ± ${figure(one.sigma)} against version`
    + ` ${one.earlier}, and its NashConv is ${figure(one.nash_conv)} off.`);
  return [...beaten, ...judged];
}

const result = (score) => (score > 0.5 ? "✓ won" : score < 0.5 ? "✗ lost" : "– drawn");

// Elo by version, with two standard errors either way.
function Ratings({ rated }) {
  const span = range(rated.flatMap((one) => [one.elo - 2 * one.sigma, one.elo + 2 * one.sigma]));
  if (!span) return null;
  const [low, high] = span, versions = rated.map((one) => versionOf(one.name));
  const [first, last] = [versions[0], versions.at(-1)];
  const x = (version) => 44 + 340 * (version - first) / Math.max(1, last - first), y = (elo) =>
      150 - 138 * (elo - low) / (high - low || 1);
  const said = rated.map((one) => `${one.name} ${Math.round(one.elo)} ± ${Math.round(one.sigma)}`);
  return html`<figure class="chart"><figcaption>Elo by version, with two standard errors</figcaption>
    <svg class="ratings" viewBox="0 0 400 170" role="img" aria-label=${`Elo by version: ${said.slice(-12).join(", ")}`}>
      ${[low, (low + high) / 2, high].map((elo) => html`<g key=${elo}><line class="grid" x1="40" x2="390" y1=${y(elo)}
          y2=${y(elo)} /><text x="36" y=${y(elo) + 4} text-anchor="end">${Math.round(elo)}</text></g>`)}
      ${[...new Set([first, last])].map((version) => html`<text key=${version} x=${x(version)} y="166"
          text-anchor="middle">v${version}</text>`)}
      ${rated.map((one, index) => html`<g key=${one.name}><title>${said[index]}, ${one.games} games</title>
        <line class="spread" x1=${x(versions[index])} x2=${x(versions[index])} y1=${y(one.elo - 2 * one.sigma)}
          y2=${y(one.elo + 2 * one.sigma)} />
        <circle cx=${x(versions[index])} cy=${y(one.elo)} r="2.4" /></g>`)}</svg></figure>`;
}

// The share of games that the player of the row won against that of the column.
function Matrix({ table }) {
  const by = new Map(table.pairs.map((one) => [`${one.player} ${one.other}`, one]));
  const met = (name) => table.pairs.filter((one) => one.player === name).length;
  const order = (a, b) => (versionOf(a) ?? -1) - (versionOf(b) ?? -1);
  const names = [...new Set(table.pairs.map((one) => one.player))].sort((a, b) => met(b) - met(a)).slice(0,
      MAX_COLUMNS).sort(order);
  return html`<h3>Who beats whom: share won by the row against the column</h3>
    <${Scroll} label="who beats whom"><table class="matrix"><thead><tr>
      <th><span class="hidden">player</span></th>${names.map((name) => html`<th key=${name} scope="col">${name}</th>`)}</tr>
        </thead><tbody>
    ${names.map((row) => html`<tr key=${row}><th scope="row">${row}</th>${names.map((column) => {
      const one = by.get(`${row} ${column}`);
      if (!one) return html`<td key=${column} class="quiet">·</td>`;
      const num = one.won + one.drawn + one.lost, share = (one.won + one.drawn / 2) / num;
      return html`<td key=${column} class=${share > 0.5 ? "good" : share < 0.5 ? "bad" : ""}
          title=${`${one.won} won, ${one.drawn} drawn, ${one.lost} lost`}>${percent(share)}</td>`;
    })}</tr>`)}</tbody></table><//>`;
}
