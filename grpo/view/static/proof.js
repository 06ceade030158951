// The page of `grpo prove`.
import { Answer, Scroll, figure, html, range, runPath, useAnswer } from "./common.js";
import { Curve } from "./charts.js";
import { Frame } from "./run.js";

export function ProofPage({ run }) {
  const state = useAnswer(runPath(run, "proof"), run);
  return html`<${Frame} run=${run} here="proof" title="proof">${() => html`<${Answer} state=${state}>${(page) => {
    // A training service has datums and checkpoints, where a run has rollouts and batches.
    const names = { datums: "rollouts", checkpoints: "batches" };
    const facts = Object.fromEntries(page.parts.map((part) => [names[part.name] ?? part.name, part.facts]));
    return html`<p class=${page.broken.length ? "bad" : page.unproved.length ? "" : "good"} role="status"><b>${page.verdict}</b>
        </p>
      <p class="quiet">Run ${page.run_id}, ${page.state}, step ${figure(page.step)}${page.max_steps === null
        ? "" : ` of ${figure(page.max_steps)}`}. The same page: <code>grpo prove</code> on the run's folder or a copy of it.</p>
      <table class="proof"><tbody>${page.parts.map((part) => html`<tr key=${part.name}><th scope="row">${part.name}</th>
        <td class=${part.broken.length ? "bad" : part.unproved.length ? "quiet" : "good"}>${part.broken.length
          ? "✗" : part.unproved.length ? "○" : "✓"}<span class="hidden"> ${part.broken.length ? "broken" : part.unproved.length
            ? "in part" : "proved"}</span></td>
        <td>${part.summary}</td></tr>`)}</tbody></table>
      <${Found} title="Broken" what="broken" found=${page.broken} /><${Found} title="Unproved" what="quiet"
        found=${page.unproved} />
      <h2>Fate of every ${facts.rollouts.refused ? "datum" : "rollout"}</h2>
      <table><tbody>${Object.entries(facts.rollouts.states ?? {}).map(([name, num]) => html`<tr key=${name}><td>${name}</td>
        <td>${figure(num)}</td></tr>`)}
      ${Object.entries(facts.rollouts.dropped ?? {}).map(([name, num]) => html`<tr key=${`dropped ${name}`}>
          <td class="quiet">dropped: ${name}</td><td>${figure(num)}</td></tr>`)}</tbody></table>
      <h2>Checks of the ledger</h2><ul class="checks">${Object.entries(facts.rollouts.checks ?? {}).map(([name, found]) =>
        html`<li key=${name} class=${found.length ? "bad" : "good"}>
        ${found.length ? "✗" : "✓"} ${name}${found.length ? html`<ul>${found.map((one) => html`<li>${one}</li>`)}</ul>`
            : ""}</li>`)}</ul>
      <${Samples} of=${facts.tokens.by_step} gaps=${facts.gradients.gaps} />
      ${facts.versions.canaries?.length > 0 && html`<${Canary} proofs=${facts.versions.canaries} />`}
      <${Digests} title="Versions on disk" files=${facts.versions.files} /><${Digests} title="Batches on disk"
        files=${facts.batches.files} />
      <${Digests} title="Code of the user" files=${facts.code.files} />`;
  }}<//>`}<//>`;
}

function Found({ title, what, found }) {
  return found.length > 0 && html`<h2>${title}</h2>
      <ul class="findings">${found.map((one) => html`<li key=${one} class=${what === "broken" ? "bad" : ""}>${one}</li>`)}</ul>`;
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
    ${witnessed.length > 0 && html`<${Curve}
        title="Witness in the gradient against that of the batch (share of its size), by step" steps=${witnessed}
      series=${[{ label: "largest difference", values: Object.values(gaps) }]} />`}</div>`;
}

function Digests({ title, files }) {
  const rows = Object.entries(files ?? {});
  return rows.length > 0 && html`<details><summary>${title} (${rows.length}), with their digests</summary>
      <${Scroll} label=${title}><table><tbody>
    ${rows.map(([name, digest]) => html`<tr key=${name}><td>${name}</td><td><code>${digest}</code></td></tr>`)}</tbody></table>
        <//></details>`;
}

// How far each server's log-probabilities of the canary were from the trainer's.
function Canary({ proofs }) {
  const versions = [...new Set(proofs.map((one) => one.version))], servers = [...new Set(proofs.map((one) => one.server))];
  const by = new Map(proofs.map((one) => [`${one.version} ${one.server}`, one.max_abs]));
  const largest = (key) => figure(range(proofs.map((one) => one[key]))[1]);
  const tolerance = figure(range(proofs.map((one) => one.tolerance))[0]);
  return html`<h2>Canary</h2><p class="quiet">Differences up to ${tolerance} nats are a proof. The bases of trainer and servers
      differ by up to ${largest("base_max_abs")} nats, ${largest("base_mean_abs")} on average.</p>
    <div class="charts"><${Curve} title="Largest difference between trainer and server (nats), by version" steps=${versions}
      series=${servers.map((server) => ({ label: server,
          values: versions.map((version) => by.get(`${version} ${server}`) ?? null) }))} /></div>`;
}
