// Charts on uPlot, and the heat strip. Given numbers and elements; knows nothing of jobs.
"use strict";
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const two = (n) => String(n).padStart(2, "0");
const clock = (t, seconds = true) => { const d = new Date(t * 1000); return `${two(d.getHours())}:${two(d.getMinutes())}${seconds ? ":" + two(d.getSeconds()) : ""}`; };
const AXIS = 56, RIGHT = 26, BAND = 0.25; // the band of the peaks, as a share of the rest

// A chart that can be built anew (another theme, other series) and takes new data cheaply.
class Chart {
  constructor(element, { unit = "", tip = null, marks = null, gaps = null, onScale = null, zero = true }) {
    Object.assign(this, { element, unit, tipText: tip, marks, gaps, cut: Infinity, onScale, zero, plot: null, data: null, series: [] });
    this.tip = document.createElement("div"); this.tip.className = "tip"; this.tip.hidden = true;
    new ResizeObserver(() => this.resize()).observe(element);
  }
  size() { return { width: Math.max(this.element.clientWidth, 120), height: this.element.clientHeight }; }
  resize() { if (this.plot && this.element.clientWidth) this.plot.setSize(this.size()); }
  build(series) {
    this.series = series;
    if (this.plot) { this.plot.destroy(); this.plot = null; }
    this.element.querySelector(".none")?.remove();
    this.element.append(this.tip);
    if (this.data) this.make();
  }
  make() {
    const axis = { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const options = {
      ...this.size(), padding: [10, RIGHT, 0, 0], legend: { show: false },
      cursor: { points: { show: false }, sync: { key: "hora", setSeries: false, scales: ["x", null] }, y: false, drag: { x: true, y: false } },
      scales: { x: { time: true }, y: { distr: 100, fwd: (v) => this.folded(v), bwd: (v) => this.unfolded(v), range: (u, low, high) => this.settle(u.scales.y, this.range(low, high)) } },
      axes: [
        { ...axis, space: 70, size: 26, values: (u, splits, i, space, step) => splits.map((t) => clock(t, step < 60)) },
        { ...axis, size: AXIS, space: 34, splits: (u, i, low, high, step) => this.ticks(low, high, step), filter: (u, splits) => splits, values: (u, splits) => splits.map((v) => pretty(v) + this.unit) },
      ],
      series: [{}, ...this.series.map((one) => ({ points: { show: false }, spanGaps: false, ...one }))],
      hooks: {
        drawClear: [(u) => { this.drawGaps(u); this.drawMarks(u); }],
        draw: [(u) => this.drawPeaks(u)],
        setCursor: [(u) => this.showTip(u)],
        setScale: [(u, key) => { if (key === "x" && this.onScale) this.onScale(u); }],
      },
    };
    this.plot = new uPlot(options, this.data, this.element);
  }
  // One checkpoint that takes ten times a step must not flatten everything else: values above the cut share a band at the
  // top of the chart, on a scale of its own.
  range(low, high) {
    this.cut = Infinity;
    if (low === null || high === null) return [0, 1];
    const values = [];
    for (let s = 1; s < this.data.length; s++) for (const v of this.data[s]) if (v !== null && v !== undefined) values.push(v);
    values.sort((a, b) => a - b);
    const most = values[Math.floor(values.length * 0.96)];
    if (this.zero) low = 0;
    if (values.length > 30 && most > low && high - low > 2.5 * (most - low)) {
      this.cut = low + 1.5 * (most - low); this.top = high;
      this.fold = (BAND * (this.cut - low)) / (high - this.cut);
      return [low, high];
    }
    const room = (high - low || Math.abs(high) || 1) * (this.zero ? 0.12 : 0.08);
    return [this.zero ? 0 : low - room, high + room];
  }
  // uPlot keeps the folded ends until the ends change; the fold may change without them.
  settle(scale, [low, high]) { if (scale) Object.assign(scale, { _min: this.folded(low), _max: this.folded(high) }); return [low, high]; }
  folded(v) { return v <= this.cut ? v : this.cut + (v - this.cut) * this.fold; }
  unfolded(v) { return v <= this.cut ? v : this.cut + (v - this.cut) / this.fold; }
  // Ticks at round values below the cut, and one for the greatest value.
  ticks(low, high, step) {
    const end = Math.min(high, this.cut), ticks = [];
    if (this.cut !== Infinity) { const rough = (end - low) / 4, ten = 10 ** Math.floor(Math.log10(rough)); step = [1, 2, 5, 10].find((n) => n * ten >= rough) * ten; }
    for (let v = Math.ceil(low / step) * step; v <= end + step / 1e6; v += step) ticks.push(Number(v.toPrecision(12)));
    return this.cut === Infinity ? ticks : [...ticks, high];
  }
  set(data) {
    this.data = data;
    if (!data[0].length) return;
    if (!this.plot || this.plot.series.length !== data.length) { if (this.series.length + 1 === data.length) this.build(this.series); return; }
    const x = this.plot.scales.x, zoomed = this.last && (x.min > this.last[0] || x.max < this.last[1]);
    this.last = [data[0][0], data[0][data[0].length - 1]];
    this.plot.setData(data, !zoomed);
    if (zoomed) this.plot.redraw();
  }
  drawGaps(u) {
    if (!this.gaps) return;
    const { ctx, bbox } = u, ratio = devicePixelRatio;
    ctx.save(); ctx.textAlign = "center"; ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    for (const { from, to, words } of this.gaps()) {
      const a = Math.max(u.valToPos(from, "x", true), bbox.left), b = Math.min(u.valToPos(to, "x", true), bbox.left + bbox.width);
      if (b <= a) continue;
      ctx.fillStyle = css("--heat0"); ctx.fillRect(a, bbox.top, b - a, bbox.height);
      if (ctx.measureText(words).width < b - a - 8 * ratio) { ctx.fillStyle = css("--quiet"); ctx.fillText(words, (a + b) / 2, bbox.top + bbox.height / 2); }
    }
    ctx.restore();
  }
  // A line where the scale changes, and the greatest of neighbouring peaks in figures; a tick names the greatest of all.
  drawPeaks(u) {
    if (this.cut === Infinity) return;
    const { ctx, bbox } = u, ratio = devicePixelRatio, xs = this.data[0], tops = new Map(), edge = Math.round(u.valToPos(this.cut, "y", true)) + 0.5;
    for (let s = 1; s < this.data.length; s++) this.data[s].forEach((v, i) => { if (v > this.cut && v > (tops.get(i) || 0)) tops.set(i, v); });
    ctx.save(); ctx.fillStyle = ctx.strokeStyle = css("--quiet"); ctx.font = `${11 * ratio}px system-ui, sans-serif`; ctx.textAlign = "left";
    ctx.setLineDash([2 * ratio, 3 * ratio]); ctx.beginPath(); ctx.moveTo(bbox.left, edge); ctx.lineTo(bbox.left + bbox.width, edge); ctx.stroke();
    let end = -1;
    for (const [i, v] of [...tops].sort((a, b) => b[1] - a[1]).slice(1, 13).sort((a, b) => a[0] - b[0])) {
      const x = u.valToPos(xs[i], "x", true), y = u.valToPos(v, "y", true), words = pretty(v) + this.unit, wide = ctx.measureText(words).width;
      if (x < bbox.left || x <= end || x + wide + 8 * ratio > bbox.left + bbox.width) continue;
      ctx.fillText(words, x + 6 * ratio, y + 10 * ratio); end = x + wide + 16 * ratio;
    }
    ctx.restore();
  }
  drawMarks(u) {
    if (!this.marks) return;
    const { ctx, bbox } = u;
    ctx.save();
    for (const { at, color } of this.marks()) {
      const x = Math.round(u.valToPos(at, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = color; ctx.globalAlpha = 0.75; ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath(); ctx.moveTo(x + 0.5, bbox.top); ctx.lineTo(x + 0.5, bbox.top + bbox.height); ctx.stroke();
      ctx.beginPath(); ctx.arc(x, bbox.top, 3.5 * devicePixelRatio, 0, 7); ctx.fill();
    }
    ctx.restore();
  }
  showTip(u) {
    const { left, idx } = u.cursor;
    if (!this.tipText || left < 0 || idx === null || !u.over.matches(":hover")) { this.tip.hidden = true; return; }
    this.tip.textContent = this.tipText(idx);
    place(this.tip, this.element, left + AXIS, 14);
  }
}

function place(tip, box, x, y) {
  tip.hidden = false;
  const flip = x + tip.offsetWidth + 24 > box.clientWidth;
  tip.style.left = `${flip ? x - tip.offsetWidth - 14 : x + 14}px`;
  tip.style.top = `${y}px`;
}

function pretty(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return trim(value / 1e9) + "G";
  if (size >= 1e6) return trim(value / 1e6) + "M";
  if (size >= 1e4) return trim(value / 1e3) + "k";
  if (size >= 100 || size === 0) return String(Math.round(value));
  return trim(value);
}
const trim = (value) => String(Number(value.toPrecision(3)));

// Rank × time, coloured by lateness. Aligned with the chart above it, zoom included.
class Heat {
  constructor(canvas, labels, tip) {
    Object.assign(this, { canvas, labels, tip, range: null, columns: null });
    canvas.addEventListener("mousemove", (event) => this.point(event));
    canvas.addEventListener("mouseleave", () => { tip.hidden = true; });
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }
  rowHeight() { const n = this.columns.ranks.length; return n <= 8 ? 18 : n <= 16 ? 13 : n <= 64 ? 8 : Math.max(2, Math.floor(420 / n)); }
  set(columns, xs, late) { Object.assign(this, { columns, xs, late }); this.draw(); }
  draw() {
    if (!this.columns || !this.columns.ranks.length) return;
    const { canvas, columns, xs } = this, row = this.rowHeight(), ranks = columns.ranks;
    const width = canvas.parentElement.clientWidth - (canvas.previousElementSibling ? canvas.offsetLeft : 0);
    const ratio = devicePixelRatio, height = row * ranks.length, wide = canvas.clientWidth || width;
    canvas.style.height = `${height}px`; canvas.width = wide * ratio; canvas.height = height * ratio;
    const ctx = canvas.getContext("2d"), ground = rgb(css("--heat0")), card = css("--card");
    const [from, to] = this.range || [xs[0], xs[xs.length - 1]], span = to - from || 1, gap = row > 6 ? ratio : 0;
    ctx.fillStyle = card; ctx.fillRect(0, 0, canvas.width, canvas.height);
    ranks.forEach((rank, r) => {
      const stuck = this.stuck && this.stuck.ranks.has(rank) ? this.stuck.from : Infinity;
      columns.late[r].forEach((late, i) => {
        if (xs[i] + columns.bin_s > stuck) late = 100;
        if (late === null) return;
        const a = Math.floor(((xs[i] - from) / span) * canvas.width), b = Math.floor(((xs[i] + columns.bin_s - from) / span) * canvas.width);
        if (b < 0 || a > canvas.width) return;
        ctx.fillStyle = heat(late, ground);
        ctx.fillRect(a, r * row * ratio, Math.max(b - a, 1), row * ratio - gap);
      });
    });
    this.label(ranks, row);
  }
  label(ranks, row) {
    const every = row >= 11 ? 1 : Math.ceil(13 / row);
    const wanted = ranks.map((rank, r) => [rank, r % every === 0 ? (ranks.length <= 16 ? `rank ${rank}` : String(rank)) : ""]);
    const key = JSON.stringify([wanted, [...this.late]]);
    if (key === this.labelled) return;
    this.labelled = key;
    this.labels.replaceChildren(...wanted.map(([rank, text]) => { const e = document.createElement("span"); e.textContent = text; if (this.late.has(rank)) e.className = "late"; return e; }));
  }
  point(event) {
    if (!this.columns || !this.columns.ranks.length) return;
    const box = this.canvas.getBoundingClientRect(), { columns, xs } = this;
    const [from, to] = this.range || [xs[0], xs[xs.length - 1]];
    const t = from + ((event.clientX - box.left) / box.width) * (to - from);
    const i = Math.min(Math.max(Math.floor((t - xs[0]) / columns.bin_s), 0), xs.length - 1), r = Math.floor(((event.clientY - box.top) / box.height) * columns.ranks.length);
    const late = columns.late[r] && columns.late[r][i];
    if (late === null || late === undefined) { this.tip.hidden = true; return; }
    this.tip.textContent = `${clock(xs[i])}  rank ${columns.ranks[r]}\nlate by ${pretty(late)} % of a step\nown time ${pretty(columns.step[r][i])} ms`;
    place(this.tip, this.canvas.parentElement, event.clientX - box.left + this.canvas.offsetLeft, event.clientY - box.top + 8);
  }
}

function rgb(hex) { const n = parseInt(hex.slice(1), 16); return [n >> 16, (n >> 8) & 255, n & 255]; }
const AMBER = [246, 180, 75], RED = [214, 51, 63];
function heat(late, ground) {
  const part = Math.min(Math.max(late - 1.5, 0) / 25, 1);
  const [a, b, f] = part < 0.36 ? [ground, AMBER, part / 0.36] : [AMBER, RED, (part - 0.36) / 0.64];
  return `rgb(${a.map((v, k) => Math.round(v + (b[k] - v) * f)).join(",")})`;
}
