// Curves by uPlot, small curves as SVG, timelines and heat maps on canvases of our own.
import { figure, html, range, useEffect, useRef } from "./common.js";

const TONES = ["--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6"];

export function tone(index) {
  return getComputedStyle(document.documentElement).getPropertyValue(TONES[index % TONES.length]).trim();
}

// A small curve without axes; for screen readers its last value.
export function Spark({ values, label }) {
  const span = range(values);
  if (!span) return html`<span class="quiet">–</span>`;
  const [low, high] = span, height = high - low || 1;
  const points = values.map((value, index) =>
    `${(index / Math.max(1, values.length - 1) * 98 + 1).toFixed(1)},${(23 - (value - low) / height * 22).toFixed(1)}`);
  return html`<svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" role="img"
    aria-label=${`${label}: ${figure(values[0])} to ${figure(values.at(-1))}`}><polyline points=${points.join(" ")} /></svg>`;
}

// `series`: [{ label, values }] over `steps`; a click on a step calls `onStep`. Charts with one `group` share a cursor.
export function Curve({ title, steps, series, onStep, group, marks = [] }) {
  const place = useRef(null), chart = useRef(null);
  const said = series.map((one) => {
    const span = range(one.values), last = one.values.findLast((value) => value !== null);
    return span ? `${one.label}: last ${figure(last)}, between ${figure(span[0])} and ${figure(span[1])}` : `${one.label}: none`;
  }).join("; ");
  const shape = series.map((one) => one.label).join("\n");
  useEffect(() => {
    const ink = getComputedStyle(document.documentElement).getPropertyValue("--quiet").trim();
    const grid = { stroke: getComputedStyle(document.documentElement).getPropertyValue("--line").trim(), width: 1 };
    const axis = { stroke: ink, grid, ticks: grid, font: "11px system-ui" };
    const options = {
      width: place.current.clientWidth || 320, height: 170,
      cursor: { sync: group ? { key: group } : undefined, focus: { prox: 24 }, drag: { x: true, y: false } },
      scales: { x: { time: false } },
      legend: { live: true },
      axes: [{ ...axis, space: 45 }, { ...axis, size: 58, values: (_, ticks) => ticks.map((tick) => figure(tick, 3)) }],
      series: [{ label: "step" }, ...series.map((one, index) => ({
        label: one.label, stroke: tone(index), width: 1.6, spanGaps: true,
        points: { show: steps.length < 40, size: 4 }, value: (_, value) => figure(value, 4),
      }))],
      hooks: { draw: [(plot) => drawMarks(plot, marks)] },
    };
    chart.current = new uPlot(options, [steps, ...series.map((one) => one.values)], place.current);
    let pressed = 0;
    const over = chart.current.over;
    const down = (event) => { pressed = event.clientX; };
    const up = (event) => {
      const index = chart.current.cursor.idx;
      if (onStep && Math.abs(event.clientX - pressed) < 4 && index !== null && index !== undefined) onStep(steps[index]);
    };
    over.addEventListener("mousedown", down);
    over.addEventListener("mouseup", up);
    const fit = new ResizeObserver(() => chart.current.setSize({ width: place.current.clientWidth, height: 170 }));
    fit.observe(place.current);
    return () => { fit.disconnect(); chart.current.destroy(); };
  }, [shape, group, marks.length]);
  useEffect(() => { chart.current.setData([steps, ...series.map((one) => one.values)]); }, [steps, series]);
  return html`<figure class="chart"><figcaption>${title}</figcaption>
    <div ref=${place} role="img" aria-label=${`${title}. ${said}`} class=${onStep ? "clickable" : ""}></div></figure>`;
}

function drawMarks(plot, marks) {
  const { ctx } = plot;
  ctx.save();
  ctx.strokeStyle = tone(3);
  ctx.setLineDash([3, 3]);
  for (const step of marks) {
    const x = Math.round(plot.valToPos(step, "x", true));
    ctx.beginPath();
    ctx.moveTo(x, plot.bbox.top);
    ctx.lineTo(x, plot.bbox.top + plot.bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

const SPAN_TONES = { train: 0, generate: 1, busy: 1, load: 2, publish: 4, evaluate: 5, wait: 3, sleep: 3, pack: 2, ship: 4 };

// Programs as lanes, spans as bars; wheel zooms, dragging moves, a click on a span with a step calls `onStep`.
export function Gantt({ lanes, spans, from, to, onMove, onStep }) {
  const place = useRef(null);
  const lane = 26, height = lanes.length * lane + 22;
  useEffect(() => {
    const canvas = place.current, width = canvas.clientWidth, scale = devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const ctx = canvas.getContext("2d");
    ctx.scale(scale, scale);
    const x = (time) => (time - from) / (to - from) * width;
    const style = getComputedStyle(document.documentElement);
    ctx.font = "11px system-ui";
    for (const [index, what, begin, end] of spans) {
      const thin = what === "wait" || what === "generate" || what === "sleep";
      ctx.globalAlpha = thin ? 0.3 : 0.9;
      ctx.fillStyle = tone(SPAN_TONES[what] ?? 5);
      ctx.fillRect(x(begin), index * lane + (thin ? 9 : 3), Math.max(0.7, x(end) - x(begin)), thin ? 6 : lane - 7);
    }
    ctx.globalAlpha = 1;
    ctx.fillStyle = style.getPropertyValue("--quiet");
    const step = 10 ** Math.floor(Math.log10(Math.max(1e-6, to - from)));
    const every = (to - from) / step < 3 ? step / 4 : (to - from) / step < 6 ? step / 2 : step;
    for (let tick = Math.ceil(from / every) * every; tick < to; tick += every) {
      ctx.fillRect(x(tick), lanes.length * lane, 1, 5);
      ctx.fillText(`${figure(tick, every < 1 ? 2 : 0)} s`, x(tick) + 3, height - 5);
    }
  }, [spans, from, to, lanes.length]);
  const timeAt = (event) => from + event.offsetX / place.current.clientWidth * (to - from);
  const drag = useRef(null);
  const wheel = (event) => {
    event.preventDefault();
    const middle = timeAt(event), factor = event.deltaY > 0 ? 1.25 : 0.8;
    onMove(middle - (middle - from) * factor, middle + (to - middle) * factor);
  };
  const move = (event) => {
    if (!drag.current || !(event.buttons & 1)) return;
    const shift = (drag.current.x - event.offsetX) / place.current.clientWidth * (drag.current.to - drag.current.from);
    if (Math.abs(drag.current.x - event.offsetX) > 3) onMove(drag.current.from + shift, drag.current.to + shift);
  };
  const click = (event) => {
    if (drag.current && Math.abs(drag.current.x - event.offsetX) > 3) return;
    const time = timeAt(event), index = Math.floor(event.offsetY / lane);
    const hit = spans.filter((span) => span[0] === index && span[2] <= time && time <= span[3]).at(-1);
    if (hit?.[4] && onStep) onStep(hit[4], hit[1]);
  };
  const kinds = [...new Set(spans.map((span) => span[1]))].sort();
  return html`<p class="legend">${kinds.map((what) => html`<span key=${what}><i style=${{ background: tone(SPAN_TONES[what] ?? 5) }}></i>${what}</span>`)}</p><div class="gantt">
    <ul aria-label="programs and how busy they were">${lanes.map((one) => html`<li key=${one.who}>
      <b>${one.who.replace(/^grpo-/, "").replace("http://", "")}</b> <span class="quiet">${one.busy === null ? "" : `${Math.round(one.busy * 100)}%`}</span></li>`)}</ul>
    <canvas ref=${place} height=${height} style=${{ height: `${height}px` }} role="img"
      aria-label=${`Timeline from ${figure(from, 1)} to ${figure(to, 1)} seconds of ${lanes.map((one) => one.who).join(", ")}`}
      onWheel=${wheel} onMouseDown=${(event) => { drag.current = { x: event.offsetX, from, to }; }}
      onMouseMove=${move} onClick=${click}></canvas></div>`;
}
