"use strict";
// Draws the timeline and the memory of the page from the JSON that it carries, and gives the bars their colours.
// Spans stay in typed columns; a frame draws only what the window shows, and of spans within a pixel one colour.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);

  // Okabe and Ito 2008: eight colours that people with any colour vision tell apart.
  const COLOUR = {
    F: "#0072b2", C: "#0072b2", R: "#56b4e9", B: "#e69f00", I: "#d55e00", W: "#009e73", "F&B": "#8c8a3a",
    OPT: "#f0e442", NORM: "#b8ad2e", communication: "#cc79a7", copy: "#8f6b4a", host: "#7f8a96", launch: "#7f8a96",
    offload: "#8f6b4a", bubble: "#c3cad2", idle: "#c3cad2", ahead: "#dfe3e8", compute: "#5a78a8",
  };
  const MEMORY = {
    parameters: "#0072b2", gradients: "#e69f00", master: "#009e73", states: "#6ccfb0", activations: "#56b4e9",
    logits: "#f0e442", temporary: "#d55e00", communication: "#cc79a7", workspace: "#8f6b4a", overhead: "#a3adb8",
  };
  const SPARE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8f6b4a"];
  const colourOf = (kind, role) => {
    return COLOUR[kind] || COLOUR[role] || COLOUR.compute;
  };
  const partColour = (key) => {
    if (COLOUR[key]) return COLOUR[key];
    return /communication|SEND|RECV|UNSHARD|AR$|REDUCE|A2A/.test(key) ? COLOUR.communication : COLOUR.compute;
  };
  const word = (kind) => Object.hasOwn(data.words, kind) ? data.words[kind] : kind.toLowerCase().replaceAll("_", " ");
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const dark = (hex) => {
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    return 0.299 * r + 0.587 * g + 0.114 * b < 140;
  };

  // --- quantities ---------------------------------------------------------------------------------------------------
  const digits = (value, n) => Number(value.toPrecision(n)).toLocaleString("en", { maximumFractionDigits: 12 });
  const seconds = (s) => {
    const size = Math.abs(s);
    const [unit, factor] = size >= 1 || s === 0 ? ["s", 1] : size >= 1e-3 ? ["ms", 1e3] : size >= 1e-6 ? ["µs", 1e6] : ["ns", 1e9];
    return `${digits(s * factor, 4)} ${unit}`;
  };
  const bytes = (b) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let i = 0;
    while (Math.abs(b) >= 1024 && i < units.length - 1) { b /= 1024; i += 1; }
    return `${digits(b, 4)} ${units[i]}`;
  };
  const flops = (f) => {
    const units = ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"];
    let i = 0;
    while (f >= 1000 && i < units.length - 1) { f /= 1000; i += 1; }
    return `${digits(f, 4)} ${units[i]}`;
  };

  // --- spans --------------------------------------------------------------------------------------------------------
  const KIND = 0, ROLE = 1, STAGE = 2, PATH = 3, BYTES = 4, FLOPS = 5, EFFECT = 6;

  // Columns of a timeline: start and end in seconds by span, and the lanes [worker, stream, row, first, last].
  function read(timeline) {
    const s = timeline.spans, n = s.gap.length;
    const start = new Float64Array(n), end = new Float64Array(n), lanes = [];
    let at = 0;
    for (const [worker, stream, row, count] of s.lanes) {
      let tick = 0;
      const lane = { timeline, worker, stream, row, first: at, last: at + count, empty: true };
      for (const stop = at + count; at < stop; at += 1) {
        tick += s.gap[at];
        start[at] = tick * s.tick_s;
        tick += s.lasts[at];
        end[at] = tick * s.tick_s;
        if (s.lasts[at]) lane.empty = false;
      }
      lanes.push(lane);
    }
    return Object.assign(timeline, { start, end, laneList: lanes });
  }
  const timelines = data.timelines.map(read);
  timelines.forEach((t, i) => { t.mark = timelines[0].clock === t.clock && i ? "2" : t.clock[0].toUpperCase(); });
  const extent = Math.max(...timelines.map((t) => t.spans.end_s), 1e-12);
  const entry = (t, i) => t.spans.table[t.spans.what[i]];
  const action = (t, i) => {
    const e = entry(t, i), unit = t.spans.unit[i];
    return (e[STAGE] < 0 ? "" : e[STAGE]) + t.kinds[e[KIND]] + (unit < 0 ? "" : unit);
  };
  const laneOf = (t, i) => t.laneList.find((lane) => i >= lane.first && i < lane.last);
  const several = timelines.length > 1;

  function describe(t, i) {
    const e = entry(t, i), lane = laneOf(t, i), worker = t.workers[lane.worker];
    const lines = [`${action(t, i)}   ${word(t.kinds[e[KIND]])}`];
    lines.push(`${several ? t.name + ", " : ""}${worker.name}${worker.count > 1 ? ` (${worker.count} ranks)` : ""}, ${t.streams[lane.stream]}`);
    lines.push(`${seconds(t.end[i] - t.start[i])} from ${seconds(t.start[i])}`);
    if (t.spans.step.length && t.spans.step[i]) lines.push(`step ${t.spans.step[i]}`);
    if (e[PATH] >= 0) lines.push(t.paths[e[PATH]]);
    if (e[BYTES] >= 0) lines.push(`${bytes(e[BYTES])} moved`);
    if (e[FLOPS] >= 0 && t.end[i] > t.start[i]) lines.push(`${flops(e[FLOPS])}, ${flops(e[FLOPS] / (t.end[i] - t.start[i]))}/s`);
    const back = t.spans.cause[i];
    if (back) {
      const cause = i - back;
      lines.push(`starts when ${action(t, cause)} on ${t.workers[laneOf(t, cause).worker].name} is done`);
    }
    return lines;
  }

  // --- rows of the drawing: for each worker its streams, predicted over measured ----------------------------------------
  const HEAD = 20, AXIS = 22;
  const rowsDrawn = [];
  let height = AXIS;
  (() => {
    const names = [...new Set(timelines.flatMap((t) => t.workers.map((w) => w.name)))];
    for (const name of names) {
      const count = timelines.map((t) => t.workers.find((w) => w.name === name)).find(Boolean).count;
      rowsDrawn.push({ head: count > 1 ? `${name} · ${count} ranks` : name, top: height, height: HEAD });
      height += HEAD;
      const streams = [...new Set(timelines.flatMap((t) => t.streams))];
      for (const stream of streams) {
        for (const t of timelines) {
          for (const lane of t.laneList) {
            if (lane.empty || t.workers[lane.worker].name !== name || t.streams[lane.stream] !== stream) continue;
            const size = stream === "compute" ? 22 : 14;
            rowsDrawn.push({ lane, label: lane.row ? "" : stream, mark: several ? t.mark : "", top: height, height: size });
            height += size;
          }
        }
      }
      height += 4;
    }
  })();
  const laneRows = rowsDrawn.filter((row) => row.lane);

  // --- the window -----------------------------------------------------------------------------------------------------
  let from = 0, to = extent, chosen = null, queued = false;
  const box = $("lanes"), canvas = $("lanes-canvas"), space = $("lanes-space");
  const memoryCanvas = $("memory-canvas");
  let printing = false;
  const gutter = () => (box.clientWidth < 560 ? 74 : 130);
  const wide = () => Math.max(box.clientWidth - gutter() - 8, 40);
  const xOf = (s) => gutter() + ((s - from) / (to - from)) * wide();
  const sOf = (x) => from + ((x - gutter()) / wide()) * (to - from);
  function show(a, b) {
    const size = Math.min(Math.max(b - a, extent * 1e-7), extent);
    const begin = Math.min(Math.max(a, 0), extent - size);
    from = begin;
    to = begin + size;
    redraw();
  }
  const zoom = (factor, at) => show(at - (at - from) * factor, at + (to - at) * factor);
  const pan = (share) => show(from + share * (to - from), to + share * (to - from));
  function redraw() {
    if (queued) return;
    queued = true;
    requestAnimationFrame(() => { queued = false; drawLanes(); drawMemory(); });
  }

  function prepare(target, width, tall) {
    const ratio = window.devicePixelRatio || 1;
    if (target.width !== Math.round(width * ratio) || target.height !== Math.round(tall * ratio)) {
      target.width = Math.round(width * ratio);
      target.height = Math.round(tall * ratio);
    }
    const g = target.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.fillStyle = style("--back");
    g.fillRect(0, 0, width, tall);
    g.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    g.textBaseline = "middle";
    return g;
  }
  function steps(low, high, most) {
    const raw = (high - low) / Math.max(most, 1), power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * power).find((m) => m >= raw);
    const out = [];
    for (let i = Math.ceil(low / step); i * step <= high; i += 1) out.push(i * step);
    return out;
  }
  function drawAxis(g, tall, textY) {
    g.textAlign = "center";
    for (const at of steps(from, to, wide() / 90)) {
      const x = xOf(at);
      g.fillStyle = style("--line");
      g.fillRect(Math.round(x), 0, 1, tall);
      g.fillStyle = style("--dim");
      if (x < gutter() + wide() - 24) g.fillText(seconds(at), Math.max(x, gutter() + 16), textY);
    }
    g.textAlign = "left";
  }

  // The first span of a lane that ends after `s`.
  function search(t, lane, s) {
    let low = lane.first, high = lane.last;
    while (low < high) {
      const mid = (low + high) >> 1;
      if (t.end[mid] < s) low = mid + 1; else high = mid;
    }
    return low;
  }
  // Every pixel has one colour of the legend, none is blended: a span takes whole pixels of the device, and where many
  // share one, it has the colour whose time was shown least until then, so that a dense lane has colours by their time.
  function drawLane(g, row, top) {
    const lane = row.lane, t = lane.timeline, left = gutter(), right = left + wide(), ratio = window.devicePixelRatio || 1;
    const high = Math.round((top + 1) * ratio), low = Math.round((top + row.height - 1) * ratio);
    const paint = (a, b, colour) => {
      g.fillStyle = colour;
      g.fillRect(a / ratio, high / ratio, (b - a) / ratio, (low - high) / ratio);
    };
    let column = -1, inside = 0;
    const owed = new Map();
    const flush = () => {
      if (!inside) return;
      let most = null;
      for (const [colour, time] of owed) if (most === null || time > owed.get(most)) most = colour;
      paint(column, column + 1, most);
      owed.set(most, owed.get(most) - inside);
      inside = 0;
    };
    for (let i = search(t, lane, from); i < lane.last && t.start[i] <= to; i += 1) {
      if (t.end[i] === t.start[i]) continue;
      const a = Math.max(xOf(t.start[i]), left), b = Math.min(xOf(t.end[i]), right);
      const e = entry(t, i), colour = colourOf(t.kinds[e[KIND]], data.roles[e[ROLE]]);
      if ((b - a) * ratio < 1.5) {
        const at = Math.min(Math.floor(((a + b) / 2) * ratio), Math.ceil(right * ratio) - 1);
        if (at !== column) flush();
        column = at;
        owed.set(colour, (owed.get(colour) || 0) + b - a);
        inside += b - a;
        continue;
      }
      flush();
      owed.clear();
      paint(Math.round(a * ratio), Math.round((b - (b - a > 4 ? 1 : 0)) * ratio), colour);
      if (b - a > 26 && row.height > 12) {
        const text = action(t, i);
        if (g.measureText(text).width < b - a - 6) {
          g.fillStyle = dark(colour) ? "#fff" : "#000";
          g.fillText(text, a + 3, top + row.height / 2);
        }
      }
    }
    flush();
  }
  function drawLanes() {
    const tall = printing ? Math.min(height, 6000) : Math.min(height, Math.round(window.innerHeight * 0.7));
    const offset = printing ? 0 : box.scrollTop, width = box.clientWidth;
    canvas.style.height = `${tall}px`;
    space.style.height = `${printing ? 0 : height - tall}px`;
    const g = prepare(canvas, width, tall);
    drawAxis(g, tall, AXIS / 2);
    for (const row of rowsDrawn) {
      const top = row.top - offset;
      if (top + row.height < 0 || top > tall) continue;
      if (row.head) {
        g.fillStyle = style("--soft");
        g.fillRect(0, top, width, row.height);
        g.fillStyle = style("--text");
        g.font = "600 11px system-ui, 'DejaVu Sans', sans-serif";
        g.fillText(row.head, 6, top + row.height / 2);
        g.font = "11px system-ui, 'DejaVu Sans', sans-serif";
        continue;
      }
      g.fillStyle = style("--dim");
      g.fillText((row.mark ? row.mark + " " : "") + row.label, 10, top + row.height / 2, gutter() - 14);
      drawLane(g, row, top);
    }
    g.fillStyle = style("--back");
    if (offset > 0) { g.fillRect(0, 0, width, AXIS); drawAxis(g, AXIS, AXIS / 2); }
    if (chosen) outline(g, chosen, offset);
  }
  function outline(g, { t, i }, offset) {
    const row = laneRows.find((r) => r.lane.timeline === t && i >= r.lane.first && i < r.lane.last);
    if (!row) return;
    const a = Math.max(xOf(t.start[i]), gutter() - 2), b = Math.min(xOf(t.end[i]), gutter() + wide() + 2);
    if (b < gutter() || a > gutter() + wide()) return;
    g.lineWidth = 2;
    g.strokeStyle = style("--text");
    g.strokeRect(a, row.top - offset + 1, Math.max(b - a - 1, 2), row.height - 2);
  }

  // --- choosing and hovering --------------------------------------------------------------------------------------------
  function at(x, y) {
    const depth = y + box.scrollTop;
    if (x < gutter() || y < AXIS) return null;
    const row = laneRows.find((r) => depth >= r.top && depth < r.top + r.height);
    if (!row) return null;
    const t = row.lane.timeline, slack = (2 / wide()) * (to - from), s = sOf(x);
    for (let i = search(t, row.lane, s - slack); i < row.lane.last && t.start[i] <= s + slack; i += 1) {
      if (t.end[i] > t.start[i] && t.start[i] <= s + slack) return { t, i };
    }
    return null;
  }
  function choose(found, reveal) {
    chosen = found;
    $("detail").textContent = found ? describe(found.t, found.i).join(" · ") : "";
    if (found && reveal) {
      const { t, i } = found, size = to - from;
      if (t.end[i] < from || t.start[i] > to) show(t.start[i] - size / 3, t.start[i] + (2 * size) / 3);
      const row = laneRows.find((r) => r.lane.timeline === t && i >= r.lane.first && i < r.lane.last);
      if (row.top - AXIS < box.scrollTop) box.scrollTop = row.top - AXIS;
      if (row.top + row.height > box.scrollTop + box.clientHeight) box.scrollTop = row.top + row.height - box.clientHeight;
    }
    redraw();
  }
  function along(direction) {
    if (!laneRows.length) return;
    if (!chosen) { across(0); return; }
    const { t, i } = chosen, lane = laneOf(t, i);
    for (let j = i + direction; j >= lane.first && j < lane.last; j += direction) {
      if (t.end[j] > t.start[j]) { choose({ t, i: j }, true); return; }
    }
  }
  function across(direction) {
    if (!laneRows.length) return;
    const now = chosen ? laneRows.findIndex((r) => r.lane === laneOf(chosen.t, chosen.i)) : 0;
    const row = laneRows[Math.min(Math.max(now + direction, 0), laneRows.length - 1)];
    const t = row.lane.timeline, s = chosen ? chosen.t.start[chosen.i] : from;
    let i = Math.min(search(t, row.lane, s), row.lane.last - 1);
    while (i < row.lane.last - 1 && t.end[i] === t.start[i]) i += 1;
    while (i > row.lane.first && t.end[i] === t.start[i]) i -= 1;
    choose({ t, i }, true);
  }

  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  function hover(event, lines) {
    tip.hidden = !lines;
    if (!lines) return;
    tip.textContent = lines.join("\n");
    const side = event.clientX > window.innerWidth / 2 ? event.clientX - tip.offsetWidth - 14 : event.clientX + 14;
    tip.style.left = `${Math.max(4, side)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 4)}px`;
  }

  const pointers = new Map();
  let moved = 0;
  const local = (event) => {
    const frame = canvas.getBoundingClientRect();
    return [event.clientX - frame.left, event.clientY - frame.top];
  };
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event.clientX);
    moved = 0;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) {
      const found = at(...local(event));
      hover(event, found ? describe(found.t, found.i) : null);
      return;
    }
    const before = pointers.get(event.pointerId), other = [...pointers].find(([id]) => id !== event.pointerId);
    pointers.set(event.pointerId, event.clientX);
    moved += Math.abs(event.clientX - before);
    tip.hidden = true;
    if (other) {
      const was = Math.abs(before - other[1]), is = Math.abs(event.clientX - other[1]);
      if (was > 8 && is > 8) zoom(was / is, sOf((event.clientX + other[1]) / 2 - canvas.getBoundingClientRect().left));
    } else if (moved > 3) {
      pan((before - event.clientX) / wide());
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    pointers.delete(event.pointerId);
    if (moved <= 3) choose(at(...local(event)), false);
  });
  canvas.addEventListener("pointercancel", (event) => pointers.delete(event.pointerId));
  canvas.addEventListener("pointerleave", (event) => hover(event, null));
  canvas.addEventListener("dblclick", (event) => zoom(0.4, sOf(local(event)[0])));
  box.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) {
      event.preventDefault();
      zoom(Math.exp(Math.sign(event.deltaY) * 0.25), sOf(local(event)[0]));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      pan((event.deltaX || event.deltaY) / wide());
    }
  }, { passive: false });
  box.addEventListener("scroll", redraw);
  const middle = () => (chosen ? Math.min(Math.max(chosen.t.start[chosen.i], from), to) : (from + to) / 2);
  const KEYS = {
    ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), ArrowUp: () => across(-1), ArrowDown: () => across(1),
    "+": () => zoom(0.6, middle()), "=": () => zoom(0.6, middle()), "-": () => zoom(1 / 0.6, middle()),
    0: () => show(0, extent), Home: () => show(0, extent), n: () => along(1), p: () => along(-1),
    Escape: () => choose(null, false),
  };
  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(KEYS, event.key)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  $("zoom-in").addEventListener("click", () => zoom(0.6, middle()));
  $("zoom-out").addEventListener("click", () => zoom(1 / 0.6, middle()));
  $("zoom-all").addEventListener("click", () => show(0, extent));

  // --- memory: what one worker holds, stacked by class --------------------------------------------------------------------
  function curve(t, worker) {
    const events = [], classes = t.buffers.length, held = Float64Array.from(t.spans.resident[worker]);
    for (const lane of t.laneList) {
      if (lane.worker !== worker) continue;
      for (let i = lane.first; i < lane.last; i += 1) {
        for (const [cls, change] of t.spans.effects[entry(t, i)[EFFECT]]) {
          const s = change > 0 ? t.start[i] : t.end[i];
          events.push([t.repeats ? s % t.step_s : s, change, cls]);
        }
      }
    }
    events.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    const time = [0], rows = [Float64Array.from(held)];
    for (const [s, change, cls] of events) {
      held[cls] += change;
      if (s === time[time.length - 1]) rows[rows.length - 1] = Float64Array.from(held);
      else { time.push(s); rows.push(Float64Array.from(held)); }
    }
    const total = rows.map((row) => row.reduce((a, b) => a + b, 0));
    const used = [...Array(classes).keys()].filter((c) => rows.some((row) => row[c] > 0));
    return { time, rows, total, used, end: t.repeats ? t.step_s : t.spans.end_s };
  }
  const withMemory = timelines.filter((t) => t.spans.resident.length);
  const memoryColour = (name, i) => MEMORY[name] || SPARE[i % SPARE.length];
  let curves = [];
  function pickWorker() {
    const name = $("memory-worker").value;
    curves = withMemory.filter((t) => t.workers.some((w) => w.name === name))
      .map((t) => ({ t, ...curve(t, t.workers.findIndex((w) => w.name === name)) }));
    const first = curves[0], list = $("memory-legend");
    list.replaceChildren();
    for (const c of [...first.used].reverse()) legend(list, memoryColour(first.t.buffers[c], c), first.t.buffers[c]);
    if (curves.length > 1) legend(list, style("--text"), `${curves[1].t.name}, all classes (line)`);
    redraw();
  }
  function legend(list, colour, text) {
    const item = document.createElement("li"), swatch = document.createElement("i");
    swatch.style.background = colour;
    item.append(...(colour ? [swatch] : []), text);
    list.append(item);
  }
  function drawMemory() {
    if (!memoryCanvas || !curves.length) return;
    const width = box.clientWidth, tall = 260, bottom = tall - AXIS, name = $("memory-worker").value;
    const limit = data.limits[name], most = Math.max(...curves.map((c) => c.total.reduce((a, b) => Math.max(a, b), 0)));
    const top = Math.max(most, limit ? limit.peak_bytes : 0, limit && limit.limit_bytes < 3 * most ? limit.limit_bytes : 0) * 1.12 || 1;
    memoryCanvas.style.height = `${tall}px`;
    const g = prepare(memoryCanvas, width, tall), y = (b) => bottom - (b / top) * (bottom - 10);
    drawAxis(g, bottom, bottom + AXIS / 2);
    const unit = top > 2 ** 30 ? [2 ** 30, "GiB"] : [2 ** 20, "MiB"];
    for (const mark of steps(0, top / unit[0], 5)) {
      g.fillStyle = style("--line");
      g.fillRect(gutter(), Math.round(y(mark * unit[0])), wide(), 1);
      g.fillStyle = style("--dim");
      g.textAlign = "right";
      g.fillText(`${digits(mark, 3)} ${unit[1]}`, gutter() - 6, y(mark * unit[0]));
      g.textAlign = "left";
    }
    g.save();
    g.beginPath();
    g.rect(gutter(), 0, wide(), bottom);
    g.clip();
    area(g, curves[0], y);
    if (curves[1]) line(g, curves[1], y);
    g.restore();
    if (limit) threshold(g, y, limit.limit_bytes, top, `limit ${bytes(limit.limit_bytes)}`, [6, 4]);
    const peak = curves[0].t.peaks.find((p) => p.worker === name);
    if (peak && peak.moment_s >= from && peak.moment_s <= to && peak.moment_s <= curves[0].end) {
      const x = xOf(peak.moment_s), text = `peak ${bytes(peak.bytes)}${peak.action ? " in " + peak.action : ""}`;
      g.fillStyle = style("--text");
      g.beginPath();
      g.arc(x, y(peak.bytes), 3.5, 0, 7);
      g.fill();
      const room = g.measureText(text).width + 8;
      plate(g, text, x + room > gutter() + wide() ? x - room : x + 8, y(peak.bytes) - 9);
    }
  }
  function plate(g, text, x, y) {
    g.fillStyle = style("--back");
    g.globalAlpha = 0.85;
    g.fillRect(x - 3, y - 7, g.measureText(text).width + 6, 14);
    g.globalAlpha = 1;
    g.fillStyle = style("--text");
    g.fillText(text, x, y);
  }
  function threshold(g, y, value, top, text, dash) {
    if (value > top) {
      const said = `${text}, above this`;
      plate(g, said, gutter() + wide() - g.measureText(said).width - 6, 10);
      return;
    }
    g.strokeStyle = style("--text");
    g.lineWidth = 1.5;
    g.setLineDash(dash);
    g.beginPath();
    g.moveTo(gutter(), y(value));
    g.lineTo(gutter() + wide(), y(value));
    g.stroke();
    g.setLineDash([]);
    plate(g, text, gutter() + 6, y(value) - 9);
  }
  // Places of a curve that the window shows, at most a few a pixel: of those that share a pixel the fullest.
  function places(c) {
    const out = [];
    let pixel = -1;
    for (let i = 0; i < c.time.length; i += 1) {
      const next = i + 1 < c.time.length ? c.time[i + 1] : c.end;
      if (next < from || c.time[i] > to) continue;
      const x = Math.floor(xOf(Math.max(c.time[i], from)) * 2), last = out[out.length - 1];
      if (x === pixel && last !== undefined && next < to) {
        if (c.total[i] > c.total[last]) out[out.length - 1] = i;
      } else { out.push(i); pixel = x; }
    }
    return out;
  }
  function area(g, c, y) {
    const shown = places(c);
    if (!shown.length) return;
    const base = new Float64Array(shown.length);
    const x = shown.map((i) => xOf(Math.max(c.time[i], from)));
    x.push(xOf(Math.min(c.end, to)));
    for (const cls of c.used) {
      g.fillStyle = memoryColour(c.t.buffers[cls], cls);
      g.beginPath();
      g.moveTo(x[0], y(base[0]));
      shown.forEach((i, k) => { const level = y(base[k] + c.rows[i][cls]); g.lineTo(x[k], level); g.lineTo(x[k + 1], level); });
      for (let k = shown.length - 1; k >= 0; k -= 1) { g.lineTo(x[k + 1], y(base[k])); g.lineTo(x[k], y(base[k])); }
      g.fill();
      shown.forEach((i, k) => { base[k] += c.rows[i][cls]; });
    }
  }
  function line(g, c, y) {
    const shown = places(c);
    g.strokeStyle = style("--text");
    g.lineWidth = 1.5;
    g.beginPath();
    shown.forEach((i, k) => {
      const next = k + 1 < shown.length ? c.time[shown[k + 1]] : c.end;
      g.lineTo(xOf(c.time[i]), y(c.total[i]));
      g.lineTo(xOf(next), y(c.total[i]));
    });
    g.stroke();
  }
  if (memoryCanvas) {
    const select = $("memory-worker");
    const peaks = new Map(withMemory[0].peaks.map((p) => [p.worker, p.bytes]));
    const room = (name) => (peaks.get(name) || 0) / (data.limits[name] ? data.limits[name].limit_bytes : 1);
    for (const worker of withMemory[0].workers) {
      select.append(new Option(worker.count > 1 ? `${worker.name} (${worker.count} ranks)` : worker.name, worker.name));
    }
    select.value = withMemory[0].workers.map((w) => w.name).reduce((a, b) => (room(b) > room(a) ? b : a));
    select.addEventListener("change", pickWorker);
    memoryCanvas.addEventListener("pointermove", (event) => {
      const x = event.clientX - memoryCanvas.getBoundingClientRect().left, s = sOf(x);
      if (x < gutter() || s < from || s > to) { hover(event, null); return; }
      const lines = [seconds(s)];
      for (const c of curves) {
        let low = 0, high = c.time.length;
        while (low < high) { const mid = (low + high) >> 1; if (c.time[mid] <= s) low = mid + 1; else high = mid; }
        const row = c.rows[Math.max(low - 1, 0)];
        lines.push(`${several ? c.t.name + " " : ""}${bytes(row.reduce((a, b) => a + b, 0))}`);
        if (c === curves[0]) for (const cls of [...c.used].reverse()) if (row[cls]) lines.push(`  ${c.t.buffers[cls]} ${bytes(row[cls])}`);
      }
      hover(event, lines);
    });
    memoryCanvas.addEventListener("pointerleave", (event) => hover(event, null));
    pickWorker();
  }

  // --- legend, bars, life -------------------------------------------------------------------------------------------------
  const seen = new Map();
  for (const t of timelines) {
    t.spans.what.forEach((w, i) => {
      const e = t.spans.table[w];
      if (t.end[i] === t.start[i] || seen.has(e[KIND] + t.clock)) return;
      seen.set(e[KIND] + t.clock, [colourOf(t.kinds[e[KIND]], data.roles[e[ROLE]]), data.roles[e[ROLE]], t.kinds[e[KIND]]]);
    });
  }
  const named = new Map([...seen.values()].map(([colour, role, kind]) => [role === "communication" && !COLOUR[kind] ? role : word(kind), colour]));
  if (several) for (const t of timelines) named.set(`${t.mark} ${t.name}`, "");
  for (const [text, colour] of named) legend($("legend"), colour, text);
  for (const cell of document.querySelectorAll("[data-part]")) cell.style.background = partColour(cell.dataset.part);

  window.addEventListener("beforeprint", () => { printing = true; drawLanes(); drawMemory(); });
  window.addEventListener("afterprint", () => { printing = false; redraw(); });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  new ResizeObserver(redraw).observe(box);
  drawLanes();
  drawMemory();
})();
