"use strict";
// What is shown is a function of (program, frame) alone: going back shows the same picture as going there.

let DATA;
const $ = (id) => document.getElementById(id);
const EMPTY = new Set(["zero", "padding", "unset"]);
const WORDS = {
  gradient: "own gradient", share: "gradient ÷ d", sum: "sum of some ranks", average: "average", old: "old parameter",
  new: "new parameter", stale: "stale parameter", moment: "moment", zero: "zero", padding: "padding",
  unset: "not written", mixture: "nonsense", garbage: "garbage", freed: "released",
};
const STILL = matchMedia("(prefers-reduced-motion: reduce)");
const escape = (text) => `${text}`.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const mean = (numbers) => Math.round(numbers.reduce((sum, one) => sum + one, 0) / numbers.length);

// ------------------------------------------------------------------------------------------------ recordings

class Player {
  /** A recording, its frames made whole. */
  constructor(recording) {
    Object.assign(this, recording);
    this.param = this.params.flatMap((n, p) => Array(n).fill(p));
    this.states = [];
    let state = { cells: [], dead: [], gone: new Set(), at: Array(this.ranks).fill(0) };
    this.frames.forEach((frame, k) => {
      state = { cells: [...state.cells], dead: [...state.dead], gone: new Set(state.gone), at: [...state.at] };
      for (const [rank, stack] of frame.at) state.at[rank] = stack;
      for (const s of frame.gone) state.gone.add(s);
      for (const s of new Set(frame.cells.map(([one]) => one))) {
        const { values, labels, by } = state.cells[s] || { values: [], labels: [], by: [] };
        state.cells[s] = { values: [...values], labels: [...labels], by: [...by] };
        state.gone.delete(s);
      }
      for (const [s, start, values, labels] of frame.cells) {
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
    this.held = this.states.map((one) => this.bytesHeld(one));
    this.rows = this.makeRows();
    this.phases = this.makePhases();
  }

  /** Rows with the place of each part on each rank, in cells: what is cut into d shards has a line a shard. */
  makeRows() {
    const rows = new Map();
    const rank = ({ row }) => ["parameters", "ParameterBuffer.flat", "gradients"].indexOf(row) + 1
      || (/moment|exp_avg/.test(row) ? 9 : 5);
    const order = this.storages.map((storage, s) => s).filter((s) => this.states.some((state) => state.cells[s]));
    order.sort((a, b) => rank(this.storages[a]) - rank(this.storages[b]) || a - b);
    const isCut = (blocks) => blocks.length && blocks.every((block) => block.length === this.ranks && this.ranks > 1);
    const width = ({ blocks }) => blocks.reduce((sum, block) => sum + Math.max(...block.map(([, n]) => n)), 0);
    this.wide = Math.max(16, ...this.storages.filter(({ blocks }) => isCut(blocks)).map(width));
    if (this.param.length < 32) this.wide = Math.max(8, ...this.storages.filter(({ blocks }) => isCut(blocks)).map(width));
    for (const s of order) {
      const { row, rank: of, part } = this.storages[s];
      if (!rows.has(row)) rows.set(row, { name: row, lines: 1, parts: [], slots: Array.from({ length: this.ranks }, () => new Map()) });
      rows.get(row).parts.push(s);
      const slots = rows.get(row).slots[of];
      slots.set(part, [...(slots.get(part) || []), s]);
    }
    for (const row of rows.values()) {
      for (const slots of row.slots) {
        let at = 0, cut = 0;
        const parts = [...slots].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
        for (const [, storages] of parts) {
          for (const s of storages) {
            const storage = this.storages[s];
            storage.place = [];
            let x = cut;
            if (isCut(storage.blocks)) {
              for (const block of storage.blocks) {
                block.forEach(([start, n], y) => { for (let i = 0; i < n; i++) storage.place[start + i] = [x + i, y]; });
                x += Math.max(...block.map(([, n]) => n));
              }
              row.lines = Math.max(row.lines, this.ranks);
            } else {
              for (let i = 0; i < storage.numel; i++) storage.place[i] = [(at + i) % this.wide, Math.floor((at + i) / this.wide)];
              row.lines = Math.max(row.lines, Math.ceil((at + storage.numel) / this.wide));
            }
          }
          const last = this.storages[storages[0]];
          if (isCut(last.blocks)) cut += width(last) + 1; else at += Math.max(...storages.map((s) => this.storages[s].numel));
        }
      }
    }
    return [...rows.values()];
  }

  /** Of each phase where it begins; the line that calls a method belongs to it. */
  makePhases() {
    const phases = [];
    this.frames.forEach(({ phase, step }, k) => {
      const last = phases[phases.length - 1];
      if (last && (phase === "" || phase === "step" || last.phase === phase && last.step === step)) last.end = k + 1;
      else phases.push({ phase: phase || "start", step, start: last ? last.end : 0, end: k + 1 });
    });
    return phases;
  }

  /** The frame in which this program is where `other` is in its frame k: phase for phase, both begin and end at once. */
  twin(other, k) {
    const theirs = other.phases.findIndex((one) => k < one.end), { phase, step, start, end } = other.phases[theirs];
    const mine = this.phases.find((one) => one.phase === phase && one.step === step);
    if (!mine) {
      const before = other.phases[theirs - 1];
      return before ? this.twin(other, before.end - 1) : 0;
    }
    return k === end - 1 ? mine.end - 1 : Math.min(mine.start + k - start, mine.end - 1);
  }

  bytesHeld(state) {
    const held = Array(this.ranks).fill(0);
    this.storages.forEach(({ counted, rank, numel, itemsize }, s) => {
      if (counted && state.cells[s] && !state.gone.has(s)) held[rank] += numel * itemsize;
    });
    return held;
  }

  sent(k) {
    const bytes = Array(this.ranks).fill(0);
    for (const { arrows } of this.operations) for (const [from, , n, start] of arrows) if (start <= k) bytes[from] += n;
    return bytes;
  }

  label(s, cell, k) { return this.labels[this.states[k].cells[s].labels[cell]]; }

  kind(s, cell, k) {
    const state = this.states[k], [kind, , origin] = this.label(s, cell, k), { step } = this.frames[k];
    if (state.gone.has(s)) return "freed";
    if (state.dead[s] && state.dead[s].has(cell) && !EMPTY.has(kind)) return "garbage";
    if (kind !== "parameter") return kind;
    return origin < step ? "stale" : origin > Math.min(step, this.lastStep - 1) ? "new" : "old";
  }

  /** What is drawn of a row on a rank: of each part the storage that came last. */
  drawn(row, rank, k) {
    return [...row.slots[rank].values()].map((some) => some.filter((s) => this.states[k].cells[s]).pop()).filter((s) => s !== undefined);
  }

  place(rank, k) {
    const stack = this.stacks[this.states[k].at[rank]];
    return stack && stack.length ? stack[stack.length - 1] : [0, 1];
  }

  placeText(rank, k) {
    const [name, file] = this.functions[this.place(rank, k)[0]];
    return `${this.files[file][0]}:${this.place(rank, k)[1]} in ${name}`;
  }

  /** What a rank holds in a row, in words. */
  describe(row, rank, k) {
    const counts = new Map();
    for (const s of this.drawn(row, rank, k)) {
      if (this.states[k].gone.has(s)) continue;
      this.states[k].cells[s].labels.forEach((_, cell) => {
        const [, e, origin] = this.label(s, cell, k), kind = this.kind(s, cell, k);
        let words = WORDS[kind];
        if (kind === "gradient" && origin !== rank) words = `gradient of rank ${origin}`;
        if (kind === "share") words = origin === rank ? "own gradient ÷ d" : "gradient ÷ d of others";
        if (["average", "new"].includes(kind) && this.owners[e] === rank) words += " (own)";
        if (kind !== "padding") counts.set(words, (counts.get(words) || 0) + 1);
      });
    }
    const order = (words) => Object.values(WORDS).findIndex((word) => words.startsWith(word));
    const sorted = [...counts].sort(([a], [b]) => order(a) - order(b) || a.localeCompare(b));
    return sorted.map(([words, count]) => `${words} × ${count}`).join(", ") || "nothing";
  }

  waits(rank, k) { return k + 1 < this.frames.length && !this.frames[k].at.some(([one]) => one === rank); }

  /** Collectives that are under way in frame k, or have been since frame `from`. */
  travelling(from, k) {
    return this.operations.map((one) => ({ ...one, start: Math.min(...one.arrows.map((a) => a[3])), end: Math.max(...one.arrows.map((a) => a[4])) }))
      .filter((one) => one.start <= k && one.end > from).map((one) => ({ ...one, live: k < one.end }));
  }
}

const players = new Map();
function player(id) {
  if (!players.has(id)) players.set(id, new Player(DATA.programs.find((program) => program.id === id)));
  return players.get(id);
}

// ---------------------------------------------------------------- the picture: page and chapters have it from here

const colour = (rank) => (rank < 0 ? "var(--everyone)" : `var(--rank${rank % 8})`);

/** Stripes in the colour of each owner: gradients wide, what travels fine, moments level. */
function patterns(ranks) {
  const of = (name, rank, size, turn, stroke, paper) => `<pattern id="${name}${rank}" width="${size}" height="${size}" `
    + `patternUnits="userSpaceOnUse" patternTransform="rotate(${turn})"><rect width="${size}" height="${size}" fill="${colour(rank)}" `
    + `fill-opacity="${paper}"/><path d="M0 0V${size}" stroke="${colour(rank)}" stroke-width="${stroke}"/></pattern>`;
  const all = Array.from({ length: ranks + 1 }, (_, i) => i - 1);
  return `<defs>${all.map((r) => of("gradient", r, 5, 45, 5, 0.3) + of("share", r, 3, 45, 1.4, 0.12)
    + of("moment", r, 4, 90, 3, 0.25)).join("")}</defs>`;
}

function drawCell(p, s, cell, k, from, x, y, size, high) {
  const kind = p.kind(s, cell, k), [, e] = p.label(s, cell, k), { values, by } = p.states[k].cells[s];
  const isShared = kind === "moment" && p.owners[0] >= 0;
  const owner = isShared ? p.storages[s].rank : e === null ? -1 : p.owners[e], pattern = kind === "sum" ? "share" : kind;
  const fill = ["gradient", "share", "moment"].includes(pattern) ? ` fill="url(#${pattern}${owner})"` : "";
  const written = by[cell] > from && kind !== "freed" ? " written" : "";
  const left = cell > 0 && p.states[k].cells[s].labels[cell - 1], before = left !== false && p.labels[left][1];
  const gap = kind !== "freed" && e !== null && Number.isInteger(before) && p.param[e] !== p.param[before] && p.storages[s].place[cell][0] > 0
    ? `<path class="gap" d="M${x - 0.5} ${y}v${high}"/>` : "";
  const text = kind === "freed" || size < 20 ? "" : kind === "padding" ? "·" : number(values[cell]);
  const words = text ? `<text class="value ${kind}" x="${x + size / 2 - 0.5}" y="${y + high - 5}" style="font-size:${Math.min(11, 1.6 * size / Math.max(3, text.length))}px">${text}</text>` : "";
  return `<rect class="cell ${kind}${written}" x="${x}" y="${y}" width="${size - 1}" height="${high - 1}" rx="${kind === "new" ? high / 3 : 1}" `
    + `style="--own:${colour(owner)}"${fill} tabindex="-1" data-s="${s}" data-cell="${cell}"/>${gap}${words}`;
}

function number(value) {
  if (value === null) return "?";
  for (const digits of [5, 4, 3, 2]) { const text = `${+value.toPrecision(digits)}`; if (text.length <= 5) return text; }
  return value.toExponential(0);
}

/** A row of all ranks, or of `only` one -> [svg, height]. */
function drawRow(p, row, k, from, top, sizes, only) {
  const out = [];
  for (let rank = 0; rank < p.ranks; rank++) {
    if (only !== undefined && rank !== only) continue;
    const left = only === undefined ? rank * sizes.column : 0, cells = [];
    for (const s of p.drawn(row, rank, k)) {
      p.storages[s].place.forEach(([x, y], cell) => {
        cells.push(drawCell(p, s, cell, k, from, left + x * sizes.cell, top + y * sizes.high, sizes.cell, sizes.high));
      });
    }
    out.push(`<g class="cells" tabindex="0" role="group" data-rank="${rank}" aria-label="rank ${rank}, ${escape(row.name)}: ${p.describe(row, rank, k)}">${cells.join("")}</g>`);
  }
  return [out.join(""), row.lines * sizes.high];
}

/** Sizes in pixels: cells as wide as they fit beside each other, and as high as `rows` fit below each other. */
function sizesFor(p, width, height = 0, rows = []) {
  const column = (width + 10) / p.ranks, cell = Math.min(34, Math.floor((10 * (column - 10)) / p.wide) / 10);
  const lines = rows.reduce((sum, row) => sum + row.lines, 0);
  const high = Math.floor((height - 19 * rows.length) / (lines || 1));
  return { column, cell, high: cell > 20 ? 18 : Math.max(7, Math.min(18, 1.6 * cell, high)) };
}

/** All memory of all ranks in frame k, and what has travelled since frame `from` -> svg. `looks`: the row to look at. */
function drawMemory(p, k, from, width, height, looks, lanes, rows) {
  const sizes = sizesFor(p, width, height - 42 - 20 * lanes, rows), out = [];
  let y = 0;
  for (let rank = 0; rank < p.ranks; rank++) {
    const x = rank * sizes.column, wide = sizes.column - 10;
    out.push(`<rect x="${x}" y="0" width="${wide}" height="4" fill="${colour(rank)}"/><text x="${x}" y="18" class="rank">rank ${rank}</text>`,
      `<text x="${x}" y="31" class="soft" data-held="${rank}">${p.held[k][rank]} B</text>`);
    if (p.waits(rank, k)) out.push(`<text x="${x + wide}" y="18" class="waits">waits</text>`);
  }
  y = 38;
  const moving = p.travelling(from, k), shown = moving.length > lanes ? [grouped(moving)] : moving;
  shown.forEach((one, i) => out.push(drawLane(p, one, y + i * 20, width)));
  if (!shown.length) out.push(`<text x="0" y="${y + 13}" class="soft">nothing is under way</text>`);
  y += 20 * lanes + 4;
  for (const row of rows) {
    const fresh = row.slots.some((_, rank) => p.drawn(row, rank, k).some((s) => p.states[k].cells[s].by.some((by) => by > from)));
    const texts = row.slots.map((_, rank) => p.describe(row, rank, k)), same = texts.every((text) => text === texts[0]);
    const said = width < 500 ? "" : same ? texts[0] === "nothing" ? "not there" : `each rank: ${texts[0]}` : [...new Set(texts)].slice(0, 2).join(" | ").slice(0, 80);
    out.push(`<text x="0" y="${y + 11}" class="name${fresh ? " changed" : ""}">${row.name === looks ? "▶ " : ""}${escape(row.name)} <tspan class="soft">${escape(said)}</tspan></text>`);
    const [svg, high] = drawRow(p, row, k, from, y + 15, sizes);
    out.push(`<g class="row" data-row="${escape(row.name)}">${svg}</g>`);
    y += high + 19;
  }
  return `<svg class="memory${sizes.cell < 8 ? " small" : ""}" viewBox="0 0 ${width} ${y}" width="${width}" height="${y}" role="group" aria-label="memory of all ranks">${patterns(p.ranks)}${out.join("")}<g class="flying"></g></svg>`;
}

const grouped = (some) => ({ ...some[0], kind: `${some.length} ${some[0].kind}s`, params: some.flatMap((one) => one.params),
  arrows: some.flatMap((one) => one.arrows), live: some.some((one) => one.live) });

/** A collective is one bar over all ranks. */
function drawLane(p, one, y, width) {
  const give = Array(p.ranks).fill(0), get = Array(p.ranks).fill(0);
  for (const [from, to, n] of one.arrows) { give[from] += n; get[to] += n; }
  const same = give.every((n, r) => n === give[0] && get[r] === get[0]);
  const sizes = same ? `a rank gives ${give[0]} B, gets ${get[0]}` : `rank ${give.findIndex((n) => n)} gives ${Math.max(...give)} B, others get ${Math.max(...get)}`;
  const params = one.params.length > 6 ? `${one.params.length} tensors` : one.params.map((param) => `p${param}`).join(" ");
  const words = width < 500 ? `${one.kind} · ${one.live ? "under way" : `a rank gives ${mean(give)} B`}`
    : `${one.kind} · ${one.what || "values"} of ${params} · ${sizes}${one.live ? " · under way" : ""}`;
  return `<g class="lane ${one.what || "other"}${one.live ? " live" : ""}"><rect x="0" y="${y}" width="${width}" height="17" rx="4"/><text x="6" y="${y + 12.5}">${escape(words)}</text></g>`;
}

/** What runs, from left to right, and what is under way meanwhile: a line of it for each collective. */
function drawOverlap(p, width, high, now) {
  const x = (k) => (k / p.frames.length) * width, out = [], isFigure = now === undefined;
  for (const { phase, start, end } of p.phases) {
    const wide = x(end) - x(start);
    out.push(`<g class="phase${now >= start && now < end ? " now" : ""}" data-k="${start}"><rect x="${x(start)}" y="0" width="${Math.max(1, wide - 1)}" height="15"/>`,
      wide > 6.4 * phase.length ? `<text x="${x(start) + wide / 2}" y="11">${phase}</text>` : "", "</g>");
  }
  p.travelling(-1, Infinity).forEach((one, i) => {
    const y = 18 + i * high;
    out.push(`<rect class="bar ${one.what}" x="${x(one.start)}" y="${y}" width="${x(one.end) - x(one.start)}" height="${high - 1}"/>`,
      isFigure ? `<text class="soft" x="${one.start > p.frames.length / 2 ? x(one.start) - 6 : x(one.end) + 6}" y="${y + high - 5}" text-anchor="${one.start > p.frames.length / 2 ? "end" : "start"}">${one.kind} of ${one.params.map((param) => `p${param}`).join(", ")}</text>` : "");
  });
  const tall = 18 + p.operations.length * high;
  if (!isFigure) out.push(`<path class="needle" d="M${x(now + 0.5)} 0V${tall}"/>`);
  return [out.join(""), tall];
}

/** The SVG files that the chapters show. */
function figures() {
  const style = document.querySelector("style").textContent.match(/\/\* picture \*\/([\s\S]*?)\/\* end \*\//)[1];
  const file = (title, width, height, p, body) => `<svg xmlns="http://www.w3.org/2000/svg" class="figure" viewBox="-10 -10 ${width + 20} ${height + 20}" width="${width + 20}" height="${height + 20}" role="img" data-stamp="${DATA.stamp.slice(0, 16)}"><title>${title}</title><style>${style}</style>`
    + `<rect x="-10" y="-10" width="100%" height="100%" class="paper"/>${patterns(p.ranks)}${body.replaceAll(/ tabindex="-?\d"| data-(?:s|cell|rank|k)="[^"]*"| role="group"| aria-label="[^"]*"/g, "")}</svg>\n`;
  const three = player("3"), four = player("4"), made = {}, buffer = three.rows.find((one) => one.name === "GradBuffer.flat");
  let y = 0, body = "";
  const wanted = three.beats.filter(({ frame }, i) => i === 0 || buffer.parts.some((s) => three.states[frame].cells[s].by.some((by) => by > three.beats[i - 1].frame))
    || buffer.parts.some((s) => [...three.states[frame].dead[s] || []].length !== [...three.states[three.beats[i - 1].frame].dead[s] || []].length));
  for (const { frame, lines, function: f } of wanted) {
    const [name, file] = three.functions[f], line = three.files[file][1].split("\n")[lines[0] - 1].trim();
    const [svg, high] = drawRow(three, buffer, frame, frame, y + 16, sizesFor(three, 800));
    body += `<text x="0" y="${y + 11}" class="name">${escape(frame ? `${name.split(".").pop()}: ${line}` : "before the step")}</text>${svg}`;
    y += high + 26;
  }
  body += `<text x="0" y="${y + 8}" class="soft">Columns: ranks 0 to 3. Colour: the rank that owns a line. Striped: own gradients; filled: averages; round: new parameters; grey: garbage.</text>`;
  made["show_buffer.svg"] = file("The buffer of stage 3 on four ranks, through one step", 800, y + 14, three, body);

  const flat = four.rows.find((one) => one.name === "ParameterBuffer.flat"), [first] = four.drawn(flat, 0, 0);
  let x = 90, partition = "";
  four.storages[first].blocks.forEach((block, i) => {
    const tensors = [...new Set(block.flatMap(([start, n]) => Array.from({ length: n }, (_, j) => four.label(first, start + j, 0)[1])).filter((e) => e !== null).map((e) => four.param[e]))];
    partition += `<text x="${x}" y="11" class="name">${i}: ${tensors.map((one) => `p${one}`).join(", ")}</text>`;
    block.forEach(([start, n], rank) => { for (let j = 0; j < n; j++) partition += drawCell(four, first, start + j, 0, 0, x + j * 28, 20 + rank * 19, 28, 19); });
    x += 28 * block[0][1] + 22;
  });
  for (let rank = 0; rank < four.ranks; rank++) partition += `<text x="0" y="${33 + rank * 19}" class="soft">rank ${rank} steps</text>`;
  partition += `<text x="0" y="116" class="soft">Buckets 0 to 6 leave in this order, and their parameters come back in the reverse one. ·: padding.</text>`;
  made["show_buckets.svg"] = file("Stage 4: the parameters of one rank in buckets, each cut into four shards", x, 122, four, partition);

  const [strip, tall] = drawOverlap(four, 900, 17);
  made["show_overlap.svg"] = file("Stage 4: what rank 0 runs, and what is under way meanwhile", 900, tall + 20, four,
    `${strip}<text x="0" y="${tall + 14}" class="soft">To the right: lines of rank 0, no seconds. Above what it runs, below what is under way. A layer waits for its own bucket only.</text>`);
  return made;
}

// ------------------------------------------------------------------------------------------------ beats and lines

const now = { id: "0", beside: "", k: 0, beat: 0, playing: false, shown: null };

const beats = () => player(now.id).beats;
/** The frame that the picture is compared with: everything that has changed since is marked. */
const since = () => (now.beat < 0 ? now.k - 1 : now.beat ? beats()[now.beat - 1].frame : player(now.id).bug ? now.k - 1 : now.k);
const hash = () => `#${now.id}${now.beside ? `+${now.beside}` : ""}${now.beat < 0 ? `/${now.k + 1}` : `.${now.beat + 1}`}`;

function toBeat(beat) {
  const to = Math.max(0, Math.min(beats().length - 1, beat)), forward = to === now.beat + 1;
  Object.assign(now, { beat: to, k: beats()[to].frame });
  draw();
  if (forward && !STILL.matches) fly(player(now.id), since(), now.k);
}

function toFrame(k) {
  now.k = Math.max(0, Math.min(player(now.id).frames.length - 1, k));
  now.beat = -1;
  draw();
}

/** The beat that a frame belongs to: the first that it isn't beyond. */
function nearest(k) {
  const at = beats().findIndex(({ frame }) => frame >= k);
  return at < 0 ? beats().length - 1 : at;
}

function step(by) {
  if (!beats().length) return toFrame(now.k + by);
  if (now.beat < 0) {
    const at = nearest(now.k);
    return toBeat(by < 0 ? (beats()[at].frame >= now.k ? at - 1 : at) : beats()[at].frame > now.k ? at : at + 1);
  }
  if (by > 0 && $("predict").checked && now.beat < beats().length - 1 && ask(now.beat + 1)) return undefined;
  return toBeat(now.beat + by);
}

function select(id, beside, beat, frame) {
  now.id = id;
  const right = player(id).right;
  now.beside = right || (beside === id ? "" : beside);
  now.beat = -2;
  if (frame !== undefined || !beats().length) toFrame(frame || 0); else toBeat(beat || 0);
}

let timer = 0;
function play(on) {
  now.playing = on;
  clearTimeout(timer);
  $("play").textContent = on ? "❚❚ pause" : "▶ play";
  if (!on) return;
  const isBeat = now.beat >= 0;
  const isLast = () => (isBeat ? now.beat >= beats().length - 1 : now.k >= player(now.id).frames.length - 1);
  if (isLast()) { if (isBeat) toBeat(0); else toFrame(0); }
  const next = () => {
    if (!now.playing) return;
    if (isBeat) step(1); else toFrame(now.k + 1);
    if (isLast() || $("question").open) play(false); else timer = setTimeout(next, +$("speed").value / (isBeat ? 1 : 10));
  };
  timer = setTimeout(next, +$("speed").value / (isBeat ? 2 : 10));
}

/** Cells that a collective has brought between two frames fly from the ranks that they come from. */
function fly(p, from, k) {
  const layer = document.querySelector(".panel .flying"), groups = new Map();
  const rectOf = (s, cell) => document.querySelector(`.panel rect[data-s="${s}"][data-cell="${cell}"]`);
  for (let f = from + 1; f <= k; f++) {
    for (const [rank, o] of p.frames[f].ended) {
      const { kind, arrows } = p.operations[o], senders = [...new Set(arrows.filter((a) => a[1] === rank).map((a) => a[0]))];
      for (const [s, start, values, labels] of p.frames[f].cells.filter(([one]) => p.storages[one].rank === rank)) {
        const { row, part } = p.storages[s], home = p.rows.find((one) => one.name === row);
        values.forEach((_, i) => {
          const [, e] = p.labels[labels[i]], whole = /reduce/.test(kind);
          for (const sender of whole ? senders : senders.filter((one) => e !== null && one === p.owners[e])) {
            const other = (home.slots[sender].get(part) || []).filter((one) => p.states[k].cells[one]).pop();
            const there = other === undefined ? null : rectOf(other, start + i), here = rectOf(s, start + i);
            if (!there || !here) continue;
            const key = [sender, rank, here.getAttribute("y"), row].join();
            if (!groups.has(key)) groups.set(key, { dx: there.x.baseVal.value - here.x.baseVal.value, rects: [] });
            groups.get(key).rects.push(here);
          }
        });
      }
    }
  }
  for (const { dx, rects } of groups.values()) {
    const flying = document.createElementNS("http://www.w3.org/2000/svg", "g");
    flying.append(...rects.map((one) => { const copy = one.cloneNode(); copy.removeAttribute("tabindex"); copy.removeAttribute("data-s"); return copy; }));
    layer.append(flying);
    const path = [{ transform: `translate(${dx}px,0)`, opacity: 0.9 }, { transform: `translate(${dx / 2}px,-14px)` }, { transform: "none", opacity: 1 }];
    flying.animate(path, { duration: 550, easing: "ease-in-out" }).onfinish = () => flying.remove();
  }
}

// ------------------------------------------------------------------------------------------------ the page

function draw() {
  const p = player(now.id), beat = now.beat >= 0 ? beats()[now.beat] : null;
  const [f] = p.place(0, now.k), [name, , , , doc] = p.functions[f];
  const says = beat ? beat.says : `${name}: ${(doc || "a line of it").split("\n")[0]}`;
  if ($("says").textContent !== says) $("says").textContent = says;
  $("intro").textContent = p.title;
  drawMeters(p);
  drawCode(p, beat);
  drawPanels(p, beat);
  drawFooter(p);
  history.replaceState(null, "", hash());
}

function drawMeters(p) {
  const sent = mean(p.sent(now.k)), held = mean(p.held[now.k]), formula = p.formula;
  const meter = (words, value, of, text) => `<span class="meter"><b>${words} ${value} B</b>${of ? ` of ${of} <i>${escape(text)}</i><progress max="${of}" value="${value}" aria-label="${words}"></progress>` : ""}</span>`;
  const most = mean(p.held[0].map((_, rank) => Math.max(...p.held.map((one) => one[rank]))));
  $("meters").innerHTML = meter("sent", sent, formula && formula.sent_bytes, formula && formula.sent)
    + meter("holds", held, formula && formula.held_bytes, formula && `${formula.held} after a step; at most ${most} B, no activations`);
}

/** One source line: comments, strings and keywords in colours. */
function coloured(text) {
  const words = /(#.*$)|("(?:[^"\\]|\\.)*"?)|\b(def|class|return|for|in|if|else|while|not|and|or|is|None|True|False|with|import|from|lambda|pass)\b/g;
  let out = "", at = 0;
  for (const found of text.matchAll(words)) {
    out += `${escape(text.slice(at, found.index))}<i class="${found[1] ? "c" : found[2] ? "s" : "k"}">${escape(found[0])}</i>`;
    at = found.index + found[0].length;
  }
  return out + escape(text.slice(at));
}

function drawFunction(p, f, marked, ranks, isBeat) {
  const [name, file, first, end] = p.functions[f], source = p.files[file][1].split("\n"), edit = p.edit && p.edit.file === file ? p.edit : null;
  const out = [`<div class="name">${name}, ${p.files[file][0]}:${marked[0]}</div>`];
  let inDoc = false;
  const indent = source[first - 1].search(/\S/), cut = (text) => (text.slice(0, indent).trim() ? text : text.slice(indent));
  const line = (kind, gutter, text) => out.push(`<div class="code-line${kind}"><span class="gutter">${gutter}</span><code>${text}</code></div>`);
  const gone = () => edit.gone.forEach((text) => line(" gone", "−", escape(cut(text))));
  for (let n = first; n <= end; n++) {
    const text = source[n - 1], quotes = text.split('"""').length - 1, isDoc = inDoc || quotes > 0;
    if (quotes === 1) inDoc = !inDoc;
    const isNew = edit && n >= edit.line && n < edit.line + edit.come;
    if (edit && n === edit.line) gone();
    if (isDoc && isBeat) continue;
    const at = ranks.filter(([, one]) => one === n).map(([rank]) => `<b style="background:${colour(rank)}">${rank}</b>`).join("");
    line(`${marked.includes(n) ? " now" : ""}${isNew ? " come" : ""}`, isNew ? "+" : at, coloured(cut(text)));
  }
  if (edit && edit.line === end + 1) gone();
  return `<div class="function">${out.join("")}</div>`;
}

function drawCode(p, beat) {
  const edit = p.edit, where = p.states[now.k].at.map((stack, rank) => [rank, ...p.place(rank, now.k)]);
  const functionAt = (file, line) => p.functions.map((one, f) => [one, f]).filter(([one]) => one[1] === file && one[2] <= line && line <= one[3] + 1).map(([, f]) => f).pop();
  const shown = beat ? [[beat.function, beat.lines]] : p.stacks[p.states[now.k].at[0]].map(([f, line]) => [f, [line]]);
  if (edit) {
    const f = functionAt(edit.file, edit.line);
    if (f !== undefined && !shown.some(([one]) => one === f)) shown.unshift([f, [edit.line]]);
  }
  $("code").innerHTML = shown.map(([f, lines]) => drawFunction(p, f, lines, where.filter(([, one]) => one === f).map(([rank, , n]) => [rank, n]), Boolean(beat))).join("");
  $("code").classList.toggle("beat", Boolean(beat));
  const mark = [...$("code").querySelectorAll(".now")].pop();
  if (mark) $("code").scrollTop = Math.max(0, mark.offsetTop - $("code").clientHeight * 0.6);
}

function drawPanels(p, beat) {
  const sides = [[p, now.k, since()]];
  if (now.beside) {
    const q = player(now.beside), k = beat && beat.right !== undefined ? beat.right : q.twin(p, now.k), before = now.beat > 0 ? beats()[now.beat - 1].right : undefined;
    sides.push([q, k, before === undefined ? k - 1 : before]);
  }
  const box = $("panels"), width = Math.floor((box.clientWidth - 14 - 14 * (sides.length - 1)) / (window.innerWidth < 800 ? 1 : sides.length));
  const isNarrow = window.innerWidth < 800 && sides.length > 1;
  const rowsOf = (q) => (isNarrow && beat ? q.rows.filter((row) => row.name === beat.look) : q.rows);
  const taken = window.innerWidth < 800 ? $("said").offsetHeight + $("code").offsetHeight + 26 : 8;
  const high = ($("panels").parentElement.clientHeight - taken) / (isNarrow ? 2 : 1) - (sides.length > 1 ? 30 : 8);
  const most = (q) => Math.max(1, ...q.beats.map(({ frame }, i) => q.travelling(i ? q.beats[i - 1].frame : frame, frame).length));
  const lanes = Math.min(window.innerWidth < 800 ? 1 : 3, Math.max(...sides.map(([q]) => most(q))));
  box.innerHTML = sides.map(([q, k, from], i) => `<div class="panel">${sides.length > 1 ? `<h2>${escape(i ? (p.right ? "the right run" : q.short) : p.bug ? "with the bug" : q.short)}</h2>` : ""}`
    + `${drawMemory(q, k, from, width, high, beat ? beat.look : "", lanes, rowsOf(q))}</div>`).join("");
  if (beat && p.bug) markDifferences(sides);
  const look = ({ target }) => { if (target.dataset && target.dataset.s) inspect(sides[[...box.children].indexOf(target.closest(".panel"))], +target.dataset.s, +target.dataset.cell); };
  for (const happening of ["onmouseover", "onclick", "onfocusin"]) box[happening] = look;
  box.addEventListener("focusin", look);
}

/** In the run with the bug: cells that hold another value than in the right one, garbage aside. */
function markDifferences([[p, k], [q, m]]) {
  for (const row of p.rows) {
    const theirs = q.rows.find((one) => one.name === row.name);
    for (const s of theirs ? row.slots.flatMap((_, rank) => p.drawn(row, rank, k)) : []) {
      const { rank, part } = p.storages[s], other = q.drawn(theirs, rank, m).find((one) => q.storages[one].part === part);
      p.states[k].cells[s].values.forEach((value, cell) => {
        const kinds = other === undefined ? ["freed"] : [p.kind(s, cell, k), q.states[m].cells[other].values[cell] === undefined ? "freed" : q.kind(other, cell, m)];
        if (kinds.some((kind) => ["freed", "garbage", "unset"].includes(kind)) || value === q.states[m].cells[other].values[cell]) return;
        const drawn = document.querySelector(`.panel rect[data-s="${s}"][data-cell="${cell}"]`);
        if (drawn) drawn.classList.add("wrong");
      });
    }
  }
}

function inspect([p, k], s, cell) {
  const { rank, row, part } = p.storages[s], { values, by } = p.states[k].cells[s], [kind, e, origin] = p.label(s, cell, k), seen = p.kind(s, cell, k);
  const whose = e === null ? "no element of the model" : `element ${e - p.param.indexOf(p.param[e])} of p${p.param[e]}`;
  const owner = e === null ? "" : p.owners[e] === -1 ? "; every rank steps it" : `; rank ${p.owners[e]} steps it`;
  const what = { gradient: `gradient of rank ${origin}`, share: `gradient of rank ${origin} ÷ ${p.ranks}`, sum: `sum of ranks 0 to ${origin}`,
    average: "average over the ranks", parameter: origin === 0 ? "parameter before the first step" : `parameter after step ${origin}` }[kind] || WORDS[kind];
  const also = seen === "garbage" ? ", which nobody reads again (garbage)" : seen === "freed" ? ", released" : seen === "stale" ? ", stale: a newer one is on its way" : "";
  const came = p.frames[by[cell]].ended.filter(([r]) => r === rank).map(([, o]) => p.operations[o]).filter((one) => one.arrows.some((a) => a[1] === rank))
    .map((one) => `${one.kind} from rank ${[...new Set(one.arrows.filter((a) => a[1] === rank).map((a) => a[0]))].join(", ")}`);
  $("inspector").innerHTML = `<b>rank ${rank} · ${escape(row)}${part ? ` ${part}` : ""}[${cell}] = ${number(values[cell])}</b> · ${what}${also} · ${whose}${owner} · `
    + (by[cell] === 0 ? "there from the start" : `written at ${p.placeText(rank, by[cell])} (line ${by[cell] + 1})${came.length ? `, arrived by ${came.join("; ")}` : ""}`);
}

function drawFooter(p) {
  $("beats").innerHTML = beats().map((_, i) => `<a href="#${now.id}${now.beside && !p.right ? `+${now.beside}` : ""}.${i + 1}"${i === now.beat ? ' aria-current="step"' : ""} aria-label="beat ${i + 1}">${i + 1}</a>`).join("");
  const width = $("band").clientWidth, [svg, tall] = drawOverlap(p, width, 3, now.k);
  $("band").innerHTML = `<svg width="${width}" height="${tall}">${svg}</svg>`;
  $("slider").max = p.frames.length - 1;
  $("slider").value = now.k;
  $("where").textContent = now.beat < 0 ? `line ${now.k + 1} of ${p.frames.length}` : `beat ${now.beat + 1} of ${beats().length}`;
  const shown = DATA.programs.filter((one) => !one.hidden);
  $("programs").innerHTML = shown.filter((one) => !one.bug).map((one) => `<a href="#${one.id}" role="tab" aria-selected="${one.id === now.id}">${escape(one.short).replace(" ", " <span>")}</span></a>`).join("");
  const option = (one, at) => `<option value="${one.id}"${one.id === at ? " selected" : ""}>${escape(one.short)}</option>`;
  $("bugs").innerHTML = `<option value="">–</option>${shown.filter((one) => one.bug).map((one) => option(one, now.id)).join("")}`;
  $("beside").innerHTML = `<option value="">–</option>${shown.filter((one) => !one.bug && one.id !== now.id).map((one) => option(one, now.beside)).join("")}`;
  $("beside").disabled = Boolean(p.right);
  $("lines").setAttribute("aria-pressed", now.beat < 0);
}

/** Before a beat is shown: what will a rank hold in its row? The wrong answers are what the row holds in other beats. */
function ask(to) {
  const p = player(now.id), beat = beats()[to], row = p.rows.find((one) => one.name === beat.look);
  const rank = row ? row.slots.findIndex((_, r) => p.describe(row, r, beat.frame) !== p.describe(row, r, now.k)) : -1;
  if (rank < 0) return false;
  const right = p.describe(row, rank, beat.frame), all = new Set([right, p.describe(row, rank, now.k)]);
  for (const one of beats()) for (let r = 0; r < p.ranks; r++) if (all.size < 3) all.add(p.describe(row, r, one.frame));
  if (all.size < 2) return false;
  play(false);
  $("question").innerHTML = `<b>What will rank ${rank} hold in ${escape(row.name)}?</b>${[...all].sort().map((text) => `<button>${escape(text)}</button>`).join("")}`;
  const buttons = [...$("question").querySelectorAll("button")];
  buttons.forEach((button) => { button.onclick = () => {
    const isRight = button.textContent === right;
    button.className = isRight ? "right" : "wrong";
    buttons.forEach((one) => { one.disabled = true; if (one.textContent === right) one.className = "right"; });
    const on = document.createElement("button");
    on.textContent = isRight ? "Right. Go on" : "Not so. Go on, and look";
    on.onclick = () => { $("question").close(); toBeat(to); };
    $("question").append(on);
    on.focus();
  }; });
  $("question").showModal();
  return true;
}

// --------------------------------------------------------------------------------------------------- controls

function jump(isWanted) {
  for (let k = now.k + 1; k < player(now.id).frames.length; k++) if (isWanted(player(now.id), k)) return toFrame(k);
  return toFrame(player(now.id).frames.length - 1);
}
const isMessage = (p, k) => p.operations.some((one) => one.arrows.some((a) => a[3] === k || a[4] === k));
const isFunction = (p, k) => p.place(0, k)[0] !== p.place(0, k - 1)[0];

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("question").open) return;
  if (/^(SELECT|INPUT)$/.test(event.target.tagName) && event.target.type !== "checkbox") return;
  if (event.key === " " && /^(BUTTON|INPUT|A)$/.test(event.target.tagName)) return;
  const group = event.target.closest && event.target.closest(".cells");
  if (group && (event.target !== group ? /^Arrow|Escape/ : /^Enter/).test(event.key)) {
    const cells = [...group.querySelectorAll(".cell")], at = cells.indexOf(event.target);
    const to = event.key === "Escape" ? group : cells[event.key === "Enter" ? 0 : at + (/Right|Down/.test(event.key) ? 1 : -1)];
    if (to) to.focus();
    return event.preventDefault();
  }
  const action = {
    " ": () => play(!now.playing), ArrowRight: () => step(1), ArrowLeft: () => step(-1), ArrowDown: () => toFrame(now.k + 1),
    ArrowUp: () => toFrame(now.k - 1), Home: () => (now.beat < 0 ? toFrame(0) : toBeat(0)), End: () => (now.beat < 0 ? toFrame(Infinity) : toBeat(Infinity)),
    m: () => jump(isMessage), f: () => jump(isFunction), "?": () => $("help").click(),
  }[event.key];
  if (!action) return undefined;
  event.preventDefault();
  if (event.key !== " ") play(false);
  return action();
}

function swipes() {
  let from = null;
  document.body.addEventListener("touchstart", ({ touches }) => { from = [touches[0].clientX, touches[0].clientY]; }, { passive: true });
  document.body.addEventListener("touchend", ({ changedTouches: [to] }) => {
    const x = to.clientX - from[0], y = to.clientY - from[1];
    if (Math.abs(x) > 50 && Math.abs(x) > 2 * Math.abs(y)) { play(false); step(x < 0 ? 1 : -1); }
  });
}

function follow() {
  const [, id, beside, mark, at] = decodeURIComponent(location.hash).match(/^#([^+/.]*)(?:\+([^/.]*))?(?:([/.])(.*))?$/) || [];
  const known = (one) => DATA.programs.some((program) => program.id === one && !program.hidden);
  const program = known(id) ? id : DATA.programs[0].id;
  select(program, known(beside) ? beside : "", mark === "." ? +at - 1 || 0 : 0, mark === "/" && at !== "wrong" ? +at - 1 || 0 : undefined);
}

async function start() {
  const packed = Uint8Array.from(atob($("data").textContent), (sign) => sign.charCodeAt(0));
  DATA = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  const sample = (kind, words) => `<span><svg width="22" height="12">${patterns(1)}<rect class="cell ${kind}" x="1" y="1" width="20" height="10" rx="${kind === "new" ? 4 : 1}" style="--own:var(--rank0)"${["gradient", "share", "moment"].includes(kind) ? ` fill="url(#${kind}0)"` : ""}/></svg>${words}</span>`;
  $("legend").innerHTML = `<span>colour: the rank that steps it</span>${["gradient", "share", "average", "old", "new", "stale", "moment", "garbage"].map((kind) => sample(kind, WORDS[kind])).join("")}`;
  $("helptext").innerHTML = DATA.help;
  const stopped = (action) => () => { play(false); action(); };
  $("slider").oninput = stopped(() => toFrame(+$("slider").value));
  for (const [id, action] of Object.entries({ back: () => step(-1), forward: () => step(1), up: () => toFrame(now.k - 1), down: () => toFrame(now.k + 1),
    message: () => jump(isMessage), function: () => jump(isFunction), lines: () => (now.beat < 0 && beats().length ? toBeat(nearest(now.k)) : toFrame(now.k)) })) $(id).onclick = stopped(action);
  $("play").onclick = () => play(!now.playing);
  $("bugs").onchange = stopped(() => $("bugs").value && select($("bugs").value, ""));
  $("beside").onchange = stopped(() => { now.beside = $("beside").value; draw(); });
  $("help").onclick = () => { $("helptext").hidden = !$("helptext").hidden; $("help").setAttribute("aria-expanded", !$("helptext").hidden); };
  $("band").onclick = ({ target }) => { const phase = target.closest(".phase"); if (phase) { play(false); toFrame(+phase.dataset.k); } };
  document.addEventListener("keydown", keys);
  window.addEventListener("resize", draw);
  window.addEventListener("hashchange", follow);
  swipes();
  follow();
  document.body.dataset.ready = "yes";
}
start();
