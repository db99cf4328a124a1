// A timeline file: one row for every tensor, what it went through over time, and which rank came last how often.
"use strict";
class TimelineView {
  constructor(data) {
    const spans = data.tensors.flatMap((t) => t[1]);
    Object.assign(this, { data, box: $("t-box"), canvas: $("t-canvas"), tip: $("t-tip"), row: 18, label: Math.min(250, innerWidth * 0.34) });
    this.whole = [spans.reduce((a, s) => Math.min(a, s[0]), Infinity), spans.reduce((a, s) => Math.max(a, s[1]), 0)];
    this.range = [...this.whole];
    $("t-space").style.height = `${data.tensors.length * this.row + 24}px`;
    this.box.addEventListener("scroll", () => this.draw());
    this.box.addEventListener("wheel", (event) => { if (event.ctrlKey || event.shiftKey) { event.preventDefault(); this.zoom(event.deltaY + event.deltaX > 0 ? 1.25 : 0.8, event.offsetX); } }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => { this.held = event.clientX; this.canvas.setPointerCapture(event.pointerId); });
    this.canvas.addEventListener("pointerup", () => { this.held = null; });
    this.canvas.addEventListener("pointermove", (event) => this.moved(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("dblclick", () => { this.range = [...this.whole]; this.draw(); });
    const keys = { w: () => this.zoom(0.7), s: () => this.zoom(1.4), a: () => this.pan(-0.15), d: () => this.pan(0.15) };
    document.addEventListener("keydown", (event) => { if (event.target.tagName !== "INPUT" && keys[event.key]) keys[event.key](); });
    new ResizeObserver(() => this.draw()).observe(this.box);
    this.words();
  }
  words() {
    const { data } = this, total = data.late.reduce((a, l) => a + l[1], 0), ms = (us) => (us >= 1e6 ? `${trim(us / 1e6)} s` : `${trim(us / 1e3)} ms`);
    text("t-note", `${plural(data.tensors.length, "tensor")}, ${ms(this.whole[1] - this.whole[0])}` + (data.num_left_out ? `; ${data.num_left_out.toLocaleString("en")} spans are left out here, Perfetto shows them` : "") + ". Shift and wheel or W and S zoom, drag or A and D move, a double click shows all.");
    $("t-late").replaceChildren(...data.late.slice().sort((a, b) => b[2] - a[2]).slice(0, 16).map(([rank, count, us]) => h("span", { className: "chip" }, `rank ${rank} came last in ${Math.round((100 * count) / total)} % of ${total.toLocaleString("en")} operations, on average ${ms(us / count)} after the first`)));
  }
  width() { return this.box.clientWidth - this.label; }
  at(x) { return this.range[0] + ((x - this.label) / this.width()) * (this.range[1] - this.range[0]); }
  zoom(factor, x = this.label + this.width() / 2) {
    const centre = this.at(x), [a, b] = this.range.map((t) => centre + (t - centre) * factor);
    if (b - a < 10) return;
    this.range = b - a > this.whole[1] - this.whole[0] ? [...this.whole] : [a, b]; this.draw();
  }
  pan(share) { const by = share * (this.range[1] - this.range[0]); this.range = this.range.map((t) => t + by); this.draw(); }
  moved(event) {
    if (this.held !== null && this.held !== undefined) { this.pan((this.held - event.clientX) / this.width()); this.held = event.clientX; return; }
    const tensor = this.data.tensors[Math.floor((event.offsetY - 24 + this.box.scrollTop) / this.row)], t = this.at(event.offsetX);
    const found = event.offsetY > 24 && event.offsetX > this.label && tensor ? tensor[1].filter((s) => s[0] <= t && t <= s[1]).pop() : null;
    this.tip.hidden = !found;
    if (!found) return;
    this.tip.textContent = `${tensor[0]}\n${this.data.kinds[found[2]]}   ${trim((found[1] - found[0]) / 1e3)} ms\nfrom ${trim((found[0] - this.whole[0]) / 1e3)} ms`;
    place(this.tip, $("t-frame"), event.offsetX, event.offsetY + 30);
  }
  color(kind) {
    const name = this.data.kinds[kind];
    return css(name.startsWith("NEGOTIATE") ? "--wait-soft" : /WAIT|QUEUE/.test(name) ? "--wait" : /MEMCPY|COPY|PACK/.test(name) ? "--data" : "--reduce");
  }
  draw() {
    const { canvas, box, row, label } = this, ratio = devicePixelRatio, wide = box.clientWidth, tall = box.clientHeight;
    if (!wide || !tall) return;
    canvas.width = wide * ratio; canvas.height = tall * ratio; canvas.style.height = `${tall}px`;
    const ctx = canvas.getContext("2d"), [from, to] = this.range, scale = this.width() / (to - from || 1), colors = this.data.kinds.map((_, k) => this.color(k));
    ctx.scale(ratio, ratio); ctx.font = "12px system-ui, sans-serif"; ctx.textBaseline = "middle";
    const first = Math.max(Math.floor((box.scrollTop - 24) / row), 0), quiet = css("--quiet"), ink = css("--text");
    for (let r = first; r < this.data.tensors.length; r++) {
      const y = 24 + r * row - box.scrollTop;
      if (y > tall) break;
      const [name, spans] = this.data.tensors[r]; let end = -1;
      for (const [a, b, kind, deep] of spans) {
        const x0 = Math.max((a - from) * scale, 0), x1 = Math.min((b - from) * scale, this.width());
        if (x1 < 0 || x0 > this.width() || (x1 <= end && !deep)) continue;  // out of sight, or in a pixel that has its colour
        ctx.fillStyle = colors[kind]; ctx.fillRect(label + x0, y + 2 + 3 * Math.min(deep, 3), Math.max(x1 - x0, 1), row - 4 - 3 * Math.min(deep, 3)); end = Math.max(end, x1);
      }
      ctx.fillStyle = ink; ctx.save(); ctx.beginPath(); ctx.rect(0, y, label - 8, row); ctx.clip(); ctx.fillText(name, 0, y + row / 2); ctx.restore();
    }
    ctx.fillStyle = css("--card"); ctx.fillRect(0, 0, wide, 22); ctx.fillStyle = quiet;
    for (let k = 0; k <= 5; k++) { const x = label + (this.width() * k) / 5; ctx.textAlign = k === 5 ? "right" : k ? "center" : "left"; ctx.fillText(`${trim((from - this.whole[0] + ((to - from) * k) / 5) / 1e3)} ms`, x, 10); }
    ctx.textAlign = "left";
  }
}
async function showTimeline() {
  for (const part of document.querySelectorAll("main > *")) part.hidden = part.id !== "timeline";
  const answer = await ask("api/timeline");
  if (answer.ok) { charts.timeline = new TimelineView(await answer.json()); charts.timeline.draw(); }
}
