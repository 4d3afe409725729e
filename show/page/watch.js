"use strict";
// What is shown is a function of (program, frame) alone: going back shows the same picture as going there.

const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const GARBAGE = new Set(["zero", "padding", "unset"]);
const WORDS = {
  gradient: "own gradient", share: "gradient ÷ d", sum: "sum of some ranks", average: "average", old: "old parameter",
  new: "new parameter", stale: "stale parameter", moment: "moment", zero: "zero", padding: "padding", unset: "not written",
  mixture: "nonsense", garbage: "garbage", freed: "released",
};

// ------------------------------------------------------------------------------------------------ recordings

class Player {
  /** A recording, its frames made whole. */
  constructor(recording) {
    Object.assign(this, recording);
    this.offsets = [];
    this.params.forEach((n, p) => { for (let i = 0; i < n; i++) this.offsets.push([p, i]); });
    this.states = [];
    let state = { cells: this.storages.map(() => null), dead: this.storages.map(() => new Set()), gone: new Set(), at: Array(this.ranks).fill(-1) };
    this.frames.forEach((frame, k) => {
      state = { ...state, cells: [...state.cells], dead: [...state.dead], gone: new Set(state.gone), at: [...state.at] };
      for (const [rank, stack] of frame.at) state.at[rank] = stack;
      for (const s of frame.gone) state.gone.add(s);
      const fresh = new Set();
      for (const [s, start, values, labels] of frame.cells) {
        if (!fresh.has(s)) {
          const old = state.cells[s];
          state.cells[s] = old ? { values: [...old.values], labels: [...old.labels], by: [...old.by] } : { values: [], labels: [], by: [] };
          fresh.add(s);
        }
        state.gone.delete(s);
        values.forEach((value, i) => {
          state.cells[s].values[start + i] = value;
          state.cells[s].labels[start + i] = labels[i];
          state.cells[s].by[start + i] = k;
        });
      }
      for (const [s, dead] of frame.dead) state.dead[s] = new Set(dead);
      this.states.push(state);
    });
    this.lastStep = Math.max(...this.frames.map((frame) => frame.step));
    this.rows = this.makeRows();
    this.segments = this.makeSegments();
    this.held = this.states.map((state) => this.bytesHeld(state));
    this.most = this.held[0].map((_, rank) => Math.max(...this.held.map((held) => held[rank])));
  }

  makeRows() {
    const rows = new Map();
    this.storages.forEach((storage, s) => {
      if (!rows.has(storage.row)) rows.set(storage.row, { name: storage.row, parts: [] });
      rows.get(storage.row).parts.push(s);
    });
    const used = (row) => row.parts.some((s) => this.states.some((state) => state.cells[s]));
    const order = (row) => ["parameters", "ParameterBuffer.flat", "gradients"].indexOf(row.name) + 1 || (/moment|exp_avg/.test(row.name) ? 9 : row.name.includes(":") ? 8 : 5);
    const list = [...rows.values()].filter(used);
    list.forEach((row) => row.parts.sort((a, b) => this.storages[a].part.localeCompare(this.storages[b].part, "en", { numeric: true })));
    return list.map((row, i) => [order(row), i, row]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map((one) => one[2]);
  }

  makeSegments() {
    // The line that calls a method belongs to it; what lies between two methods belongs to the later one.
    const segments = [];
    this.frames.forEach((frame, k) => {
      const phase = frame.phase;
      if (phase === "" || phase === "step") return;
      const last = segments[segments.length - 1];
      if (last && last.phase === phase && last.step === frame.step) last.end = k + 1;
      else { segments.push({ phase, step: frame.step, start: last ? last.end : 0, end: k + 1 }); }
    });
    if (segments.length) segments[segments.length - 1].end = this.frames.length;
    return segments;
  }

  bytesHeld(state) {
    const held = Array(this.ranks).fill(0);
    this.storages.forEach((storage, s) => {
      if (storage.counted && state.cells[s] && !state.gone.has(s)) held[storage.rank] += storage.numel * storage.itemsize;
    });
    return held;
  }

  sent(k) {
    const bytes = Array(this.ranks).fill(0), messages = Array(this.ranks).fill(0);
    for (const operation of this.operations) {
      for (const [from, , nbytes, start] of operation.arrows) {
        if (start <= k) { bytes[from] += nbytes; messages[from] += 1; }
      }
    }
    return { bytes, messages };
  }

  kind(s, cell, k) {
    const state = this.states[k];
    const [kind, , origin] = this.labels[state.cells[s].labels[cell]];
    if (state.gone.has(s)) return "freed";
    if (state.dead[s].has(cell) && !GARBAGE.has(kind)) return "garbage";
    if (kind !== "parameter") return kind;
    const step = this.frames[k].step;
    return origin < step ? "stale" : origin > Math.min(step, this.lastStep - 1) ? "new" : "old";
  }

  place(rank, k) {
    const stack = this.stacks[this.states[k].at[rank]];
    return stack ? stack[stack.length - 1] : null;
  }

  placeText(rank, k) {
    const place = this.place(rank, k);
    if (!place) return "";
    const [name, file] = this.functions[place[0]];
    return `${this.files[file][0]}:${place[1]} in ${name}`;
  }

  lineText(rank, k) {
    const place = this.place(rank, k);
    return place ? this.files[this.functions[place[0]][1]][1].split("\n")[place[1] - 1].trim() : "";
  }

  describe(row, rank, k) {
    /** What a rank holds in a row, in words: [[count, words], …]. */
    const counts = new Map();
    for (const s of row.parts) {
      const cells = this.states[k].cells[s];
      if (this.storages[s].rank !== rank || !cells || this.states[k].gone.has(s)) continue;
      cells.labels.forEach((number, cell) => {
        const [kind, element, origin] = this.labels[number];
        const seen = this.kind(s, cell, k);
        let words = WORDS[seen];
        if (seen === "gradient" && origin !== rank) words = `gradient of rank ${origin}`;
        if (seen === "share") words = origin === rank ? `own gradient ÷ ${this.ranks}` : `gradient ÷ ${this.ranks} of others`;
        if (["average", "new"].includes(seen) && this.owners[element] === rank) words += " (own)";
        counts.set(words, (counts.get(words) || 0) + 1);
      });
    }
    const order = (words) => Object.values(WORDS).findIndex((word) => words.startsWith(word));
    return [...counts].filter(([words]) => words !== "padding").sort((a, b) => order(a[0]) - order(b[0]) || a[0].localeCompare(b[0]));
  }

  describeText(row, rank, k) {
    return this.describe(row, rank, k).map(([words, count]) => `${words} × ${count}`).join(", ") || "nothing";
  }

  unionText(row, k) {
    /** What some rank holds, where ranks differ. */
    const words = this.states[k].at.flatMap((_, rank) => this.describe(row, rank, k).map((one) => one[0]));
    return [...new Set(words)].join(", ");
  }

  waits(rank, k) {
    /** Whether a message that this rank waits for at its line is under way. */
    let moved = false;
    for (const [r] of this.frames[k].at) moved ||= r === rank;
    return !moved && k + 1 < this.frames.length;
  }
}

const players = new Map();
function player(id) {
  if (!players.has(id)) players.set(id, new Player(DATA.programs.find((program) => program.id === id)));
  return players.get(id);
}

// ------------------------------------------------------------------------------------------------- the clock

const now = { id: "3", beside: "", k: 0, playing: false, predict: false, asked: null };

/** Two programs on one clock: each phase begins in both at once, and whoever is through waits. */
function clock() {
  const a = player(now.id), b = now.beside ? player(now.beside) : null;
  if (!b) return a.frames.map((_, k) => [k, 0, a.segments.findIndex((one) => k < one.end)]);
  const ticks = [];
  const phases = mergePhases(a.segments, b.segments);
  phases.forEach(([i, j], index) => {
    const x = a.segments[i], y = b.segments[j];
    const length = Math.max(x ? x.end - x.start : 0, y ? y.end - y.start : 0);
    const at = (segment, segments, next, o) => segment ? segment.start + Math.min(o, segment.end - segment.start - 1)
      : Math.max(0, (next < segments.length ? segments[next].start : segments[segments.length - 1].end) - 1);
    for (let o = 0; o < length; o++) ticks.push([at(x, a.segments, ahead(phases, index, 0), o), at(y, b.segments, ahead(phases, index, 1), o), index]);
  });
  return ticks;
}
function ahead(phases, index, side) {
  for (let n = index; n < phases.length; n++) if (phases[n][side] !== -1) return phases[n][side];
  return Infinity;
}
function mergePhases(a, b) {
  const same = (x, y) => x.phase === y.phase && x.step === y.step;
  const merged = [];
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && same(a[i], b[j])) merged.push([i++, j++]);
    else if (i < a.length && (j >= b.length || !b.slice(j).some((y) => same(a[i], y)))) merged.push([i++, -1]);
    else merged.push([-1, j++]);
  }
  return merged;
}

let ticks = [];
function select(id, beside, k) {
  now.id = id; now.beside = beside === id ? "" : beside; now.asked = null;
  ticks = clock();
  $("slider").max = ticks.length - 1;
  drawPrograms();
  drawBand();
  $("differs").hidden = !player(id).differs;
  go(k || 0);
}

function go(k) {
  now.k = Math.max(0, Math.min(ticks.length - 1, k));
  draw();
}

/** Forward by one; in "predict first" a result is shown only when its reader has chosen. -> whether it moved */
function forward() {
  if (now.k >= ticks.length - 1) return false;
  if (now.predict && !now.beside && ask(now.k + 1)) return false;
  go(now.k + 1);
  return true;
}

let timer = 0;
function play(on) {
  now.playing = on;
  clearTimeout(timer);
  $("play").textContent = on ? "❚❚ pause" : "▶ play";
  $("play").setAttribute("aria-label", on ? "pause" : "play");
  if (!on) return;
  if (now.k >= ticks.length - 1) go(0);
  const next = () => { if (!now.playing) return; if (forward()) timer = setTimeout(next, +$("speed").value); else play(false); };
  timer = setTimeout(next, +$("speed").value);
}

function jump(wanted) {
  play(false);
  for (let k = now.k + 1; k < ticks.length; k++) if (wanted(k)) return go(k);
  go(ticks.length - 1);
}
function isMessage(k) {
  const sides = [[player(now.id), 0]].concat(now.beside ? [[player(now.beside), 1]] : []);
  return sides.some(([p, side]) => {
    const frame = ticks[k][side];
    return frame !== ticks[k - 1][side] && p.operations.some((one) => one.arrows.some((arrow) => arrow[3] === frame || arrow[4] === frame));
  });
}
function isFunction(k) {
  const p = player(now.id), at = (one) => (p.place(0, ticks[one][0]) || [])[0];
  return at(k) !== at(k - 1);
}

// ------------------------------------------------------------------------------------------------ the picture

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "class") made.className = value; else if (name === "style") made.style.cssText = value; else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}
const rankColour = (rank) => `var(--rank${rank % 8})`;
const number = (value) => value === null ? "?" : Number.isInteger(value) ? `${value}` : `${+value.toPrecision(4)}`;

function draw() {
  const [ka, kb, segment] = ticks[now.k], p = player(now.id);
  $("slider").value = now.k;
  $("slider").setAttribute("aria-valuetext", `frame ${now.k + 1} of ${ticks.length}, ${p.frames[ka].phase}, ${p.placeText(0, ka)}`);
  drawIntro(p, ka);
  document.querySelectorAll("#band span").forEach((span, i) => span.classList.toggle("now", i === segment));
  $("code").hidden = Boolean(now.beside);
  if (!now.beside) drawCode(p, ka);
  const panels = [drawPanel(p, ka, Boolean(now.beside))];
  if (now.beside) panels.push(drawPanel(player(now.beside), kb, true));
  const scrolled = [...document.querySelectorAll(".panel")].map((panel) => panel.scrollTop);
  $("panels").replaceChildren(...panels);
  panels.forEach((panel, i) => { panel.scrollTop = scrolled[i] || 0; });
  const step = p.lastStep > 1 && p.frames[ka].step < p.lastStep ? `step ${p.frames[ka].step + 1}, ` : "";
  if (!$("inspector").textContent) $("inspector").textContent = "Hover over, tap or focus a cell to read what it is, which line wrote it, and where it came from.";
  $("where").textContent = `frame ${now.k + 1} of ${ticks.length} · ${step}${phaseName(p, ka)}`;
  history.replaceState(null, "", `#${now.id}${now.beside ? `+${now.beside}` : ""}/${now.k + 1}`);
}

function phaseName(p, k) {
  const { phase, step } = p.frames[k];
  return phase === "forward" && step === p.lastStep ? "next forward" : phase || "start";
}

function drawIntro(p, k) {
  const parts = [element("b", {}, p.title), element("span", { class: k ? "said" : "" }, p.intro)];
  if (p.differs && k >= p.differs.frame) parts.push(" ", element("b", { style: "color:var(--bad)" }, p.differs.text));
  $("intro").replaceChildren(...parts);
}

function drawPrograms() {
  const stages = DATA.programs.filter((program) => !program.bug), bugs = DATA.programs.filter((program) => program.bug);
  $("programs").replaceChildren(...stages.map((program) => {
    const button = element("button", { role: "tab", "aria-selected": program.id === now.id, title: program.title }, program.short.split(" ")[0], element("span", {}, ` ${program.short.split(" ").slice(1).join(" ")}`));
    button.onclick = () => { play(false); select(program.id, now.beside, 0); };
    return button;
  }));
  const option = (value, text, chosen) => element("option", { value, ...(chosen ? { selected: "" } : {}) }, text);
  $("bugs").replaceChildren(option("", "–", false), ...bugs.map((program) => option(program.id, program.short, program.id === now.id)));
  $("beside").replaceChildren(option("", "nothing", false), ...DATA.programs.filter((program) => program.id !== now.id)
    .map((program) => option(program.id, program.bug ? `bug: ${program.short}` : program.short, program.id === now.beside)));
}

function drawBand() {
  const a = player(now.id), b = now.beside ? player(now.beside) : null;
  const lengths = new Map();
  ticks.forEach(([, , segment], k) => { const one = lengths.get(segment) || [k, 0]; one[1]++; lengths.set(segment, one); });
  $("band").replaceChildren(...[...lengths].map(([segment, [start, length]]) => {
    const p = ticks[start][0] in a.frames ? a : b;
    const merged = b ? mergePhases(a.segments, b.segments)[segment] : [segment, -1];
    const of = merged[0] !== -1 ? [a, merged[0]] : [b, merged[1]];
    const phase = of[0].segments[of[1]];
    const name = phase.phase === "forward" && phase.step === of[0].lastStep ? "next forward" : phase.phase;
    const span = element("span", { style: `flex:${length} 1 0`, title: name }, name);
    span.onclick = () => { play(false); go(start); };
    return span;
  }));
}

// The code: functions that run now, each below the one that called it.
function drawCode(p, k) {
  const stacks = p.states[k].at.map((number) => p.stacks[number] || []);
  const depth = Math.max(...stacks.map((stack) => stack.length));
  const shown = [];
  for (let level = 0; level < depth; level++) {
    for (const stack of stacks) if (stack[level] && !shown.some((one) => one[0] === stack[level][0])) shown.push([stack[level][0], level]);
  }
  const parts = [drawCaption(p, k)];
  for (const [number, level] of shown) parts.push(drawFunction(p, number, level, stacks));
  const old = $("code").scrollTop;
  $("code").replaceChildren(...parts);
  $("code").scrollTop = old;
  const line = $("code").querySelectorAll(".code-line.now");
  const last = line[line.length - 1];
  if (last) {
    const box = $("code").getBoundingClientRect(), rect = last.getBoundingClientRect();
    if (rect.bottom > box.bottom - 8) $("code").scrollTop += rect.bottom - box.bottom + 40;
    if (rect.top < box.top + 8) $("code").scrollTop -= box.top - rect.top + 40;
  }
}

function drawCaption(p, k) {
  const stack = p.stacks[p.states[k].at[0]] || [];
  const said = [...stack].reverse().find(([number]) => p.functions[number][4]);
  const doc = said ? p.functions[said[0]][4].split("\n\n")[0].replace(/\s+/g, " ") : "The loop, the same in every stage.";
  return element("div", { class: "caption" }, element("b", {}, said ? p.functions[said[0]][0] : "train"), element("div", {}, doc));
}

function drawFunction(p, number, level, stacks) {
  const [name, file, start, end] = p.functions[number];
  const source = p.files[file][1].split("\n").slice(start - 1, end);
  const indent = Math.min(...source.filter((text) => text.trim()).map((text) => text.match(/^ */)[0].length));
  const made = element("div", { class: "function", style: `margin-left:${Math.min(level, 7) * 9}px` }, element("div", { class: "name" }, `${p.files[file][0]} · ${name}`));
  let inDoc = false;
  source.forEach((text, i) => {
    const line = start + i, gutter = element("span", { class: "gutter" });
    let here = false;
    stacks.forEach((stack, rank) => {
      const at = stack[level];
      if (!at || at[0] !== number || at[1] !== line) return;
      const top = stack.length === level + 1;
      here ||= top;
      gutter.append(element("i", { class: top ? "" : "calls", style: `background:${rankColour(rank)}`, title: `rank ${rank}` }, rank));
    });
    const quotes = (text.match(/"""/g) || []).length, isDoc = inDoc || quotes > 0;
    if (quotes % 2) inDoc = !inDoc;
    const code = element("span");
    const margin = Math.max(0, text.match(/^ */)[0].length - indent);
    code.style.cssText = `padding-left:${margin + 4}ch;text-indent:-4ch`;
    code.innerHTML = isDoc ? `<span class="s">${escape(text.trim())}</span>` : highlight(text.trim());
    made.append(element("div", { class: `code-line${here ? " now" : ""}${isDoc ? " doc" : ""}` }, gutter, code));
  });
  return made;
}
const escape = (text) => text.replace(/[&<>]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" }[sign]));
const TOKEN = /(#.*$)|("[^"]*"|'[^']*')|\b(def|class|return|for|in|if|else|elif|while|not|and|or|is|None|True|False|import|from|as|with|lambda|yield|self)\b|\b(\d+(?:\.\d+)?)\b|(\b\w+(?=\())|(@\w[\w.]*)/g;
function highlight(text) {
  let done = 0, out = "";
  for (const found of text.matchAll(TOKEN)) {
    const kind = found[1] ? "c" : found[2] ? "s" : found[3] ? "k" : found[4] ? "n" : "f";
    out += escape(text.slice(done, found.index)) + `<span class="${kind}">${escape(found[0])}</span>`;
    done = found.index + found[0].length;
  }
  return out + escape(text.slice(done));
}

// The memory: a column a rank, a row a name.
function drawPanel(p, k, isHalf) {
  const panel = element("div", { class: `panel${isHalf ? " half" : ""}`, "aria-label": p.title });
  panel.append(element("h2", {}, element("span", {}, p.short), element("code", {}, `${p.placeText(0, k).split(" in ")[0]}  ${p.lineText(0, k)}`)));
  const { bytes, messages } = p.sent(k);
  const heads = element("div", { class: "ranks heads", style: `--d:${p.ranks}` });
  for (let rank = 0; rank < p.ranks; rank++) {
    const head = element("div", { class: "head", style: `--rank:${rankColour(rank)}` }, element("b", {}, `rank ${rank} `));
    head.append(element("span", { class: p.waits(rank, k) ? "waits" : "" }, p.waits(rank, k) ? "waits" : ""), element("br"),
      `sent ${bytes[rank]} B in ${messages[rank]}`, element("br"), `holds ${p.held[k][rank]} B, at most ${p.most[rank]}`);
    heads.append(head);
  }
  panel.append(heads, drawWires(p, k));
  for (const row of p.rows) panel.append(drawRow(p, row, k, isHalf));
  const look = ({ target }) => { if (target.dataset && target.dataset.s) inspect(p, +target.dataset.s, +target.dataset.cell, k); };
  for (const happening of ["mouseover", "click", "focusin"]) panel.addEventListener(happening, look);
  return panel;
}

function cellWidth(p, row, isHalf) {
  const phone = window.innerWidth <= 800, d = phone ? Math.min(2, p.ranks) : p.ranks;
  const code = isHalf || phone ? 0 : Math.min(620, Math.max(340, window.innerWidth * 0.36));
  const share = phone ? 1 : isHalf ? 0.5 : 1;
  const column = ((window.innerWidth - code) * share - 40 - 10 * (d - 1)) / d - (phone ? 8 : 0);
  const widest = (blocks) => blocks.reduce((sum, block) => sum + Math.max(...block.map(([, n]) => n)), 0);
  const ofRank = (rank) => row.parts.filter((s) => p.storages[s].rank === rank).map((s) => p.storages[s].blocks);
  const one = Math.max(...row.parts.map((s) => widest(p.storages[s].blocks)));
  const all = Math.max(...p.states[0].at.map((_, rank) => ofRank(rank).reduce((sum, blocks) => sum + widest(blocks), 0)));
  const blocks = Math.max(...p.states[0].at.map((_, rank) => ofRank(rank).reduce((sum, some) => sum + some.length, 0)));
  const fit = (cells, gaps) => Math.min(34, Math.floor((column - 7 * gaps - 10) / cells) - 1);
  const together = fit(all, blocks);
  return Math.max(9, together >= 20 ? together : fit(one, 1));
}

function drawRow(p, row, k, isHalf) {
  const state = p.states[k], fresh = new Set(p.frames[k].cells.map((run) => run[0]));
  const alive = row.parts.some((s) => state.cells[s] && !state.gone.has(s));
  const texts = Array.from({ length: p.ranks }, (_, rank) => p.describeText(row, rank, k));
  const same = texts.every((text) => text === texts[0]);
  const title = element("div", { class: "title" }, element("b", {}, row.name), " ", alive ? same ? `each rank: ${texts[0]}` : p.unionText(row, k) : "not there");
  const made = element("div", { class: `row${row.parts.some((s) => fresh.has(s)) ? " changed" : ""}${alive ? "" : " absent"}` }, title);
  const width = cellWidth(p, row, isHalf), small = width < 15;
  const ranks = element("div", { class: `ranks${small ? " small" : ""}`, style: `--d:${p.ranks};--cell:${width}px` });
  for (let rank = 0; rank < p.ranks; rank++) {
    const blocks = element("div", { class: "blocks", style: `--rank:${rankColour(rank)}`, role: "group", tabindex: "0", "aria-label": `rank ${rank}, ${row.name}: ${texts[rank]}` });
    for (const s of row.parts) if (p.storages[s].rank === rank) for (const block of p.storages[s].blocks) blocks.append(drawBlock(p, s, block, k, width));
    ranks.append(blocks);
  }
  made.append(ranks);
  return made;
}

function drawBlock(p, s, block, k, width) {
  const cells = p.states[k].cells[s], made = element("div", { class: "block" });
  for (const [start, numel] of block) {
    const line = element("div", { class: "cells" });
    for (let cell = start; cell < start + numel; cell++) line.append(drawCell(p, s, cell, k, cells, cell > start, width));
    made.append(line);
  }
  return made;
}

function drawCell(p, s, cell, k, cells, isInside, width) {
  if (!cells) return element("span", { class: "cell freed" });
  const kind = p.kind(s, cell, k), [, e] = p.labels[cells.labels[cell]];
  const owner = e === null ? -1 : p.owners[e];
  const before = isInside ? p.labels[cells.labels[cell - 1]][1] : null;
  const gap = isInside && e !== null && before !== null && p.offsets[e][0] !== p.offsets[before][0];
  const wrong = p.differs && k >= p.differs.frame && p.differs.cells.some((one) => one[0] === s && one[1] === cell);
  const written = cells.by[cell] === k && k > 0 && kind !== "freed";
  const made = element("span", { class: `cell ${kind}${written ? " written" : ""}${wrong ? " wrong" : ""}${gap ? " gap" : ""}`, tabindex: "-1", "data-s": s, "data-cell": cell,
    ...(owner >= 0 ? { style: `--own:${rankColour(owner)}` } : {}) });
  made.textContent = kind === "freed" ? "" : kind === "padding" ? "·" : number(cells.values[cell]);
  made.style.fontSize = `${Math.max(7, Math.min(12, (width - 2) / (0.58 * Math.max(3, made.textContent.length))))}px`;
  return made;
}

function inspect(p, s, cell, k) {
  const storage = p.storages[s], cells = p.states[k].cells[s];
  if (!cells) return;
  const [kind, e, origin] = p.labels[cells.labels[cell]], seen = p.kind(s, cell, k), by = cells.by[cell];
  const whose = e === null ? "no element of the model" : `parameter ${p.offsets[e][0]}, element ${p.offsets[e][1]} (${e + 1} of ${p.offsets.length})`;
  const owner = e === null ? "" : p.owners[e] === -1 ? "; every rank steps it" : `; rank ${p.owners[e]} steps it`;
  const what = { gradient: `gradient of rank ${origin}`, share: `gradient of rank ${origin} ÷ ${p.ranks}`, sum: `sum of ranks 0 to ${origin}`,
    average: "average over the ranks", parameter: origin === 0 ? "parameter before the first step" : `parameter after step ${origin}` }[kind] || WORDS[kind];
  const also = seen === "garbage" ? ", which nobody reads again (garbage)" : seen === "freed" ? ", released" : seen === "stale" ? ", stale: a newer one is on its way" : "";
  const came = p.frames[by].ended.filter(([rank, o]) => rank === storage.rank && p.operations[o].arrows.some((arrow) => arrow[1] === rank))
    .map(([rank, o]) => `${p.operations[o].kind} from rank ${[...new Set(p.operations[o].arrows.filter((arrow) => arrow[1] === rank).map((arrow) => arrow[0]))].join(", ")}`);
  $("inspector").replaceChildren(element("b", {}, `rank ${storage.rank} · ${storage.row}${storage.part ? ` ${storage.part}` : ""}[${cell}] = ${number(cells.values[cell])}`),
    ` · ${what}${also} · ${whose}${owner} · `, by === 0 ? "there from the start" : `written at ${p.placeText(storage.rank, by)} (frame ${by + 1})${came.length ? `, arrived by ${came.join("; ")}` : ""}`);
}

// Messages that are under way: a lane for each line that has sent some.
function drawWires(p, k) {
  const height = 38, lanes = Math.max(1, ...p.states.map((_, f) => p.operations.filter((one) => isUnderWay(one, f)).length));
  const made = element("div", { class: "wires", style: `height:${lanes * height}px` });
  if (!p.operations.some((one) => isUnderWay(one, k))) made.append(element("div", { class: "lane other" }, element("span", { class: "label" }, "no message is under way")));
  for (const operation of p.operations.filter((one) => isUnderWay(one, k))) {
    const live = operation.arrows.filter(([, , , start, end]) => start <= k && k < end);
    const sizes = [...new Set(live.map((arrow) => arrow[2]))].sort((a, b) => a - b);
    const calls = operation.calls > 1 && operation.kind !== "send" ? `${operation.calls} ${operation.kind}s` : operation.kind === "send" ? "exchange" : operation.kind;
    const lane = element("div", { class: `lane ${operation.what || "other"}` }, element("span", { class: "label" }, element("b", {}, calls),
      ` · ${operation.what || "values"} of ${operation.params.map((param) => `p${param}`).join(", ")} · ${live.length} messages of ${sizes.join(" to ")} B are under way`));
    lane.innerHTML += arrows(p, live, operation);
    made.append(lane);
  }
  return made;
}
const isUnderWay = (operation, k) => operation.arrows.some(([, , , start, end]) => start <= k && k < end);

function arrows(p, live, operation) {
  const x = (rank) => 1000 * (rank + 0.5) / p.ranks;
  const paths = live.map(([from, to]) => {
    const a = x(from), b = x(to), up = a < b, far = Math.abs(from - to);
    const y = up ? 25 : 33, bend = up ? 27 - 8 * far : 31 + 7 * far, room = 16 * Math.sign(b - a);
    return `<path d="M${a + room} ${y} Q${(a + b) / 2} ${bend} ${b - room} ${y}" marker-end="url(#tip)" vector-effect="non-scaling-stroke"/>`;
  });
  const nodes = Array.from({ length: p.ranks }, (_, rank) => `<ellipse cx="${x(rank)}" cy="29" rx="9" ry="6" fill="${rankColour(rank)}" stroke="none"/>`);
  return `<svg viewBox="0 0 1000 44" preserveAspectRatio="none" role="img" aria-label="${live.map(([from, to, n]) => `${from} to ${to}, ${n} bytes`).join("; ")}"><defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto"><path d="M0 0 8 4 0 8z" fill="currentColor" stroke="none" style="fill:currentColor"/></marker></defs>${paths.join("")}${nodes.join("")}</svg>`;
}

// ---------------------------------------------------------------------------------------------- predict first

/** Before frame k shows what a message has brought: a question about the first rank that it reaches. -> asked? */
function ask(k) {
  const p = player(now.id), frame = p.frames[k], key = `${now.id}/${k}`;
  if (now.asked === key || !frame.ended.length) return false;
  const changed = frame.cells.filter((run) => frame.ended.some(([rank]) => rank === p.storages[run[0]].rank));
  if (!changed.length) return false;
  const s = changed[0][0], rank = p.storages[s].rank, row = p.rows.find((one) => one.parts.includes(s));
  const right = p.describeText(row, rank, k), choices = new Set([right]);
  const others = [p.describeText(row, rank, k - 1), ...wrongAnswers(p, row, rank, k)];
  for (const other of others) if (choices.size < 3) choices.add(other);
  const shuffled = [...choices].sort((a, b) => hash(a + k) - hash(b + k));
  const operation = p.operations[frame.ended.find(([r]) => r === rank)[1]];
  const box = $("question");
  box.replaceChildren(element("b", {}, `${operation.kind} of ${operation.what}: what will rank ${rank} hold in ${row.name}?`));
  for (const choice of shuffled) {
    const button = element("button", {}, choice);
    button.onclick = () => {
      now.asked = key;
      const isRight = choice === right;
      button.className = isRight ? "right" : "wrong";
      if (!isRight) [...box.querySelectorAll("button")].find((one) => one.textContent === right).className = "right";
      box.querySelectorAll("button").forEach((one) => { one.disabled = true; });
      const on = element("button", { style: "text-align:center" }, isRight ? "Right. Go on" : "Not so. Go on, and look");
      on.onclick = () => { box.close(); go(k); };
      box.append(on);
      on.focus();
    };
    box.append(button);
  }
  play(false);
  box.showModal();
  return true;
}
function wrongAnswers(p, row, rank, k) {
  const n = row.parts.filter((s) => p.storages[s].rank === rank).reduce((sum, s) => sum + p.storages[s].numel, 0);
  const isParams = p.describeText(row, rank, k).includes("parameter");
  const kinds = isParams ? [WORDS.new, WORDS.old, WORDS.average] : [WORDS.average, WORDS.gradient, WORDS.sum];
  return kinds.map((words) => `${words} × ${n}`);
}
function hash(text) { let h = 7; for (const sign of text) h = (h * 31 + sign.charCodeAt(0)) % 1009; return h; }

// --------------------------------------------------------------------------------------------------- controls

function drawLegend() {
  const sample = (kind, text) => { const one = element("span", {}, element("i", { class: `cell ${kind}`, style: "--own:var(--rank0);font-style:normal" }, text)); one.append(WORDS[kind]); return one; };
  $("legend").replaceChildren(element("span", {}, "colour: the rank that steps the element"), sample("gradient", "7"), sample("share", "1.75"), sample("average", "157"), sample("old", "514"),
    sample("new", "357"), sample("stale", "514"), sample("moment", "157"), sample("garbage", "2"), sample("padding", "·"), sample("freed", ""));
  $("helptext").innerHTML = DATA.help;
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("question").open) return;
  if (/^(SELECT|INPUT)$/.test(event.target.tagName) && event.target.id !== "slider" && event.key !== "Escape") return;
  const cell = event.target.classList && event.target.classList.contains("cell") ? event.target : null;
  if (event.target.classList && event.target.classList.contains("blocks") && event.key === "Enter") { const first = event.target.querySelector(".cell"); if (first) first.focus(); return event.preventDefault(); }
  if (cell && /^Arrow|Escape/.test(event.key)) { moveFocus(cell, event.key); return event.preventDefault(); }
  const action = {
    " ": () => play(!now.playing), ArrowRight: () => { play(false); forward(); }, ArrowLeft: () => { play(false); go(now.k - 1); },
    Home: () => { play(false); go(0); }, End: () => { play(false); go(ticks.length - 1); }, m: () => jump(isMessage), f: () => jump(isFunction),
    "?": () => $("help").click(),
  }[event.key];
  if (!action || event.key === " " && event.target.tagName === "BUTTON" && event.target.id !== "play") return;
  event.preventDefault();
  action();
}
function moveFocus(cell, key) {
  const blocks = cell.closest(".blocks"), cells = [...blocks.querySelectorAll(".cell")], at = cells.indexOf(cell);
  if (key === "Escape") return blocks.focus();
  const next = cells[at + (key === "ArrowRight" || key === "ArrowDown" ? 1 : -1)];
  if (next) next.focus();
}

function start() {
  drawLegend();
  $("slider").oninput = () => { play(false); go(+$("slider").value); };
  $("first").onclick = () => { play(false); go(0); };
  $("last").onclick = () => { play(false); go(ticks.length - 1); };
  $("back").onclick = () => { play(false); go(now.k - 1); };
  $("forward").onclick = () => { play(false); forward(); };
  $("play").onclick = () => play(!now.playing);
  $("message").onclick = () => jump(isMessage);
  $("function").onclick = () => jump(isFunction);
  $("differs").onclick = () => { play(false); const { frame } = player(now.id).differs; go(ticks.findIndex((tick) => tick[0] === frame)); };
  $("bugs").onchange = () => { play(false); if ($("bugs").value) select($("bugs").value, "", 0); };
  $("beside").onchange = () => { play(false); select(now.id, $("beside").value, 0); };
  $("predict").onchange = () => { now.predict = $("predict").checked; now.asked = null; };
  $("help").onclick = () => { const hidden = $("helptext").hidden; $("helptext").hidden = !hidden; $("help").setAttribute("aria-expanded", hidden); };
  document.addEventListener("keydown", keys);
  window.addEventListener("resize", draw);
  window.addEventListener("hashchange", follow);
  follow();
}
function follow() {
  const [programs, k] = decodeURIComponent(location.hash.slice(1)).split("/"), [id, beside] = (programs || "").split("+");
  const known = (one) => DATA.programs.some((program) => program.id === one);
  const wanted = k === "wrong" && known(id) && player(id).differs ? player(id).differs.frame : +k - 1 || 0;
  select(known(id) ? id : DATA.programs.find((program) => program.id === "4") ? "4" : DATA.programs[0].id, known(beside) ? beside : "", wanted);
}
start();
