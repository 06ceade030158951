// Curves by uPlot, small curves as SVG, timelines on a canvas of our own, and pictures of charts.
import { figure, html, range, useEffect, useRef } from "./common.js";

const TONES = 6;
const HEIGHT = 176;
const WHOLE = [1, 2, 5].flatMap((one) => Array.from({ length: 9 }, (_, power) => one * 10 ** power)).sort((a, b) => a - b);

const toneName = (index) => `--series-${(index % TONES) + 1}`;
const tone = (index) => styled(toneName(index)); // for a canvas; asking for it makes the browser style the page

function styled(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// A small curve without axes; for screen readers its first and last value.
export function Spark({ values, label }) {
  const span = range(values);
  if (!span) return html`<span class="quiet">–</span>`;
  const [low, high] = span, height = high - low || 1;
  const points = values.map((value, index) =>
    `${((index / Math.max(1, values.length - 1)) * 98 + 1).toFixed(1)},${(23 - ((value - low) / height) * 22).toFixed(1)}`);
  return html`<svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" role="img"
    aria-label=${`${label}: ${figure(values[0])} to ${figure(values.at(-1))}`}><polyline points=${points.join(" ")} /></svg>`;
}

// An exponential mean over the values before, without a bias to the first; gaps stay gaps.
export function smoothed(values, share) {
  if (!share) return values;
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean * share + value * (1 - share);
    weight = weight * share + 1 - share;
    return mean / weight;
  });
}

const mounted = new Set(); // all charts of the page, for its picture
const waiting = []; // charts below what is seen, which are made one by one when there is time

function makeNext() {
  const chart = waiting.shift();
  if (!chart) return;
  if (mounted.has(chart) && chart.box.checkVisibility?.()) chart.make();
  (window.requestIdleCallback ?? setTimeout)(makeNext);
}

// `series`: [{ label, values }] over `steps`. A click or Enter on a step calls `onStep`, dragging calls `onRange` with two
// steps. Charts with one `group` share a cursor. `smooth` in [0, 1), `log`: the axis.
export function Curve({ title, steps, series, onStep, onRange, span, group, marks = [], smooth = 0, log = false, note }) {
  const box = useRef(null), place = useRef(null), now = useRef({});
  now.current = { steps, series, onStep, onRange, span, marks, smooth, log, title };
  const shape = `${series.map((one) => one.label).join("\n")} ${log} ${smooth > 0} ${group}`;
  useEffect(() => {
    const chart = { make: () => { chart.plot ??= makePlot(place.current, box.current, now, group); }, box: box.current, now };
    box.current.chart = chart;
    mounted.add(chart);
    const seen = new IntersectionObserver((found) => { if (found.some((one) => one.isIntersecting)) chart.make(); },
      { rootMargin: "200px" });
    seen.observe(place.current);
    waiting.push(chart);
    setTimeout(makeNext, 200);
    const fit = new ResizeObserver(() => chart.plot?.setSize({ width: place.current.clientWidth, height: HEIGHT }));
    fit.observe(place.current);
    return () => { mounted.delete(chart); seen.disconnect(); fit.disconnect(); chart.plot?.destroy(); chart.plot = null; };
  }, [shape]);
  useEffect(() => {
    const { plot } = box.current.chart;
    if (!plot) return;
    plot.setData(dataOf(now.current), false);
    const [low, high] = span ?? range(steps) ?? [0, 1];
    plot.setScale("x", { min: low, max: high > low ? high : low + 1 });
  }, [steps, series, smooth, span?.[0], span?.[1]]);
  const at = useRef(null);
  const move = (event) => {
    const { plot } = box.current.chart, by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (event.key === "Enter" && onStep && at.current !== null) onStep(steps[at.current]);
    if (event.key === "Home" || event.key === "End" || by) {
      const last = steps.length - 1;
      at.current = event.key === "Home" ? 0 : event.key === "End" ? last : Math.min(last, Math.max(0, (at.current ?? last) + by));
      plot?.setCursor({ left: plot.valToPos(steps[at.current], "x"), top: HEIGHT / 2 });
      event.target.setAttribute("aria-valuenow", steps[at.current]);
      event.target.setAttribute("aria-valuetext", `step ${steps[at.current]}: ${series
        .map((one) => `${one.label} ${figure(one.values[at.current], 4)}`).join(", ")}`);
      event.preventDefault();
    }
  };
  const last = (one) => one.values.findLast((value) => value !== null);
  return html`<figure class="chart" ref=${box}><figcaption><span>${title}</span>
      <button class="plain" title="save as a picture" aria-label=${`PNG, save a picture of ${title}`}
        onClick=${() => saveChart(box.current.chart)}>PNG</button></figcaption>
    <ul class="legend">${series.map((one, index) => html`<li key=${one.label}><i style=${{ background: `var(${toneName(index)})` }}></i>${
      series.length > 1 || one.label !== title ? `${one.label} ` : ""}<b data-value=${index}>${figure(last(one), 4)}</b></li>`)}
      ${note && html`<li>${note}</li>`}</ul>
    <div ref=${place} class=${`plot${onStep ? " clickable" : ""}`} tabindex="0" role="slider" aria-label=${`${title}, by step`}
      aria-valuemin=${steps[0]} aria-valuemax=${steps.at(-1)} aria-valuenow=${steps.at(-1)} onKeyDown=${move}
      aria-valuetext=${`last: ${series.map((one) => `${one.label} ${figure(last(one), 4)}`).join(", ")}`}></div></figure>`;
}

function dataOf({ steps, series, smooth }) {
  const raw = series.map((one) => one.values);
  return [steps, ...(smooth ? raw : []), ...raw.map((values) => smoothed(values, smooth))];
}

function makePlot(place, box, now, group) {
  const { series, smooth, log, steps, span } = now.current;
  const grid = { stroke: styled("--line"), width: 1 };
  const axis = { stroke: styled("--quiet"), grid, ticks: { ...grid, size: 4 }, font: "12px system-ui", gap: 4 };
  const line = (one, index, faint) => ({
    label: one.label, stroke: faint ? `${tone(index)}44` : tone(index), width: faint ? 1 : 1.6, spanGaps: true,
    points: { show: steps.length < 40 && !faint, size: 4 },
  });
  const values = (_, index) => {
    for (const field of box.querySelectorAll("[data-value]")) {
      const column = now.current.series[Number(field.dataset.value)]?.values ?? [];
      field.firstChild.data = figure(index === null || index === undefined
          ? column.findLast((value) => value !== null) : column[index], 4);
    }
  };
  const positive = series.some((one) => one.values.some((value) => value > 0));
  const plot = new uPlot({
    width: place.clientWidth || 320, height: HEIGHT,
    cursor: { sync: group ? { key: group } : undefined, focus: { prox: 24 }, drag: { x: true, y: false, setScale: false } },
    scales: { x: { time: false, range: (_, low, high) => (low === high ? [low, low + 1] : [low, high]) }, y: log && positive
        ? { distr: 3 } : { range: spread } },
    legend: { show: false },
    axes: [{ ...axis, space: 56, size: 28, incrs: WHOLE },
        { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))) }],
    series: [{ label: "step" }, ...(smooth ? series.map((one, index) => line(one, index, true)) : []),
      ...series.map((one, index) => line(one, index, false))],
    hooks: {
      draw: [(plot) => drawMarks(plot, now.current.marks)],
      setCursor: [(plot) => values(plot, plot.cursor.idx)],
      setSelect: [(plot) => {
        if (plot.select.width < 4) return;
        const ends = [plot.select.left, plot.select.left + plot.select.width].map((left) => plot.posToVal(left, "x"));
        plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        now.current.onRange?.(Math.floor(ends[0]), Math.ceil(ends[1]));
      }],
    },
  }, dataOf(now.current), place);
  if (span) plot.setScale("x", { min: span[0], max: span[1] });
  let pressed = 0;
  plot.over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
  plot.over.addEventListener("mouseup", (event) => {
    const index = plot.cursor.idx;
    if (Math.abs(event.clientX - pressed) < 4 && index !== null
        && index !== undefined) now.current.onStep?.(now.current.steps[index]);
  });
  plot.over.addEventListener("dblclick", () => now.current.onRange?.(null, null));
  return plot;
}

// Room above and below the values; around one value alone, too.
function spread(_, low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : low > 0 ? [0, 1.25 * low] : [1.25 * low, 0];
  const room = 0.08 * (high - low);
  return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toFixed(2)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toFixed(1)}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(0);
  return `${+value.toPrecision(4)}`;
}

function drawMarks(plot, marks) {
  const { ctx } = plot;
  ctx.save();
  ctx.strokeStyle = styled("--edge");
  ctx.setLineDash([3, 3]);
  for (const step of marks) {
    const x = Math.round(plot.valToPos(step, "x", true));
    if (x < plot.bbox.left || x > plot.bbox.left + plot.bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, plot.bbox.top);
    ctx.lineTo(x, plot.bbox.top + plot.bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

// --- pictures ---

function paintChart(ctx, chart, x, y, width, scale) {
  chart.make();
  const { title } = chart.now.current;
  ctx.fillStyle = styled("--ink");
  ctx.font = `600 ${14 * scale}px system-ui`;
  ctx.fillText(title, x, y + 16 * scale, width);
  ctx.font = `${12 * scale}px system-ui`;
  let at = x;
  for (const item of chart.box.querySelectorAll(".legend li")) {
    const mark = item.querySelector("i");
    ctx.fillStyle = mark ? getComputedStyle(mark).backgroundColor : "transparent";
    ctx.fillRect(at, y + 30 * scale, 12 * scale, 3 * scale);
    ctx.fillStyle = styled("--quiet");
    ctx.fillText(item.textContent, at + 16 * scale, y + 36 * scale);
    at += ctx.measureText(item.textContent).width + 32 * scale;
  }
  const canvas = chart.plot.ctx.canvas;
  ctx.drawImage(canvas, x, y + 44 * scale, width, (width / canvas.width) * canvas.height);
}

function picture(width, height, name, paint) {
  const canvas = Object.assign(document.createElement("canvas"), { width, height }), ctx = canvas.getContext("2d");
  ctx.fillStyle = styled("--ground");
  ctx.fillRect(0, 0, width, height);
  paint(ctx);
  canvas.toBlob((blob) => {
    const link = Object.assign(document.createElement("a"),
        { href: URL.createObjectURL(blob), download: `${name.replace(/[^\w-]+/g, "-")}.png` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
}

function saveChart(chart) {
  chart.make();
  requestAnimationFrame(() => picture(1280, 640, chart.now.current.title, (ctx) => paintChart(ctx, chart, 32, 16, 1216, 2)));
}

// The page's charts in one picture, below its name and its figures.
export function savePage(name, numbers) {
  const charts = [...mounted].filter((chart) => chart.box.checkVisibility?.() ?? true);
  for (const chart of charts) chart.make();
  const columns = 3, width = 600, height = 360, rows = Math.ceil(charts.length / columns);
  requestAnimationFrame(() => picture(columns * (width + 32) + 32, 160 + rows * height, name, (ctx) => {
    ctx.fillStyle = styled("--ink");
    ctx.font = "600 40px system-ui";
    ctx.fillText(name, 32, 64);
    ctx.font = "24px system-ui";
    ctx.fillText(numbers.map(([label, value]) => `${label}: ${value}`).join("   ·   "), 32, 112);
    charts.forEach((chart, index) => paintChart(ctx, chart, 32 + (index % columns) * (width + 32),
      152 + Math.floor(index / columns) * height, width, 1.5));
  }));
}

// --- timelines ---

// Each kind of span has a tone and a height of its own, so that colour is not all that tells them apart.
const SPANS = {
  train: [0, 24], busy: [1, 24], generate: [1, 8], load: [2, 24], ship: [2, 12], publish: [4, 24], pack: [4, 12],
  evaluate: [3, 24], sleep: [5, 12], wait: [5, 4],
};
const name = (one) => one.who.replace(/^grpo-/, "").replace("http://", "");
const busy = (one) => (one.busy === null ? "" : `${Math.round(one.busy * 100)}%`);
const NARROW = innerWidth <= 640, LANE = NARROW ? 48 : 32; // where there is no room beside them, lanes have names above

// Programs as lanes, spans as bars; the wheel or + and - zoom, dragging or arrows move, a click on a span with a step calls
// `onStep`.
export function Gantt({ lanes, spans, from, to, onMove, onStep }) {
  const place = useRef(null), drag = useRef(null);
  const height = lanes.length * LANE + 24;
  useEffect(() => {
    const draw = () => drawSpans(place.current, { lanes, spans, from, to, height });
    draw();
    const fit = new ResizeObserver(draw);
    fit.observe(place.current);
    return () => fit.disconnect();
  }, [spans, from, to, lanes.length]);
  const timeAt = (event) => from + (event.offsetX / place.current.clientWidth) * (to - from);
  const zoom = (middle, factor) => onMove(middle - (middle - from) * factor, middle + (to - middle) * factor);
  const wheel = (event) => { event.preventDefault(); zoom(timeAt(event), event.deltaY > 0 ? 1.25 : 0.8); };
  const move = (event) => {
    if (!drag.current || !(event.buttons & 1)) return;
    const shift = ((drag.current.x - event.offsetX) / place.current.clientWidth) * (drag.current.to - drag.current.from);
    if (Math.abs(drag.current.x - event.offsetX) > 3) onMove(drag.current.from + shift, drag.current.to + shift);
  };
  const key = (event) => {
    const shift = { ArrowLeft: -0.1, ArrowRight: 0.1 }[event.key], factor = { "+": 0.8, "-": 1.25 }[event.key];
    if (shift) onMove(from + shift * (to - from), to + shift * (to - from));
    if (factor) zoom((from + to) / 2, factor);
    if (shift || factor) event.preventDefault();
  };
  const click = (event) => {
    if (drag.current && Math.abs(drag.current.x - event.offsetX) > 3) return;
    const time = timeAt(event), index = Math.floor(event.offsetY / LANE);
    const hit = spans.filter((span) => span[0] === index && span[2] <= time && time <= span[3]).at(-1);
    if (hit?.[4] && onStep) onStep(hit[4], hit[1]);
  };
  const kinds = [...new Set(spans.map((span) => span[1]))].sort();
  return html`<ul class="legend">${kinds.map((what) => html`<li key=${what}><i style=${{
      background: `var(${toneName((SPANS[what] ?? [5])[0])})`, height: `${(SPANS[what] ?? [5, 24])[1] / 2}px`, verticalAlign: "middle" }}>
          </i>${what}</li>`)}</ul>
    <div class="gantt"><ul aria-label="programs and how busy they were">${lanes.map((one) => html`<li key=${one.who}>
      <b>${name(one)}</b> <span class="quiet">${busy(one)}</span></li>`)}</ul>
    <canvas ref=${place} height=${height} style=${{ height: `${height}px` }} tabindex="0" role="img"
      aria-label=${`Timeline from ${figure(from, 1)} to ${figure(to, 1)} seconds: ${lanes.map((one) =>
          `${name(one)} ${busy(one)}`).join(", ")}. Arrow keys move, plus and minus zoom.`}
      onWheel=${wheel} onKeyDown=${key} onMouseDown=${(event) => { drag.current = { x: event.offsetX, from, to }; }}
      onMouseMove=${move} onClick=${click}></canvas></div>`;
}

function drawSpans(canvas, { lanes, spans, from, to, height }) {
  const width = canvas.clientWidth, scale = devicePixelRatio || 1, ctx = canvas.getContext("2d");
  canvas.width = width * scale;
  canvas.height = height * scale;
  ctx.scale(scale, scale);
  const x = (time) => ((time - from) / (to - from)) * width;
  ctx.font = "12px system-ui";
  const tones = Array.from({ length: TONES }, (_, index) => tone(index));
  for (const [lane, what, begin, end] of spans) {
    const [index, tall] = SPANS[what] ?? [5, 24];
    ctx.fillStyle = tones[index];
    ctx.fillRect(x(begin), (lane + 1) * LANE - 16 - tall / 2, Math.max(0.7, x(end) - x(begin)), tall);
  }
  ctx.fillStyle = styled("--quiet");
  if (NARROW) lanes.forEach((one, index) => ctx.fillText(`${name(one)} ${busy(one)}`, 4, index * LANE + 14));
  const unit = 10 ** Math.floor(Math.log10(Math.max(1e-6, to - from)));
  const every = (to - from) / unit < 3 ? unit / 2 : (to - from) / unit < 6 ? unit : 2 * unit;
  for (let tick = Math.ceil(from / every) * every; tick < to; tick += every) {
    ctx.fillRect(x(tick), lanes.length * LANE, 1, 4);
    if (x(tick) < width - 40) ctx.fillText(`${figure(tick, every < 1 ? 2 : 0)} s`, x(tick) + 4, height - 8);
  }
}
