// The page of one job: gets everything once, then what changes, and puts it into the document as text, never as HTML.
"use strict";
const $ = (id) => document.getElementById(id);
const PARTS = ["data", "forward", "backward", "between", "wait", "reduce", "optimizer", "checkpoint"], WAIT = PARTS.indexOf("wait");
const PART_NAMES = { data: "waiting for data", forward: "forward and the script", backward: "backward", between: "between backward and step", wait: "waiting for other ranks", reduce: "reduction not hidden", optimizer: "optimizer", checkpoint: "checkpoint" };
const run = { facts: {}, head: null, columns: null, events: [], lines: [], stacks: { stacks: {}, profiles: {} }, may: [], live: true };
let metric = null, connected = false, dirty = new Set();

function h(tag, props, ...children) {
  const element = Object.assign(document.createElement(tag), props || {});
  element.append(...children.filter((c) => c !== null && c !== undefined));
  return element;
}
const text = (id, value) => { const e = $(id); if (e.textContent !== value) e.textContent = value; };
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
function duration(s) {
  if (s === null || s === undefined) return "–";
  s = Math.round(s);
  if (s < 90) return `${s} s`;
  if (s < 5400) return `${Math.floor(s / 60)} min ${s % 60 && s < 600 ? two(s % 60) + " s" : ""}`.trim();
  return `${Math.floor(s / 3600)} h ${two(Math.floor((s % 3600) / 60))} min`;
}
function bytes(n) { return n >= 1e9 ? `${trim(n / 1e9)} GB` : n >= 1e6 ? `${trim(n / 1e6)} MB` : `${Math.round(n / 1e3)} kB`; }

// ---- the token: out of the address bar, which people show around, into this tab's memory ---------------------------
function token() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  try {
    if (given) { sessionStorage.setItem("hora-token", given); history.replaceState(null, "", location.pathname); return given; }
    return sessionStorage.getItem("hora-token") || "";
  } catch { return given || ""; }  // a frame without storage keeps its address
}
const TOKEN = token();
const ask = (path, options = {}) => fetch(path, { ...options, credentials: "omit", cache: "no-store", headers: { Authorization: `Bearer ${TOKEN}` } });

// ---- the stream -----------------------------------------------------------------------------------------------------
async function follow() {
  let pause = 500;
  for (;;) {
    try {
      const answer = await ask("api/stream");
      if (!answer.ok) {
        const why = (await answer.text()).trim();
        away(why);
        if (answer.status === 401) return;
        pause = 10000;
      } else {
        connected = true; pause = 500;
        await read(answer.body.getReader());
      }
    } catch { /* the job's process has gone, or the network: try again below */ }
    connected = false;
    if (run.head && ["done", "failed", "stopped"].includes(run.head.state)) { text("link", "The job is over. This page keeps what it has until you close it."); return; }
    away("the connection to the job is lost");
    await new Promise((resume) => setTimeout(resume, pause));
    pause = Math.min(pause * 1.6, 10000);
  }
}
async function read(reader) {
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line) take(JSON.parse(line));
  }
}
function away(why) {
  $("state").dataset.state = "away"; text("words", run.head ? "out of touch" : "not connected"); text("since", why);
}

function take(news) {
  if (news.everything) {
    Object.assign(run, news.everything); run.shownLines = 0;
    ["head", "columns", "events", "lines", "stacks", "facts"].forEach((k) => dirty.add(k));
    if (run.timeline) { showFacts(); text("link", "A timeline. ui.perfetto.dev opens the same file."); showTimeline(); return; }
  } else {
    if (news.head) { run.head = news.head; dirty.add("head"); }
    if (news.columns) { merge(news.columns); dirty.add("columns"); }
    if (news.events) { run.events = run.events.concat(news.events).slice(-1000); dirty.add("events"); }
    if (news.lines) { run.lines = run.lines.concat(news.lines).slice(-3000); dirty.add("lines"); }
    if (news.stacks) { run.stacks = news.stacks; dirty.add("stacks"); }
  }
  if (!document.hidden) requestAnimationFrame(render);
}
function merge(news) {
  const old = run.columns;
  if (news.first === 0 || !old) { run.columns = news; return; }
  const extend = (a, b) => a.slice(0, news.first).concat(b);
  run.columns = {
    ...news, first: 0, step: old.step.map((row, i) => extend(row, news.step[i])), late: old.late.map((row, i) => extend(row, news.late[i])),
    parts: old.parts.map((row, i) => extend(row, news.parts[i])), rate: extend(old.rate, news.rate),
    metrics: Object.fromEntries(Object.entries(old.metrics).map(([name, row]) => [name, extend(row, news.metrics[name])])),
  };
}

// ---- drawing --------------------------------------------------------------------------------------------------------
const charts = {};
function render() {
  if (!run.head || !dirty.size) return;
  const now = dirty; dirty = new Set();
  if (now.has("facts")) { for (const part of document.querySelectorAll(".later")) part.hidden = false; showFacts(); }  // what the first paint does without
  if (now.has("head")) showHead();
  if (now.has("head") || now.has("stacks")) { showAlerts(); showPending(); }
  if (now.has("head")) { showBars(); showHosts(); showDemo(); }
  if (now.has("events")) showEvents();
  if (now.has("columns") || now.has("head") || now.has("events")) showCharts();
  if (now.has("stacks") || now.has("facts")) { showStacks(); showProfiles(); }
  if (now.has("lines")) showLines();
}

function showFacts() {
  const { title, command, id } = run.facts;
  text("title", title || `job ${id}`); text("command", command || ""); document.title = `${title || "job"} · hora`;
  $("actions").hidden = !run.may.length; $("ask-stacks").hidden = !run.may.includes("stacks");
  text("link", run.live ? `job ${id} · began ${new Date(run.facts.began * 1000).toLocaleString()}` : `a recorded run of ${new Date(run.facts.began * 1000).toLocaleString()}`);
}

function showHead() {
  const now = run.head;
  $("state").dataset.state = now.state; text("words", now.words);
  const op = now.pending.find((one) => one.missing.length);
  const passed = duration(now.now - run.facts.began);
  text("since", now.state === "starting" ? awaited() : now.state === "waiting" && op ? `for ${duration(op.waited_s)} in ${op.name}` : now.why ? now.why.split("\n")[0].slice(0, 160) : run.live && now.state === "training" ? `for ${passed}` : passed);
  setNumber("n-step", now.step.toLocaleString("en"), now.total ? `of ${now.total.toLocaleString("en")}` : "");
  $("n-bar").hidden = !now.total; if (now.total) $("n-bar").firstChild.style.width = `${Math.min((100 * now.step) / now.total, 100)}%`;
  const ms = now.step_ms;
  setNumber("n-time", ms ? (ms >= 10000 ? trim(ms / 1000) : trim(ms)) : "–", ms ? (ms >= 10000 ? "s" : "ms") : "");
  setNumber("n-rate", now.samples_per_s ? pretty(now.samples_per_s) : "–", "");
  setNumber("n-left", now.left_s === null ? "–" : duration(now.left_s), "");
  const lost = now.ranks.filter((r) => r.state === "lost" || r.state === "failed").length;
  setNumber("n-size", String(now.size - lost), lost ? `of ${now.size}` : "");
  setNumber("n-hidden", now.bytes_per_s ? String(Math.round(100 * now.hidden)) : "–", now.bytes_per_s ? `% · ${bytes(now.bytes_per_s)}/s` : "");
  drawWorlds();
}
function setNumber(id, value, unit) {
  const key = value + "|" + unit, element = $(id);
  if (element.dataset.key === key) return;
  element.dataset.key = key;
  element.replaceChildren(value, ...(unit ? [h("small", {}, unit)] : []));
}
// What the first step still waits for, in words.
function awaited() {
  const missing = run.head.ranks.filter((r) => r.state === "starting"), names = missing.slice(0, 6).map((r) => r.rank).join(", ") + (missing.length > 6 ? " …" : "");
  if (!run.head.size) return "waiting for the launcher to start the ranks";
  if (missing.length) return `waiting for rank${missing.length > 1 ? "s" : ""} ${names} to start: Python, imports, hvd.init()`;
  return "all ranks are here; waiting for the first optimizer.step()";
}
// The world's size over time, as steps.
function drawWorlds() {
  const canvas = $("n-worlds"), worlds = run.head.worlds;
  canvas.hidden = worlds.length < 2;
  if (canvas.hidden) return;
  canvas.title = worlds.slice(-20).map(([at, , size]) => `${clock(at)}  ${plural(size, "rank")}`).join("\n");
  const w = (canvas.width = canvas.clientWidth * devicePixelRatio), tall = (canvas.height = 14 * devicePixelRatio), ctx = canvas.getContext("2d");
  const most = Math.max(...worlds.map((one) => one[2])), from = worlds[0][0], span = run.head.now - from || 1;
  ctx.strokeStyle = css("--accent"); ctx.lineWidth = 1.5 * devicePixelRatio; ctx.beginPath();
  worlds.forEach(([at, , size], i) => {
    const x = ((at - from) / span) * w, y = tall - (size / most) * (tall - 4) - 1, next = i + 1 < worlds.length ? ((worlds[i + 1][0] - from) / span) * w : w;
    if (i) ctx.lineTo(x, y); else ctx.moveTo(x, y);
    ctx.lineTo(next, y);
  });
  ctx.stroke();
}

// What charts show of the bins: from the first step on, or half of each would be empty, and without the holes that steps
// longer than a bin leave; a hole of more than two steps is one.
function forCharts(c) {
  const rows = [...c.step, ...Object.values(c.metrics)];
  let first = 0, n = c.parts[0].length;
  while (first < n && rows.every((row) => row[first] === null)) first++;
  if (first === n) return null;
  while (isOver() && rows.every((row) => row[n - 1] === null)) n--;  // the end of a job is no gap
  const most = Math.ceil((2.5 * (run.head.step_ms || 0)) / 1000 / c.bin_s) + 1, shown = (row) => bridged(row.slice(first, n), most);
  return {
    ...c, began: c.began + first * c.bin_s, gaps: gapsOf(c, first, n, most), step: c.step.map(shown), late: c.late.map(shown), parts: c.parts.map(shown),
    metrics: Object.fromEntries(Object.entries(c.metrics).map(([name, row]) => [name, row.slice(first, n)])),
  };
}
// Times in which no rank ended a step, with what the events say about them.
function gapsOf(c, first, n, most) {
  const found = [];
  let from = null;
  for (let i = first; i <= n; i++) {
    const empty = i < n && c.step.every((row) => row[i] === null);
    if (empty && from === null) from = i;
    if (!empty && from !== null) { if (i - from > most) found.push({ from: c.began + from * c.bin_s, to: c.began + i * c.bin_s }); from = null; }
  }
  for (const gap of found) {
    const kinds = new Set(run.events.filter((e) => e[1] > gap.from - 2 * c.bin_s && e[1] < gap.to + c.bin_s).map((e) => e[2]));
    gap.words = kinds.has("world") || kinds.has("lost") ? "ranks re-form" : kinds.has("stall") ? "ranks wait" : kinds.has("commit") ? "commit or checkpoint" : "no step: evaluation, checkpoint, or other work";
  }
  return found;
}
const gapAt = (t) => run.shown.gaps.find((gap) => t >= gap.from && t < gap.to);
function bridged(row, most) {
  let last = -1;
  row.forEach((value, i) => {
    if (value === null) return;
    if (last >= 0 && i - last > 1 && i - last <= most + 1) for (let k = last + 1; k < i; k++) row[k] = row[last] + ((value - row[last]) * (k - last)) / (i - last);
    last = i;
  });
  return row;
}
const times = () => { const c = run.shown, n = c.parts[0].length; return Array.from({ length: n }, (_, i) => c.began + i * c.bin_s); };
const median = (values) => { const v = values.filter((x) => x !== null).sort((a, b) => a - b), n = v.length; return n ? (v[(n - 1) >> 1] + v[n >> 1]) / 2 : null; };
const isOver = () => !run.live || ["done", "failed", "stopped"].includes(run.head.state);
const verdicts = () => (run.head.stragglers.length || !isOver() ? run.head.stragglers : run.head.past);
const lateRanks = () => new Set([...verdicts().map((s) => s.rank), ...run.head.pending.flatMap((op) => (run.head.state === "waiting" ? op.missing : []))]);
const MARKS = { world: "--accent", lost: "--bad", failed: "--bad", nan: "--bad", drift: "--bad", commit: "--good", stall: "--warn" };
// Commits after every few steps are no news: their marks would cover the curve.
const rare = (kind) => kind !== "commit" || run.events.reduce((n, e) => n + (e[2] === kind), 0) <= 20;
const marks = (kinds) => () => run.events.filter((e) => kinds.includes(e[2]) && rare(e[2])).map((e) => ({ at: e[1], color: css(MARKS[e[2]]) }));

function showCharts() {
  const c = (run.shown = run.columns && forCharts(run.columns));
  if (!c) { const none = $("c-step").querySelector(".none"); if (none) none.textContent = `No step has ended yet: ${awaited()}.`; return; }
  $("lateness").hidden = false;
  const xs = times(), late = lateRanks();
  const medians = xs.map((_, i) => median(c.step.map((row) => row[i])));
  const shown = c.ranks.length <= 128 ? c.ranks.map((_, i) => i) : c.ranks.map((_, i) => i).filter((i) => late.has(c.ranks[i]));
  const key = JSON.stringify([c.ranks, [...late], shown.length]), several = c.ranks.length > 2;
  charts.step ||= new Chart($("c-step"), {
    unit: " ms", marks: marks(["world", "lost", "nan", "drift"]), gaps: () => run.shown.gaps, onScale: (u) => { if (charts.heat) { charts.heat.range = [u.scales.x.min, u.scales.x.max]; charts.heat.draw(); } },
    tip: (i) => stepTip(i),
  });
  charts.step.data = [xs, ...shown.map((r) => c.step[r]), ...(several ? [medians] : [])];
  if (charts.step.key !== key) {
    charts.step.key = key;
    charts.step.build([...shown.map((r) => (late.has(c.ranks[r]) ? { stroke: lateColor(c, r, late), width: 2.4 } : { stroke: rankColor(c, r), width: c.ranks.length <= 8 ? 1.6 : 1 })), ...(several ? [{ stroke: css("--text"), width: 2.6 }] : [])]);
  } else charts.step.set(charts.step.data);
  charts.heat ||= new Heat($("heat"), $("heat-ranks"), $("heat-tip"));
  const scale = charts.step.plot && charts.step.plot.scales.x;
  charts.heat.range = scale && scale.min !== null && scale.max !== scale.min ? [scale.min, scale.max] : null;
  const op = run.head.state === "waiting" && run.head.pending.find((one) => one.missing.length);
  charts.heat.stuck = op ? { ranks: new Set(op.missing), from: run.head.now - op.waited_s } : null;
  charts.heat.set(c, xs, late);
  showRankLegend(c, late);
  showParts(c, xs);
  showMetric(c, xs);
}
// Up to eight ranks have colours of their own; more are thin lines around their median.
const RANK_COLORS = ["#4f8ff7", "#f0a63a", "#22ab9c", "#8a7cf5", "#d46bb5", "#8aa33a", "#a9794b", "#3fb6d9"];
const rankColor = (c, r) => (c.ranks.length <= 8 ? RANK_COLORS[r] : css("--thin"));
// Red for one late rank; several keep their own colours, so that you can tell them apart.
const lateColor = (c, r, late) => (late.size > 1 && c.ranks.length <= 8 ? rankColor(c, r) : css("--bad"));
function showRankLegend(c, late) {
  const key = JSON.stringify([c.ranks, [...late], c.gaps.length > 0, document.documentElement.dataset.theme]);
  if ($("step-legend").dataset.key === key) return;
  $("step-legend").dataset.key = key;
  const entry = (color, words) => { const mark = h("i"); mark.style.background = color; return h("span", {}, mark, words); };
  const named = c.ranks.map((rank, r) => [rank, r]).filter(([rank]) => c.ranks.length <= 8 || late.has(rank)).slice(0, 12);
  const items = named.map(([rank, r]) => entry(late.has(rank) ? lateColor(c, r, late) : rankColor(c, r), late.has(rank) ? `rank ${rank}, late` : `rank ${rank}`));
  if (c.ranks.length > 8) items.push(entry(css("--quiet"), "each other rank"));
  if (c.ranks.length > 2) items.push(entry(css("--text"), "median of the ranks"));
  if (c.gaps.length) items.push(entry(css("--heat0"), "gap: no rank ended a step (point at it for the reason)"));
  $("step-legend").replaceChildren(...items);
}
function stepTip(i) {
  const c = run.shown, rows = c.ranks.map((rank, r) => [rank, c.step[r][i]]).filter((p) => p[1] !== null && p[1] !== undefined).sort((a, b) => b[1] - a[1]);
  const mid = median(rows.map((p) => p[1])), gap = gapAt(c.began + i * c.bin_s);
  if (gap || !rows.length) return `${clock(c.began + i * c.bin_s)}\n${gap ? gap.words : "no step ended here"}`;
  if (rows.length <= 2) return [clock(c.began + i * c.bin_s), ...rows.map(([rank, ms]) => `rank ${rank}   ${pretty(ms)} ms`)].join("\n");
  return [`${clock(c.began + i * c.bin_s)}   median ${pretty(mid)} ms`, ...rows.slice(0, 4).map(([rank, ms]) => `rank ${rank}   ${pretty(ms)} ms   ${mid ? (ms / mid).toFixed(2) : "–"}×`)].join("\n");
}
function showParts(c, xs) {
  const sums = []; let below = xs.map(() => 0);
  for (const row of c.parts) { below = row.map((v, i) => (v === null ? null : (below[i] || 0) + v)); sums.push(below); }
  charts.parts ||= new Chart($("c-parts"), { unit: " ms", tip: (i) => [clock(run.shown.began + i * run.shown.bin_s), ...PARTS.map((p, k) => `${PART_NAMES[p]}   ${pretty(run.shown.parts[k][i])} ms`)].join("\n") });
  charts.parts.data = [xs, ...sums.slice().reverse()];
  if (!charts.parts.series.length) charts.parts.build(PARTS.slice().reverse().map((p) => ({ stroke: css(p === "wait" ? "--wait-soft" : `--${p}`), fill: css(p === "wait" ? "--wait-soft" : `--${p}`), width: 0.5 })));
  else charts.parts.set(charts.parts.data);
}
function showMetric(c, xs) {
  const names = Object.keys(c.metrics);
  if (!names.length) return;
  if (!metric || !names.includes(metric)) metric = names.find((n) => /loss/i.test(n)) || names[0];
  const key = JSON.stringify([names, metric]);
  if ($("metric-pick").dataset.key !== key) {
    $("metric-pick").dataset.key = key;
    $("metric-pick").replaceChildren(...names.slice(0, 8).map((name) => { const b = h("button", { onclick: () => { metric = name; charts.metric.build([]); charts.metric.series = []; dirty.add("columns"); render(); } }, name); b.setAttribute("aria-pressed", String(name === metric)); return b; }));
  }
  charts.metric ||= new Chart($("c-metric"), { zero: false, marks: marks(["world", "commit", "nan", "lost", "drift"]), tip: (i) => `${clock(run.shown.began + i * run.shown.bin_s)}\n${metric}   ${pretty(run.shown.metrics[metric][i])}` });
  charts.metric.data = [xs, c.metrics[metric]];
  if (!charts.metric.series.length) charts.metric.build([{ stroke: css("--accent"), width: 2, spanGaps: true }]);
  else charts.metric.set(charts.metric.data);
}

function showBars() {
  const ranks = run.head.ranks.filter((r) => r.parts), late = lateRanks();
  if (!$("legend").childElementCount) $("legend").append(...PARTS.map((p) => h("span", {}, h("i", { className: `p-${p}` }), PART_NAMES[p])));
  if (!ranks.length) { $("bars").replaceChildren(h("p", { className: "none" }, "No step has ended yet.")); return; }
  const shown = ranks.length <= 16 ? ranks : ranks.slice().sort((a, b) => a.parts[WAIT] - b.parts[WAIT]).slice(0, 16);
  const longest = Math.max(...shown.map((r) => r.parts.reduce((a, b) => a + b, 0)), 1e-9);
  const rows = [];
  for (const r of shown) {
    const total = r.parts.reduce((a, b) => a + b, 0), stack = h("div", { className: "stack", title: PARTS.map((p, i) => `${PART_NAMES[p]} ${pretty(r.parts[i])} ms`).join("\n") });
    PARTS.forEach((p, i) => { const piece = h("i", { className: `p-${p}` }); piece.style.width = `${(100 * r.parts[i]) / longest}%`; stack.append(piece); });
    rows.push(h("span", { className: `name${late.has(r.rank) ? " late" : ""}` }, `rank ${r.rank}`), stack, h("span", { className: "ms" }, `${pretty(total - r.parts[WAIT])} ms own`));
  }
  $("bars").replaceChildren(...rows);
}

// A demo's buttons: each kills a rank.
function showDemo() {
  const shown = run.facts.demo && run.may.includes("remove") && !isOver();
  $("demo").hidden = !shown;
  if (!shown) return;
  const resumed = run.events.findLast((e) => e[2] === "resumed");
  text("demo-note", resumed ? `${clock(resumed[1])}  ${resumed[4]}` : "After a kill, this line says how long the training was interrupted.");
  const key = JSON.stringify([run.head.size, run.head.ranks.map((r) => [r.rank, r.host, r.state])]);
  if ($("demo-ranks").dataset.key === key) return; // a button that is replaced between press and release misses the click
  $("demo-ranks").dataset.key = key;
  $("demo-ranks").replaceChildren(...run.head.ranks.map((r) => h("button", { disabled: r.state !== "here" || run.head.size < 2, title: `SIGKILL to the process of rank ${r.rank} on ${r.host}`, onclick: () => act("remove", { rank: r.rank }) }, `Kill rank ${r.rank}`)));
}

// ---- findings -------------------------------------------------------------------------------------------------------
const foreign = (frame) => frame[4] !== "user";
const ownKey = (frames) => JSON.stringify(frames.slice(Math.max(frames.findIndex((f) => !foreign(f)), 0)).map((f) => f.slice(0, 3)));
function frameRows(frames, limit = 7, blame = true) {
  const guilty = frames.findIndex((f) => !foreign(f));
  const first = guilty > limit - 3 ? guilty - 2 : 0, part = frames.slice(first, first + limit);
  const box = h("div", { className: "frames" });
  if (first) box.append(h("div", { className: "where" }, `… ${plural(first, "frame")} further in`));
  part.forEach((f, k) => {
    const [file, line, name, code] = f, own = !foreign(f);
    box.append(h("div", { className: blame && k + first === guilty ? "guilty" : own ? "own" : "lib", title: `${file}:${line}\n${code || ""}` }, `${file.split("/").slice(-2).join("/")}:${line}  ${name}`, code ? h("span", { className: "where" }, `   ${code}`) : null));
  });
  if (frames.length > first + limit) box.append(h("div", { className: "where" }, `… ${plural(frames.length - first - limit, "frame")} further out`));
  return box;
}
function mainFrames(rank) { const s = run.stacks.stacks[rank]; return s && s.threads.length ? s.threads[0][1] : null; }

function showAlerts() {
  const now = run.head, cards = [];
  const op = now.pending.find((one) => one.missing.length);
  if (now.state === "waiting" && op) {
    for (const rank of op.missing.slice(0, 3)) {
      const place = now.ranks.find((r) => r.rank === rank) || { host: "" }, frames = mainFrames(rank);
      cards.push(alertCard("bad", `rank ${rank} on ${place.host} keeps the others waiting`, `${plural(op.there.length, "rank")} wait in ${op.name} for ${duration(op.waited_s)}.`, null, frames ? [`rank ${rank} is here right now`, frames] : null));
    }
  }
  for (const one of now.drifts.slice(-2)) {
    const [title, ...rest] = one.text.split(": ");
    cards.push(alertCard("bad", title, rest.join(": "), null, null));
  }
  for (const s of verdicts().slice(0, 2)) {
    const past = s.until !== null, frames = s.line ? s.line.frames : past ? null : mainFrames(s.rank), percent = (x) => `${Math.round(100 * x)}\u00a0%`;
    const note = !s.line ? `rank ${s.rank} was here when last asked` : `rank ${s.rank} ${past ? "was" : "is"} here in ${percent(s.line.share)} of its time` + (s.line.other === null ? "" : `, rank ${s.line.other} in ${percent(s.line.usual)}`);
    const share = s.cause && `, ${s.cause}`, when = past ? `from ${clock(s.since)} to ${clock(s.until)}` : `since ${clock(s.since, false)}`;
    const others = run.head.size === 2 ? ["The other rank", "s"] : ["The others", ""];
    cards.push(alertCard("", `${s.claim} ${when}${share}`, `${others[0]} wait${past ? "ed" : others[1]} for it for ${s.late}\u00a0% of every step. Try first: ${s.advice}.`, s.excess, frames ? [note, frames] : null));
  }
  if (now.state === "failed" && now.why) cards.push(alertCard("bad", now.why.split("\n")[0].slice(0, 200), now.why.split("\n").slice(1, 9).join("\n"), null, null));
  const key = JSON.stringify([verdicts(), now.drifts, now.state, op && [op.missing, op.name, Math.round(op.waited_s)], run.stacks, now.why]);
  if (key === $("alerts").dataset.key) return;
  $("alerts").dataset.key = key; $("alerts").replaceChildren(...cards);
}
function alertCard(kind, title, note, shares, stack) {
  const left = h("div", {}, h("h2", {}, title), h("p", {}, note));
  if (shares) {
    const bar = h("div", { className: "share" });
    for (const p of PARTS) if (shares[p]) { const i = h("i", { className: `p-${p}`, title: `${PART_NAMES[p]} ${Math.round(100 * shares[p])} %` }); i.style.width = `${100 * shares[p]}%`; bar.append(i); }
    left.append(bar, h("small", {}, "the additional time: " + PARTS.filter((p) => shares[p]).map((p) => `${PART_NAMES[p]} ${Math.round(100 * shares[p])}\u00a0%`).join(", ")));
  }
  return h("div", { className: `card alert ${kind}` }, left, stack ? h("div", {}, h("small", {}, stack[0]), frameRows(stack[1])) : null);
}

function showPending() {
  const ops = run.head.pending;
  if (!ops.length) { $("pending").replaceChildren(h("p", { className: "none" }, "Nothing.")); return; }
  const chips = (ranks, kind) => h("span", { className: "chips" }, ...ranks.slice(0, 40).map((r) => h("span", { className: `chip ${kind}` }, String(r))));
  $("pending").replaceChildren(...ops.slice(0, 6).map((op) => h("div", { className: "op" }, h("code", {}, op.name), h("span", { className: "quiet" }, `  ${duration(op.waited_s)}`),
    h("div", { className: "row" }, h("span", {}, "there"), chips(op.there, "good")), h("div", { className: "row" }, h("span", {}, "missing"), op.missing.length ? chips(op.missing, "bad") : h("span", {}, "none: data is moving")))));
}

const GAUGES = {
  cpu: "Busy share of all cores, of every program on the host.", memory: "Memory in use on the host, without caches.", gpu: "Busy share of the GPU, and its memory in use.",
  shm: "Shared memory in use on the host.", link: "Bytes sent, as a share of the speed of the network link.",
};
function showHosts() {
  const gauge = (name, share, words) => { const i = h("i"), title = GAUGES[name.split(" ")[0]]; i.style.width = `${Math.min(100 * share, 100)}%`; return [h("span", { className: "quiet", title }, name), h("div", { className: `gauge${share > 0.93 ? " hot" : ""}`, title }, i), h("span", { className: "v", title }, words)]; };
  $("hosts").replaceChildren(...Object.entries(run.head.hosts).map(([name, f]) => {
    const rows = [];
    if (f.cpu !== undefined) rows.push(...gauge("cpu", f.cpu, `${Math.round(100 * f.cpu)} % of ${f.num_cpus}`));
    if (f.memory_total) rows.push(...gauge("memory", f.memory / f.memory_total, `${bytes(f.memory)} of ${bytes(f.memory_total)}`));
    (f.gpus || []).slice(0, 16).forEach((g, i) => rows.push(...gauge(`gpu ${i}`, g.busy, `${Math.round(100 * g.busy)} % · ${bytes(g.memory)}`)));
    if (f.shm_total) rows.push(...gauge("shm", f.shm / f.shm_total, `${bytes(f.shm)} of ${bytes(f.shm_total)}`));
    if (f.net_in !== undefined) rows.push(h("span", { className: "quiet" }, "network"), h("span", { className: "quiet" }, ""), h("span", { className: "v", title: "Bytes received and sent in a second, by every program on the host." }, `↓ ${bytes(f.net_in)}/s ↑ ${bytes(f.net_out)}/s${f.net_step ? ` · ${bytes(f.net_step)} a step` : ""}`));
    if (f.link && f.net_out !== undefined) rows.push(...gauge("link", f.net_out / f.link, `${Math.round(100 * f.net_out / f.link)} % of ${bytes(f.link)}/s`));
    const who = f.ranks.length > 6 ? `${plural(f.ranks.length, "rank")}: ${f.ranks[0]} … ${f.ranks[f.ranks.length - 1]}` : `rank${f.ranks.length === 1 ? "" : "s"} ${f.ranks.join(", ")}`;
    return h("div", { className: "host" }, h("div", {}, h("b", {}, name), h("div", { className: "quiet" }, who)), rows.length ? h("div", { className: "gauges" }, ...rows) : h("span", { className: "none" }, "no news yet"));
  }));
}

function showEvents() {
  const last = run.events.findLast((e) => e[2] === "commit");  // of many commits the newest will do
  const shown = run.events.filter((e) => e[2] !== "commit" || e === last).slice(-60).reverse();
  $("events").replaceChildren(...(shown.length ? shown.map(([, at, kind, , words]) => h("li", { className: kind }, h("span", { className: "k" }), h("time", {}, clock(at)), h("span", {}, words))) : [h("li", { className: "none" }, "Nothing out of the ordinary.")]));
}

function showStacks() {
  const groups = new Map(), known = Object.entries(run.stacks.stacks);
  for (const [rank, s] of known) {
    if (!s.threads.length) continue;
    // Ranks that wait in the same line of the script are in the same place, wherever inside the library they are.
    const frames = s.threads[0][1], key = ownKey(frames);
    if (!groups.has(key)) groups.set(key, { ranks: [], frames: s.threads[0][1], others: s.threads.length - 1, at: s.at });
    groups.get(key).ranks.push(Number(rank));
  }
  const list = [...groups.values()].sort((a, b) => b.ranks.length - a.ranks.length);
  text("stacks-note", known.length ? `at ${clock(Math.max(...known.map(([, s]) => s.at)))}: ` + list.map((g, i) => `${plural(g.ranks.length, "rank")} ${i ? "there" : "here"}`).join(", ") : "where every rank is, grouped");
  $("stacks").replaceChildren(...(list.length ? list.map((g) => h("div", { className: "group" }, h("div", { className: "who" }, h("b", {}, plural(g.ranks.length, "rank")), h("div", { className: "chips" }, ...g.ranks.slice(0, 64).map((r) => h("span", { className: `chip${lateRanks().has(r) ? " bad" : ""}` }, String(r))))), frameRows(g.frames, 12, g.ranks.some((r) => lateRanks().has(r))))) : [h("p", { className: "none" }, run.may.includes("stacks") ? "Ask for them with “Look now”. When the job stands still they appear by themselves." : "None were recorded.")]));
}

// Where profiled ranks were found, the newest profile first.
function showProfiles() {
  const known = Object.entries(run.stacks.profiles).filter(([, p]) => p.num_samples).sort((a, b) => b[1].at - a[1].at).slice(0, 4);
  $("profiles").replaceChildren(...(known.length ? [h("h3", { title: "Samples of the training thread, a hundred in a second or fewer." }, "Profiles ", h("small", {}, "where a rank was found when it was looked at again and again"))] : []), ...known.map(([rank, p]) =>
    h("div", { className: "group" }, h("div", { className: "who" }, h("b", {}, `rank ${rank}`), h("div", { className: "quiet" }, `${trim(p.seconds)} s until ${clock(p.at)}`)),
      h("div", { className: "founds" }, ...p.stacks.slice(0, 3).map(([count, frames]) => h("div", {}, h("small", {}, `${Math.round((100 * count) / p.num_samples)} % of the time`), frameRows(frames, 4, lateRanks().has(Number(rank)))))))));
}

// ---- output ---------------------------------------------------------------------------------------------------------
let logKey = "", lastLine = 0;
function showLines() {
  const box = $("log"), filter = $("log-filter").value.toLowerCase(), rank = $("log-rank").value;
  const ranks = [...new Set(run.lines.map((l) => l[2]))].sort((a, b) => a - b), pickKey = ranks.join();
  if ($("log-rank").dataset.key !== pickKey) {
    $("log-rank").dataset.key = pickKey;
    $("log-rank").replaceChildren(h("option", { value: "" }, "all ranks"), ...ranks.map((r) => h("option", { value: String(r) }, r < 0 ? "launcher" : `rank ${r}`)));
    $("log-rank").value = rank;
  }
  const key = JSON.stringify([filter, rank]), fresh = key !== logKey || run.shownLines === 0;
  if (fresh) { box.replaceChildren(); lastLine = 0; logKey = key; run.shownLines = 1; }
  const wanted = run.lines.filter((l) => l[0] > lastLine && (!rank || String(l[2]) === rank) && (!filter || l[4].toLowerCase().includes(filter)));
  if (run.lines.length) lastLine = run.lines[run.lines.length - 1][0];
  const rows = wanted.slice(-2000).map(([, at, r, stream, words]) => h("div", { className: r < 0 ? "launcher" : stream, title: clock(at) }, h("span", { className: "r" }, r < 0 ? "hora" : String(r)), words));
  box.append(...rows);
  while (box.childElementCount > 2000) box.firstChild.remove();
  if ($("log-follow").checked) box.scrollTop = box.scrollHeight;
}

// ---- actions --------------------------------------------------------------------------------------------------------
async function act(action, body = {}) {
  const answer = await ask(`api/${action}`, { method: "POST", body: JSON.stringify(body) }).catch(() => null);
  if (!answer || !answer.ok) text("link", answer ? (await answer.text()).trim() : "the job does not answer");
}
// Asks, and gives what was chosen, or null.
function confirmed(question, yes, { rank = null, seconds = false, danger = true } = {}) {
  text("ask-text", question); text("ask-yes", yes); $("ask-yes").className = danger ? "danger" : "";
  $("ask-rank-row").hidden = rank === null; $("ask-seconds-row").hidden = !seconds; $("ask-what").hidden = rank === null && !seconds;
  if (rank !== null) { $("ask-rank").replaceChildren(...run.head.ranks.filter((r) => r.state === "here").map((r) => h("option", { value: String(r.rank) }, `${r.rank} on ${r.host}`))); $("ask-rank").value = String(rank); }
  return new Promise((answer) => {
    $("ask").onclose = () => answer($("ask").returnValue === "yes" ? { rank: Number($("ask-rank").value), seconds: Number($("ask-seconds").value) || 5 } : null);
    $("ask").returnValue = "no"; $("ask").showModal();
  });
}
async function bundle() {
  const answer = await ask("api/bundle");
  if (!answer.ok) return;
  const link = h("a", { href: URL.createObjectURL(await answer.blob()), download: `hora-${run.facts.id}.zip` });
  link.click(); setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
function openMenu() {
  const may = (what) => run.may.includes(what), items = [], over = isOver();
  const add = (words, action, danger = false) => items.push(h("button", { className: danger ? "danger" : "", onclick: () => { closeMenu(); action(); } }, words));
  const worst = run.head.stragglers.length ? run.head.stragglers[0].rank : 0;
  if (may("stacks") && !over) add("Look at all stacks", () => act("stacks"));
  if (may("profile") && !over) add("Profile a rank …", async () => { const chosen = await confirmed("Where does a rank spend its time?", "Profile it", { rank: worst, seconds: true, danger: false }); if (chosen) act("profile", chosen); });
  if (may("bundle")) add("Download everything as a bundle", bundle);
  if (may("stop") && !over) add("Commit, then stop …", async () => { if (await confirmed("Stop the job at its next commit?", "Commit and stop")) act("stop", { commit: true }); });
  if (may("remove") && !over && run.facts.elastic) add("Remove a rank …", async () => { const chosen = await confirmed("End the process of a rank? The others go on without it.", "Remove it", { rank: worst }); if (chosen) act("remove", chosen); }, true);
  if (may("stop") && !over) add("Stop the job …", async () => { if (await confirmed("Stop the job now? What was not committed is lost.", "Stop the job")) act("stop", { commit: false }); }, true);
  $("menu").replaceChildren(...items); $("menu").hidden = false; $("actions").setAttribute("aria-expanded", "true");
}
function closeMenu() { $("menu").hidden = true; $("actions").setAttribute("aria-expanded", "false"); }

// ---- light and dark -------------------------------------------------------------------------------------------------
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  for (const chart of Object.values(charts)) { chart.series = []; chart.key = ""; }
  charts.timeline?.draw();
  ["head", "columns"].forEach((k) => dirty.add(k)); render();
}
const preferred = matchMedia("(prefers-color-scheme: dark)");
let chosen = null;
try { chosen = localStorage.getItem("hora-theme"); } catch { /* no storage in this frame */ }
setTheme(chosen || (preferred.matches ? "dark" : "light"));
preferred.addEventListener("change", () => { if (!chosen) setTheme(preferred.matches ? "dark" : "light"); });
$("theme").onclick = () => { chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; try { localStorage.setItem("hora-theme", chosen); } catch { /* as above */ } setTheme(chosen); };
$("actions").onclick = () => ($("menu").hidden ? openMenu() : closeMenu());
document.addEventListener("click", (event) => { if (!event.target.closest(".menu")) closeMenu(); });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") closeMenu(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) requestAnimationFrame(render); });
$("ask-stacks").onclick = () => act("stacks");
$("log-filter").oninput = $("log-rank").onchange = () => { dirty.add("lines"); render(); };
$("log").addEventListener("wheel", () => { const box = $("log"); setTimeout(() => { $("log-follow").checked = box.scrollTop + box.clientHeight > box.scrollHeight - 40; }, 50); }, { passive: true });
// The page is painted first, then filled; in a tab or a frame that is not painted, soon.
let begun = false;
const begin = () => { if (!begun) { begun = true; follow(); } };
requestAnimationFrame(() => setTimeout(begin)); setTimeout(begin, 300);
