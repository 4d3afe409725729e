"use strict";
// What is shown is a function of (program, frame) alone: going back shows the same picture as going there.

let DATA, speed = 1; // DATA.programs: recordings (show/frames.py) with what the page says of them (show/page.py)
const MS_A_WORD = 143, FOLLOWED_MS = 1600, TOGETHER_MS = 1200; // 35 words take 5 s
const $ = (id) => document.getElementById(id);
const WORDS = {
  gradient: "own gradient", share: "gradient ÷ d", average: "average", old: "old parameter", new: "new parameter",
  stale: "stale parameter", moment: "moment", zero: "zero", padding: "padding", unset: "not written",
  mixture: "nonsense", garbage: "garbage", freed: "released",
};
const STILL = matchMedia("(prefers-reduced-motion: reduce)");
const isNarrow = () => window.innerWidth < 800;
const escape = (text) => `${text}`.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
const total = (numbers) => numbers.reduce((sum, number) => sum + number, 0);
const mean = (numbers) => Math.round(total(numbers) / numbers.length);
const last = (list) => list[list.length - 1];
const clamp = (n, most) => Math.max(0, Math.min(most, n));
const isAlive = (cells) => Boolean(cells) && cells[0].kind !== "freed";
// p and q: Players; k: the number of a frame; s: the number of a storage; d: the number of ranks.

// ------------------------------------------------------------------------------------------------ recordings

class Player {
  /** A recording, whose frames are differences, as whole states: the cells of each storage, and where each rank is.
      A cell is {value, kind, element, origin, by}; by: the frame in which it was written. */
  constructor(recording) {
    Object.assign(this, recording);
    this.param = this.params.flatMap((n, index) => Array(n).fill(index)); // of each element
    let cells = [], at = [];
    this.states = this.frames.map((frame, k) => {
      [cells, at] = [[...cells], [...at]];
      for (const [rank, stack] of frame.at) at[rank] = stack;
      for (const [s, written] of frame.memory) {
        const before = cells[s] && isAlive(cells[s]) ? cells[s] : [];
        cells[s] = written ? written.map(([value, kind, element, origin], i) => {
          const isSame = before[i] && before[i].value === value;
          return { value, kind, element, origin, by: isSame ? before[i].by : k };
        }) : before.map((cell) => ({ ...cell, kind: "freed" }));
      }
      return { cells, at };
    });
    this.held = this.states.map((state) => Array.from({ length: this.ranks }, (_, rank) =>
      total(this.storages.map((storage, s) => (storage.rank === rank && isAlive(state.cells[s]) ? storage.nbytes : 0)))));
    const leaving = this.operations.filter(({ kind }) => kind === "reduce-scatter").map(({ params }) => `${params}`);
    const areBuckets = leaving.length > 2 && new Set(leaving).size === leaving.length;
    for (const operation of this.operations) {
      const params = operation.params.map((i) => `p${i}`).join(" ");
      operation.line = areBuckets ? `bucket ${leaving.indexOf(`${operation.params}`) + 1} (${params})` : operation.whole;
    }
    this.rows = this.makeRows();
    this.phases = this.makePhases();
  }

  /** Rows with the storages of each rank, by part; and how many cells are side by side. */
  makeRows() {
    const first = ["parameters", "ParameterBuffer.flat", "gradients"], rows = new Map();
    const order = ({ row }) => first.indexOf(row) + 1 || (/moment|exp_avg/.test(row) ? 9 : 5);
    for (const s of [...this.storages.keys()].sort((a, b) => order(this.storages[a]) - order(this.storages[b]))) {
      const { row, rank, part, places } = this.storages[s];
      if (!rows.has(row)) rows.set(row, { name: row, lines: 1, slots: this.held[0].map(() => ({})) });
      (rows.get(row).slots[rank][part] ||= []).push(s);
      rows.get(row).lines = Math.max(rows.get(row).lines, ...places.map(([, y]) => y + 1));
    }
    this.wide = Math.max(...this.storages.flatMap(({ places }) => places.map(([x]) => x + 1)));
    return [...rows.values()];
  }

  /** Of each phase where it begins; the line that calls a method belongs to it. */
  makePhases() {
    const phases = [];
    this.frames.forEach(({ phase, step }, k) => {
      const before = last(phases), isSame = before && before.phase === phase && before.step === step;
      if (before && (phase === "" || phase === "step" || isSame)) before.end = k + 1;
      else phases.push({ phase: phase || "start", step, start: before ? before.end : 0, end: k + 1 });
    });
    return phases;
  }

  /** Bytes that a rank has sent until frame k, a mean. */
  sent(k) {
    const left = this.operations.flatMap(({ arrows }) => arrows).filter(([, , , start]) => start <= k);
    return Math.round(total(left.map(([, , bytes]) => bytes)) / this.ranks);
  }

  /** What is drawn of a row on a rank: of each part the storage that came last. */
  drawn(row, rank, k) {
    const { cells } = this.states[k];
    return Object.values(row.slots[rank]).map((numbers) => last(numbers.filter((s) => cells[s]))).filter((s) => s >= 0);
  }

  place(rank, k) { return last(this.states[k].at[rank]); }

  /** What a rank holds in a row, in words. */
  describe(row, rank, k) {
    const counts = new Map();
    for (const s of this.drawn(row, rank, k)) {
      for (const { kind, element, origin } of this.states[k].cells[s]) {
        let words = WORDS[kind];
        if (kind === "gradient" && origin !== rank) words = `gradient of rank ${origin}`;
        if (kind === "share") words = origin === rank ? "own gradient ÷ d" : "gradient ÷ d of others";
        if (["average", "new"].includes(kind) && this.owners[element] === rank) words += " (own)";
        if (kind !== "padding" && kind !== "freed") counts.set(words, (counts.get(words) || 0) + 1);
      }
    }
    const order = (words) => Object.values(WORDS).findIndex((word) => words.startsWith(word));
    const sorted = [...counts].sort(([a], [b]) => order(a) - order(b) || a.localeCompare(b));
    return sorted.map(([words, count]) => `${words} × ${count}`).join(", ") || "nothing";
  }
}

const players = {};
const player = (id) => (players[id] ||= new Player(DATA.programs.find((program) => program.id === id)));

// ---------------------------------------------------------------- the picture: page and chapters have it from here

const tag = (name, attributes, inside = "") => {
  const text = Object.entries(attributes).map(([key, value]) => ` ${key}="${escape(value)}"`).join("");
  return `<${name}${text}${inside === "" ? "/>" : `>${inside}</${name}>`}`;
};
const write = (x, y, kind, words, more = {}) => tag("text", { x, y, class: kind, ...more }, escape(words));

const cellRect = (kind, owner, x, y, width, height, written = "", more = {}) => tag("rect", {
  class: `cell ${kind}${written} o${owner}`, x, y, width, height,
  rx: kind === "new" ? (height + 1) / 3 : 1, fill: `url(#${kind}${owner})`, ...more,
});

function drawCell(p, s, cell, k, from, x, y, size, high) {
  const cells = p.states[k].cells[s], { value, kind, element, by } = cells[cell];
  const before = cell && cells[cell - 1].element;
  const isShared = kind === "moment" && p.owners[0] >= 0;
  const owner = isShared ? p.storages[s].rank : element === null ? -1 : p.owners[element];
  const written = by > from && kind !== "freed" ? " written" : "";
  const isNext = kind !== "freed" && cell && ![element, before].includes(null) && p.param[element] !== p.param[before];
  const hasGap = isNext && p.storages[s].places[cell][0];
  const gap = hasGap ? tag("path", { class: "gap", d: `M${x - 0.5} ${y}v${high}` }) : "";
  const text = kind === "freed" || size < (kind === "moment" ? 26 : 20) ? "" : kind === "padding" ? "·" : number(value);
  const at = { "data-s": s, "data-cell": cell, tabindex: -1 };
  const rect = cellRect(kind, owner, x, y, size - 1, high - 1, written, at);
  return rect + gap + (text && writeValue(x, y + high - 5, size, kind, text));
}

function writeValue(x, y, size, kind, text) {
  const style = `font-size:${Math.min(11, (1.6 * size) / Math.max(3, text.length))}px`;
  return write(x + size / 2 - 0.5, y, `value ${kind}`, text, { style });
}

/** At most five characters: eighths are written as such, because an average over 2, 4 or 8 ranks has them. */
function number(value) {
  if (value === null) return "?";
  const eighths = 8 * (Math.abs(value) % 1);
  if (eighths && Number.isInteger(eighths) && Math.abs(value) < 1000) {
    return `${value < 0 ? "-" : ""}${Math.trunc(Math.abs(value)) || ""}${"⅛¼⅜½⅝¾⅞"[eighths - 1]}`;
  }
  const texts = [5, 4, 3, 2].map((digits) => `${+value.toPrecision(digits)}`);
  return texts.find((text) => text.length <= 5) || value.toExponential(0);
}

/** A row of all ranks, with its top at `top` -> svg. */
function drawRow(p, row, k, from, top, { column, cell: size, high }) {
  return row.slots.map((_, rank) => {
    const draw = (s) => p.storages[s].places.map(([x, y], cell) =>
      drawCell(p, s, cell, k, from, rank * column + x * size, top + y * high, size, high)).join("");
    const words = `rank ${rank}, ${row.name}: ${p.describe(row, rank, k)}`;
    const group = { class: "cells", role: "group", tabindex: 0, "aria-label": words };
    return tag("g", group, p.drawn(row, rank, k).map(draw).join(""));
  }).join("");
}

/** All memory of all ranks in frame k, marked where it has changed since frame `from` -> svg.

    Cells are as wide as they fit beside each other, and as high as `rows` fit below each other. */
function drawMemory(p, k, from, width, height, looks, rows) {
  const top = 38, nLines = total(rows.map(({ lines }) => lines)) || 1;
  const column = (width + 10) / p.ranks, cell = Math.min(34, Math.floor((10 * (column - 10)) / p.wide) / 10);
  const fitting = Math.floor((height - top - 19 * rows.length) / nLines);
  const high = Math.max(cell > 20 ? 12 : 7, Math.min(18, 2 * cell, fitting));
  const out = p.held[k].map((bytes, rank) => {
    const x = rank * column;
    return tag("rect", { x, y: 0, width: column - 10, height: 4, class: `own o${rank}` })
      + write(x, 18, "rank", `rank ${rank}`) + write(x, 31, "soft", `${bytes} B`);
  });
  let y = top;
  for (const row of rows) {
    const texts = [...new Set(row.slots.map((_, rank) => p.describe(row, rank, k)))];
    const all = texts[0] === "nothing" ? "not there" : `each rank: ${texts[0]}`;
    const said = texts.length === 1 ? all : `rank 0: ${texts[0]}`;
    const name = `${row.name === looks ? "▶ " : ""}${escape(row.name)} `;
    const fitting = width < 500 ? "" : cutAtComma(said, width / 6.5 - row.name.length);
    const words = name + tag("tspan", { class: "soft" }, escape(fitting) || " ");
    out.push(tag("text", { x: 0, y: y + 11, class: "name" }, words));
    const cells = drawRow(p, row, k, from, y + 15, { column, cell, high });
    out.push(tag("g", { class: "row", "data-row": row.name }, cells));
    y += row.lines * high + 19;
  }
  const label = { role: "group", "aria-label": "memory of all ranks" };
  return tag("svg", { class: "memory", viewBox: `0 0 ${width} ${y}`, width, height: y, ...label }, out.join(""));
}

const cutAtComma = (text, most) => (text.length <= most ? text : `${text.slice(0, most).replace(/,[^,]*$/, "")}, …`);

/** What runs, from left to right, and below it what is in flight meanwhile, a line for each bucket or kind of message:
    outlined what has been in flight since frame `from` -> [svg, height, where the band begins]. */
function drawOverlap(p, width, high, from, k) {
  const lines = [...new Set(p.operations.map(({ line }) => line))], isLive = ({ start, end }) => start <= k && k < end;
  const left = 12 + 6 * Math.max(0, ...lines.map((line) => line.length)), tall = 18 + lines.length * high;
  const x = (frame) => left + (frame / p.frames.length) * (width - left), top = (line) => 18 + lines.indexOf(line) * high;
  const phases = p.phases.map(({ phase, start, end }) => {
    const wide = x(end) - x(start), isNow = k >= start && k < end;
    return tag("g", { class: `phase${isNow ? " now" : ""}`, "data-k": start },
      tag("rect", { x: x(start), y: 0, width: Math.max(1, wide - 1), height: 15, class: "line" })
      + (wide > 6.4 * phase.length ? write(x(start) + wide / 2, 11, "", phase) : ""));
  });
  const names = lines.map((line) => write(0, top(line) + high - 5,
    p.operations.some((operation) => operation.line === line && isLive(operation)) ? "rank" : "soft", line));
  const bars = p.operations.map((operation) => {
    const { start, end, kind, what, line } = operation, wide = x(end) - x(start);
    const state = isLive(operation) ? " live" : from < end && start <= k ? " landed" : "";
    return tag("rect", { class: `bar ${what}${state}`, x: x(start), y: top(line), width: wide, height: high - 2, rx: 3 })
      + (kind !== line && wide > 6.4 * kind.length ? write(x(start) + 6, top(line) + high - 5, "", kind) : "");
  });
  const needle = tag("path", { class: "needle", d: `M${x(k + 0.5)} 0V${tall}` });
  return [[...phases, ...names, ...bars, needle].join(""), tall, left];
}

// ------------------------------------------------------------------------------------------------ beats and lines

const WITH_D = ["idea-2", "idea", "idea-8"]; // as the slider has them
// beat: -1 where the page goes line by line, as it always does for a package of the reader's own, which has no beats
const now = { id: "", k: 0, beat: 0, playing: false };

const beats = () => player(now.id).beats;
/** The frame that the picture is compared with: everything that has changed since is marked. */
const since = () => {
  if (now.beat > 0) return beats()[now.beat - 1].frame;
  return now.beat < 0 || player(now.id).bug ? now.k - 1 : now.k;
};
const isLast = () => now.beat >= beats().length - 1;
const stages = () => DATA.programs.filter(({ hidden, bug, tab }) => !hidden && !bug && !tab);
const isNow = ({ id }) => id === (player(now.id).tab || now.id);
const nextStage = () => stages()[stages().findIndex(isNow) + 1];

/** Show a beat; if it `moves`, with all that has been sent since the beat before -> the ms that this takes. */
function toBeat(beat, moves = false) {
  if (!beats().length) return toFrame(now.k);
  const to = clamp(beat, beats().length - 1);
  Object.assign(now, { beat: to, k: beats()[to].frame });
  draw();
  return moves && !STILL.matches ? fly() : 0;
}

function toFrame(k) {
  Object.assign(now, { beat: -1, k: clamp(k, player(now.id).frames.length - 1) });
  draw();
}

/** The beat that a frame belongs to: the first that it isn't beyond. */
const nearest = (k) => clamp(beats().filter(({ frame }) => frame < k).length, beats().length - 1);

function step(by) {
  if (!beats().length) return toFrame(now.k + by);
  let to = now.beat + by;
  if (now.beat < 0) {
    const at = nearest(now.k), { frame } = beats()[at];
    to = by < 0 ? at - (frame >= now.k) : at + (frame <= now.k);
  } else if (by > 0 && $("predict").checked && to < beats().length && ask(to)) return;
  if (to < beats().length) return toBeat(to, by > 0);
  if (nextStage()) select(nextStage().id);
  return 0;
}

function select(id, beat = 0, frame = undefined) {
  Object.assign(now, { id, beat: -2 });
  if (frame === undefined) toBeat(beat); else toFrame(frame);
}

let timer = 0;
function play(on) {
  now.playing = on;
  clearTimeout(timer);
  $("play").textContent = on ? "❚❚ pause" : "▶ play";
  if (!on) return;
  const isBeat = now.beat >= 0, isEnd = () => (isBeat ? isLast() : now.k >= player(now.id).frames.length - 1);
  if (isEnd()) { if (isBeat) toBeat(0); else toFrame(0); }
  const reading = () => (isBeat ? Math.max(3000, MS_A_WORD * beats()[now.beat].says.split(" ").length) : 350);
  const next = () => {
    const moving = isBeat ? step(1) : toFrame(now.k + 1);
    if (isEnd() || $("question").open) play(false); else timer = setTimeout(next, (reading() + (moving || 0)) / speed);
  };
  timer = setTimeout(next, reading() / speed / 2);
}

/** A cell as it is drawn in a panel. */
const rectOf = (s, cell, panel = 0) =>
  document.querySelectorAll(".panel")[panel].querySelector(`rect[data-s="${s}"][data-cell="${cell}"]`);

let landings = [];
function land() {
  landings.forEach(clearTimeout);
  landings = [];
  $("flying").innerHTML = "";
}

/** Cells fly as they left: from where they lay to where they arrive. First one message alone, with its values, then all
    others of the operation. What they bring is drawn when the last is there. One operation follows the other, also where
    they were in flight together. -> the ms of it all */
function fly() {
  const panels = sides(), shown = panels.map(([, k]) => k), later = (ms, action) => landings.push(setTimeout(action, ms / speed));
  let ms = 0;
  panels.forEach(([p, k, from], panel) => {
    const arriving = p.operations.filter(({ end }) => from < end && end <= k).sort((a, b) => a.end - b.end);
    if (arriving.length) shown[panel] = arriving[0].end - 1;
    arriving.forEach((operation, i) => {
      const after = arriving[i + 1] ? arriving[i + 1].end - 1 : k, messages = [...operation.moves.keys()];
      if (!i) {
        later(ms, () => flyMessages(p, panel, operation, messages.slice(0, 1), FOLLOWED_MS, true));
        ms += FOLLOWED_MS;
      }
      later(ms, () => flyMessages(p, panel, operation, messages.slice(i ? 0 : 1), TOGETHER_MS, false));
      ms += TOGETHER_MS;
      later(ms, () => { $("flying").innerHTML = ""; shown[panel] = after; drawPanels(shown); });
    });
  });
  if (ms) {
    drawPanels(shown);
    later(ms, land);
  }
  return ms;
}

/** Some messages of an operation, in some ms: to ranks that are further away they take longer. What is summed goes when
    it arrives, and what is gathered stays. */
function flyMessages(p, panel, { kind: operationKind, arrows, moves }, messages, ms, isFollowed) {
  for (const message of messages) {
    const [sender, receiver, , start] = arrows[message], [source, first, target, targetFirst, n] = moves[message];
    const wait = isFollowed ? 0 : (ms / 2 / p.ranks) * ((receiver - sender + p.ranks - 1) % p.ranks);
    const cells = p.states[start].cells[source];
    for (let i = 0; i < n; i++) {
      const here = rectOf(source, first + i, panel), there = rectOf(target, targetFirst + i, panel);
      if (!here || !there) continue;
      const [from, to] = [here, there].map((rect) => rect.getBoundingClientRect());
      const { kind, element, value } = cells[first + i], owner = element === null ? -1 : p.owners[element];
      const flying = document.createElementNS("http://www.w3.org/2000/svg", "g"), hasValue = isFollowed && from.width > 18;
      flying.innerHTML = cellRect(kind, owner, from.x, from.y, from.width, from.height)
        + (hasValue ? writeValue(from.x, from.bottom - 4, from.width, kind, kind === "padding" ? "·" : number(value)) : "");
      if (isFollowed) flying.setAttribute("class", "followed");
      $("flying").append(flying);
      const path = [[0, 0], [to.x - from.x, to.y - from.y]].map(([x, y]) => ({ transform: `translate(${x}px,${y}px)` }));
      const duration = isFollowed ? ms : ms / 2;
      const flight = flying.animate(path, { duration: duration / speed, delay: wait / speed, easing: "ease-in-out", fill: "both" });
      if (operationKind.includes("reduce")) flight.onfinish = () => flying.remove();
    }
  }
}

// ------------------------------------------------------------------------------------------------ the page

function draw() {
  land();
  const p = player(now.id), beat = now.beat >= 0 ? beats()[now.beat] : null;
  document.body.classList.toggle("compares", Boolean(beat && p.beside && !p.bug));
  $("group").hidden = !WITH_D.includes(now.id);
  if (!$("group").hidden) [$("d").value, $("d-is").textContent] = [Math.log2(p.ranks), p.ranks];
  const [name, , , , doc] = p.functions[p.place(0, now.k)[0]];
  const says = beat ? beat.says : `${name}: ${(doc || "a line of it").split("\n")[0]}`;
  if ($("says").textContent !== says) $("says").textContent = says;
  $("intro").textContent = p.title;
  drawMeters(p);
  drawCode(p, beat);
  drawFooter(p); // before the panels, which take the height that is left
  drawPanels();
  history.replaceState(null, "", `#${now.id}${beat ? `.${now.beat + 1}` : `/${now.k + 1}`}`);
}

function drawMeters(p) {
  const meter = (words, value, of, text, ddp) => {
    if (!of) return `<span class="meter"><b>${words} ${value} B</b></span>`;
    const most = Math.max(of, ddp, value), bar = tag("progress", { max: most, value, "aria-label": words }, " ");
    const mark = `<i style="left:${(100 * ddp) / most}%"></i><u style="right:${100 - (100 * ddp) / most}%">DDP: ${ddp}</u>`;
    return `<span class="meter"><b>${words} ${value} B</b> of ${of} B <span>= ${escape(text)}</span>`
      + `<span class="bar">${bar}${mark}</span></span>`;
  };
  const formula = p.formula || {}, numel = p.param.length;
  const ddp = { sent: (8 * numel * (p.ranks - 1)) / p.ranks, held: 16 * numel };
  const most = mean(p.held[0].map((_, rank) => Math.max(...p.held.map((bytes) => bytes[rank]))));
  const held = p.held[now.k], words = Math.min(...held) < Math.max(...held) ? "holds (mean)" : "holds";
  $("meters").innerHTML = meter("sent", p.sent(now.k), formula.sent && p.sent_bytes, formula.sent, ddp.sent)
    + meter(words, mean(held), formula.held_bytes, `${formula.held} after a step; at most ${most} B`, ddp.held);
}

/** A function with the lines that are `marked`, the ranks that are at a line, and the edit as a diff. */
function drawFunction(p, f, marked, ranks, isBeat) {
  const [name, file, first, end] = p.functions[f], source = p.files[file][1].split("\n");
  const edit = p.edit && p.edit.file === file ? p.edit : { line: 0, come: 0, gone: [] };
  const out = [`<div class="name">${name}, ${p.files[file][0]}:${marked[0]}</div>`];
  const indent = source[first - 1].search(/\S/);
  const cut = (text) => (text.slice(0, indent).trim() ? text : text.slice(indent));
  const add = (kind, gutter, text) => out.push(
    `<div class="code-line${kind}"><span class="gutter">${gutter}</span><code>${text}</code></div>`);
  let inDoc = false;
  for (let n = first; n <= end + 1; n++) {
    if (n === edit.line) edit.gone.forEach((text) => add(" gone", "−", escape(cut(text))));
    if (n > end) break;
    const text = source[n - 1], quotes = text.split('"""').length - 1, isDoc = inDoc || quotes > 0;
    if (quotes === 1) inDoc = !inDoc;
    if (isDoc && isBeat) continue;
    const isNew = n >= edit.line && n < edit.line + edit.come;
    const at = ranks.filter(([, line]) => line === n).map(([rank]) => `<b class="o${rank}">${rank}</b>`).join("");
    add(`${marked.includes(n) ? " now" : ""}${isNew ? " come" : ""}`, isNew ? "+" : at, escape(cut(text)));
  }
  return `<div class="function">${out.join("")}</div>`;
}

function drawCode(p, beat) {
  const { at } = p.states[now.k], where = at.map((_, rank) => [rank, ...p.place(rank, now.k)]);
  const shown = beat ? [[beat.function, beat.lines]] : at[0].map(([f, line]) => [f, [line]]);
  if (p.edit) {
    const { file, line } = p.edit;
    const f = p.functions.findLastIndex(([, inFile, first, end]) => inFile === file && first <= line && line <= end + 1);
    if (!shown.some(([number]) => number === f)) shown.unshift([f, [line]]);
  }
  const ranksIn = (f) => where.filter(([, number]) => number === f).map(([rank, , line]) => [rank, line]);
  $("code").innerHTML = shown.map(([f, lines]) => drawFunction(p, f, lines, ranksIn(f), Boolean(beat))).join("");
  $("code").classList.toggle("beat", Boolean(beat));
  const mark = last([...$("code").querySelectorAll(".now")]);
  if (mark) $("code").scrollTop = Math.max(0, mark.offsetTop - $("code").clientHeight * 0.6);
}

/** What is shown side by side, [player, frame, frame before, title] each: most programs have one side. */
function sides() {
  const p = player(now.id), beat = beats()[now.beat], [left, right] = p.bug ? ["with the bug", "the right run"] : ["stage 3", "DDP"];
  if (!beat || !p.beside) return [[p, now.k, since(), left]];
  const from = now.beat ? beats()[now.beat - 1].right : beat.right - Number(p.bug);
  return [[p, now.k, since(), left], [player(p.beside), beat.right, from, right]];
}

/** The memory of all `sides`, in the frames that are `shown`. */
function drawPanels(shown = sides().map(([, k]) => k)) {
  const all = sides().map(([p, , from, title], i) => [p, shown[i], Math.min(from, shown[i]), title]), isPair = all.length > 1;
  const box = $("panels"), beat = beats()[now.beat], [[p]] = all;
  const across = isNarrow() ? 1 : all.length, width = Math.floor((box.clientWidth - 14 * across) / across);
  const taken = isNarrow() ? $("said").offsetHeight + $("code").offsetHeight + 26 : 8;
  const height = (box.parentElement.clientHeight - taken) / (all.length / across) - (isPair ? 30 : 8);
  const isThere = (q, row, ks) => ks.some((k) => row.slots.some((_, rank) =>
    q.drawn(row, rank, k).some((s) => isAlive(q.states[k].cells[s]))));
  const isWritten = (q, row, k, from) => row.slots.some((_, rank) => q.drawn(row, rank, k).some((s) =>
    q.states[k].cells[s].some(({ kind, by }) => by > from && !["freed", "garbage"].includes(kind))));
  // Two panels below each other, on a phone: there is room for the row that the beat is about, or for what has changed.
  const isChosen = (q, row, k, from) => row.name === beat?.look || (!p.bug && row.name !== "exp_avg_sq"
    && (isWritten(q, row, k, from) || (k === from && row.name !== "parameters")));
  const rowsOf = (q, k, from) => q.rows.filter((row) => !isNarrow() || (isThere(q, row, [k, Math.max(0, from)])
    && (!isPair || isChosen(q, row, k, from))));
  box.innerHTML = all.map(([q, k, from, title]) => {
    const memory = drawMemory(q, k, from, width, height, beat && beat.look, rowsOf(q, k, from));
    return `<div class="panel">${isPair ? `<h2>${title}</h2>` : ""}${memory}</div>`;
  }).join("");
  if (isPair && p.bug) markDifferences(...all);
  const look = ({ target: { dataset: at, parentElement } }) => {
    if (at.s) inspect(...all[[...box.children].indexOf(parentElement.closest(".panel"))], +at.s, +at.cell);
  };
  Object.assign(box, { onmouseover: look, onclick: look, onfocus: look });
}

/** In the run with the bug: cells that hold another value than in the right one, garbage aside. */
function markDifferences([p, k], [q, m]) {
  const isNothing = ({ kind }) => ["freed", "garbage", "unset"].includes(kind);
  for (const row of p.rows) {
    const theirs = q.rows.find(({ name }) => name === row.name);
    for (const s of theirs ? row.slots.flatMap((_, rank) => p.drawn(row, rank, k)) : []) {
      const { rank, part } = p.storages[s], other = q.drawn(theirs, rank, m).find((t) => q.storages[t].part === part);
      (other === undefined ? [] : p.states[k].cells[s]).forEach((mine, cell) => {
        const right = q.states[m].cells[other][cell];
        const isSame = isNothing(mine) || isNothing(right) || mine.value === right.value;
        if (!isSame) rectOf(s, cell)?.classList.add("wrong");
      });
    }
  }
}

function inspect(p, k, from, title, s, cell) {
  const { rank, row, part } = p.storages[s], { value, kind, element: e, origin, by } = p.states[k].cells[s][cell];
  const whose = e === null ? "no element of the model" : `element ${e - p.param.indexOf(p.param[e])} of p${p.param[e]}`;
  const owner = e === null ? "" : p.owners[e] === -1 ? "; every rank updates it" : `; rank ${p.owners[e]} updates it`;
  const what = {
    gradient: `gradient of rank ${origin}`, share: `gradient of rank ${origin} ÷ ${p.ranks}`,
    average: "average over the ranks", garbage: "garbage: nobody reads it before it is written or released",
    stale: "stale parameter: a newer one is on its way",
  }[kind] || WORDS[kind];
  const came = p.operations.map(({ kind: sent, arrows }) => [sent, arrows.filter((a) => a[1] === rank && a[4] === by)])
    .filter(([, arrows]) => arrows.length)
    .map(([sent, arrows]) => `${sent} from rank ${[...new Set(arrows.map(([sender]) => sender))].join(", ")}`);
  const [f, line] = p.place(rank, by), [writer, file] = p.functions[f];
  const place = `written at ${p.files[file][0]}:${line} in ${writer} (line ${by + 1})`;
  const name = `rank ${rank} · ${escape(row)}${part && ` ${part}`}[${cell}] = ${number(value)}`;
  $("inspector").innerHTML = `<b>${name}</b> · ${what} · ${whose}${owner} · `
    + (by ? place : "there from the start") + (by && came.length ? `, arrived by ${came.join("; ")}` : "");
}

function drawFooter(p) {
  const link = (i) => tag("a", {
    href: `#${now.id}.${i + 1}`, "aria-label": `beat ${i + 1}`, ...(i === now.beat && { "aria-current": "step" }),
  }, `${i + 1}`);
  $("beats").innerHTML = beats().map((_, i) => link(i)).join("");
  const width = Math.max(300, $("band").clientWidth); // 0 beside the calculator
  const [svg, height, left] = drawOverlap(p, width, isNarrow() ? 15 : 17, since(), now.k);
  $("band").innerHTML = tag("svg", { width, height }, svg);
  $("slider").style = `margin-left: ${left - 8}px; width: ${width - left + 16}px`; // below the band
  Object.assign($("slider"), { max: p.frames.length - 1, value: now.k });
  const beat = `beat ${now.beat + 1} of ${beats().length}`, next = nextStage();
  $("inspector").textContent = `Ψ = ${p.param.length} parameters, d = ${p.ranks} ranks. Hover over, tap or focus a cell to read what it is.`;
  $("next").hidden = !(now.beat >= 0 && isLast() && next);
  if (next) Object.assign($("next"), { href: `#${next.id}`, textContent: `next: ${/^\d/.test(next.short) ? "stage " : ""}${next.short.replace(/(\d) .*/, "$1")} →` });
  $("where").textContent = now.beat < 0 ? `line ${now.k + 1} of ${p.frames.length}` : beat;
  const bugs = DATA.programs.filter(({ bug }) => bug);
  const isCalculating = document.body.classList.contains("calculates");
  const tab = (program) => tag("a", { href: `#${program.id}`, role: "tab", "aria-selected": isNow(program) && !isCalculating },
    `${escape(program.short).replace(" ", " <span>")}</span>`);
  const option = (program) => tag("option", { value: program.id, ...(isNow(program) && { selected: "" }) }, escape(program.short));
  const calculator = tag("a", { href: "#bytes", role: "tab", "aria-selected": isCalculating }, "bytes");
  $("programs").innerHTML = stages().map(tab).join("") + calculator;
  $("bugs").innerHTML = `<option value="">–</option>${bugs.map(option).join("")}`;
  $("lines").setAttribute("aria-pressed", now.beat < 0);
}

/** Before a beat is shown: who will hold an average, or a new parameter? Where that doesn't change: how much is sent? */
function ask(to) {
  const p = player(now.id), { frame } = beats()[to], bytes = p.sent(frame) - p.sent(now.k);
  const holders = (kind, k) => {
    const hold = (rank) => p.storages.some((storage, s) => storage.rank === rank && isAlive(p.states[k].cells[s])
      && p.states[k].cells[s].some((cell) => cell.kind === kind && cell.element === 0));
    const ranks = [...p.held[0].keys()].filter(hold);
    return ranks.length === p.ranks ? "every rank" : ranks.map((rank) => `rank ${rank}`).join(" and ") || "no rank";
  };
  const kind = ["average", "new"].find((candidate) => holders(candidate, frame) !== holders(candidate, now.k));
  if (!kind && !bytes) return false;
  const question = kind ? `Who will hold the ${{ average: "average", new: "new parameter" }[kind]} of element 1?`
    : "How many bytes will a rank send in this beat?";
  const right = kind ? holders(kind, frame) : `${bytes} B`;
  const wrong = kind ? [holders(kind, now.k), "every rank", "no rank", "rank 0", "rank 3"]
    : [`${2 * bytes} B`, `${Math.round(bytes / 3)} B`];
  const answers = [...new Set([right, ...wrong])].slice(0, 3).sort();
  play(false);
  $("question").innerHTML = `<b>${question}</b>` + answers.map((text) => `<button>${escape(text)}</button>`).join("");
  const buttons = [...$("question").querySelectorAll("button")], goOn = document.createElement("button");
  goOn.onclick = () => { $("question").close(); toBeat(to, true); };
  for (const chosen of buttons) chosen.onclick = () => {
    for (const button of buttons) {
      button.disabled = true;
      button.className = button.textContent === right ? "right" : button === chosen ? "wrong" : "";
    }
    goOn.textContent = chosen.textContent === right ? "Right. Go on" : "Not so. Go on, and look";
    $("question").append(goOn);
    goOn.focus();
  };
  $("question").showModal();
  return true;
}

// --------------------------------------------------------------------------------------------------- controls

function keys(event) {
  const { key, target } = event;
  if (event.ctrlKey || event.metaKey || event.altKey || $("question").open) return;
  if (/^(SELECT|INPUT)$/.test(target.tagName) && target.type !== "checkbox") return;
  if (key === " " && /^(BUTTON|INPUT|A)$/.test(target.tagName)) return;
  const group = target.closest && target.closest(".cells");
  if (group && (target !== group ? /^Arrow|Escape/ : /^Enter/).test(key)) {
    const cells = [...group.querySelectorAll(".cell")], by = /Right|Down/.test(key) ? 1 : -1;
    const to = key === "Escape" ? group : cells[key === "Enter" ? 0 : cells.indexOf(target) + by];
    if (to) to.focus();
    event.preventDefault();
    return;
  }
  const arrows = { ArrowRight: "forward", ArrowLeft: "back", ArrowDown: "down", ArrowUp: "up" };
  const button = { " ": "play", "?": "help", r: "again", ...arrows }[key], end = { Home: 0, End: Infinity }[key];
  if (button) $(button).click();
  else if (end !== undefined) paused(() => (now.beat < 0 ? toFrame(end) : toBeat(end)))();
  else return;
  event.preventDefault();
}

const paused = (action) => (...event) => { play(false); action(...event); };

let touched = null;
function swipe({ changedTouches: [to] }) {
  const x = to.clientX - touched.clientX, y = to.clientY - touched.clientY;
  if (Math.abs(x) > 50 && Math.abs(x) > 2 * Math.abs(y)) $(x < 0 ? "forward" : "back").click();
}

/** What a link says: #4.7 is a beat, #4/118 a line. */
function follow() {
  const [, id, mark, at] = decodeURIComponent(location.hash).match(/^#([^/.]*)([/.]?)(.*)$/) || [];
  const isCalculating = ["bytes", "calculator"].includes(id);
  const { id: known } = DATA.programs.find((program) => program.id === id && !program.hidden) || DATA.programs[0];
  now.id ||= known;
  showCalculator(isCalculating);
  if (isCalculating) {
    drawFooter(player(now.id));
    return;
  }
  const place = +at - 1 || 0, isLine = mark === "/" && at !== "wrong";
  select(known, isLine ? 0 : place, isLine ? place : undefined);
}

async function start() {
  const packed = Uint8Array.from(atob($("data").textContent), (sign) => sign.charCodeAt(0));
  DATA = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  const picture = (kind) => tag("svg", { width: 22, height: 12 }, cellRect(kind, 0, 1, 1, 20, 10));
  const sample = (kind) => `<span>${picture(kind)}${WORDS[kind]}</span>`;
  const kinds = ["gradient", "share", "average", "old", "new", "stale", "moment", "garbage"];
  $("legend").innerHTML = `<span>colour: the rank that updates it; brown: every rank</span>${kinds.map(sample).join("")}`;
  const actions = {
    back: () => step(-1), forward: () => step(1), up: () => toFrame(now.k - 1), down: () => toFrame(now.k + 1),
    again: () => (now.beat < 0 ? toFrame(now.k) : toBeat(now.beat, true)),
    lines: () => (now.beat < 0 ? toBeat(nearest(now.k)) : toFrame(now.k)),
  };
  for (const [id, action] of Object.entries(actions)) $(id).onclick = paused(action);
  $("play").onclick = () => play(!now.playing);
  $("slider").oninput = paused(() => toFrame(+$("slider").value));
  $("d").oninput = paused(() => select(WITH_D[$("d").value - 1], now.beat));
  $("bugs").onchange = paused(() => select($("bugs").value || now.id));
  $("band").onclick = ({ target }) => {
    const phase = target.closest(".phase");
    if (phase) paused(toFrame)(+phase.dataset.k);
  };
  $("panels").addEventListener("focusin", (event) => $("panels").onfocus(event));
  document.addEventListener("keydown", keys);
  window.addEventListener("resize", () => {
    if (!document.body.classList.contains("calculates")) (now.beat < 0 ? toFrame(now.k) : toBeat(now.beat));
  });
  window.addEventListener("hashchange", follow);
  document.body.addEventListener("touchstart", ({ touches }) => { touched = touches[0]; }, { passive: true });
  document.body.addEventListener("touchend", swipe);
  startCalculator();
  follow();
  document.body.dataset.ready = "yes";
}

